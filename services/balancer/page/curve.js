// The last rounds as curves.
import { percent, ratio, seconds, show, svg, whole } from "./drawing.js";

const HEIGHT = 240;
const EDGE = { left: 58, right: 12, top: 12, bottom: 28 };

/** Max/mean load at the lower bound: over the same mean as that of the plan. */
export const boundOf = (round) => (round.after ? (round.bound * round.imbalance_after) / round.after : null);

/** What may be drawn of rounds. */
export const CURVES = {
  imbalance: {
    what: "Max/mean load", text: ratio, base: 1,
    lines: [
      { class: "before", name: "as loaded", of: (round) => round.imbalance_before },
      { class: "after", name: "as trained", of: (round) => round.imbalance_after },
      { class: "bound", name: "lower bound", of: (round) => boundOf(round) },
    ],
  },
  moved: { what: "Share of bytes moved", text: percent, base: 0, lines: [{ class: "after", name: "bytes that changed rank", of: (round) => (round.size ? round.moved_size / round.size : null) }] },
  wait: {
    what: "Seconds", text: seconds, base: 0,
    lines: [
      { class: "before", name: "from the first rank's submission to the decision", of: (round) => round.wait_seconds },
      { class: "after", name: "of that, the search", of: (round) => round.search_seconds },
    ],
  },
};

const known = (value) => value !== null && value !== undefined;

function path(rounds, line, x, y) {
  let text = "", broken = true;
  rounds.forEach((round, at) => {
    const value = line.of(round);
    if (!known(value)) { broken = true; return; }
    text += `${broken ? "M" : "L"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    broken = false;
  });
  return text;
}

/** Draws rounds; `moment` is the one that is looked at. */
export function drawCurve(node, rounds, kind, moment) {
  const { what, text, base, lines } = CURVES[kind];
  const width = Math.max(280, node.clientWidth);
  const values = rounds.flatMap((round) => lines.map((line) => line.of(round))).filter(known);
  if (!values.length) return show(node);
  const top = Math.max(...values, base + 1e-9), bottom = Math.min(base, ...values);
  const x = (at) => EDGE.left + ((width - EDGE.left - EDGE.right) * at) / Math.max(1, rounds.length - 1);
  const y = (value) => HEIGHT - EDGE.bottom - ((HEIGHT - EDGE.top - EDGE.bottom) * (value - bottom)) / (top - bottom);
  const last = rounds.at(-1);
  const said = lines.map((line) => `${line.name} ${text(line.of(last))}`).join(", ");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": `${what} of rounds ${whole(rounds[0].round)} to ${whole(last.round)}. In the last one: ${said}.` });
  for (let step = 0; step <= 4; step++) {
    const value = bottom + ((top - bottom) * step) / 4;
    picture.append(svg("path", { class: "grid", d: `M${EDGE.left} ${y(value)}H${width - EDGE.right}` }), svg("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, text(value)));
  }
  picture.append(svg("text", { x: EDGE.left, y: HEIGHT - 8 }, `round ${whole(rounds[0].round)}`), svg("text", { x: width - EDGE.right, y: HEIGHT - 8, "text-anchor": "end" }, whole(last.round)));
  rounds.forEach((round, at) => { if (round.reason) picture.append(svg("circle", { class: "fallback", cx: x(at), cy: HEIGHT - EDGE.bottom, r: 3 })); });
  for (const line of lines) picture.append(svg("path", { class: `line ${line.class}`, d: path(rounds, line, x, y) }));
  const at = rounds.indexOf(moment);
  if (at >= 0) picture.append(svg("path", { class: "line moment", d: `M${x(at)} ${EDGE.top}V${HEIGHT - EDGE.bottom}` }));
  show(node, picture);
}
