// Models: their residency and load at each site.

import { card, h, show, table } from "../dom.js";
import { lines } from "../chart.js";
import { models as all, network } from "../network.js";
import { button } from "../manage.js";
import { catalogue } from "./catalogue.js";
import { bytes, ms, number, percent } from "../words.js";

const SHOWN = 20, MAX_SECONDS = 300;
const LIES = { device: ["awake", "good"], host: ["asleep in memory", "soft"], disk: ["on disk", "soft"], loading: ["loading", "wait"], failed: ["failed", "bad"] };

export function models(session) {
  const list = h("div"), told = h("p", { class: "soft", role: "status" });
  const filter = h("input", { type: "search", placeholder: "Filter (/)", "aria-label": "Filter models", oninput: () => { update(); offered?.draw(); } });

  const say = (text) => show(told, text), offered = session.is_admin ? catalogue(filter, say) : null;
  const used = new Map(); // model -> samples of the used share of its caches, since the view was opened

  function note(model) {
    const at = Object.fromEntries(model.at.filter((one) => one.kv_blocks_total).map((one) => [one.site, 1 - one.kv_blocks_free / one.kv_blocks_total]));
    const samples = [...(used.get(model.name) ?? []).filter((sample) => sample.at < network.at), { at: network.at, ...at }].slice(-MAX_SECONDS);
    used.delete(model.name);
    used.set(model.name, samples);
    if (used.size > 2 * SHOWN) used.delete(used.keys().next().value);
    const sites = Object.keys(at).slice(0, 8);
    return samples.length > 1 && sites.length > 0 && h("details", null, h("summary", null, "Cache over time"),
      lines("Cache used", percent, samples, sites.map((site) => [site, (sample) => sample[site] ?? null])));
  }

  function update() {
    const isOpen = new Set([...list.querySelectorAll("details[open]")].map((one) => one.dataset.model));
    const found = all().filter((model) => model.name.toLowerCase().includes(filter.value.toLowerCase()));
    show(list, found.slice(0, SHOWN).map((model) => card(model.name, table([
      ["site", (one) => one.site],
      ["state", (one) => h("span", { class: LIES[one.residency][1], title: one.detail }, one.residency === "loading" ? ["loading ", h("progress", { max: 1, value: one.loaded, "aria-label": `Loading ${one.name} at ${one.site}` }), ` ${percent(one.loaded)}`] : LIES[one.residency][0], one.detail && `: ${one.detail}`)],
      ["running", (one) => one.running, true], ["waiting", (one) => one.waiting, true],
      ["cache used", (one) => (one.kv_blocks_total ? percent(1 - one.kv_blocks_free / one.kv_blocks_total) : "–"), true],
      ["prompt tokens/s", (one) => number(Math.round(one.prefill_tokens_per_s)) , true], ["tokens/s a stream", (one) => number(Math.round(one.decode_tokens_per_s)), true],
      ["weights", (one) => bytes(one.weights_bytes), true], ["last wake", (one) => (one.wake_ms ? ms(one.wake_ms) : "–"), true],
      ["wakes", (one) => one.wakes, true], ["put to sleep", (one) => one.evictions, true],
      ["", (one) => [one.residency !== "device" && one.residency !== "loading" && button(session, "wake", one.site, one.name, say), one.residency === "device" && button(session, "sleep", one.site, one.name, say),
        one.is_added && button(session, "remove", one.site, one.name, say, `Remove ${one.name} from ${one.site}? Its files stay.`)]],
    ], model.at, ""), model.at[0].aliases.length > 0 && h("p", { class: "soft" }, `also called ${model.at[0].aliases.join(", ")}`),
      kept(note(model), model.name, isOpen))),
    !found.length && h("p", { class: "soft" }, all().length ? "No model matches." : session.is_admin ? "No model is served yet: run one from the catalogue above." : "No model is served yet."),
    found.length > SHOWN && h("p", { class: "soft" }, `${found.length - SHOWN} more: filter to see them.`));
  }

  return { node: h("div", null, h("div", { class: "row" }, filter, told), offered?.node, h("h2", null, "Served"), list), update, leave: () => offered?.leave() };
}

function kept(details, name, isOpen) {
  if (details) { details.dataset.model = name; details.open = isOpen.has(name); }
  return details;
}
