// Two plans side by side: one that was kept, and the one of now.
import { $, bytes, html, percent, seconds, show } from "./drawing.js";
import { isPinned } from "./placements.js";
import { hbmBudget } from "./request.js";
import { drawMemory, drawTime, durations, sizes } from "./stacks.js";

const MOST = 100;

const sized = (value) => (value === null || value === undefined ? "no limit" : typeof value === "number" ? bytes(value) : String(value));

const ROWS = [
  ["a step", ({ plan }) => plan.seconds, seconds],
  ["HBM for tables, a rank", ({ request }) => hbmBudget(request.topology), sized],
  ["of it taken", ({ plan }) => plan.hbm.used_bytes, bytes],
  ["host memory for tables, a host", ({ request }) => request.topology.host_bytes ?? null, sized],
  ["of it taken", ({ plan }) => plan.host.used_bytes, bytes],
  ["tables", ({ request }) => request.tables.length, String],
  ["pinned tables", ({ request }) => request.tables.filter(isPinned).length, String],
  ["fused modules", ({ plan }) => plan.modules.length, String],
];

function change(before, after) {
  if (typeof before !== "number" || typeof after !== "number" || before === after) return before === after ? "" : "differs";
  return before === 0 ? "" : `${after > before ? "+" : "−"}${percent(Math.abs(after / before - 1))}`;
}

/** Draws a kept plan beside the one of now; nothing where none is kept or none found now. */
export function drawComparison(kept, now, actions) {
  const node = $("comparison");
  node.hidden = kept === null;
  if (kept === null) return;
  const buttons = html("p", { class: "actions" }, html("button", { type: "button", onclick: () => actions.back() }, "Go back to the kept plan"),
    html("button", { type: "button", onclick: () => actions.forget() }, "Forget it"));
  if (now === null) {
    show(node, html("h2", {}, "Side by side"), html("p", {}, "There is no plan now to hold beside the kept one."), buttons);
    return;
  }
  const table = html("table", {}, html("thead", {}, html("tr", {}, ...["", "kept", "now", "change"].map((name) => html("th", { scope: "col" }, name)))),
    html("tbody", {}, ...ROWS.map(([name, value, words]) => html("tr", {}, html("th", { scope: "row" }, name), html("td", {}, words(value(kept))),
      html("td", {}, words(value(now))), html("td", {}, change(value(kept), value(now)))))));
  const [a, b] = [sizes(kept.plan), sizes(now.plan)];
  const whole = { hbm: Math.max(a.hbm, b.hbm), host: Math.max(a.host, b.host) };
  const slowest = Math.max(durations(kept), durations(now));
  const side = (name, shown) => {
    const memory = html("div"), time = html("div");
    drawMemory(memory, shown, whole);
    drawTime(time, shown, slowest);
    return html("div", {}, html("h3", {}, name), memory, time);
  };
  show(node, html("h2", {}, "Side by side"), buttons, html("div", { class: "scroll", role: "region", "aria-label": "Figures side by side", tabindex: "0" }, table),
    html("div", { class: "sides" }, side("kept", kept), side("now", now)), differences(kept.plan, now.plan));
}

function differences(kept, now) {
  const before = new Map(kept.placements.map((placement) => [placement.table, placement]));
  const after = new Map(now.placements.map((placement) => [placement.table, placement]));
  const place = (placement) => (placement ? `${placement.mode} ${percent(placement.ratio)}` : "is not there");
  const names = [...new Set([...before.keys(), ...after.keys()])].filter((name) => place(before.get(name)) !== place(after.get(name)));
  if (!names.length) return html("p", {}, "All tables have the same mode and ratio in both.");
  const saved = (name) => (before.get(name)?.seconds ?? 0) - (after.get(name)?.seconds ?? 0);
  names.sort((a, b) => Math.abs(saved(b)) - Math.abs(saved(a)));
  const row = (name) => html("tr", {}, html("th", { scope: "row" }, name), html("td", {}, place(before.get(name))), html("td", {}, place(after.get(name))),
    html("td", {}, Math.abs(saved(name)) < 1e-9 ? "the same" : `${saved(name) < 0 ? "+" : "−"}${seconds(Math.abs(saved(name)))}`));
  return html("div", {}, html("h3", {}, `${names.length} ${names.length === 1 ? "table is" : "tables are"} placed differently${names.length > MOST ? `, the first ${MOST}:` : ""}`),
    html("div", { class: "scroll", role: "region", "aria-label": "Tables placed differently", tabindex: "0" }, html("table", {}, html("thead", {}, html("tr", {},
      ...["table", "kept", "now", "a step"].map((name) => html("th", { scope: "col" }, name)))), html("tbody", {}, ...names.slice(0, MOST).map(row)))));
}
