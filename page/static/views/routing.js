// The choice of a site: the predicted cost of each candidate, and earlier predictions with the actual times.

import { card, h, show, table } from "../dom.js";
import { color, stacked } from "../chart.js";
import { models, network } from "../network.js";
import { ms } from "../words.js";

let asked = null; // body of the playground's request to explain
export const ask = (body) => { asked = body; };

export function routing(visitor) {
  const model = h("select", { "aria-label": "Model" });
  const prompt = h("textarea", { rows: 3, "aria-label": "Prompt", placeholder: "A prompt (may be empty)" });
  const address = h("input", { "aria-label": "Client's address", placeholder: "client's address (yours if empty)" });
  const session = h("input", { "aria-label": "Session", placeholder: "x-session-affinity (none if empty)" });
  const result = h("div", { "aria-live": "polite" }), recent = h("div");

  async function explain() {
    const body = asked ?? { model: model.value, messages: [{ role: "user", content: prompt.value || "Hello" }] };
    const headers = { "content-type": "application/json" };
    if (session.value) headers["x-session-affinity"] = session.value;
    const answer = await fetch(`debug/route?address=${encodeURIComponent(address.value)}`, { method: "POST", headers, body: JSON.stringify(body) });
    const told = await answer.json();
    if (!answer.ok) { show(result, h("p", { class: "bad", role: "alert" }, told.error.message)); return; }
    drawRanking(told);
  }

  function drawRanking(told) {
    const most = Math.max(1, ...told.ranking.map((one) => one.cost_ms));
    const terms = [...new Set(told.ranking.flatMap((one) => Object.keys(one.terms)))];
    show(result, card("What each site would cost",
      h("p", { class: "soft" }, `${told.prompt_tokens} prompt tokens`, told.home && `; the conversation's home is ${told.home.site}, which holds ${told.home.cached_tokens} of them`),
      h("div", { class: "legend" }, terms.map((term, i) => h("span", null, h("i", { style: { background: color(i) } }), term))),
      table([["site", (one) => h("b", null, one.site)], ["cost", (one) => ms(one.cost_ms), true],
        ["", (one) => h("div", { style: { width: "min(40vw, 420px)" } }, stacked(terms.map((term) => [term, one.terms[term] ?? 0]), most, (term, value) => `${term} ${ms(value)}`))],
        ["why", (one) => one.reason], ["cached tokens", (one) => one.cached_tokens, true], ["last status", (one) => (one.status_age_s === null ? "none yet" : `${one.status_age_s.toFixed(1)} s ago`), true]], told.ranking, "No site can take it."),
      Object.entries(told.left_out).map(([site, reason]) => h("p", { class: "soft" }, `${site} is left out: ${reason}`))));
  }

  function update() {
    const names = models().map((one) => one.name), chosen = model.value;
    if (names.join() !== [...model.options].map((one) => one.value).join()) {
      show(model, names.map((name) => h("option", { value: name }, name)));
      if (names.includes(chosen)) model.value = chosen;
    }
    const list = network.decisions.slice(-20).reverse();
    const most = Math.max(1, ...list.map((one) => Math.max(one.predicted_ms, one.actual_ms)));
    show(recent, card("Recent streams: predicted and actual time to first token", table([
      ["site", (one) => one.site], ["why", (one) => one.reason], ["predicted", (one) => ms(one.predicted_ms), true], ["actual", (one) => ms(one.actual_ms), true],
      ["", (one) => h("div", { style: { width: "min(40vw, 380px)" } }, stacked(Object.entries(one.terms), most, (term, value) => `predicted: ${term} ${ms(value)}`), stacked([["actual", one.actual_ms]], most, (term, value) => `actual ${ms(value)}`))],
    ], list, "No stream has been answered yet: send a request in the playground.")));
  }

  if (asked && visitor.is_admin) explain().finally(() => { asked = null; });
  return { node: h("div", null, visitor.is_admin && card("", h("p", { class: "soft" }, "Which site would get this request? It is not sent."), prompt,
    h("div", { class: "row" }, h("label", null, "Model ", model), address, session, h("button", { class: "main", type: "button", onclick: explain }, "Explain"))), result, recent), update };
}
