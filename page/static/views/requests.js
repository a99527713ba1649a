// The newest requests: account, model, site, outcome, and the duration of each phase.

import { card, h, show, table } from "../dom.js";
import { color, stacked } from "../chart.js";
import { clock, ms, number } from "../words.js";

const PHASES = ["retries and network", "wake", "admission", "queue", "prefill", "decode", "relay"];
const SHOWN = 60;

export function requests(session) {
  const list = h("div", { "aria-live": "off" }), filter = h("input", { type: "search", class: "grow", placeholder: "Filter by account, model, site, outcome or request id (/)", "aria-label": "Filter requests", oninput: () => draw() });
  let rows = [];

  async function read() {
    try {
      const answer = await fetch("page/requests"), told = await answer.json();
      if (!answer.ok) { show(list, h("p", { class: "bad", role: "alert" }, told.error.message)); return; }
      rows = told.requests.reverse();
    } catch { return; }
    draw();
  }

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((one) => words.every((word) => `${one.account} ${one.model} ${one.site} ${one.outcome} ${one.path} ${one.request_id}`.toLowerCase().includes(word)));
    const most = Math.max(1, ...found.slice(0, SHOWN).map((one) => one.took_ms));
    const isOpen = new Set([...list.querySelectorAll("details[open]")].map((one) => one.dataset.id));
    show(list, h("div", { class: "legend" }, PHASES.map((name, i) => h("span", null, h("i", { style: { background: color(i) } }), name))), table([
      ["when", (one) => clock(one.at_s)], ["account", (one) => one.account || "–"], ["model", (one) => one.model || one.path], ["site", (one) => one.site || "none"],
      ["outcome", (one) => h("span", { class: one.outcome === "ok" ? "good" : "bad" }, one.outcome)], ["first token", (one) => ms(one.first_token_ms), true], ["total", (one) => ms(one.took_ms), true], ["tokens", (one) => number(one.output_tokens), true],
      ["time", (one) => trace(one, most, isOpen)],
    ], found.slice(0, SHOWN), rows.length ? "No request matches." : "No request has ended yet: send one in the playground."),
    found.length > SHOWN && h("p", { class: "soft" }, `${found.length - SHOWN} more: filter to see them.`));
  }

  function trace(one, most, isOpen) {
    const parts = phases(one);
    const details = h("details", { "data-id": one.request_id, open: isOpen.has(one.request_id) }, h("summary", null, h("div", { class: "timing" }, stacked(parts, most, (name, value) => `${name} ${ms(value)}`))),
      parts.filter(([, value]) => value > 0).map(([name, value]) => h("p", { class: "soft" }, `${name}: ${ms(value)}`)),
      one.tries > 0 && h("p", null, `${one.tries} ${one.tries === 1 ? "site" : "sites"} declined or failed first`), one.moves > 0 && h("p", null, `its stream moved ${one.moves} times`),
      one.phases && h("p", { class: "soft" }, `${number(one.phases.prompt_tokens)} tokens of prompt, ${number(one.phases.cached_tokens)} of them cached`),
      h("p", { class: "mono soft" }, one.request_id));
    return details;
  }

  const timer = setInterval(read, 2000);
  read();
  return { node: h("div", null, h("div", { class: "row" }, filter), card("", list), h("p", { class: "soft" }, "The last 500 requests of this process, kept in memory. If telemetry.otlp is set in its file, it also sends traces to a collector.")), leave: () => clearInterval(timer) };
}

function phases(one) {
  const at = one.phases;
  if (!at) return [["retries and network", one.first_token_ms ?? one.took_ms], ...PHASES.slice(1, 5).map((name) => [name, 0]), ["decode", one.first_token_ms === null ? 0 : one.took_ms - one.first_token_ms], ["relay", 0]];
  const site = at.wake_ms + at.admission_ms + at.queue_ms + at.prefill_ms;
  const before = Math.max(0, Math.min(1000 * (at.at_s - one.at_s), one.took_ms - site - at.decode_ms));
  return [["retries and network", before], ["wake", at.wake_ms], ["admission", at.admission_ms], ["queue", at.queue_ms], ["prefill", at.prefill_ms], ["decode", at.decode_ms], ["relay", Math.max(0, one.took_ms - before - site - at.decode_ms)]];
}
