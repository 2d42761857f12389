// One job's stream: its figures, its rounds back in time, its ranks.
import { CURVES, boundOf, drawCurve } from "./curve.js";
import { $, bytes, clock, html, number, percent, ratio, say, seconds, show, whole } from "./drawing.js";
import { ranks, state } from "./jobs_view.js";
import { drawRanks } from "./ranks.js";

const MOST_ROUNDS = 5000;
const DRAWN_ROUNDS = 240;
const LISTED_ROUNDS = 60;
const MOST_SNAPSHOTS = 600;

/** Bytes that a round has moved, as a share of all. */
const movedShare = (round) => (round.size ? round.moved_size / round.size : null);

export class JobView {
  constructor(root) {
    this.root = root;
    this.begin(null);
    for (const input of root.querySelectorAll("[name=drawn]")) input.addEventListener("change", () => this.draw());
    $("moment").addEventListener("input", () => { this.isLive = false; this.moment = Number($("moment").value); this.draw(); });
    $("live").addEventListener("click", () => { this.isLive = true; this.draw(); });
    $("rounds-table").addEventListener("toggle", () => this.drawTable());
    new ResizeObserver(() => { if (this.rounds.length) this.drawCurve(); }).observe($("curve"));
  }

  /** Another session from now on. */
  begin(name) {
    this.rounds = [];
    this.snapshots = [];
    this.latest = null;
    this.isLive = true;
    this.moment = 0;
    this.saidHeaviest = this.saidFallbacks = "";
    say($("one-title"), name ? [name.job, name.group, name.loader].join(" / ") : "");
    for (const id of ["facts", "curve", "legend", "ranks", "heaviest", "fallbacks"]) show($(id));
    for (const id of ["ranks-text", "moment-facts", "moment-text"]) say($(id), "");
  }

  take(document) {
    const other = this.latest && (this.latest.session.run_id !== document.session.run_id || this.latest.session.restart_count !== document.session.restart_count || this.latest.balancer.instance !== document.balancer.instance);
    if (other) { this.rounds = []; this.snapshots = []; this.isLive = true; }
    this.latest = document;
    const { number: numbers, ...columns } = document.rounds;
    const last = this.rounds.at(-1)?.number ?? -1;
    numbers.forEach((at, index) => {
      if (at > last) this.rounds.push({ number: at, ...Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[index]])) });
    });
    const forgotten = Math.max(0, this.rounds.length - MOST_ROUNDS);
    this.rounds.splice(0, forgotten);
    this.moment = Math.max(0, this.moment - forgotten);
    this.snapshots.push({ number: this.rounds.at(-1)?.number ?? -1, ranks: document.ranks, heaviest: document.heaviest });
    this.snapshots.splice(0, this.snapshots.length - MOST_SNAPSHOTS);
    this.draw();
  }

  /** What has been seen, all of it. */
  saved() {
    const names = Object.keys(this.latest.rounds);
    return { ...this.latest, rounds: Object.fromEntries(names.map((name) => [name, this.rounds.map((round) => round[name])])) };
  }

  draw() {
    if (!this.latest) return;
    if (this.isLive) this.moment = Math.max(0, this.rounds.length - 1);
    this.drawFacts();
    this.drawCurve();
    this.drawMoment();
    this.drawFallbacks();
    this.drawTable();
  }

  drawFacts() {
    const { session } = this.latest;
    const facts = [
      ["State", state(session)],
      ["Ranks", ranks(session)],
      ["Round", whole(session.round)], ["Rounds a second", number(session.rounds_per_second)],
      ["Balanced here", whole(session.rounds_balanced)],
      ["Without a plan", whole(Object.values(session.rounds_identity).reduce((sum, count) => sum + count, 0))],
      ["of these by the ranks", whole(session.rounds_by_ranks)],
      ["Breaker", session.breaker_openings ? `opened ${session.breaker_openings} ×, ${whole(session.rounds_elsewhere)} rounds` : "closed so far"],
      ["Mean wait", seconds(session.wait_seconds)],
      ["GPU-hours saved", number(session.saved_gpu_hours)], ["still lost", number(session.lost_gpu_hours)],
      ["Strategy", session.window > 1 ? `${session.strategy}, window of ${session.window}` : session.strategy],
      ["Run", `${session.run_id.slice(0, 24)}${session.restart_count !== "0" ? `, restart ${session.restart_count}` : ""}`],
    ];
    show($("facts"), ...facts.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));
  }

  drawCurve() {
    const kind = this.root.querySelector("[name=drawn]:checked").value;
    const end = this.isLive ? this.rounds.length : Math.min(this.rounds.length, Math.max(this.moment + DRAWN_ROUNDS / 2, DRAWN_ROUNDS));
    const shown = this.rounds.slice(Math.max(0, end - DRAWN_ROUNDS), end);
    drawCurve($("curve"), shown, kind, this.isLive ? null : this.rounds[this.moment]);
    show($("legend"), ...CURVES[kind].lines.map((line) => html("span", {}, html("i", { class: `key ${line.class}` }), line.name)),
      html("span", {}, html("i", { class: "key fallback" }), "a round without a plan that was followed"));
  }

  drawMoment() {
    const slider = $("moment"), round = this.rounds[this.moment];
    slider.max = String(Math.max(0, this.rounds.length - 1));
    slider.value = String(this.moment);
    $("live").setAttribute("aria-pressed", String(this.isLive));
    if (!round) return;
    const text = `${whole(round.round)}, ${clock(round.time)}`;
    slider.setAttribute("aria-valuetext", `round ${text}`);
    say($("moment-text"), text);
    say($("moment-facts"), round.reason
      ? `Without a plan: ${round.reason}. The ranks waited ${seconds(round.wait_seconds)}.`
      : `Max/mean load ${ratio(round.imbalance_before)} as loaded, ${ratio(round.imbalance_after)} as trained, at best ${ratio(boundOf(round))}. `
        + `${whole(round.moved_samples)} of ${whole(round.samples)} samples moved, ${percent(movedShare(round))} of ${bytes(round.size)}. `
        + `Decided after ${seconds(round.wait_seconds)}, of which the search took ${seconds(round.search_seconds)}.`);
    let seen = this.snapshots.at(-1);
    if (!this.isLive) seen = this.snapshots.findLast((one) => one.number <= round.number) ?? this.snapshots[0];
    drawRanks($("ranks"), $("ranks-text"), seen.ranks, this.latest.ranks_left_out);
    this.drawHeaviest(seen.heaviest);
  }

  drawHeaviest(heaviest) {
    const said = JSON.stringify(heaviest);
    if (said === this.saidHeaviest) return;  // what somebody marks to copy stays marked
    this.saidHeaviest = said;
    if (!heaviest) return show($("heaviest"), html("p", { class: "hint" }, "The samples of the next round will be looked at."));
    const head = ["Sample", "Cost", "of a rank's mean load", "Loaded on", "Trained on"];
    show($("heaviest"), html("table", {}, html("caption", { class: "hint" }, `Of round ${whole(heaviest.round)}. A sample above 100 % outweighs what a rank has on average: only pieces of it, or a window, make such a batch even.`),
      html("thead", {}, html("tr", {}, ...head.map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", {}, ...heaviest.samples.map((sample, at) => html("tr", {}, html("th", { scope: "row" }, String(at + 1)),
        html("td", {}, number(sample.cost)), html("td", {}, percent(sample.share)), html("td", {}, `rank ${sample.home}`), html("td", {}, `rank ${sample.rank}${sample.pieces > 1 ? ` and ${whole(sample.pieces - 1)} more` : ""}`))))));
  }

  drawFallbacks() {
    const { session, fallbacks, gaps } = this.latest;
    const before = this.saidFallbacks;
    this.saidFallbacks = JSON.stringify([session.rounds_identity, fallbacks, gaps]);
    if (before === this.saidFallbacks) return;
    const counts = Object.entries(session.rounds_identity).sort((a, b) => b[1] - a[1]).map(([reason, count]) => `${reason} ${whole(count)}`);
    const said = [...fallbacks.map((one) => ({ time: one.time, text: `round ${whole(one.round)}: ${one.reason}. ${one.detail}` })),
      ...gaps.map((one) => ({ time: one.time, text: `rounds ${whole(one.first)} to ${whole(one.last)} did not come here: the ranks' breaker was open` }))]
      .sort((a, b) => b.time - a.time);
    show($("fallbacks"), html("p", {}, counts.length ? `By reason: ${counts.join(", ")}.` : "Every round that came here got a plan, and it was followed."),
      said.length ? html("ul", {}, ...said.map((one) => html("li", {}, `${clock(one.time)} ${one.text}`))) : null);
  }

  drawTable() {
    const table = $("rounds-table");
    if (!table.open) return;
    const head = ["Round", "Time", "Before", "After", "Bound", "Moved", "Wait", "Without a plan"];
    const rows = this.rounds.slice(-LISTED_ROUNDS).reverse();
    show(table.querySelector("div"), html("table", {}, html("thead", {}, html("tr", {}, ...head.map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", {}, ...rows.map((round) => html("tr", {}, html("th", { scope: "row" }, whole(round.round)), html("td", {}, clock(round.time)),
        html("td", {}, ratio(round.imbalance_before)), html("td", {}, ratio(round.imbalance_after)), html("td", {}, ratio(boundOf(round))),
        html("td", {}, percent(movedShare(round))), html("td", {}, seconds(round.wait_seconds)), html("td", { class: "text" }, round.reason))))));
  }
}
