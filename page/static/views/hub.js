// A search on the Hugging Face hub, from the machine of the first site.

import { h, show, table } from "../dom.js";
import { call } from "../manage.js";
import { number } from "../words.js";

export function hub(sites, run, pull) {
  const words = h("input", { class: "grow", required: true, maxlength: 200, placeholder: "search the Hugging Face hub: words of a model's name", "aria-label": "Search the hub" }), found = h("div", { class: "stack", "aria-live": "polite" });

  async function search() {
    const [site] = sites();
    if (!site) { show(found, h("p", { class: "soft" }, "There is no site that could search.")); return; }
    show(found, h("p", { class: "soft" }, `${site} searches the hub.`));
    let models;
    try { ({ models } = await call("GET", `manage/hub?${new URLSearchParams({ site, words: words.value })}`)); } catch (error) {
      show(found, h("p", { class: "bad", role: "alert" }, error.message), h("p", { class: "soft" }, "Without the hub: a directory, a GGUF file or a packed model's URL can be named below."));
      return;
    }
    show(found, table([
      ["on the hub", (one) => [h("b", { class: "source" }, one.source), one.is_gated && h("div", { class: "wait" }, "its terms must be accepted at the hub first")]],
      ["architecture", (one) => one.architecture || h("span", { class: "bad" }, "not supported")], ["parameters", (one) => (one.parameters ? number(one.parameters) : "–"), true],
      ["licence", (one) => one.license || "–"], ["downloads a month", (one) => number(one.downloads), true],
      ["", (one) => one.architecture && ["Run", "Pull"].map((verb) => h("button", { type: "button", "aria-label": `${verb} ${one.source}`, onclick: () => (verb === "Run" ? run : pull)({ source: one.source, name: one.source.split("/").at(-1), at: {} }) }, verb))],
    ], models, "The hub has no such model with weights as safetensors."));
  }

  return h("div", null, h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); search(); } }, words, h("button", null, "Search")), found);
}
