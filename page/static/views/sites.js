// Sites: state, load, devices and processes, and the faults of the last day.

import { card, h, show, table } from "../dom.js";
import { network } from "../network.js";
import { act, button, call, copy, dialog } from "../manage.js";
import { bytes, clock, ms, seconds } from "../words.js";

const SHOWN = 50, SHOWN_FAULTS = 50;

export function sites(session) {
  const list = h("div"), told = h("p", { class: "soft", role: "status" }), wrong = h("div");
  const filter = h("input", { type: "search", placeholder: "Filter (/)", "aria-label": "Filter sites", oninput: () => update() });
  let devices = {};
  const say = (text) => show(told, text);

  function update() {
    const word = filter.value.toLowerCase();
    const found = network.sites.filter((site) => `${site.name} ${site.place?.city ?? ""} ${site.state}`.toLowerCase().includes(word));
    show(list,
      card("", table([
        ["site", (site) => h("b", null, site.name)], ["place", (site) => site.place?.city ?? "–"],
        ["state", (site) => h("span", { class: site.state === "healthy" ? "good" : site.state === "unhealthy" ? "bad" : "wait", title: site.detail }, site.state)],
        ["requests", (site) => `${site.inflight} of ${site.max_inflight}`, true], ["round trip", (site) => ms(site.rtt_ms), true],
        ["models awake", (site) => `${site.models.filter((model) => model.residency === "device").length} of ${site.models.length}`, true],
        ["up for", (site) => seconds(site.uptime_s), true], ["version", (site) => site.version],
        ["", (site) => network.name === "router" && (site.state === "draining" ? button(session, "resume", site.name, "", say) : button(session, "drain", site.name, "", say, `Drain ${site.name}? It gets no further requests; open ones finish.`))],
      ], found.slice(0, SHOWN), word ? "No site matches." : "No site has joined yet.")),
      found.length > SHOWN && h("p", { class: "soft" }, `${found.length - SHOWN} more: filter to see them.`),
      found.slice(0, word || found.length < 6 ? 6 : 0).map((site) => card(`What runs at ${site.name}`,
        site.detail && h("p", { class: "bad" }, site.detail),
        devices[site.name] && table([["device", (one) => one.name], ["memory used", (one) => `${bytes(one.used_bytes)} of ${bytes(one.total_bytes)}`, true],
          ["power", (one) => (one.power_w ? `${Math.round(one.power_w)} W` : "–"), true], ["temperature", (one) => (one.celsius ? `${Math.round(one.celsius)} °C` : "–"), true]], devices[site.name], ""),
        table([["role", (one) => one.role], ["device", (one) => one.device ?? "–"], ["pid", (one) => one.pid, true], ["address", (one) => one.url ?? "–"]], site.processes, "The site has not reported its processes."))));
  }

  async function readFaults() {
    let faults;
    if (session.is_admin) devices = Object.fromEntries(Object.entries((await call("GET", "manage/catalogue").catch(() => ({ sites: {} }))).sites).map(([name, one]) => [name, one.devices]));
    try { ({ faults } = await (await fetch("page/faults")).json()); } catch { return; }
    show(wrong, card("Faults of the last day", table([
      ["when", (one) => clock(one.at_s)], ["site", (one) => h("b", null, one.site)], ["what", (one) => `${one.what}${one.until_s === null ? "" : one.until_s > one.at_s ? ` for ${seconds(one.until_s - one.at_s)}` : ""}`],
      ["cause", (one) => one.cause || "–"], ["", (one) => one.until_s === null && h("span", { class: "bad" }, "ongoing")],
    ], (faults ?? []).slice(0, SHOWN_FAULTS), "No site has failed since this process started.")));
  }

  readFaults();
  const timer = setInterval(readFaults, 5000);
  const join = () => act(say, "a line for one more machine", async () => {
    const { line } = await call("POST", "manage/join", {});
    const box = dialog("One more machine", h("p", null, "Paste this on the other machine within an hour. It works once."), h("pre", { class: "mono", tabindex: 0 }, line),
      h("div", { class: "row end" }, copy(line, "Copy the line"), h("button", { type: "button", class: "main", onclick: () => box.close() }, "Done")));
    return "a line for one more machine was made";
  });
  const joining = session.is_admin && network.name === "router" && card("One more machine", session.adds_machines ? h("button", { type: "button", class: "main", onclick: join }, "Add a machine")
    : h("p", null, "Machines cannot join this network. To make a network that they can join, run ", h("code", null, "pilotlight network init FOLDER --host NAME"), "."));
  return { node: h("div", null, h("div", { class: "row" }, filter, told), list, wrong, joining), update, leave: () => clearInterval(timer) };
}
