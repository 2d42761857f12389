// Which tables are on a rank and in a host's memory, from the service's report.
const PARTS = ["forward_seconds", "backward_seconds", "communication_seconds", "prefetch_seconds"];

const shards = (table, holds) => (table.ranks.length ? table.ranks.filter(holds).length : 1);

const parts = (tables, holds, size) => tables.map((table) => ({ kind: table.mode, name: table.table, size: shards(table, holds) * size(table) }));

/** Tables in the HBM of a rank, with their bytes. */
export const inHbm = (report, rank) => parts(report.tables, (one) => one === rank, (table) => table.hbm_bytes);

/** Tables of a rank, with their time of a step. */
export const inStep = (report, rank) => parts(report.tables, (one) => one === rank, (table) => PARTS.reduce((sum, name) => sum + table[name], 0));

/** Tables in the memory of a host whose first rank is `first`, with their bytes. */
export const inHost = (report, first, ranks) => parts(report.tables, (one) => one >= first && one < first + ranks, (table) => table.host_bytes);

/** The entry of a report with the most of something. */
export const fullest = (entries, field) => entries.reduce((most, entry) => (entry[field] > most[field] ? entry : most));

/** Numbers in short: 0–3, 6. */
export function spans(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found[found.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, end]) => (first === end ? `${first}` : `${first}–${end}`)).join(", ");
}
