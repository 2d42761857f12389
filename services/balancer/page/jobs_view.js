// All jobs: a row for each of their streams, in the balancer's order.
import { $, html, number, percent, ratio, say, seconds, show, whole } from "./drawing.js";

const BAD = ["falling back", "joining", "missing ranks", "left", "draining"];

/** How many ranks are there, and which are not. */
export function ranks(row) {
  if (row.joined_ranks === row.ranks) return whole(row.ranks);
  const missing = row.missing_ranks ?? [], more = row.ranks - row.joined_ranks - Math.min(missing.length, 4);
  return `${row.joined_ranks} of ${row.ranks}${missing.length ? `, not ${missing.slice(0, 4).join(", ")}${more > 0 ? " …" : ""}` : ""}`;
}

/** The state of a stream in a word, with what may be said of it. */
export const state = (row) => html("span", { class: stateClass(row) }, row.state);

const stateClass = (row) => `state ${row.state === "balanced" ? "balanced" : BAD.includes(row.state) ? "bad" : ""}`.trim();

export class JobsView {
  constructor(root, address) {
    this.root = root;
    this.address = address;
    this.rows = [];
    this.elements = new Map();
    $("find").addEventListener("input", () => this.draw());
  }

  take(document) {
    this.rows = document.sessions;
    this.leftOut = document.sessions_left_out;
    this.draw();
  }

  draw() {
    const wanted = $("find").value.trim().toLowerCase();
    const rows = this.rows.filter((row) => `${row.job}/${row.group}/${row.loader}`.toLowerCase().includes(wanted));
    $("nothing").hidden = this.rows.length > 0;
    $("shown").textContent = rows.length === this.rows.length && !this.leftOut ? "" : `${rows.length} of ${whole(this.rows.length + this.leftOut)} shown`;
    const wantedRows = rows.map((row) => this.row(row));
    const body = this.root.querySelector("tbody");
    // The same elements stay where they are: a click that takes a moment hits what it was meant for.
    if (body.children.length !== wantedRows.length || wantedRows.some((element, at) => body.children[at] !== element)) {
      const focused = document.activeElement;
      show(body, ...wantedRows);
      if (focused?.closest("#sessions") && focused.isConnected) focused.focus();
    }
    for (const key of this.elements.keys()) if (!this.rows.some((row) => this.address(row) === key)) this.elements.delete(key);
  }

  /** The row's element, brought up to date. */
  row(row) {
    const key = this.address(row);
    let element = this.elements.get(key);
    if (!element) {
      const cells = ["", "", "", "", "", "wide", "wide", ""].map((name) => html("td", { class: name || undefined }));
      element = html("tr", {}, html("th", { scope: "row" }, html("a", { href: key })), html("td", {}, html("span")), ...cells);
      this.elements.set(key, element);
    }
    const link = element.querySelector("a"), word = element.querySelector("span");
    say(link, row.group === "default" ? `${row.job} / ${row.loader}` : `${row.job} / ${row.group} / ${row.loader}`);
    link.title = `run ${row.run_id}, restart ${row.restart_count}`;
    say(word, row.state);
    word.className = stateClass(row);
    const values = [
      ranks(row), number(row.rounds_per_second),
      ratio(row.imbalance_before), ratio(row.imbalance_after), ratio(row.bound), percent(row.moved_share), seconds(row.wait_seconds), number(row.saved_gpu_hours),
    ];
    values.forEach((value, at) => say(element.children[at + 2], value));
    return element;
  }
}
