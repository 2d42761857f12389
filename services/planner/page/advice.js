// What curves and prices say in words: pure functions over the service's answers.
import { bytes, percent, seconds } from "./drawing.js";

const STEP = 0.05;
const TOLERABLE = 0.01;

/**
 * Where a falling curve bends: the point farthest below the straight line between its ends, sizes and times each
 * scaled to one (Satopää et al., Finding a "Kneedle" in a Haystack, 2011). Null where it hardly falls.
 */
export function knee(points) {
  if (points.length < 3) return null;
  const [first, last] = [points[0], points[points.length - 1]];
  const width = last.size - first.size, height = first.time - last.time;
  if (width <= 0 || height <= 0.02 * first.time) return null;
  const below = points.map((point) => 1 - (point.size - first.size) / width - (point.time - last.time) / height);
  const best = below.indexOf(Math.max(...below));
  return below[best] > 0.05 ? points[best] : null;
}

/** The smallest size above `now` that is faster than `time` by a twentieth or more. */
export const nextStep = (points, now, time) => points.find((point) => point.size > now && point.time <= time * (1 - STEP)) ?? null;

/** The smallest size that is at most a hundredth slower than `time`. */
export function spare(points, now, time) {
  const point = points.find((one) => one.time <= time * (1 + TOLERABLE));
  return point && point.size < 0.97 * now ? point : null;
}

/** Sentences about what more or less HBM would change. */
export function aboutHbm(answer, plan, points, now, ranks) {
  if (plan.seconds === null) return [];
  const saves = answer.next_hbm_gib_saves_seconds;
  const where = ranks === 1 ? "of HBM" : "of HBM on every rank";
  const lines = [];
  if (saves > 0 && saves / plan.seconds >= 1e-4) {
    const gains = answer.tables.filter((table) => table.seconds_per_gib > 0).slice(0, 3).map((table) => `${table.table} (up to ${seconds(table.seconds_per_gib)})`);
    lines.push(`One more GiB ${where} saves ${seconds(saves)} a step (${percent(saves / plan.seconds)})${gains.length ? `; it is worth most to ${gains.join(", ")}` : ""}.`);
  } else if (saves !== null) {
    lines.push(`One more GiB ${where} saves next to nothing.`);
  }
  return [...lines, ...steps(points, now, plan.seconds, "HBM", "It could go to the model.")];
}

/** The same about the memory of a host. */
export function aboutHost(answer, plan, points, now) {
  if (plan.seconds === null) return [];
  const saves = answer.next_host_gib_saves_seconds;
  const lines = [];
  if (now === null) lines.push("The memory of a host has no limit here.");
  else if (saves > 0 && saves / plan.seconds >= 1e-4) lines.push(`One more GiB on every host saves ${seconds(saves)} a step (${percent(saves / plan.seconds)}).`);
  else if (saves !== null) lines.push("One more GiB on every host saves next to nothing.");
  return [...lines, ...(now === null ? [] : steps(points, now, plan.seconds, "host memory", ""))];
}

function steps(points, now, time, what, use) {
  const lines = [];
  const next = nextStep(points, now, time);
  if (next) lines.push(`The next large step: with ${bytes(next.size)} a step takes ${seconds(next.time)}, ${percent(1 - next.time / time)} less.`);
  else if (points.length && now >= points[points.length - 1].size) lines.push(`No plan is faster with more ${what} than this.`);
  const less = spare(points, now, time);
  if (less) lines.push(`With ${bytes(less.size)}, ${bytes(now - less.size)} less, a step is at most ${percent(TOLERABLE)} slower. ${use}`.trim());
  return lines;
}
