// Overview: the map, the current figures, charts over time, and recent troubles.

import { h, show } from "../dom.js";
import { lines } from "../chart.js";
import { draw } from "../map.js";
import { history, network } from "../network.js";
import { ms, number, percent } from "../words.js";

const RANGES = { "5m": ["5 minutes", 1], "1h": ["1 hour", 10], "24h": ["24 hours", 120] };

export function overview() {
  let range = "5m", older = [], fetched = 0;
  const map = h("div", { class: "card" }), tiles = h("div", { class: "tiles" }), charts = h("div", { class: "grid" }), news = h("div");
  const buttons = h("div", { class: "row end", role: "group", "aria-label": "Time range" }, Object.entries(RANGES).map(([name, [text]]) =>
    h("button", { type: "button", "data-range": name, onclick: () => { range = name; fetched = 0; update(); } }, text)));

  function update() {
    for (const one of buttons.children) one.setAttribute("aria-pressed", String(one.dataset.range === range));
    if (range !== "5m" && performance.now() - fetched > 1000 * RANGES[range][1]) {
      fetched = performance.now();
      history(range).then((samples) => { older = samples ?? []; drawCharts(); }).catch(() => {});
    }
    show(map, draw(network, network.moves));
    drawTiles();
    drawCharts();
    drawNews();
  }

  function drawTiles() {
    const newest = network.samples.at(-1);
    const healthy = network.sites.filter((site) => site.state === "healthy").length;
    const requests = Object.values(newest?.requests ?? {}).reduce((sum, rate) => sum + rate, 0);
    const facts = [[`${healthy} of ${network.sites.length}`, network.name === "router" ? "sites healthy" : "site healthy"], [number(newest?.running ?? 0), "requests in progress"],
      [number(newest?.waiting ?? 0), "waiting"], [number(requests), "requests/s ended"], [number(newest?.tokens ?? 0), "tokens/s"],
      [ms(newest?.first_token_ms?.[0]), "first token, p50"], [percent(newest?.cached_share), "of prompt tokens cached"], [number(network.num_moves), "streams moved"]];
    show(tiles, facts.map(([value, text]) => h("div", { class: "tile" }, h("b", null, value), h("span", null, text))));
  }

  function drawCharts() {
    const samples = range === "5m" ? network.samples : older;
    const words = [...new Set(samples.flatMap((sample) => Object.keys(sample.requests)))].sort();
    const good = words.filter((word) => word === "ok" || word === "stop" || word === "length" || word === "tool_calls");
    const bad = words.filter((word) => !good.includes(word));
    const rate = (list) => (sample) => list.reduce((sum, word) => sum + (sample.requests[word] ?? 0), 0);
    const share = (name, i) => (sample) => sample[name]?.[i] ?? null;
    const percentiles = (name) => [["p50", share(name, 0)], ["p95", share(name, 1)], ["p99", share(name, 2)]];
    show(charts,
      lines("Requests per second", number, samples, [["answered", rate(good)], ["not answered", rate(bad)]]),
      lines("Tokens per second", number, samples, [["tokens/s", (sample) => sample.tokens]]),
      lines("Time to first token", ms, samples, percentiles("first_token_ms")),
      lines("Time per token", ms, samples, percentiles("token_ms")),
      lines("Requests in progress", number, samples, [["running", (sample) => sample.running], ["waiting", (sample) => sample.waiting]]),
      lines("Prompts found in caches", percent, samples, [["share", (sample) => sample.cached_share]]),
      bad.length > 0 && lines("Not answered, by reason", number, samples, bad.slice(0, 8).map((word) => [word, (sample) => sample.requests[word] ?? 0])));
  }

  function drawNews() {
    const troubles = network.sites.filter((site) => site.state !== "healthy");
    const moves = network.moves.slice(-8).reverse();
    show(news, troubles.length > 0 && h("section", { class: "card" }, h("h2", null, "Unhealthy sites"),
      troubles.slice(0, 20).map((site) => h("p", null, h("b", { class: site.state === "unhealthy" ? "bad" : "wait" }, `${site.name}: ${site.state}`), site.detail && ` – ${site.detail}`))),
    moves.length > 0 && h("section", { class: "card" }, h("h2", null, "Streams that moved"),
      moves.map((move) => h("p", null, `${move.from_site} → ${move.to_site}: ${move.cause}; its client waited ${ms(move.waited_ms)}`))));
  }

  return { node: h("div", null, map, tiles, news, buttons, charts), update };
}
