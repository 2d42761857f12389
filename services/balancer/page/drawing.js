// Elements, and numbers as people read them.
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

/** Replaces what an element shows. */
export const show = (node, ...children) => node.replaceChildren(...children.filter((child) => child !== null));

/** Sets an element's text, where it differs: what is read aloud is read once. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const known = (value) => value !== null && value !== undefined;
const digits = (value, most) => value.toLocaleString("en", { maximumSignificantDigits: most });

export const ratio = (value) => (known(value) ? value.toFixed(3) : "–");
export const percent = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : "–");
export const number = (value) => (known(value) ? digits(value, 3) : "–");
export const whole = (value) => (known(value) ? value.toLocaleString("en") : "–");

/** Seconds in s, ms or µs. */
export function seconds(value) {
  if (!known(value)) return "–";
  if (value >= 10) return `${Math.round(value).toLocaleString("en")} s`;
  if (value >= 1) return `${digits(value, 3)} s`;
  return value >= 1e-3 ? `${digits(value * 1e3, 3)} ms` : `${Math.round(value * 1e6)} µs`;
}

/** Bytes in GiB, or in smaller units where that would be 0. */
export function bytes(value) {
  if (!known(value)) return "–";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${digits(value / size, 3)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

/** The time of day. */
export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
