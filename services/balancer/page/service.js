// What the balancer is asked: a document, again and again while somebody looks, with the token that this tab was given.
const TOKEN = "evenkeel-balancer-token";
const EVERY_MS = 1000;
const LONGEST_WAIT_MS = 15_000;
const TIMEOUT_MS = 15_000;

/** What went wrong; `status` is that of HTTP, 0 without an answer. */
class Problem extends Error {
  constructor(text, status = 0) {
    super(text);
    this.status = status;
  }
}

export const hasToken = () => Boolean(sessionStorage.getItem(TOKEN));

/** Takes a token for all questions from now on; an empty one signs out. */
export const useToken = (value) => sessionStorage.setItem(TOKEN, value);

async function ask(path, stopped) {
  const token = sessionStorage.getItem(TOKEN);
  const signal = AbortSignal.any([stopped, AbortSignal.timeout(TIMEOUT_MS)]);
  const asked = { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store", signal };
  const response = await fetch(path, asked).catch(() => { throw new Problem("The balancer cannot be reached."); });
  const document = await response.json().catch(() => ({}));
  if (!response.ok) throw new Problem(document.detail ?? `The balancer answered ${response.status}.`, response.status);
  return document;
}

/** Asks for what `path()` names until it is stopped: again after failures, and not while the page is hidden. */
export function follow(path, { take, fail }) {
  const stop = new AbortController();
  let timer, wait = EVERY_MS;
  const again = (ms) => { clearTimeout(timer); timer = setTimeout(look, ms); };
  async function look() {
    if (document.hidden || stop.signal.aborted) return;
    try {
      const answer = await ask(path(), stop.signal);
      if (stop.signal.aborted) return;
      take(answer);
      wait = EVERY_MS;
    } catch (error) {
      if (stop.signal.aborted) return;
      fail(error);
      if ([400, 401, 403].includes(error.status)) return; // asking again does not help
      wait = Math.min(LONGEST_WAIT_MS, 2 * wait);
    }
    again(wait);
  }
  document.addEventListener("visibilitychange", () => again(0), { signal: stop.signal });
  look();
  return () => { stop.abort(); clearTimeout(timer); };
}
