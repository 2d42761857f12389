// The request being edited, in the form in which the service takes it. All that the page shows follows from it.
import { GIB } from "./drawing.js";
import { quantity } from "./tables_text.js";

const SAVED = "evenkeel-planner-request";

const EXAMPLE = {
  tables: [
    { name: "user_id", rows: 400000000, dim: 128, ids_per_sample: 1 },
    { name: "item_id", rows: 50000000, dim: 128, ids_per_sample: 200 },
    { name: "category", rows: 20000, dim: 64, ids_per_sample: 200 },
    { name: "city", rows: 400000, dim: 32, ids_per_sample: 1 },
    { name: "ad_id", rows: 120000000, dim: 64, ids_per_sample: 20 },
    { name: "query_hash", rows: 800000000, dim: 32, ids_per_sample: 5 },
  ],
  topology: { ranks: 8, ranks_per_host: 8, hbm_bytes: 139 * GIB, hbm_reserved_bytes: 79 * GIB, host_bytes: 1536 * GIB },
  hardware: "h200",
  runtime: "dynamicemb",
  step: { samples_per_rank: 1024 },
};

export const example = () => structuredClone(EXAMPLE);

/** The value at a path such as `topology.ranks`. */
export const valueAt = (object, path) => path.split(".").reduce((value, name) => value?.[name], object);

/** Sets the value at a path; `undefined` takes the field away, so that the service's default holds. */
export function setAt(object, path, value) {
  const names = path.split(".");
  const last = names.pop();
  let inner = object;
  for (const name of names) {
    if (typeof inner[name] !== "object" || inner[name] === null) inner[name] = {};
    inner = inner[name];
  }
  if (value === undefined) delete inner[last];
  else inner[last] = value;
}

/** The request with a bound on how long the service may search, where it has none. */
export const body = (request, limit) => ({ ...request, solver: { time_limit_s: limit, ...request.solver } });

/** The HBM of a rank that tables may use, of all that a GPU has; NaN where that is no number. */
export const hbmBudget = (topology, size = topology.hbm_bytes) =>
  Math.max(0, Math.floor(size * (1 - (topology.hbm_reserved_fraction ?? 0))) - (topology.hbm_reserved_bytes ?? 0));

/** The sizes of a topology as numbers, where a file has them as `139GiB`. */
export const numbers = (topology) => Object.fromEntries(Object.entries(topology).map(([name, value]) => [name, quantity(value)]));

/** Gives tables so much HBM of a rank: the GPU's rest is for the model. */
export function setHbmBudget(topology, budget) {
  delete topology.hbm_reserved_fraction;
  if (!(topology.hbm_bytes >= budget)) topology.hbm_bytes = budget;
  topology.hbm_reserved_bytes = topology.hbm_bytes - budget;
}

/** Everything of a request that a curve over one budget hangs on: all but that budget. */
export function curveKey(request, over) {
  const { hbm_bytes, hbm_reserved_bytes, hbm_reserved_fraction, host_bytes, ...rest } = request.topology;
  const other = over === "hbm" ? { host_bytes, some: hbm_bytes > 0 } : { hbm_bytes, hbm_reserved_bytes, hbm_reserved_fraction };
  return JSON.stringify({ ...request, topology: { ...rest, ...other } });
}

/** Keeps the request over a reload of this tab. */
export function remember(request) {
  try {
    sessionStorage.setItem(SAVED, JSON.stringify(request));
  } catch {
    // Too large for the browser's store, or none allowed: a reload begins with the example then.
  }
}

/** The request of this tab before it was loaded again. */
export function remembered() {
  try {
    return JSON.parse(sessionStorage.getItem(SAVED));
  } catch {
    return null;
  }
}
