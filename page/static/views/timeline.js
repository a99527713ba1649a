// The spans of a site's start and of its models' wakes, the newest first.

import { card, h, show } from "../dom.js";
import { color } from "../chart.js";
import { network } from "../network.js";
import { clock, ms } from "../words.js";

const PAUSE_S = 2; // spans further apart belong to different events
const SHOWN = 12;

export function timeline() {
  const site = h("select", { "aria-label": "Site", onchange: () => read() }), list = h("div", { "aria-live": "polite" });

  async function read() {
    if (!site.value) return;
    let told;
    try { told = await fetch(`page/timeline?site=${encodeURIComponent(site.value)}`); } catch { return; }
    const answer = await told.json();
    if (!told.ok) { show(list, h("p", { class: "bad", role: "alert" }, answer.error.message)); return; }
    const events = grouped(answer.spans).slice(-SHOWN).reverse();
    show(list, events.length ? events.map(draw) : h("p", { class: "soft" }, "This site has no timeline yet."));
  }

  function draw(spans) {
    const began = Math.min(...spans.map((span) => span.began_s)), ended = Math.max(...spans.map((span) => span.ended_s));
    const names = [...new Set(spans.map((span) => span.name))];
    const whole = Math.max(1e-3, ended - began);
    return card(`${clock(began)}: ${spans.find((span) => span.what)?.what ?? "the site"}, ${ms(1000 * whole)}`, spans.map((span) =>
      h("div", { class: "span", role: "img", "aria-label": `${span.name} ${span.what}: ${ms(1000 * (span.ended_s - span.began_s))}` },
        h("span", null, `${span.name} ${span.what}`), h("div", null, h("i", { style: {
          left: `${(100 * (span.began_s - began)) / whole}%`, width: `${Math.max(0.3, (100 * (span.ended_s - span.began_s)) / whole)}%`, background: color(names.indexOf(span.name)) } })),
        h("span", { class: "soft" }, ms(1000 * (span.ended_s - span.began_s))))));
  }

  function update() {
    const names = network.sites.map((one) => one.name), chosen = site.value;
    if (names.join() === [...site.options].map((one) => one.value).join()) return;
    show(site, names.map((name) => h("option", { value: name }, name)));
    if (names.includes(chosen)) site.value = chosen;
    read();
  }

  const timer = setInterval(read, 5000);
  return { node: h("div", null, h("p", null, h("label", null, "Site ", site)), list), update, leave: () => clearInterval(timer) };
}

function grouped(spans) {
  const events = [];
  let until = -Infinity;
  for (const span of [...spans].sort((a, b) => a.began_s - b.began_s)) {
    if (span.began_s > until + PAUSE_S) events.push([]);
    events.at(-1).push(span);
    until = Math.max(until, span.ended_s);
  }
  return events;
}
