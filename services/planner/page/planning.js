// One question at a time: what is asked last is what is shown, and nothing older ever comes after it.
import { body, curveKey, hbmBudget } from "./request.js";
import { ask } from "./service.js";

const LIMIT_S = 30;
const PAUSE_MS = 200;
const POINTS = { hbm: ["points", 24], host: ["host_points", 16] };

/** Asks for plans and curves of the request as it is now. */
export class Planning {
  #own = null;
  #timer = 0;
  #changed = 0;
  #curves = { hbm: null, host: null };

  /** @param view Has `over`, the budget that its curve is over; gets `begin`, `waiting(text)`, `plan(answer)`, `whatIf(answer, curves)`, `failed(problem, part)`, `end`. */
  constructor(view) {
    this.view = view;
  }

  /** Asks once the request does not change any more: at once after a pause, else in a moment. */
  later(request) {
    this.stop();
    this.view.begin(this.#kept(request));
    const pause = performance.now() - this.#changed > 3 * PAUSE_MS ? 0 : PAUSE_MS;
    this.#changed = performance.now();
    return new Promise((resolve) => { this.#timer = setTimeout(() => resolve(this.now(request)), pause); });
  }

  /** Takes back what is being asked. */
  stop() {
    clearTimeout(this.#timer);
    this.#own?.abort();
    this.#own = null;
  }

  /** Asks now; gives the problem where there was one, and null otherwise. */
  async now(request) {
    this.stop();
    const own = (this.#own = new AbortController());
    const asked = structuredClone(request);
    const waiting = (text) => { if (own === this.#own) this.view.waiting(text); };
    if (!asked.tables.length) {
      this.view.nothing("There are no tables: paste, open or add some");
      this.view.end();
      return null;
    }
    let part = "plan";
    this.view.begin(this.#kept(asked));
    try {
      const answer = await ask("v1/plans", body(asked, LIMIT_S), own.signal, waiting);
      if (own !== this.#own) return null;
      this.view.plan(answer, asked);
      part = "curve";
      const over = this.view.over, isKnown = this.#curves[over]?.key === curveKey(asked, over);
      const points = { points: 0, host_points: 0 };
      if (!isKnown) points[POINTS[over][0]] = POINTS[over][1];
      const found = await ask("v1/whatif", { ...body(asked, LIMIT_S), ...points }, own.signal, waiting);
      if (own !== this.#own) return null;
      if (!isKnown) this.#curves[over] = { key: curveKey(asked, over), points: sized(found, over, asked.topology) };
      this.view.whatIf(found, this.#kept(asked), asked, answer.plan);
      return null;
    } catch (error) {
      if (own !== this.#own) return null;
      this.view.failed(error, part, asked);
      return error;
    } finally {
      if (own === this.#own) this.view.end();
    }
  }

  /** The curves that hold for a request: those found for it, but for the budget that they are drawn over. */
  #kept(request) {
    return Object.fromEntries(Object.keys(POINTS).map((over) => {
      const curve = this.#curves[over];
      return [over, curve?.key === curveKey(request, over) ? curve.points : null];
    }));
  }
}

/** Sizes and times of the points of a curve that a plan was found for; sizes are what tables may use. */
function sized(found, over, topology) {
  const points = (over === "hbm" ? found.curve : found.host_curve).filter((point) => point.seconds !== null);
  return points.map((point) => ({ size: over === "hbm" ? hbmBudget(topology, point.hbm_bytes) : point.host_bytes, time: point.seconds }));
}
