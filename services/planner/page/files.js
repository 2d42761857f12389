// What a user opens and takes away: requests, plan files, lists of tables.
import { html } from "./drawing.js";
import { readTables } from "./tables_text.js";
import { readYaml } from "./yaml.js";

export const LARGEST_FILE = 8 << 20;
const FORMAT = "evenkeel-plan", VERSION = 1;
const FIELDS = ["tables", "topology", "hardware", "runtime", "step", "solver"];
const ELSEWHERE = ["own", "points", "host_points", "curve_hbm_bytes"];

/**
 * The request in a file, or the part of one that it holds. Throws an `Error` that says what is wrong.
 *
 * @param profiles The hardware profiles by name, of which one may be in a short topology.
 */
export function readFile(text, name, profiles) {
  if (text.length > LARGEST_FILE) throw new Error(`${name} is larger than ${LARGEST_FILE >> 20} MiB, which is more than the planner takes.`);
  const trimmed = text.replace(/^\uFEFF/, "").trim();
  if (!trimmed) throw new Error(`${name} is empty.`);
  const value = parsed(trimmed, name);
  if (Array.isArray(value)) return { tables: listed(value, name) };
  if (value === null || typeof value !== "object") throw new Error(`${name} holds no request: give tables as CSV, JSON or YAML.`);
  if (value.format !== undefined || "request" in value) {
    if (value.format !== FORMAT) throw new Error(`${name} has the format ${JSON.stringify(value.format)}, not "${FORMAT}".`);
    if (value.version !== VERSION) {
      throw new Error(`${name} is a plan file of version ${JSON.stringify(value.version)}; this page reads version ${VERSION}. Open it with the planner that wrote it.`);
    }
    return known(value.request, `${name}: request`, profiles);
  }
  if ("plan" in value || "placements" in value) {
    throw new Error(`${name} is an answer of the planner and holds no request: open the file that "Download plan.json" or "evenkeel plan --output" wrote.`);
  }
  return known(value, name, profiles);
}

function parsed(text, name) {
  if (/^[[{]/.test(text)) {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`${name} is no JSON: ${error.message}.`);
    }
  }
  const first = text.split("\n").find((line) => line.trim() && !line.trim().startsWith("#")) ?? "";
  const isYaml = /^(---|- |-$|[\w.-]+:(\s|$))/.test(first.trim());
  try {
    return isYaml ? readYaml(text) : readTables(text);
  } catch (error) {
    throw new Error(`${name} cannot be read. ${error.message}`);
  }
}

/** What `evenkeel plan` makes of a topology such as `h200x8` or `h100x64/8`: 15 % of HBM is left for the model. */
function machines(text, name, profiles) {
  const [, hardware, ranks, given] = /^(.+)x([1-9]\d{0,8})(?:\/([1-9]\d{0,8}))?$/.exec(text) ?? [];
  const profile = profiles.get(hardware);
  if (!profile) throw new Error(`${name}: topology ${JSON.stringify(text)} is not understood: write PROFILExRANKS or PROFILExRANKS/PER_HOST, with one of ${[...profiles.keys()].join(", ")}.`);
  const local = given ? Number(given) : Math.min(Number(ranks), profile.ranks_per_host);
  const host_bytes = profile.host_bytes_per_rank * local;
  return { hardware, topology: { ranks: Number(ranks), ranks_per_host: local, hbm_bytes: profile.hbm_bytes, hbm_reserved_fraction: 0.15, host_bytes } };
}

function known(value, name, profiles) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error(`${name} is no object.`);
  const strange = Object.keys(value).filter((field) => ![...FIELDS, ...ELSEWHERE].includes(field));
  if (!FIELDS.some((field) => field in value)) throw new Error(`${name} holds no request: none of ${FIELDS.join(", ")} is in it.`);
  if (strange.length) throw new Error(`${name} has the field ${JSON.stringify(strange[0])}, which no request has; one of: ${FIELDS.join(", ")}.`);
  if (typeof value.topology === "string") {
    const { hardware, topology } = machines(value.topology, name, profiles);
    value = { hardware, ...value, topology };
  }
  for (const field of ["topology", "step", "solver"]) {
    const part = value[field];
    if (part !== undefined && (part === null || typeof part !== "object" || Array.isArray(part))) throw new Error(`${name}: ${field} is no object: give its fields by name.`);
  }
  const found = Object.fromEntries(FIELDS.filter((field) => field in value).map((field) => [field, value[field]]));
  if ("tables" in found) found.tables = listed(found.tables, name);
  return found;
}

function listed(tables, name) {
  if (!Array.isArray(tables)) throw new Error(`${name}: tables is no list.`);
  const wrong = tables.findIndex((table) => table === null || typeof table !== "object" || Array.isArray(table));
  if (wrong >= 0) throw new Error(`${name}: tables[${wrong}] is no object: give its fields by name.`);
  return tables;
}

/** A plan file, as `evenkeel plan` and this page read it. */
export const planFile = (request, plan) => `${JSON.stringify({ format: FORMAT, version: VERSION, request, plan }, null, 1)}\n`;

/** Hands a text to the browser as a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  html("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Puts a text on the clipboard; false where the browser does not allow it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS there is no such clipboard: the old way, from a field that is selected.
    const field = html("textarea", { class: "aside", "aria-hidden": "true" });
    field.value = text;
    const before = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus();
    return done;
  }
}
