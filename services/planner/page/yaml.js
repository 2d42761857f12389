// The part of YAML that requests are written in: nested maps and lists, in blocks or in [ ] and { }, and comments.
import { quantity, scalar } from "./tables_text.js";

const DEEPEST = 30;
const SIZE = /^[-+]?\d[\d_]*(\.\d*)?(e[-+]?\d{1,2})?(K|M|B|G|T|KiB|MiB|GiB|TiB)$/;
const NAMED = /^("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[\w.-]+):(?:\s+(.*))?$/;
const ESCAPES = { n: "\n", t: "\t", r: "\r", 0: "\0" };

/** The value of a text. Throws an `Error` that names the line. */
export function readYaml(text) {
  const lines = text.split(/\r?\n/).map((line, index) => ({ number: index + 1, text: uncommented(line) }))
    .filter((line) => line.text.trim() && line.text.trim() !== "---")
    .map((line) => ({ ...line, indent: line.text.search(/\S/), text: line.text.trim() }));
  const reader = { lines, at: 0 };
  if (!lines.length) return null;
  const value = block(reader, lines[0].indent, 0);
  if (reader.at < lines.length) fail(lines[reader.at], "is indented otherwise than what is before it");
  return value;
}

function fail(line, what) {
  throw new Error(`Line ${line.number} ${what}: ${line.text.slice(0, 40)}`);
}

function uncommented(line) {
  let quote = "";
  for (let i = 0; i < line.length; i++) {
    if (quote === '"' ? line[i] === "\\" : quote && line.startsWith("''", i)) i++;
    else if (quote) quote = line[i] === quote ? "" : quote;
    else if (`"'`.includes(line[i]) && /(^|[\s,[{:])$/.test(line.slice(0, i))) quote = line[i];
    else if (line[i] === "#" && (i === 0 || /\s/.test(line[i - 1]))) return line.slice(0, i);
  }
  return line;
}

function block(reader, indent, depth) {
  const first = reader.lines[reader.at];
  if (depth > DEEPEST) fail(first, "is nested too deep");
  const isItem = (line) => line.text === "-" || line.text.startsWith("- ");
  const found = isItem(first) ? [] : {};
  while (reader.at < reader.lines.length) {
    const line = reader.lines[reader.at];
    if (line.indent < indent || (line.indent === indent && Array.isArray(found) && !isItem(line))) break;
    if (line.indent > indent || isItem(line) !== Array.isArray(found)) fail(line, "does not fit to what is before it");
    if (Array.isArray(found)) {
      // The rest of the line is the first line of the item.
      const rest = line.text.slice(1).trim();
      if (!rest) { reader.at++; found.push(inner(reader, indent, depth)); continue; }
      if (!NAMED.test(rest) && !rest.startsWith("- ")) { reader.at++; found.push(inline(line, rest)); continue; }
      const deeper = indent + line.text.length - rest.length;
      reader.lines[reader.at] = { ...line, indent: deeper, text: rest };
      found.push(block(reader, deeper, depth + 1));
      continue;
    }
    const [, name, rest] = NAMED.exec(line.text) ?? fail(line, "is no name with a colon");
    reader.at++;
    Object.defineProperty(found, unquoted(name), {
      value: rest ? inline(line, rest) : inner(reader, indent, depth), enumerable: true, configurable: true, writable: true,
    });
  }
  return found;
}

function inner(reader, indent, depth) {
  const next = reader.lines[reader.at];
  const item = next && next.indent === indent && next.text.startsWith("- ");
  return next && (next.indent > indent || item) ? block(reader, next.indent, depth + 1) : null;
}

function unquoted(text) {
  if (/^'.*'$/.test(text)) return text.slice(1, -1).replaceAll("''", "'");
  if (!/^".*"$/.test(text)) return text;
  return text.slice(1, -1).replace(/\\(?:x([\da-f]{2})|u([\da-f]{4})|(.))/gi, (_, byte, unit, own) =>
    own === undefined ? String.fromCharCode(Number.parseInt(byte ?? unit, 16)) : ESCAPES[own] ?? own);
}

function inline(line, text) {
  if (/^[&*!|>@%`,\]}]/.test(text)) fail(line, "uses a part of YAML that this page does not read");
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[[\]{},]|:(?=\s|$)|[^[\]{},:\s](?:[^[\]{},:]|:(?!\s|$))*/g) ?? [];
  if (!/^[[{]/.test(text)) return plain(text);
  let at = 0;
  const value = (depth) => {
    const token = tokens[at++];
    if (depth > DEEPEST) fail(line, "is nested too deep");
    if (token === undefined || /^[\]},:]$/.test(token)) fail(line, "has brackets that do not fit");
    if (token === "[") {
      const items = [];
      while (tokens[at] !== "]") { items.push(value(depth + 1)); if (tokens[at] === ",") at++; }
      at++;
      return items;
    }
    if (token !== "{") return plain(token.trim());
    const map = [];
    while (tokens[at] !== "}") {
      const name = tokens[at++];
      if (name === undefined || tokens[at++] !== ":") fail(line, "has brackets that do not fit");
      map.push([unquoted(name.trim()), value(depth + 1)]);
      if (tokens[at] === ",") at++;
    }
    at++;
    return Object.fromEntries(map);
  };
  const found = value(0);
  if (at < tokens.length) fail(line, "goes on after its brackets");
  return found;
}

function plain(text) {
  if (/^(".*"|'.*')$/.test(text)) return unquoted(text);
  if (["null", "~"].includes(text)) return null;
  return SIZE.test(text) ? quantity(text) : scalar(text);
}
