// The page: one request, what edits it, and what shows the answers to it.
import { AnswerView } from "./answer_view.js";
import { $, GIB, html } from "./drawing.js";
import { choose, clearErrors, sentence, showError, showErrors, showFields, takeField } from "./fields.js";
import { copy, download, LARGEST_FILE, planFile, readFile } from "./files.js";
import { pack, unpack } from "./links.js";
import { askForToken, bindLogin } from "./login.js";
import { Placements, isPinned } from "./placements.js";
import { Planning } from "./planning.js";
import { example, hbmBudget, numbers, remember, remembered, setHbmBudget } from "./request.js";
import { ask } from "./service.js";
import { editAll, editTable, setShardings } from "./table_dialog.js";
import { quantity, readTables, writeTables } from "./tables_text.js";

const SLIDERS = ["hbm", "host"];
const STEPS = 200;
const profiles = new Map();
let request = example();
let before = null;
let typing = 0;

const page = {
  kept: null,
  comparing: {
    back: () => replace(page.kept.request, "This is the request of the kept plan."),
    forget: () => { page.kept = null; view.compare(); view.drawCurves(); $("keep").focus(); },
  },
  again: () => changed(),
  placed: (placements) => placements_.set(request.tables, placements),
  setBudget(over, size) {
    setBudget(over, size);
    showRequest();
    changed();
  },
  refused(problem) {
    clearErrors($("job"));
    if (!problem) return [];
    if (problem.status === 401) { askForToken(problem.message); return ["Sign in to plan."]; }
    if (!problem.errors?.length) return [problem.message];
    return showErrors($("job"), problem.errors).map(sentence);
  },
};
const view = new AnswerView(page);
const planning = new Planning(view);
const placements_ = new Placements({
  edit: (index) => edit(index),
  pin(index, placed) {
    const table = request.tables[index];
    if (isPinned(table)) { delete table.modes; delete table.ratio; }
    else Object.assign(table, { modes: [placed.mode], ratio: placed.ratio });
    tablesChanged();
  },
});

/** Plans the request as it is now, in a moment. */
function changed() {
  remember(request);
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
  $("count").textContent = request.tables.length === 1 ? "1 table" : `${request.tables.length} tables`;
  return planning.later(request);
}

function tablesChanged() {
  showError($("tables"), "");
  $("tables").value = writeTables(request.tables);
  placements_.set(request.tables, []);
  return changed();
}

/** Shows the request in all inputs. */
function showRequest() {
  const { hardware } = request;
  if (hardware && typeof hardware === "object") {
    const name = `${hardware.name ?? "profile"} (from the file)`;
    profiles.set(name, hardware);
    choose($("hardware"), name);
  }
  showBudget();
  showFields($("job"), request, (input) => ["tables", "hbm"].includes(input.id) || (input.id === "hardware" && typeof hardware === "object"));
  $("tables").value = writeTables(request.tables);
  showSliders();
}

const budget = (over) => (over === "hbm" ? hbmBudget(request.topology) : request.topology.host_bytes ?? null);

function setBudget(over, size) {
  if (over === "hbm") setHbmBudget(request.topology, Math.round(size));
  else request.topology.host_bytes = Math.round(size);
}

const showBudget = () => { const size = budget("hbm"); $("hbm").value = Number.isFinite(size) ? String(Number((size / GIB).toFixed(3))) : ""; };

/** The memory that a slider may reach: that of the hardware, or what is asked for where that is more. */
function most(over) {
  const profile = typeof request.hardware === "object" ? request.hardware : profiles.get(request.hardware);
  const { hbm_bytes, ranks, ranks_per_host } = request.topology;
  const usual = over === "hbm" ? Number(hbm_bytes) : 2 * (profile?.host_bytes_per_rank ?? 0) * (Number(ranks_per_host ?? ranks) || 1);
  return Math.max(usual || 256 * GIB, Number(budget(over)) || 0);
}

function showSliders() {
  for (const over of SLIDERS) {
    const value = budget(over), slider = $(`${over}-slider`);
    slider.value = Number.isFinite(value) ? String(Math.round(STEPS * Math.sqrt(value / most(over)))) : slider.max;
    slider.setAttribute("aria-valuetext", Number.isFinite(value) ? `${$(over).value} GiB` : "no limit");
  }
}

/** Takes another request; the one before can be had back. */
function replace(next, text) {
  before = request;
  request = structuredClone(next);
  showRequest();
  tablesChanged();
  notice(text, true);
}

function notice(text, undo = false) {
  $("notice").hidden = !text;
  $("notice").querySelector("span").textContent = text;
  $("undo").hidden = !undo;
}

function edit(index, isNew = false) {
  const old = structuredClone(request.tables);
  const table = isNew ? { name: freeName(), rows: 1000000, dim: 64 } : request.tables[index];
  editTable(table, index, isNew, {
    apply: (edited) => { request.tables[index] = edited; return tablesChanged(); },
    remove: () => { const rest = { ...request, tables: old.filter((_, at) => at !== index) }; replace(rest, `${table.name} is removed.`); },
    // The list has been drawn again meanwhile: its button is another one.
    closed: () => (document.querySelector(`[data-row="edit-${index}"]`) ?? $("add")).focus(),
    cancel: () => { if (JSON.stringify(old) !== JSON.stringify(request.tables)) { request.tables = old; tablesChanged(); } },
  });
}

function freeName() {
  const names = new Set(request.tables.map((table) => table.name));
  let number = request.tables.length + 1;
  while (names.has(`table_${number}`)) number++;
  return `table_${number}`;
}

async function openFile(file) {
  try {
    if (file.size > LARGEST_FILE) throw new Error(`${file.name} is larger than ${LARGEST_FILE >> 20} MiB, which is more than the planner takes.`);
    const found = readFile(await file.text(), file.name, profiles);
    if (found.topology) found.topology = numbers(found.topology);
    replace("topology" in found ? { hardware: "h200", runtime: "dynamicemb", step: {}, tables: [], ...found } : { ...request, ...found }, `${file.name} is open.`);
  } catch (error) {
    notice(error.message);
  }
}

async function openLink() {
  try {
    const found = await unpack(location.hash);
    if (found === null) return false;
    const wanted = readFile(JSON.stringify(found), "The link", profiles);
    replace({ ...example(), ...wanted, topology: numbers(wanted.topology ?? example().topology) }, "The request of the link is open.");
    return true;
  } catch (error) {
    notice(error.message);
    return false;
  }
}

async function share() {
  try {
    const hash = await pack(request);
    history.replaceState(null, "", hash);
    notice((await copy(location.href)) ? "A link to this request is on the clipboard." : "The address of this page now holds the request: copy it from the browser's bar.");
  } catch (error) {
    notice(error.message);
  }
}

function bind() {
  $("job").addEventListener("input", (event) => {
    const { target } = event;
    if ($("undo").hidden) notice("");
    if (target.id === "tables") {
      clearTimeout(typing);
      planning.stop();
      typing = setTimeout(typed, 300);
    } else if (target.type === "range") {
      const over = target.id.split("-")[0];
      setBudget(over, Math.round(((Number(target.value) / STEPS) ** 2 * most(over)) / 2 ** 26) * 2 ** 26);
      showRequest();
      changed();
    } else if (target.id === "hbm") {
      const size = quantity(target.value.trim());
      if (!(size >= 0)) return refuse(target, `HBM for tables: is no number of GiB (got ${target.value || "nothing"}); give one such as 60`);
      if (size * GIB > request.topology.hbm_bytes) {
        const most = Number((request.topology.hbm_bytes / GIB).toFixed(3));
        return refuse(target, `HBM for tables: is more than a GPU has (got ${target.value}); give at most ${most}, or the GPU more`);
      }
      showError(target, "");
      setBudget("hbm", size * GIB);
      showFields($("job"), request, (input) => input.id !== "gpu");
      showSliders();
      changed();
    } else if (target.id === "hardware") {
      request.hardware = profiles.has(target.value) && target.value.endsWith("(from the file)") ? profiles.get(target.value) : target.value;
      showSliders();
      changed();
    } else if (takeField(target, request)) {
      showBudget();
      showSliders();
      changed();
    }
  });
  $("stop").addEventListener("click", () => {
    planning.stop();
    view.stopped();
  });
  $("undo").addEventListener("click", () => { const back = before; replace(back, "This is the request from before."); });
  $("dismiss").addEventListener("click", () => notice(""));
  $("open").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { if ($("file").files[0]) openFile($("file").files[0]); $("file").value = ""; });
  $("share").addEventListener("click", share);
  $("example").addEventListener("click", () => replace(example(), "This is the example."));
  $("add").addEventListener("click", () => edit(request.tables.length, true));
  $("all").addEventListener("click", () => editAll((change) => replace({ ...request, tables: request.tables.map(change) }, "All tables are changed.")));
  $("keep").addEventListener("click", () => { page.kept = structuredClone(view.now); view.compare(); view.drawCurves(); notice("This plan is kept. Change a budget or a pin to see both side by side."); });
  $("copy").addEventListener("click", async () => { $("lines").open = true; notice((await copy(view.code)) ? "The lines are on the clipboard." : "The browser does not allow it: copy them below."); });
  $("download").addEventListener("click", () => download("plan.json", planFile(view.now.request, view.now.plan)));
  window.addEventListener("hashchange", openLink);
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) openFile(event.dataTransfer.files[0]); });
  bindLogin(start);
}

/** Shows what is wrong with an input, and no plan: it would not be one of what stands there. */
function refuse(input, text) {
  planning.stop();
  view.nothing("This cannot be planned");
  showError(input, text);
  view.end();
}

/** The tables as they were typed, once they are typed. */
function typed() {
  try {
    request.tables = readTables($("tables").value);
  } catch (error) {
    return refuse($("tables"), error.message);
  }
  showError($("tables"), "");
  placements_.set(request.tables, []);
  changed();
}

/** Gets what the service knows, then plans. */
async function start() {
  const away = new AbortController();
  try {
    for (const profile of await ask("v1/hardware-profiles", undefined, away.signal, (text) => view.waiting(text))) {
      if (!profiles.has(profile.name)) $("hardware").append(html("option", { value: profile.name }, `${profile.name} – ${profile.device}`));
      profiles.set(profile.name, profile);
    }
    const document = await ask("openapi.json", undefined, away.signal);
    const sharding = document.components?.schemas?.Table?.properties?.sharding;
    setShardings(sharding?.enum ?? sharding?.anyOf?.find((kind) => kind.enum)?.enum ?? []);
  } catch (error) {
    view.failed(error, "plan");
    view.end();
    return;
  }
  showRequest();
  await changed();
}

async function open() {
  bind();
  const saved = remembered();
  if (saved?.tables && saved.topology) request = saved;
  showRequest();
  placements_.set(request.tables, []);
  if (/^#p\d+=/.test(location.hash)) await openLink();
  await start();
}

open();
