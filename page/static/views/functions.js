// Functions: the sites where they run, the traffic shares of their versions, and their output and logs.

import { card, h, show, table } from "../dom.js";
import { network } from "../network.js";
import { call, choice } from "../manage.js";
import { stores } from "./stores.js";
import { clock, ms } from "../words.js";

const MAX_LINES = 500;

export function functions(session) {
  const running = h("div"), deployed = h("div"), log = h("pre", { class: "log", role: "log", tabindex: 0, "aria-label": "What it prints" });
  const title = h("span", { class: "soft" }, "Nothing is followed."), stop = h("button", { type: "button", hidden: true, onclick: () => follow(null) }, "Stop");
  let source = null, lines = [];

  function follow(name) {
    source?.close();
    source = null;
    stop.hidden = !name;
    if (!name) { title.textContent = "Nothing is followed."; return; }
    lines = [];
    show(log);
    title.textContent = `${name}: nothing has been printed yet.`;
    source = new EventSource(`page/tail?name=${encodeURIComponent(name)}`);
    source.onmessage = (event) => {
      const { site, at_s, line } = JSON.parse(event.data);
      lines = [...lines, `${at_s ? clock(at_s) : ""} ${site}  ${line}`].slice(-MAX_LINES);
      title.textContent = `${name}, the last ${lines.length} lines`;
      const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
      log.textContent = lines.join("\n");
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    };
    source.onerror = () => { if (source?.readyState === EventSource.CLOSED) title.textContent = `${name} cannot be followed: an admin key is needed, or it is gone.`; };
  }

  const name = h("input", { "aria-label": "Function", placeholder: "function" }), grep = h("input", { type: "search", class: "grow", "aria-label": "Text in lines, errors and paths", placeholder: "text in a line, an error or a path (/)" });
  const status = choice([["", "every outcome"], ["error", "failures"], ["ok", "ok"], ["exception", "exceptions"], ["exceededCpu", "too much CPU time"], ["exceededMemory", "too much memory"], ["4xx", "4xx"], ["5xx", "5xx"]], { "aria-label": "Outcome" });
  const since = choice([["", "all that are stored"], ["3600", "the last hour"], ["86400", "the last day"]], { "aria-label": "Since" }), kept = h("div", { "aria-live": "polite" });

  async function search() {
    if (!name.value) { show(kept, h("p", { class: "soft" }, "Name a function, or choose logs in its row.")); return; }
    const asked = new URLSearchParams({ name: name.value, grep: grep.value, limit: 200, ...(status.value && { status: status.value }), ...(since.value && { since_s: Date.now() / 1000 - Number(since.value) }) });
    let found;
    try { found = await call("GET", `page/logs?${asked}`); } catch (error) { show(kept, h("p", { class: "bad", role: "alert" }, error.message)); return; }
    show(kept, table([
      ["when", (one) => clock(one.at_s)], ["site", (one) => one.site], ["what", (one) => [one.what, one.lines.length + one.detail.length > 0 && h("pre", { class: "log", tabindex: 0 }, [...one.lines.map(([, , text]) => text), one.error, one.detail].filter(Boolean).join("\n"))]],
      ["outcome", (one) => h("span", { class: one.outcome === "ok" && (one.status ?? 0) < 500 ? "good" : "bad" }, `${one.outcome} ${one.status ?? ""}`)], ["took", (one) => ms(one.wall_ms), true], ["CPU", (one) => ms(one.cpu_ms), true], ["version", (one) => h("span", { class: "mono" }, one.version)],
    ], found.invocations.reverse(), "No stored invocation matches."), Object.entries(found.unread).map(([site, reason]) => h("p", { class: "bad" }, `${site}: ${reason}`)));
  }

  const form = h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); search(); } }, name, grep, status, since, h("button", { class: "main" }, "Search"));

  async function read() {
    const answer = await fetch("page/functions");
    const found = answer.ok ? await answer.json() : [];
    show(deployed, found.length > 0 && card("Deployed versions", table([
      ["function", (one) => h("b", null, one.name)], ["revision", (one) => one.revision, true],
      ["traffic", (one) => one.shares.map((share) => `${share.percent} % to version ${share.number}`).join(", ") || "off the network"], ...(session.is_admin ? [["account", (one) => one.account || "–"], ["secrets", (one) => one.secret_names.join(", ") || "–"]] : []),
      ["versions", (one) => h("ol", { class: "plain" }, [...one.versions].reverse().slice(0, 5).map((version) =>
        h("li", null, `${version.number}: ${new Date(1000 * version.created_s).toLocaleString()} `, h("span", { class: "mono soft" }, version.digest.slice(0, 12)), ` ${version.message}`)))],
    ], found, "")));
  }

  function update() {
    const serving = network.sites.filter((site) => site.functions);
    const rows = serving.flatMap((site) => site.functions.functions.map((one) => ({ site: site.name, ...one })));
    const refused = serving.filter((site) => site.functions.isolation_tier === 0);
    show(running,
      card("", table([["function", (one) => h("b", null, one.name)], ["site", (one) => one.site], ["processes", (one) => one.isolates || "asleep", true],
        ["open requests", (one) => one.inflight, true], ["requests", (one) => one.asked, true], ["failed", (one) => h("span", { class: one.failed ? "bad" : null }, one.failed), true],
        ["sockets", (one) => one.sockets, true], ["started", (one) => one.started, true],
        ["", (one) => session.is_admin && [h("button", { type: "button", "aria-label": `follow ${one.name}`, onclick: () => follow(nameOf(one)) }, "follow"),
          h("button", { type: "button", "aria-label": `logs of ${one.name}`, onclick: () => { name.value = nameOf(one); search(); } }, "logs")]]], rows,
      serving.length ? "No function is deployed. `pilotlight init` makes one, `pilotlight deploy` uploads it." : "No site of this network serves functions: set [functions] in a site's file.")),
      serving.map((site) => site.functions.why_not_more && h("p", { class: "soft" }, `${site.name}: isolation tier ${site.functions.isolation_tier}; ${site.functions.why_not_more}`)),
      refused.length > 0 && h("p", { class: "bad" }, `Not isolated at ${refused.map((site) => site.name).join(", ")}.`));
  }

  read();
  const timer = setInterval(read, 10_000);
  return {
    node: h("div", null, running, deployed, session.is_admin && stores(), session.is_admin && card("Logs", form, kept), session.is_admin && card("What a function prints", h("div", { class: "row" }, title, h("span", { class: "grow" }), stop), log)),
    update, leave: () => { follow(null); clearInterval(timer); },
  };
}

// Sites name a version NAME@DIGEST.
const nameOf = (one) => one.name.split("@")[0];
