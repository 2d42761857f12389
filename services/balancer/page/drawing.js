// Elements, numbers as people read them, and curves.
export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 240, EDGE = { left: 58, right: 12, top: 12, bottom: 28 };

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** An HTML element; children that are strings become text, never markup. */
export const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);

const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

/** Replaces what an element shows. */
export const show = (node, ...children) => node.replaceChildren(...children);

/** Sets an element's text, where it differs: what is read aloud is read once. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const digits = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
const known = (format) => (value) => (value === null || value === undefined ? "–" : format(value));

export const ratio = known((value) => value.toFixed(3));
export const percent = known((value) => `${(100 * value).toFixed(1)} %`);
export const number = known(digits);
export const whole = known((value) => value.toLocaleString("en"));
/** Seconds in s, ms or µs. */
export const seconds = known((value) => (value >= 1 ? `${digits(value)} s` : value >= 1e-3 ? `${digits(value * 1e3)} ms` : `${Math.round(value * 1e6)} µs`));
/** The time of day. */
export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

/** Draws figures of rounds as lines; `lines` have a class, a name and what they are of. */
export function drawCurve(node, rounds, { what, text, base, lines }) {
  const width = Math.max(280, node.clientWidth), last = rounds.at(-1);
  const values = rounds.flatMap((round) => lines.map((line) => line.of(round) ?? base));
  const top = Math.max(...values, base + 1e-9), bottom = Math.min(base, ...values);
  const x = (at) => EDGE.left + ((width - EDGE.left - EDGE.right) * at) / Math.max(1, rounds.length - 1);
  const y = (value) => HEIGHT - EDGE.bottom - ((HEIGHT - EDGE.top - EDGE.bottom) * (value - bottom)) / (top - bottom);
  const label = `${what} of rounds ${whole(rounds[0].round)} to ${whole(last.round)}. In the last one: ${lines.map((line) => `${line.name} ${text(line.of(last))}`).join(", ")}.`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": label });
  for (let step = 0; step <= 4; step++) {
    const value = bottom + ((top - bottom) * step) / 4;
    picture.append(svg("path", { class: "grid", d: `M${EDGE.left} ${y(value)}H${width - EDGE.right}` }), svg("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, text(value)));
  }
  picture.append(svg("text", { x: EDGE.left, y: HEIGHT - 8 }, `round ${whole(rounds[0].round)}`), svg("text", { x: width - EDGE.right, y: HEIGHT - 8, "text-anchor": "end" }, whole(last.round)));
  for (const line of lines) {
    const points = rounds.map((round, at) => `${x(at).toFixed(1)} ${y(line.of(round) ?? base).toFixed(1)}`);
    picture.append(svg("path", { class: `line ${line.class}`, d: `M${points.join("L")}` }));
  }
  show(node, picture);
}
