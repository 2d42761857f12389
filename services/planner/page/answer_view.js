// What the service answered, on the page: one plan, its pictures, its curves, or why there is none.
import { aboutHbm, aboutHost, knee } from "./advice.js";
import { drawComparison } from "./comparison.js";
import { curveTable, drawCurve } from "./curve.js";
import { $, bytes, html, percent, seconds, show } from "./drawing.js";
import { hbmBudget } from "./request.js";
import { drawRanks } from "./ranks_report.js";
import { drawMemory, drawTime, legend } from "./stacks.js";

const WORDS = { hbm: "HBM for tables", host: "memory of a host" };
const budget = (over, { topology }) => (over === "hbm" ? hbmBudget(topology) : topology.host_bytes ?? null);

/** Shows answers; `page` has `kept`, `refused(problem)`, `setBudget(over, bytes)`, `placed(placements)`, `compare`. */
export class AnswerView {
  /** The request and the plan that are shown, or null. */
  now = null;
  code = "";
  #curves = { hbm: null, host: null };
  #whatIf = null;
  #today = null;

  constructor(page) {
    this.page = page;
    for (const choice of document.querySelectorAll("[name=over]")) choice.addEventListener("change", () => (this.#today && !this.#curves[this.over] ? this.page.again() : this.drawCurves()));
    new ResizeObserver(() => this.drawCurves()).observe($("curve"));
  }

  /** The budget that the curve is over: `hbm` or `host`. */
  get over() {
    return document.querySelector("[name=over]:checked").value;
  }

  begin(curves) {
    $("plan").setAttribute("aria-busy", "true");
    $("headline").textContent = "Planning…";
    $("stop").hidden = false;
    this.#curves = curves;
    this.#whatIf = this.#today = null;
    this.drawCurves();
  }

  waiting(text) {
    $("headline").textContent = text;
  }

  plan({ plan, code, report }, request) {
    const isFound = plan.seconds !== null && report !== null;
    this.now = isFound ? { plan, request, report } : null;
    this.code = code;
    this.#today = { plan, request };
    this.page.refused(null);
    this.#problem(isFound ? null : this.#shortage(plan, request));
    $("answer").hidden = !isFound;
    $("what-if").hidden = false;
    $("headline").textContent = isFound ? `${seconds(plan.seconds)} a step, ${proof(plan)}` : plan.shortage ? "Nothing fits" : "No answer in time";
    if (isFound) this.#drawPlan(this.now);
    $("ranks-part").hidden = $("lines").hidden = !isFound;
    $("code").textContent = code;
    this.page.placed(plan.placements);
    this.compare();
    this.drawCurves();
  }

  #drawPlan({ plan, report }) {
    const others = (plan.trivial ?? []).map((other) => `${other.name} ${other.seconds === null ? "does not fit" : seconds(other.seconds)}`);
    const beside = others.length ? ` Without a search: ${others.join(", ")}.` : "";
    $("verdict").textContent = `${seconds(plan.seconds)} a step on ${plan.hardware} with ${plan.runtime}, ${proof(plan)}: ${plan.placements.length} tables in `
      + `${plan.modules.length} fused ${plan.modules.length === 1 ? "module" : "modules"}.${beside}`;
    const modes = new Set(plan.placements.map((placement) => placement.mode));
    legend($("legend"), [...["HBM_ONLY", "CACHING", "HYBRID", "HOST_ONLY"].filter((mode) => modes.has(mode)), "workspace", "free"]);
    legend($("time-legend"), ["forward", "backward", "communication", "prefetch"]);
    drawMemory($("memory"), this.now);
    drawTime($("time"), this.now);
    drawRanks($("ranks-report"), report);
  }

  /** Draws the kept plan beside the one of now. */
  compare() {
    drawComparison(this.page.kept, this.now, this.page.comparing);
  }

  #shortage(plan, { topology }) {
    const short = plan.shortage;
    if (!short) return [html("p", {}, "The time was over before a plan was found. Give the search more time, fewer tables or larger budgets.")];
    const offer = (over, size, words) => (size === null ? null : html("button", { type: "button", onclick: () => this.page.setBudget(over, size) }, `Plan with ${bytes(size)} ${words}`));
    const hbm = short.smallest_hbm_bytes;
    return [html("p", {}, short.explanation), html("p", { class: "actions" }, offer("hbm", hbm === null ? null : hbmBudget(topology, hbm), "of HBM for tables on every rank"),
      offer("host", short.smallest_host_bytes, "of memory on every host"))];
  }

  whatIf(answer, curves, request, plan) {
    this.#curves = curves;
    this.#whatIf = answer;
    this.#today = { plan, request };
    this.drawCurves();
  }

  failed(problem, part) {
    if (part === "curve") {
      show($("curve"), html("p", { class: "error" }, `The curve could not be made: ${problem.message}`));
      return;
    }
    this.nothing(problem.errors?.length ? "This cannot be planned" : problem.message);
    const rest = this.page.refused(problem);
    if (rest.length) this.#problem([...rest.map((text) => html("p", {}, text)), html("p", {}, html("button", { type: "button", onclick: () => this.page.again() }, "Try again"))]);
  }

  /** Shows no plan: what was shown was of another request. */
  nothing(headline) {
    this.now = this.#today = this.#whatIf = null;
    this.code = "";
    this.#curves = { hbm: null, host: null };
    $("headline").textContent = headline;
    $("answer").hidden = $("what-if").hidden = $("lines").hidden = $("ranks-part").hidden = true;
    this.#problem(null);
    this.page.placed([]);
    this.compare();
  }

  /** Shows that no more is asked; the plan of the request, where it has come, stays. */
  stopped() {
    if (this.#today === null) this.nothing("Stopped: change something, or try again");
    this.end();
  }

  end() {
    $("plan").removeAttribute("aria-busy");
    $("stop").hidden = true;
    document.body.dataset.settled = String(Number(document.body.dataset.settled ?? 0) + 1);
  }

  #problem(children) {
    $("problem").hidden = children === null;
    show($("problem"), ...(children ?? []));
  }

  /** Draws the curve that is chosen, with today's budget once its plan is there. */
  drawCurves() {
    const { over } = this;
    const words = WORDS[over], points = this.#curves[over];
    const usable = points?.length > 0;
    $("curve-table").hidden = !usable;
    if (!usable) {
      show($("curve"), html("p", { class: "hint" }, points ? this.#whatIf?.notice || `No ${words} is enough, all else equal.` : "…"));
      $("curve-text").textContent = "";
      show($("next"));
      return;
    }
    const marks = this.#marks(points, over);
    drawCurve($("curve"), points, marks, words, (size) => this.page.setBudget(over, size));
    show($("curve-table").querySelector("div"), curveTable(points, words));
    const bend = marks.find((mark) => mark.kind === "knee");
    $("curve-text").textContent = `What a size allows, all larger ones allow.${bend ? ` Beyond the knee at ${bytes(bend.size)} memory buys less.` : ""} Click to plan with a size.`;
    const now = this.#today && budget(over, this.#today.request);
    const lines = !this.#whatIf || !this.#today ? []
      : over === "hbm" ? aboutHbm(this.#whatIf, this.#today.plan, points, now, this.#today.request.topology.ranks) : aboutHost(this.#whatIf, this.#today.plan, points, now);
    show($("next"), ...lines.map((line) => html("li", {}, line)));
  }

  #marks(points, over) {
    const marks = [];
    const bend = knee(points);
    if (bend) marks.push({ name: "knee", kind: "knee", ...bend });
    const mark = (name, kind, shown) => {
      const size = shown && budget(over, shown.request);
      if (Number.isFinite(size)) marks.push({ name, kind, size, time: shown.plan.seconds });
    };
    mark("kept", "kept", this.page.kept);
    mark("today", "today", this.#today);
    return marks;
  }
}

function proof(plan) {
  if (plan.status === "OPTIMAL" && !plan.gap) return "proved optimal";
  return `within ${percent(plan.gap)} of the best possible${plan.status === "OPTIMAL" ? "" : ", when the time was over"}`;
}
