// Ranks and hosts as a table: what is on each, and how evenly; those that are alike are one line.
import { bytes, html, seconds, show } from "./drawing.js";
import { spans } from "./loads.js";

const MOST = 64;

const RANKS = [
  ["ranks", (entry) => spans(entry.ranks)], ["tables", (entry) => entry.tables], ["HBM", (entry) => bytes(entry.hbm_bytes)],
  ...["forward", "backward", "communication", "prefetch", "fixed"].map((part) => [part === "fixed" ? "launches" : part, (entry) => seconds(entry[`${part}_seconds`])]),
  ["a step", (entry) => seconds(entry.seconds)],
];
const HOSTS = [["hosts", (entry) => spans(entry.hosts)], ["ranks of one", (entry) => entry.ranks], ["tables", (entry) => entry.tables], ["memory", (entry) => bytes(entry.host_bytes)]];
const WHAT = { seconds: "time over ranks", hbm_bytes: "HBM over ranks", host_bytes: "memory over hosts" };
const table = (columns, rows) => html("table", {}, html("thead", {}, html("tr", {}, ...columns.map(([name]) => html("th", { scope: "col" }, name)))),
  html("tbody", {}, ...rows.slice(0, MOST).map((row) => html("tr", {}, ...columns.map(([, text], at) => html(at ? "td" : "th", { scope: at ? undefined : "row" }, String(text(row))))))));

/** Draws the report. */
export function drawRanks(node, report) {
  const more = report.ranks.length > MOST ? html("p", { class: "hint" }, `${MOST} of ${report.ranks.length} kinds of ranks; plan.json tells the ranks of all tables.`) : null;
  show(node, table(RANKS, report.ranks), more, table(HOSTS, report.hosts));
  if (report.ranks.length > 1 || report.hosts.length > 1) {
    node.append(html("h3", {}, "How evenly"), table([["", (entry) => WHAT[entry.of] ?? entry.of], ["most over mean", (entry) => entry.max_over_mean.toFixed(3)]], report.imbalance));
  }
}
