// One job's stream: its figures, its latest rounds, its ranks, and what was not planned here.
import { $, clock, drawCurve, html, number, percent, ratio, say, seconds, show, whole } from "./drawing.js";
import { stateClass } from "./jobs.js";

const MOST_ROUNDS = 240;
const DELAYS = { loading: "loads data too slowly", network: "gets its samples late over the network", loop: "does something else between its steps" };
const movedShare = (round) => (round.size ? round.moved_size / round.size : null);
const CURVES = {
  imbalance: {
    what: "Max/mean load", text: ratio, base: 1,
    lines: [
      { class: "before", name: "as loaded", of: (round) => round.imbalance_before },
      { class: "after", name: "as planned", of: (round) => round.imbalance_after },
      { class: "bound", name: "lower bound", of: (round) => round.imbalance_bound },
    ],
  },
  moved: { what: "Share of bytes moved", text: percent, base: 0, lines: [{ class: "after", name: "bytes that change rank", of: movedShare }] },
  seconds: {
    what: "Seconds", text: seconds, base: 0,
    lines: [
      { class: "before", name: "a call, from its begin to its plan", of: (round) => round.seconds },
      { class: "after", name: "of that, the search", of: (round) => round.search_seconds },
    ],
  },
};

/** In what a rank is slower than the others, by how much and since when; empty: in nothing. */
function slowness(rank) {
  const computes = rank.speed < 1 ? `computes at ${percent(rank.speed)} of the median rank's speed since round ${whole(rank.slow_since)}, and gets less work` : "";
  const late = rank.delay ? `${DELAYS[rank.delay]} since round ${whole(rank.delay_since)}, by ${percent(rank.delay_share)} of the median rank's computing time` : "";
  return [computes, late].filter(Boolean).join("; ");
}

export class JobView {
  constructor(root) {
    this.root = root;
    this.begin(null);
    for (const input of root.querySelectorAll("[name=drawn]")) input.addEventListener("change", () => this.drawCurve());
  }

  /** The first round that is not known yet. */
  get next() {
    return (this.rounds.at(-1)?.number ?? -1) + 1;
  }

  /** Another stream from now on. */
  begin(name) {
    this.rounds = [];
    this.latest = null;
    say($("one-title"), name ? [name.job, name.group, name.loader].join(" / ") : "");
    for (const id of ["facts", "curve", "legend", "ranks", "trouble"]) show($(id));
    say($("ranks-text"), "");
  }

  take(answer) {
    const run = ({ stream, balancer }) => [stream.run_id, stream.restart_count, balancer.instance].join();
    if (this.latest && run(this.latest) !== run(answer)) this.rounds = []; // what it has more than these comes with the next answer
    this.latest = answer;
    const { number: numbers, ...columns } = answer.rounds;
    numbers.forEach((at, index) => {
      if (at >= this.next) this.rounds.push({ number: at, ...Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[index]])) });
    });
    this.rounds.splice(0, this.rounds.length - MOST_ROUNDS);
    this.drawFacts(answer.stream);
    this.drawCurve();
    this.drawRanks(answer.ranks, answer.ranks_left_out);
    this.drawTrouble(answer.stream, answer.failures);
  }

  drawFacts(stream) {
    const facts = [
      ["State", html("span", { class: stateClass(stream) }, stream.state)], ["Last heard", `${seconds(stream.silent_seconds)} ago`],
      ["Ranks", whole(stream.ranks)], ["Round", whole(stream.round)], ["Rounds a second", number(stream.rounds_per_second)],
      ["Max/mean load", `${ratio(stream.imbalance_before)} → ${ratio(stream.imbalance_after)}`], ["Lower bound", ratio(stream.imbalance_bound)],
      ["Bytes moved", percent(stream.moved_share)], ["Planned here", whole(stream.rounds_planned)], ["Planned by rank 0", whole(stream.rounds_by_lead)],
      ["Left as loaded", whole(stream.rounds_unbalanced)], ["A round takes", seconds(stream.round_seconds)], ["A step computes", seconds(stream.step_seconds)],
      ["GPU-hours saved", number(stream.saved_gpu_hours)],
      ["Strategy", stream.window > 1 ? `${stream.strategy}, window of ${stream.window}` : stream.strategy],
      ["Run", `${stream.run_id.slice(0, 24)}${stream.restart_count !== "0" ? `, restart ${stream.restart_count}` : ""}`], ["Client", stream.client_version],
    ];
    show($("facts"), ...facts.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));
  }

  drawCurve() {
    if (!this.rounds.length) return;
    const curve = CURVES[this.root.querySelector("[name=drawn]:checked").value];
    drawCurve($("curve"), this.rounds, curve);
    show($("legend"), ...curve.lines.map((line) => html("span", {}, html("i", { class: `key ${line.class}` }), line.name)));
  }

  drawRanks(ranks, leftOut) {
    const node = $("ranks"), mean = ranks.reduce((sum, rank) => sum + rank.load_after, 0) / ranks.length;
    const most = Math.max(1e-12, ...ranks.flatMap((rank) => [rank.load_before, rank.load_after]));
    const bar = () => html("div", { class: "rank", role: "listitem" }, html("span"), html("span", { class: "bars" }, html("i", { class: "after" }), html("i", { class: "before" })), html("span"));
    while (node.children.length > ranks.length) node.lastChild.remove();
    while (node.children.length < ranks.length) node.append(bar());
    ranks.forEach((rank, at) => {
      const element = node.children[at], [name, bars, slow] = element.children;
      const text = `rank ${rank.rank}: load ${percent(mean ? rank.load_after / mean : null)} of the mean, as loaded ${percent(mean ? rank.load_before / mean : null)}${slowness(rank) ? `; ${slowness(rank)}` : ""}`;
      say(name, String(rank.rank));
      bars.children[0].style.width = `${(100 * rank.load_after) / most}%`;
      bars.children[1].style.width = `${(100 * rank.load_before) / most}%`;
      say(slow, [rank.speed < 1 ? `speed ${percent(rank.speed)}` : "", rank.delay ? `${rank.delay} +${percent(rank.delay_share)}` : ""].filter(Boolean).join(", "));
      element.classList.toggle("slow", Boolean(slowness(rank)));
      element.title = text;
      element.setAttribute("aria-label", text);
    });
    const cost = (rank) => Math.max(1 / rank.speed - 1, rank.delay_share ?? 0);
    const slow = ranks.filter(slowness).sort((a, b) => cost(b) - cost(a));
    say($("ranks-text"), `Loads of the latest round: the wide bar as planned, the thin one as loaded.${slow.slice(0, 3).map((rank) => ` Rank ${rank.rank} ${slowness(rank)}.`).join("")}`
      + `${slow.length > 3 ? ` ${slow.length - 3} more ranks are slow.` : ""}${leftOut ? ` ${whole(leftOut)} ranks of which there is less to say are left out.` : ""}`);
  }

  drawTrouble(stream, failures) {
    const counts = Object.entries(stream.failed_calls).map(([reason, count]) => `${reason} ${whole(count)}`).join(", ");
    const lead = `Rank 0 has planned ${whole(stream.rounds_by_lead)} rounds of this run by itself${stream.last_trouble ? `; the latest trouble it had: ${stream.last_trouble}` : ""}.`;
    const lines = failures.toReversed().map((one) => html("li", {}, `${clock(one.time)} ${one.reason} (${one.status})`));
    show($("trouble"), html("p", {}, lead), html("p", {}, counts ? `Calls of this job that failed here: ${counts}.` : "No call of this job has failed here."), html("ul", {}, ...lines));
  }
}
