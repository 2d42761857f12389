// Pictures of stacked parts: tables over tiers and ranks, and the time of a step.
import { MODES, bytes, gathered, html, percent, seconds, show } from "./drawing.js";
import { fullest, inHbm, inHost, inStep, spans } from "./loads.js";

const MOST_RANKS = 64;
const NAMED = 0.07;

const NAMES = {
  HBM_ONLY: "all in HBM", CACHING: "in host memory, cached in HBM", HYBRID: "split", HOST_ONLY: "all in host memory",
  workspace: "workspace of the runtime", free: "free",
  forward: "forward pass", backward: "backward pass", communication: "communication", prefetch: "fetching misses",
};

/** What the colours mean. */
export function legend(node, kinds) {
  show(node, ...kinds.map((kind) => html("span", {}, html("i", { class: `key ${kind}` }), `${MODES.includes(kind) ? `${kind}: ` : ""}${NAMES[kind] ?? kind}`)));
}

function stack(label, text, parts, whole, words) {
  const drawn = gathered(parts, whole);
  const said = drawn.filter((part) => part.kind !== "free").map((part) => `${part.name} ${words(part.size)}`);
  const bar = html("div", { class: "stack", role: "img", "aria-label": `${label}, ${text}. ${said.slice(0, 12).join(", ")}${said.length > 12 ? " and more" : ""}` },
    ...drawn.map((part) => html("span", {
      class: `part ${part.kind}`, style: { width: `${(100 * part.size) / whole}%` }, title: `${part.name}: ${words(part.size)} (${percent(part.size / whole)})`,
    }, part.size >= NAMED * whole ? part.name : "")));
  return html("div", { class: "row" }, html("p", { class: "row-label" }, html("b", {}, label), ` ${text}`), bar);
}

const byMode = (tables) => tables.sort((a, b) => MODES.indexOf(a.kind) - MODES.indexOf(b.kind) || b.size - a.size);

/**
 * Tables stacked in HBM and in host memory, and over the ranks where these differ.
 *
 * @param whole Sizes of the bars, `{hbm, host}`, so that two pictures have one scale; found from the plan where left out.
 */
export function drawMemory(node, { plan, report, request }, whole = sizes(plan)) {
  const rank = fullest(report.ranks, "hbm_bytes"), host = fullest(report.hosts, "host_bytes");
  const total = forTables(plan), reserved = request.topology.hbm_bytes - total;
  const hbm = [{ kind: "workspace", name: "workspace", size: plan.workspace_bytes }, ...byMode(inHbm(report, rank.ranks[0]))];
  hbm.push({ kind: "free", name: "free", size: total - hbm.reduce((sum, part) => sum + part.size, 0) });
  const tables = byMode(inHost(report, host.hosts[0] * host.ranks, host.ranks));
  const limit = plan.host.limit_bytes;
  if (limit !== null) tables.push({ kind: "free", name: "free", size: limit - host.host_bytes });
  const uneven = report.ranks.length > 1, fullestOf = (what, one) => (one ? `of a ${what}` : `of the fullest ${what}`);
  show(node,
    stack("HBM", `${fullestOf("rank", !uneven)}: ${bytes(plan.hbm.used_bytes)} of ${bytes(plan.hbm.limit_bytes ?? 0)} for tables${reserved > 0 ? `, beside ${bytes(reserved)} for the model` : ""}`, hbm, whole.hbm, bytes),
    stack("Host memory", `${fullestOf("host", report.hosts.length === 1)}: ${bytes(plan.host.used_bytes)}${limit === null ? "" : ` of ${bytes(limit)}`}`, tables, whole.host, bytes),
    uneven ? overRanks(report) : html("p", { class: "hint" }, rank.ranks.length === 1 ? "One rank." : `All ${rank.ranks.length} ranks hold the same parts of all tables.`),
  );
}

const forTables = (plan) => (plan.hbm.limit_bytes ?? 0) + plan.workspace_bytes;

/** How long the bars of a plan are. */
export function sizes(plan) {
  return {
    hbm: Math.max(1, forTables(plan)),
    host: Math.max(1, plan.host.limit_bytes ?? 0, plan.host.used_bytes),
  };
}

function overRanks(report) {
  const ranks = report.ranks.flatMap((entry) => entry.ranks.map((rank) => ({ rank, size: entry.hbm_bytes, tables: entry.tables })));
  const most = Math.max(1, ...report.ranks.map((entry) => entry.hbm_bytes));
  const order = ranks.length <= MOST_RANKS ? ranks.sort((a, b) => a.rank - b.rank) : ranks.sort((a, b) => b.size - a.size).slice(0, MOST_RANKS);
  const columns = order.map(({ rank, size, tables }) => html("div", { class: "column", title: `rank ${rank}: ${bytes(size)}, ${tables} tables` },
    ...gathered(byMode(inHbm(report, rank)), most, 0.01).map((part) => html("span", {
      class: `part ${part.kind}`, style: { height: `${(100 * part.size) / most}%` }, title: `rank ${rank}, ${part.name}: ${bytes(part.size)}`,
    }))));
  const mean = ranks.reduce((sum, entry) => sum + entry.size, 0) / ranks.length;
  const text = `HBM of ${order.length === ranks.length ? "each rank" : `the ${MOST_RANKS} fullest ranks`}: at most ${bytes(most)}, on average ${bytes(mean)}.`;
  return html("div", {}, html("p", { class: "row-label" }, text), html("div", { class: "columns", role: "img", "aria-label": text }, ...columns));
}

/** How long the bar of a step's kernels is. */
export const durations = ({ plan }) => Math.max(1e-12, plan.seconds);

/** The kernels of a step by part, and by table, of the slowest rank; the host launches beside them. */
export function drawTime(node, { plan, report }, whole = durations({ plan })) {
  const slowest = fullest(report.ranks, "seconds");
  const parts = ["forward", "backward", "communication", "prefetch"].map((kind) => ({ kind, name: NAMES[kind], size: slowest[`${kind}_seconds`] }));
  const tables = inStep(report, slowest.ranks[0]).sort((a, b) => b.size - a.size);
  const whose = report.ranks.length === 1 ? "" : ` of rank ${spans(slowest.ranks.slice(0, 1))}, the slowest`;
  show(node,
    stack("Kernels of a step", `${seconds(plan.seconds)}${whose}, beside ${seconds(slowest.fixed_seconds)} of launches and waiting of the host`, parts, whole, seconds),
    stack("By table", seconds(plan.seconds), tables, whole, seconds));
}
