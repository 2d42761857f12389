// The page: what it looks at, which its address names, and what is said above it.
import { $, say } from "./drawing.js";
import { JobView } from "./job.js";
import { JobsView } from "./jobs.js";
import { follow, hasToken, useToken } from "./service.js";

const NAMES = { job: "", group: "default", loader: "train" };
const job = new JobView($("one")), jobs = new JobsView($("streams"));
let stop = () => {};

/** The stream that the address names; null for all jobs. */
function named() {
  const asked = new URLSearchParams(location.hash.slice(1));
  return asked.get("job") ? Object.fromEntries(Object.entries(NAMES).map(([name, usual]) => [name, asked.get(name) ?? usual])) : null;
}

function settled(problem = "") {
  $("problem").hidden = !problem;
  say($("problem"), problem);
  document.body.dataset.settled = Number(document.body.dataset.settled ?? 0) + 1;
}

function take(answer) {
  (answer.stream ? job : jobs).take(answer);
  const draining = answer.balancer.draining ? "; the balancer is shutting down" : "";
  const count = answer.streams?.length, bad = answer.streams?.filter((row) => row.state !== "balanced").length;
  const all = `${count} ${count === 1 ? "stream" : "streams"} of jobs${bad ? `, ${bad} not balanced now` : ""}`;
  say($("headline"), (answer.stream ? `${answer.stream.job}: ${answer.stream.state}` : all) + draining);
  settled();
}

function fail(error) {
  if (error.status === 401) {
    jobs.take({ streams: [] });
    job.begin(named());
    askForToken(error.message);
  }
  say($("headline"), error.status === 401 ? "Sign in to see jobs" : "Not connected");
  settled(error.message);
}

/** Follows what the address names. */
function look() {
  stop();
  const name = named();
  $("overview").hidden = name !== null;
  $("one").hidden = name === null;
  $("sign").hidden = !hasToken();
  document.title = name ? `${name.job} · Evenkeel balancer` : "Evenkeel balancer";
  job.begin(name);
  stop = follow(() => (name ? `v1/stream?${new URLSearchParams({ ...name, since: job.next })}` : "v1/streams"), { take, fail });
}

function askForToken(why) {
  $("login-problem").hidden = !hasToken();
  say($("login-problem"), why);
  if (!$("login").open) $("login").showModal();
  $("token").focus();
}

function sign(token) {
  useToken(token);
  $("token").value = "";
  $("login").close();
  look();
}

$("sign").addEventListener("click", () => sign(""));
$("login").querySelector("[value=cancel]").addEventListener("click", () => $("login").close());
$("login").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sign($("token").value.trim().replace(/^Bearer\s+/i, "").replace(/[^\x21-\x7e]/g, ""));
});
window.addEventListener("hashchange", () => { look(); $(named() ? "one-title" : "main").focus(); });
look();
