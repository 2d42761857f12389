// Elements, and numbers as people read them.
export const GIB = 2 ** 30;
export const MODES = ["HBM_ONLY", "CACHING", "HYBRID", "HOST_ONLY"];
export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element; children that are strings become text, never markup. */
export const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);

/** An SVG element. */
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

const number = (value, digits) => value.toLocaleString("en", { maximumSignificantDigits: digits });

/** Bytes in GiB, or in smaller units where that would be 0. */
export function bytes(value) {
  for (const [unit, size] of [["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= 0.995 * size) return `${number(value / size, value >= 1000 * size ? 4 : 3)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

/** Seconds in ms or µs. */
export function seconds(value) {
  if (value >= 10) return `${number(value, 3)} s`;
  if (value >= 1e-3) return `${number(value * 1e3, 3)} ms`;
  return value >= 1e-9 ? `${number(value * 1e6, 3)} µs` : "0";
}

/** A part of one. */
export const percent = (value) => `${number(100 * value, 2)} %`;

/** How many, in short: 400 M. */
export function count(value) {
  if (typeof value !== "number") return String(value ?? "");
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${number(value / size, 3)} ${unit}`;
  }
  return number(value, 3);
}

/** Replaces what an element shows. */
export const show = (node, ...children) => node.replaceChildren(...children.filter((child) => child !== null));

/** Widths in percent of a whole, of parts that may be as many as tables: the small ones of a kind become one. */
export function gathered(parts, whole, smallest = 0.004) {
  const large = [], rest = new Map();
  for (const part of parts) {
    if (part.size <= 0) continue;
    if (part.size >= smallest * whole) large.push(part);
    else rest.set(part.kind, [...(rest.get(part.kind) ?? []), part]);
  }
  for (const [kind, few] of rest) {
    const size = few.reduce((sum, part) => sum + part.size, 0);
    large.push(few.length === 1 ? few[0] : { kind, size, name: `${few.length} smaller` });
  }
  return large.sort((a, b) => (a.kind === "free") - (b.kind === "free"));
}
