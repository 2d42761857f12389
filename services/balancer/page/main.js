// The page: all jobs, or one of them, as the balancer tells of them.
import { $, say } from "./drawing.js";
import { askForToken, bindLogin } from "./login.js";
import { JobView } from "./job_view.js";
import { JobsView } from "./jobs_view.js";
import { follow } from "./service.js";

const NAMES = ["job", "group", "loader"];
let stream = null;
let latest = null;
let paused = false;

const jobs = new JobsView($("overview"), (row) => `#${new URLSearchParams(NAMES.map((name) => [name, row[name]]))}`);
const job = new JobView($("one"));

/** Which session the address names; null: all. */
function named() {
  const found = new URLSearchParams(location.hash.slice(1));
  return found.get("job") ? Object.fromEntries(NAMES.map((name, at) => [name, found.get(name) ?? ["", "default", "train"][at]])) : null;
}

function problem(text) {
  $("problem").hidden = !text;
  say($("problem"), text);
}

function settled() {
  document.body.dataset.settled = String(1 + Number(document.body.dataset.settled ?? 0));
}

const told = {
  event(document) {
    problem("");
    if (paused) return;
    latest = document;
    if (document.session) job.take(document);
    else jobs.take(document);
    say($("headline"), headline(document));
    settled();
  },
  problem(error) {
    if (error.status === 401) {
      jobs.take({ sessions: [], sessions_left_out: 0 });
      job.begin(named());
      askForToken(error.message);
    }
    problem(error.status === 404 ? `${error.message}. It may have ended.` : error.message);
    say($("headline"), error.status === 401 ? "Sign in to see jobs" : "Not connected");
    settled();
  },
};

function headline(document) {
  const draining = document.balancer.draining ? "; the balancer is shutting down" : "";
  if (document.session) return `${document.session.job}: ${document.session.state}${draining}`;
  const all = document.sessions.length + document.sessions_left_out;
  const bad = document.sessions.filter((row) => row.state !== "balanced").length;
  return `${all} ${all === 1 ? "stream" : "streams"} of jobs${bad ? `, ${bad} not balanced` : ""}${draining}`;
}

/** Follows what the address names. */
function look({ focus = false } = {}) {
  stream?.stop();
  const session = named();
  $("overview").hidden = session !== null;
  $("one").hidden = session === null;
  document.title = session ? `${session.job} · Evenkeel balancer` : "Evenkeel balancer";
  latest = null;
  pause(false);
  if (session) job.begin(session);
  if (focus) (session ? $("one-title") : $("main")).focus();
  stream = follow(session ? `v1/events?${new URLSearchParams(session)}` : "v1/events", told);
}

function pause(value) {
  paused = value;
  $("pause").setAttribute("aria-pressed", String(value));
  $("pause").textContent = value ? "Go on" : "Pause";
}

/** What is shown, as a file for a ticket. */
function save() {
  if (!latest) return;
  const content = latest.session ? job.saved() : latest;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(content, null, 1)], { type: "application/json" }));
  link.download = `evenkeel-${latest.session ? latest.session.job.replace(/[^\w.-]/g, "_") : "jobs"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

$("pause").addEventListener("click", () => {
  pause(!paused);
  if (!paused) stream.again(); // with the rounds that were decided meanwhile
});
$("save").addEventListener("click", save);
window.addEventListener("hashchange", () => look({ focus: true }));
bindLogin(() => look());
look();
