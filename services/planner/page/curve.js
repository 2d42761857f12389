// The time of a step over a budget, as steps: what a size allows, all larger sizes allow.
import { GIB, bytes, html, seconds, show, svg } from "./drawing.js";

const HEIGHT = 250;
const EDGE = { left: 62, right: 16, top: 26, bottom: 40 };

/** Round numbers from 0 to `most`, some four to six of them. */
function ticks(most, wanted) {
  const rough = most / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => index * step);
}

/**
 * Draws a curve.
 *
 * @param points Sizes and times, ascending.
 * @param marks `{name, kind, size, time}` of what is marked: today's budget, the knee, a plan kept to compare.
 * @param pick Called with the size where somebody clicks.
 */
export function drawCurve(node, points, marks, what, pick) {
  const width = Math.max(280, node.clientWidth || 640);
  const largest = Math.max(...points.map((point) => point.size), ...marks.map((mark) => mark.size)) * 1.03 || 1;
  const slowest = Math.max(...points.map((point) => point.time), ...marks.map((mark) => mark.time ?? 0)) * 1.05 || 1;
  const x = (size) => EDGE.left + ((width - EDGE.left - EDGE.right) * size) / largest;
  const y = (time) => HEIGHT - EDGE.bottom - ((HEIGHT - EDGE.top - EDGE.bottom) * time) / slowest;
  const floor = HEIGHT - EDGE.bottom;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": described(points, marks, what) });
  const least = points[0].size;
  if (least > 0) {
    picture.append(svg("rect", { class: "nothing", x: x(0), y: EDGE.top, width: Math.max(0, x(least) - x(0)), height: floor - EDGE.top }));
    if (x(least) - x(0) > 90) picture.append(svg("text", { x: (x(0) + x(least)) / 2, y: EDGE.top + 16, "text-anchor": "middle" }, "nothing fits"));
  }
  for (const tick of ticks(slowest, 4)) {
    picture.append(svg("path", { class: "grid", d: `M${x(0)} ${y(tick)}H${width - EDGE.right}` }),
      svg("text", { x: EDGE.left - 6, y: y(tick) + 4, "text-anchor": "end" }, seconds(tick)));
  }
  for (const tick of ticks(largest / GIB, width < 480 ? 4 : 7)) {
    picture.append(svg("text", { x: x(tick * GIB), y: floor + 16, "text-anchor": "middle" }, tick.toLocaleString("en")));
  }
  picture.append(svg("text", { x: width - EDGE.right, y: HEIGHT - 6, "text-anchor": "end" }, `${what}, GiB`));
  const steps = points.map((point, index) => (index ? `H${x(point.size)}V${y(point.time)}` : `M${x(point.size)} ${y(point.time)}`)).join("");
  picture.append(svg("path", { class: "line", d: `${steps}H${width - EDGE.right}` }));
  for (const mark of marks) {
    const at = x(mark.size);
    const next = Math.min(width - EDGE.right, ...marks.map((other) => x(other.size)).filter((other) => other > at));
    const right = next - at < 105 && at > EDGE.left + 60;
    const row = { knee: floor - 8, kept: floor - 24 }[mark.kind] ?? EDGE.top - 10;
    picture.append(svg("path", { class: `mark ${mark.kind}`, d: `M${at} ${EDGE.top - 6}V${floor}` }),
      svg("text", { class: mark.kind, x: at + (right ? -5 : 5), y: row, "text-anchor": right ? "end" : "start" }, `${mark.name} ${bytes(mark.size)}`));
    if (mark.time !== null) picture.append(svg("circle", { class: `dot ${mark.kind}`, cx: at, cy: y(mark.time), r: 5 }));
  }
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    const size = ((((event.clientX - box.left) / box.width) * width - EDGE.left) / (width - EDGE.left - EDGE.right)) * largest;
    if (size > 0) pick(size);
  });
  show(node, picture);
}

function described(points, marks, what) {
  const [first, last] = [points[0], points[points.length - 1]];
  const marked = marks.map((mark) => `${mark.name} ${bytes(mark.size)}${mark.time === null ? "" : `, ${seconds(mark.time)}`}`);
  return `Time of a step over the ${what}: from ${seconds(first.time)} with ${bytes(first.size)} to ${seconds(last.time)} with ${bytes(last.size)}. ${marked.join("; ")}.`;
}

/** The points of a curve as a table. */
export function curveTable(points, what) {
  return html("table", {}, html("thead", {}, html("tr", {}, html("th", { scope: "col" }, what), html("th", { scope: "col" }, "a step"))),
    html("tbody", {}, ...points.map((point) => html("tr", {}, html("td", {}, bytes(point.size)), html("td", {}, seconds(point.time))))));
}
