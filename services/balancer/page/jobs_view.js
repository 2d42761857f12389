// All jobs: a row for each of their streams, in the balancer's order.
import { $, html, number, percent, ratio, seconds, show, whole } from "./drawing.js";

const BAD = ["falling back", "joining", "left", "draining"];

/** The state of a stream in a word, with what may be said of it. */
export const state = (row) => html("span", { class: `state ${row.state === "balanced" ? "balanced" : BAD.includes(row.state) ? "bad" : ""}` }, row.state);

export class JobsView {
  constructor(root, address) {
    this.root = root;
    this.address = address;
    this.rows = [];
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
    const focused = document.activeElement?.closest("#sessions tbody a")?.hash;
    show(this.root.querySelector("tbody"), ...rows.map((row) => this.row(row)));
    if (focused) [...this.root.querySelectorAll("tbody a")].find((link) => link.hash === focused)?.focus();
  }

  row(row) {
    const name = row.group === "default" ? `${row.job} / ${row.loader}` : `${row.job} / ${row.group} / ${row.loader}`;
    return html("tr", {},
      html("th", { scope: "row" }, html("a", { href: this.address(row), title: `run ${row.run_id}, restart ${row.restart_count}` }, name)),
      html("td", {}, state(row)),
      html("td", {}, row.joined_ranks === row.ranks ? whole(row.ranks) : `${row.joined_ranks} of ${row.ranks}`),
      html("td", {}, number(row.rounds_per_second)),
      html("td", {}, ratio(row.imbalance_before)),
      html("td", {}, ratio(row.imbalance_after)),
      html("td", {}, ratio(row.bound)),
      html("td", { class: "wide" }, percent(row.moved_share)),
      html("td", { class: "wide" }, seconds(row.wait_seconds)),
      html("td", {}, number(row.saved_gpu_hours)));
  }
}
