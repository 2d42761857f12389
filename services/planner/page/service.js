// Asking the service: every question has an end, can be taken back, and comes back with an answer or a problem.
const TOKEN = "evenkeel-planner-token";
/** Longer than the service lets a request wait and search. */
const DEADLINE_MS = 100_000;
const WAITS_S = [1, 2, 4, 8];
const LONGEST_WAIT_S = 15;

let token = sessionStorage.getItem(TOKEN) ?? "";

/** What went wrong, and where: `errors` are the service's, with field, value, problem and remedy. */
export class Problem extends Error {
  constructor(detail, { status = 0, kind = "", errors = [], retry = null } = {}) {
    super(detail);
    Object.assign(this, { status, kind, errors, retry });
  }
}

export const hasToken = () => token !== "";

/** Takes a token for all questions from now on; an empty one signs out. */
export function useToken(value) {
  token = value;
  if (value) sessionStorage.setItem(TOKEN, value);
  else sessionStorage.removeItem(TOKEN);
}

async function once(path, content, signal) {
  const headers = { Accept: "application/json" };
  if (content !== undefined) headers["Content-Type"] = "application/json";
  if (token) headers.Authorization = `Bearer ${token}`;
  const bounded = AbortSignal.any([signal, AbortSignal.timeout(DEADLINE_MS)]);
  let response, text;
  try {
    response = await fetch(path, { method: content === undefined ? "GET" : "POST", headers, body: content, signal: bounded });
    text = await response.text();
  } catch (error) {
    if (signal.aborted) throw error;
    if (bounded.aborted) throw new Problem(`The planner has not answered for ${DEADLINE_MS / 1000} s; send fewer tables, or try again.`);
    throw new Problem("The planner cannot be reached.", { retry: 0 });
  }
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    // Not the planner's own answer: a proxy's, perhaps.
  }
  if (response.ok && value !== null) return value;
  const kind = String(value?.type ?? "").split(":").pop();
  const busy = [429, 502, 503, 504].includes(response.status) && kind !== "time-limit";
  throw new Problem(value?.detail ?? `The planner answered ${response.status} ${response.statusText}`.trim() + ".", {
    status: response.status, kind, errors: value?.errors ?? [],
    retry: busy ? Number(response.headers.get("Retry-After")) || 0 : null,
  });
}

const pause = (ms, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
});

/** The service's answer; asks again, a few times, while it is busy or away. `waiting` is told why and how long. */
export async function ask(path, value, signal, waiting = () => {}) {
  const content = value === undefined ? undefined : JSON.stringify(value);
  for (let attempt = 0; ; attempt++) {
    try {
      return await once(path, content, signal);
    } catch (error) {
      if (!(error instanceof Problem) || error.retry === null || attempt >= WAITS_S.length) throw error;
      const wait = Math.min(LONGEST_WAIT_S, Math.max(WAITS_S[attempt], error.retry));
      waiting(`${error.message} Trying again in ${wait} s…`);
      await pause(wait * 1000, signal);
    }
  }
}
