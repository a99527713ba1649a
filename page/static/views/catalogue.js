// Models that could run: those at the sites and those to download, whether they fit, downloads, and the dialogs for both.

import { card, h, show, table } from "../dom.js";
import { hub } from "./hub.js";
import { act, call, choice, dialog, field, operate } from "../manage.js";
import { bytes, number, percent } from "../words.js";

const SHOWN = 40, LOOK_MS = 1000, IDLE_LOOKS = 10;

export function catalogue(filter, told) {
  const list = h("div", { class: "stack" }), downloads = h("div");
  const other = h("input", { class: "grow", placeholder: "a directory or GGUF file of a site, org/name, or https://…", "aria-label": "Another source" });
  const others = [["Run…", () => run(named())], ["Pull…", () => pull(named())]].map(([text, work]) => h("button", { type: "button", disabled: true, onclick: () => other.value.trim() && work() }, text));
  const price = h("input", { type: "number", min: 0, step: 0.01, placeholder: "none", "aria-label": "Price of a device an hour", oninput: () => draw() });
  let found = { sites: {}, unread: {} }, looks = 0, isOpen = true;

  async function read() {
    try { found = await call("GET", "manage/catalogue"); } catch (error) { show(list, h("p", { class: "bad", role: "alert" }, error.message)); return; }
    for (const one of others) one.disabled = false; // the sites are known now
    if (isOpen) { draw(); drawDownloads(); }
  }

  const running = () => Object.values(found.sites).some((one) => one.downloads.some((each) => each.state === "running"));
  const timer = setInterval(() => { if (running() || ++looks % IDLE_LOOKS === 0) read(); }, LOOK_MS);

  function sources() {
    const known = new Map();
    for (const [site, one] of Object.entries(found.sites)) {
      for (const model of one.models) {
        if (!known.has(model.source)) known.set(model.source, { ...model, at: {} });
        const row = known.get(model.source);
        if (model.is_here && !row.is_here) Object.assign(row, model);
        row.at[site] = model;
      }
    }
    return [...known.values()];
  }

  function draw() {
    const word = filter.value.toLowerCase();
    const rows = sources().filter((one) => `${one.source} ${one.kind} ${one.architecture} ${one.license}`.toLowerCase().includes(word));
    show(list, table([
      ["model", (one) => [h("b", null, one.name), h("div", { class: "soft mono source" }, one.source)]],
      ["size", (one) => bytes(one.file_bytes), true], ["context", (one) => (one.context_length ? number(one.context_length) : "–"), true],
      ["licence", (one) => one.license || "–"], ["fits", (one) => one.is_here || one.kind === "package" ? Object.entries(one.at).map(([site, at]) => h("div", null, fits(site, at))) : h("span", { class: "soft" }, "not at any site yet: pull it, or run it at once")],
      ["", (one) => [h("button", { type: "button", class: one.is_here ? "main" : null, "aria-label": `Run ${one.name}`, onclick: () => run(one) }, "Run"),
        Object.values(one.at).some((at) => !at.is_here && at.kind !== "package") && h("button", { type: "button", "aria-label": `Pull ${one.name}`, onclick: () => pull(one) }, "Pull")]],
    ], rows.slice(0, SHOWN), word ? "Nothing in the catalogue matches: name a source below." : "The catalogue is being read."),
    rows.length > SHOWN && h("p", { class: "soft" }, `${rows.length - SHOWN} more: filter to see them.`),
    Object.entries(found.unread).map(([site, reason]) => h("p", { class: "soft" }, `${site} cannot be read: ${reason}`)));
  }

  function fits(site, at) {
    if (!at.is_here) return h("span", { class: "soft" }, `${site}: ${at.how}`);
    if (!at.fit.fits) return h("span", { class: "bad" }, `${site}: ${at.fit.reason}`);
    return h("span", { title: `predicted for ${at.fit.devices}, ${at.fit.dtype}, ${at.fit.batch} sequences at once` },
      h("span", { class: "good" }, `${site}: fits`), `, ${number(at.fit.kv_tokens)} tokens of cache, ${number(Math.round(at.fit.tokens_per_s))} tokens/s${costs(at.fit)}`);
  }

  function costs(fit) {
    // The same formula as in `pilotlight plan --price`. `devices` is for example "2xh100".
    const perToken = (Number(price.value) * parseInt(fit.devices, 10)) / 3600 / fit.tokens_per_s;
    return perToken > 0 && isFinite(perToken) ? `, ${(1e6 * perToken).toPrecision(3)} per million tokens` : "";
  }

  function drawDownloads() {
    const rows = Object.entries(found.sites).flatMap(([site, one]) => one.downloads.map((each) => ({ site, ...each })));
    show(downloads, rows.length > 0 && h("h3", null, "Downloads"), rows.map((one) => h("div", { class: "row" },
      h("span", { class: "mono" }, one.source), h("span", { class: "soft" }, `to ${one.site}`),
      one.state === "running" && h("progress", { max: one.total_bytes || null, value: one.total_bytes ? one.done_bytes : undefined, "aria-label": `Download of ${one.source}` }),
      h("span", { class: one.state === "failed" ? "bad" : "soft" }, one.state === "running" ? `${bytes(one.done_bytes)} of ${bytes(one.total_bytes)}${one.total_bytes ? `, ${percent(one.done_bytes / one.total_bytes)}` : ""}` : `${one.state} ${one.error}`),
      one.state === "running" && h("button", { type: "button", onclick: () => change(one.site, { action: "cancel", source: one.source }) }, "Cancel"))));
  }

  const change = (site, fields) => act(told, `${fields.action} ${fields.source} at ${site}`, async () => { await operate(site, fields); await read(); });

  function siteBoxes(model, isChosen) {
    return Object.keys(found.sites).map((site) => {
      const at = model.at[site], box = h("input", { type: "checkbox", value: site, checked: isChosen(site, at) });
      return [box, h("p", null, h("label", null, box, at ? [" ", fits(site, at)] : ` ${site}`))];
    });
  }

  function pull(model) {
    const sites = siteBoxes(model, (site, at) => !at?.is_here);
    const box = dialog(`Pull ${model.name}`, h("p", { class: "mono" }, model.source), sites.map(([, node]) => node),
      h("form", { method: "dialog", class: "row end" }, h("button", { value: "" }, "Cancel"), h("button", { class: "main", value: "yes" }, "Pull")));
    box.addEventListener("close", () => { if (box.returnValue) for (const [one] of sites) if (one.checked) change(one.value, { action: "pull", source: model.source }); });
  }

  function run(model) {
    const all = Object.keys(found.sites), first = all.find((site) => model.at[site]?.fit?.fits) ?? all[0];
    const sites = siteBoxes(model, (site) => site === first);
    const name = h("input", { value: model.name, required: true });
    const residency = choice([["auto", "asleep in memory, else on disk"], ["host", "read into memory at start"], ["disk", "on disk"]]);
    const lossless = choice([["auto", "as measured to be faster"], ["always", "12 bits, the same answers"], ["off", "as stored"]]);
    const kv = choice([["auto", "as the model computes"], ["fp8", "8 bits: twice the tokens, less exact"]]);
    const context = h("input", { type: "number", min: 16, max: model.context_length || null, placeholder: model.context_length || "the model's" });
    const idle = h("input", { type: "number", min: 1, placeholder: "only for another model" });
    const devices = h("input", { type: "number", min: 1, placeholder: "as its load needs" });
    const box = dialog(`Run ${model.name}`, h("p", { class: "mono soft" }, model.source), sites.map(([, node]) => node), field("Name in requests", name), h("div", { class: "grid" },
      field("When it sleeps", residency), field("bf16 weights", lossless), field("KV cache", kv), field("Context, tokens", context), field("Sleep after, seconds without use", idle), field("Devices at most", devices)),
    h("form", { method: "dialog", class: "row end" }, h("button", { value: "" }, "Cancel"), h("button", { class: "main", value: "yes" }, "Run")));
    box.addEventListener("close", () => {
      if (!box.returnValue) return;
      const fields = { action: "run", source: model.source, model: name.value, residency: residency.value, lossless: lossless.value, kv_dtype: kv.value,
        ...(context.value && { context_tokens: Number(context.value) }), ...(idle.value && { sleep_after_s: Number(idle.value) }),
        ...(devices.value && { max_devices: Number(devices.value) }) };
      for (const [one] of sites) if (one.checked) change(one.value, fields);
    });
  }

  const named = () => ({ source: other.value.trim(), name: other.value.trim().split("#")[0].replace(/\/+$/, "").split("/").at(-1).replace(/\.(packed|gguf)$/, ""), at: {} });
  read();
  return {
    node: card("Catalogue", list, downloads, hub(() => Object.keys(found.sites), run, pull), h("div", { class: "row" }, other, others), h("p", null, h("label", null, h("span", { class: "soft" }, "Price of a device an hour, in your currency: "), price))),
    draw, leave: () => { isOpen = false; clearInterval(timer); },
  };
}
