// The list of tables: what each is, where the plan puts it, and the way to change or pin it.
import { $, MODES, bytes, count, html, percent, seconds, show } from "./drawing.js";

const AT_ONCE = 50;

const COLUMNS = [
  ["table", (row) => row.table.name, (row) => row.table.name ?? ""],
  ["rows", (row) => `${count(row.table.rows)} × ${row.table.dim ?? "?"}`, (row) => row.table.rows, "wide"],
  ["ids a sample", (row) => count(row.table.ids_per_sample ?? 1), (row) => row.table.ids_per_sample ?? 1, "wide"],
  ["optimizer", (row) => row.table.optimizer ?? "adam", (row) => row.table.optimizer ?? "adam", "wide"],
  ["statistics", (row) => statistics(row.table.access), (row) => statistics(row.table.access), "wide"],
  ["mode", (row) => row.placed?.mode, (row) => MODES.indexOf(row.placed?.mode), "mode"],
  ["in HBM", (row) => row.placed && percent(row.placed.ratio), (row) => row.placed?.ratio ?? 0, "wide"],
  ["HBM", (row) => row.placed && bytes(row.placed.hbm_bytes), (row) => row.placed?.hbm_bytes ?? 0],
  ["host", (row) => row.placed && bytes(row.placed.host_bytes), (row) => row.placed?.host_bytes ?? 0, "wide"],
  ["a step", (row) => row.placed && seconds(row.placed.seconds), (row) => row.placed?.seconds ?? 0],
  ["misses", (row) => row.placed && percent(row.placed.miss_rate), (row) => row.placed?.miss_rate ?? 0, "wide"],
  ["a GiB saves", (row) => row.placed && (row.placed.seconds_per_gib > 0 ? seconds(row.placed.seconds_per_gib) : "–"), (row) => row.placed?.seconds_per_gib ?? 0, "wide"],
];

function statistics(access) {
  if (!access || access.kind === "zipf") return `Zipf ${access?.exponent ?? 1.05}`;
  return String(access.kind ?? "?").replaceAll("_", " ");
}

/** Whether a table is pinned. */
export const isPinned = (table) => Boolean(table.modes?.length) || (table.ratio !== undefined && table.ratio !== null);

/** The list, and how it is sorted, filtered and how much of it is shown. */
export class Placements {
  #rows = [];
  #sorted = null;
  #shown = AT_ONCE;

  /** @param actions `edit(index)` and `pin(index)`. */
  constructor(actions) {
    this.actions = actions;
    show($("placements").tHead, html("tr", {}, ...COLUMNS.map(([name, , , kind], index) => html("th", { scope: "col", class: kind },
      html("button", { type: "button", onclick: () => this.#sort(index) }, name))), html("th", { scope: "col" }, "pin")));
    $("find").addEventListener("input", () => { this.#shown = AT_ONCE; this.#draw(); });
    $("more").addEventListener("click", () => {
      const before = this.#shown;
      this.#shown += 4 * AT_ONCE;
      this.#draw();
      $("placements").tBodies[0].rows[before]?.querySelector("button")?.focus();
    });
  }

  /** Shows the tables of a request, with the placements of a plan where there is one. */
  set(tables, placements = []) {
    const placed = new Map(placements.map((placement) => [placement.table, placement]));
    this.#rows = tables.map((table, index) => ({ table, index, placed: placed.get(String(table.name)) }));
    this.#draw();
  }

  #sort(index) {
    const again = this.#sorted?.index === index;
    this.#sorted = { index, down: again ? !this.#sorted.down : index > 0 };
    this.#draw();
  }

  #draw() {
    const wanted = $("find").value.trim().toLowerCase();
    const rows = this.#rows.filter(({ table }) => String(table.name).toLowerCase().includes(wanted));
    if (this.#sorted) {
      const key = COLUMNS[this.#sorted.index][2], sign = this.#sorted.down ? -1 : 1;
      rows.sort((a, b) => sign * (typeof key(a) === "string" ? String(key(a)).localeCompare(String(key(b))) : key(a) - key(b)));
    }
    const held = document.activeElement?.dataset?.row;
    show($("placements").tBodies[0], ...rows.slice(0, this.#shown).map((row) => this.#row(row)));
    if (held) $("placements").querySelector(`[data-row="${held}"]`)?.focus();
    [...$("placements").tHead.rows[0].cells].forEach((cell, index) => {
      if (index === this.#sorted?.index) cell.setAttribute("aria-sort", this.#sorted.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    $("more").hidden = rows.length <= this.#shown;
    const part = Math.min(this.#shown, rows.length);
    $("shown").textContent = rows.length === this.#rows.length && part === rows.length ? "" : `${part} of ${rows.length} that fit, ${this.#rows.length} in all`;
    $("find").closest("p").hidden = this.#rows.length <= 8;
  }

  #row({ table, index, placed }) {
    const pinned = isPinned(table), name = table.name ?? `table ${index}`;
    const edit = html("button", { type: "button", class: "link", "data-row": `edit-${index}`, "aria-label": `Edit ${name}`, title: "Edit", onclick: () => this.actions.edit(index) }, String(name));
    const cells = COLUMNS.slice(1).map(([, text, , kind]) => html("td", { class: kind === "mode" ? `mode ${placed?.mode ?? ""}` : kind }, text({ table, placed }) ?? "–"));
    const pin = html("td", {}, html("button", {
      type: "button", "data-row": `pin-${index}`, "aria-pressed": String(pinned), "aria-label": `${pinned ? "Unpin" : "Pin"} ${name}`, disabled: !pinned && !placed,
      title: pinned ? "Let the planner choose" : "Keep this mode and ratio", onclick: () => this.actions.pin(index, placed),
    }, pinned ? "Pinned" : "Pin"));
    return html("tr", {}, html("th", { scope: "row" }, edit), ...cells, pin);
  }
}
