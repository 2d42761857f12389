// Events of the balancer, over one connection that is closed while nobody looks.
const TOKEN = "evenkeel-balancer-token";
const LONGEST_WAIT_S = 15;
const GONE_WAIT_S = 5;
/** Without an event for so long the connection is dead: the balancer sends one every 30 s at least. */
const SILENT_MS = 45_000;

let token = sessionStorage.getItem(TOKEN) ?? "";

/** What went wrong; `status` is that of HTTP, 0 without an answer. */
export class Problem extends Error {
  constructor(text, status = 0) {
    super(text);
    this.status = status;
  }
}

export const hasToken = () => token !== "";

/** Takes a token for all questions from now on; an empty one signs out. */
export function useToken(value) {
  token = value;
  if (value) sessionStorage.setItem(TOKEN, value);
  else sessionStorage.removeItem(TOKEN);
}

async function open(path, signal) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(path, { headers, signal, cache: "no-store" });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Problem("The balancer cannot be reached.");
  }
  if (response.ok) return response;
  const text = await response.text();
  let detail = `The balancer answered ${response.status}.`;
  try {
    detail = JSON.parse(text).detail ?? detail;
  } catch {
    // Not the balancer's own answer: a proxy's, perhaps.
  }
  throw new Problem(detail, response.status);
}

/** A document that is asked for once. */
export async function ask(path) {
  return (await open(path, new AbortController().signal)).json();
}

async function read(path, stop, told) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENT_MS);
  try {
    const response = await open(path, AbortSignal.any([stop, silence.signal]));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENT_MS);
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const data = text.slice(0, end).split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data) told.event(JSON.parse(data));
      }
    }
  } catch (error) {
    if (stop.aborted || error instanceof Problem) throw error;
    throw new Problem("The balancer cannot be reached.");
  } finally {
    clearTimeout(timer);
  }
}

/** Follows a stream until it is stopped: again after breaks, and not while the page is hidden. */
export function follow(path, told) {
  const stopped = new AbortController();
  let shown = new AbortController();
  let wake = () => {};
  const changed = () => {
    shown.abort();
    shown = new AbortController();
    wake();
  };
  document.addEventListener("visibilitychange", changed);
  const pause = (ms) => new Promise((resolve) => { wake = resolve; if (ms < Infinity) setTimeout(resolve, ms); });
  (async () => {
    for (let wait = 1; !stopped.signal.aborted;) {
      if (document.hidden) { await pause(Infinity); continue; }
      const now = AbortSignal.any([stopped.signal, shown.signal]);
      try {
        await read(path, now, { event: (document) => { wait = 1; told.event(document); } });
        if (!now.aborted) await pause(1000 * wait);
      } catch (error) {
        if (now.aborted) continue;
        told.problem(error);
        if ([400, 401, 403].includes(error.status)) await pause(Infinity);
        // A job that has ended may begin again under its name.
        else await pause(1000 * (error.status === 404 ? GONE_WAIT_S : wait));
      }
      wait = Math.min(LONGEST_WAIT_S, 2 * wait);
    }
  })();
  return {
    again: changed,
    stop() { stopped.abort(); document.removeEventListener("visibilitychange", changed); wake(); },
  };
}
