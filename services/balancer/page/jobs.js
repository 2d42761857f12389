// All jobs: a row for each of their streams, in the balancer's order.
import { html, number, percent, ratio, say, seconds, show, whole } from "./drawing.js";

/** The class of a stream's state. */
export const stateClass = (row) => `state ${{ balanced: "balanced", failing: "bad" }[row.state] ?? ""}`;

export class JobsView {
  constructor(table) {
    this.body = table.querySelector("tbody");
    this.elements = new Map();
  }

  take(answer) {
    const old = this.elements, elements = answer.streams.map((row) => this.row(row, old));
    this.elements = new Map(elements.map((element) => [element.dataset.key, element]));
    // The same elements stay where they are: a click that takes a moment hits what it was meant for.
    if (elements.length === this.body.children.length && elements.every((element, at) => this.body.children[at] === element)) return;
    const focused = document.activeElement;
    show(this.body, ...elements);
    if (focused?.isConnected) focused.focus();
  }

  row(row, old) {
    const key = `#${new URLSearchParams({ job: row.job, group: row.group, loader: row.loader })}`;
    const element = old.get(key) ?? html("tr", { "data-key": key }, html("th", { scope: "row" }, html("a", { href: key })), html("td", {}, html("span")),
      ...["", "", "", "", "", "wide", "wide", "", ""].map((name) => html("td", { class: name })));
    const link = element.querySelector("a"), word = element.querySelector("span");
    say(link, row.group === "default" ? `${row.job} / ${row.loader}` : `${row.job} / ${row.group} / ${row.loader}`);
    link.title = `run ${row.run_id}, restart ${row.restart_count}`;
    say(word, row.state);
    word.className = stateClass(row);
    const cells = [
      whole(row.ranks), number(row.rounds_per_second), ratio(row.imbalance_before), ratio(row.imbalance_after), ratio(row.imbalance_bound),
      percent(row.moved_share), seconds(row.round_seconds), whole(row.rounds_by_lead), number(row.saved_gpu_hours),
    ];
    cells.forEach((text, at) => say(element.children[at + 2], text));
    return element;
  }
}
