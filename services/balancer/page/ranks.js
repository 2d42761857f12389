// A bar for each rank: its load as trained and as loaded, and how late it comes.
import { html, percent, say, seconds, whole } from "./drawing.js";

const known = (value) => value !== null && value !== undefined;
const STRAGGLES = 4;
const STRAGGLES_SECONDS = 0.02;

const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;

function bar(index) {
  return html("div", { class: "rank", role: "listitem" }, html("span", { class: "name" }, index),
    html("span", { class: "bars" }, html("i", { class: "after" }), html("i", { class: "before" }), html("i", { class: "mean" })), html("span", { class: "late" }));
}

const DELAYS = { loading: "loads data too slowly", network: "gets its samples late over the network", loop: "does something else between its steps" };

/** In what a rank is slower than the others, by how much and since when; empty: in nothing. */
function slowly(row) {
  const said = [];
  if (row.speed < 1) said.push(`computes at ${percent(row.speed)}${row.atFloor ? " or less" : ""} of the median rank's speed since round ${whole(row.since)}, and gets less work`);
  if (row.delay) said.push(`${DELAYS[row.delay] ?? row.delay} since round ${whole(row.delaySince)}, by ${percent(row.delayShare)} of the median rank's computing time`);
  return said.join("; ");
}

/** Draws the ranks of a round into bars that stay the same elements. */
export function drawRanks(node, text, ranks, leftOut) {
  const rows = ranks.rank.map((rank, at) => ({ rank, node: ranks.node[at], before: ranks.load_before[at], after: ranks.load_after[at], late: ranks.late_seconds[at], missed: ranks.missed[at], speed: ranks.speed?.[at] ?? 1, atFloor: ranks.speed_at_floor?.[at] ?? false, since: ranks.slow_since?.[at], delay: ranks.delay?.[at], delayShare: ranks.delay_share?.[at] ?? 0, delaySince: ranks.delay_since?.[at] }));
  const loads = rows.map((row) => row.after).filter(known);
  const mean = loads.reduce((sum, load) => sum + load, 0) / Math.max(1, loads.length);
  const most = Math.max(1e-12, ...rows.flatMap((row) => [row.before ?? 0, row.after ?? 0]));
  const usual = median(rows.map((row) => row.late ?? 0));
  const latest = rows.reduce((found, row) => ((row.late ?? 0) > (found?.late ?? 0) ? row : found), null);
  while (node.children.length > rows.length) node.lastChild.remove();
  while (node.children.length < rows.length) node.append(bar(""));
  rows.forEach((row, at) => {
    const element = node.children[at];
    const straggles = (row.late ?? 0) > STRAGGLES_SECONDS && row.late > STRAGGLES * usual;
    element.classList.toggle("straggler", straggles || row.speed < 1 || Boolean(row.delay));
    say(element.querySelector(".name"), String(row.rank));
    element.querySelector(".bars .after").style.width = `${(100 * (row.after ?? 0)) / most}%`;
    element.querySelector(".bars .before").style.width = `${(100 * (row.before ?? 0)) / most}%`;
    element.querySelector(".bars .mean").style.left = `${(100 * mean) / most}%`;
    say(element.querySelector(".late"), `+${seconds(row.late)}`);
    const said = `rank ${row.rank}${row.node ? ` on ${row.node}` : ""}: load ${percent(mean ? (row.after ?? 0) / mean : null)} of the mean, as loaded ${percent(mean ? (row.before ?? 0) / mean : null)}; comes ${seconds(row.late)} after the first${row.missed ? `, missed ${whole(row.missed)} rounds` : ""}${slowly(row) ? `; ${slowly(row)}` : ""}`;
    element.title = said;
    element.setAttribute("aria-label", said);
  });
  const who = latest?.late ? ` Rank ${latest.rank}${latest.node ? ` on ${latest.node}` : ""} comes last, ${seconds(latest.late)} after the first.` : "";
  const costs = (row) => (row ? Math.max(1 / row.speed - 1, row.delayShare) : 0);
  const slowest = rows.reduce((found, row) => (costs(row) > costs(found) ? row : found), null);
  const slow = slowest ? ` Rank ${slowest.rank}${slowest.node ? ` on ${slowest.node}` : ""} ${slowly(slowest)}.` : "";
  say(text, `The wide bar is the load as trained, the thin one as loaded, the line their mean; on the right, how long after the first rank a rank submits.${who}${slow}${leftOut ? ` ${whole(leftOut)} ranks of which there is less to say are left out.` : ""}`);
}
