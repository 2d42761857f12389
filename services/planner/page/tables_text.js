// Tables as text: CSV with a header, or JSON with one table a line where a table has more than CSV can say.
const TEXTS = new Set(["name", "group", "dist_type"]);

const UNITS = { K: 1e3, M: 1e6, G: 1e9, B: 1e9, T: 1e12, KIB: 2 ** 10, MIB: 2 ** 20, GIB: 2 ** 30, TIB: 2 ** 40 };

/** A number as people write it, `400M` or `139 GiB`; what is none stays as it is, for the service to refuse. */
export function quantity(text) {
  const [, digits, unit] = (typeof text === "string" && /^(.*\d)\s*([a-z]+)$/i.exec(text.trim())) || [];
  const value = scalar(digits ?? ""), size = UNITS[unit?.toUpperCase()];
  if (typeof value === "number" && Number.isFinite(value * size)) return value * size;
  return typeof text === "string" ? scalar(text) : text;
}

/** A value: a number, true, false, or a text. */
export function scalar(text) {
  if (text === "true" || text === "false") return text === "true";
  const digits = text.replace(/(?<=\d)_(?=\d)/g, "");
  const value = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(digits) ? Number(digits) : NaN;
  return Number.isFinite(value) ? value : text;
}

function cells(line, separator) {
  const found = [];
  let cell = "", quoted = false;
  for (let i = 0; i < line.length; i++) {
    if (quoted && line[i] === '"' && line[i + 1] === '"') { cell += '"'; i++; }
    else if (line[i] === '"' && (quoted || !cell.trim())) { quoted = !quoted; if (quoted) cell = ""; }
    else if (line[i] === separator && !quoted) { found.push(cell.trim()); cell = ""; }
    else cell += line[i];
  }
  if (quoted) throw new Error("has a quote that does not end");
  return [...found, cell.trim()];
}

function readCsv(text) {
  const lines = text.split(/\r?\n/);
  const first = lines.findIndex((line) => line.trim());
  const separator = ["\t", ";", ","].find((one) => lines[first].includes(one)) ?? ",";
  const names = cells(lines[first], separator);
  if (!names.includes("name")) {
    throw new Error(`Line ${first + 1} is no header with a column "name": write one, such as name,rows,dim,ids_per_sample`);
  }
  const tables = [];
  lines.forEach((line, index) => {
    if (index <= first || !line.trim()) return;
    try {
      const values = cells(line, separator);
      if (values.length > names.length) throw new Error(`has ${values.length} cells, the header ${names.length}`);
      tables.push(Object.fromEntries(names.map((name, at) => [name, values[at] ?? ""]).filter(([, value]) => value !== "")
        .map(([name, value]) => [name, column(name, value)])));
    } catch (error) {
      throw new Error(`Line ${index + 1} ${error.message}.`);
    }
  });
  return tables;
}

function column(name, value) {
  if (name === "modes") return value.split(/[ |;]+/);
  if (name === "access") {
    try {
      return JSON.parse(value);
    } catch (error) {
      throw new Error(`has an access that is no JSON: ${error.message}`);
    }
  }
  return TEXTS.has(name) ? value : quantity(value);
}

/** The tables that a text holds. Throws an `Error` that says what to mend. */
export function readTables(text) {
  const trimmed = text.trim();
  if (!trimmed) return [];
  if (!/^[[{]/.test(trimmed)) return readCsv(text);
  let value;
  try {
    value = JSON.parse(trimmed);
  } catch (error) {
    throw new Error(`This is no JSON: ${error.message}.`);
  }
  const tables = Array.isArray(value) ? value : value.tables;
  if (!Array.isArray(tables)) throw new Error('This JSON holds no tables: write a list, or an object with "tables".');
  const wrong = tables.findIndex((table) => typeof table !== "object" || table === null || Array.isArray(table));
  if (wrong >= 0) throw new Error(`tables[${wrong}] is no object: give its fields by name.`);
  return tables;
}

const isFlat = (table) => Object.values(table).every((value) => value !== null && typeof value !== "object" && !/[",;\t\n]/.test(value));

/** The tables as text. */
export function writeTables(tables) {
  if (!tables.every(isFlat)) return `[\n${tables.map((table) => `  ${JSON.stringify(table)}`).join(",\n")}\n]`;
  const names = [...new Set(["name", "rows", "dim", "ids_per_sample", ...tables.flatMap(Object.keys)])];
  return [names, ...tables.map((table) => names.map((name) => table[name] ?? ""))].map((row) => row.join(",")).join("\n");
}
