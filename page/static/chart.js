// Line charts (SVG) and stacked bars (HTML boxes).

import { h, s } from "./dom.js";
import { clock } from "./words.js";

const WIDTH = 560, HEIGHT = 170, LEFT = 46, BOTTOM = 18, TOP = 8;
export const color = (i) => `var(--c${i % 8})`;

export function lines(title, unit, samples, series) {
  // series: [name, function that returns a sample's value or null]. Null leaves a gap in the line.
  const values = series.map(([, read]) => samples.map(read));
  const most = Math.max(1e-9, ...values.flat().filter((value) => value !== null && value !== undefined));
  const top = nice(most);
  const from = samples[0]?.at ?? 0, span = Math.max(1, (samples.at(-1)?.at ?? 1) - from);
  const x = (i) => LEFT + ((samples[i].at - from) / span) * (WIDTH - LEFT - 8);
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const newest = series.map(([name], k) => `${name} ${unit(values[k].at(-1))}`).join(", ");
  const cursor = s("line", { class: "axis", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const told = h("span", null, newest);
  const box = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${newest}` },
    [0, 0.5, 1].map((share) => [
      s("line", { class: "axis", x1: LEFT, x2: WIDTH - 8, y1: y(share * top), y2: y(share * top) }),
      s("text", { x: LEFT - 6, y: y(share * top) + 4, "text-anchor": "end" }, unit(share * top)),
    ]),
    samples.length > 1 && [
      s("text", { x: LEFT, y: HEIGHT - 3 }, clock(from)),
      s("text", { x: WIDTH - 8, y: HEIGHT - 3, "text-anchor": "end" }, clock(samples.at(-1).at)),
    ],
    values.map((one, k) => s("path", { d: path(one, x, y), fill: "none", stroke: color(k), "stroke-width": 1.8 })),
    cursor);
  box.addEventListener("pointermove", (event) => {
    if (!samples.length) return;
    const where = (event.offsetX / box.clientWidth) * WIDTH;
    const i = Math.max(0, Math.min(samples.length - 1, Math.round(((where - LEFT) / (WIDTH - LEFT - 8)) * (samples.length - 1))));
    cursor.setAttribute("x1", x(i)); cursor.setAttribute("x2", x(i)); cursor.setAttribute("visibility", "visible");
    told.textContent = `${clock(samples[i].at)}: ` + series.map(([name], k) => `${name} ${unit(values[k][i])}`).join(", ");
  });
  box.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); told.textContent = newest; });
  return h("section", { class: "card" }, h("h2", null, title), box,
    h("div", { class: "legend" }, series.length > 1 && series.map(([name], k) => h("span", null, h("i", { style: { background: color(k) } }), name)), told));
}

function path(values, x, y) {
  let drawn = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null || value === undefined) { pen = "M"; return; }
    drawn += `${pen}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return drawn;
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value) * power;
}

export function stacked(parts, most, describe) {
  // parts: [name, value]. The bar is as wide as the share of their sum in `most`.
  const total = parts.reduce((sum, [, value]) => sum + Math.max(0, value), 0);
  return h("div", { class: "bar", role: "img", "aria-label": parts.map(([name, value]) => describe(name, value)).join(", "), style: { width: `${Math.max(0.5, (100 * total) / (most || 1))}%` } },
    parts.map(([name, value], i) => value > 0 && h("span", { title: describe(name, value), style: { background: color(i), flexGrow: value, flexBasis: 0 } })));
}
