// Usage: that of accounts, if the router has a ledger that the visitor may read, and this process's counts of the last day.

import { card, h, show, table } from "../dom.js";
import { history } from "../network.js";
import { number, percent } from "../words.js";
import { choice } from "../manage.js";
import { keys } from "./keys.js";

export function usage(session) {
  const node = h("div", null, h("p", { class: "soft" }, "Reading the last day."));
  const days = choice([["1", "today"], ["7", "7 days"], ["31", "31 days"]], { "aria-label": "Days of usage", onchange: () => read() });
  async function read() {
    const samples = (await history("24h")) ?? [];
    const recent = (await history("5m")) ?? [];
    const today = session.sees_usage ? await ledger(days.value) : null;
    const sum = (list, step, read) => Math.round(list.reduce((total, sample) => total + step * read(sample), 0));
    const words = [...new Set([...samples, ...recent].flatMap((sample) => Object.keys(sample.requests)))].sort();
    const rows = words.map((word) => ({ word, day: sum(samples, 120, (one) => one.requests[word] ?? 0), now: sum(recent, 1, (one) => one.requests[word] ?? 0) }));
    show(node, card("Requests by how they ended", table([["outcome", (row) => row.word], ["last 5 minutes", (row) => number(row.now), true], ["last 24 hours", (row) => number(row.day), true]], rows, "No request has ended yet.")),
      card("Tokens", table([["", (row) => row[0]], ["last 5 minutes", (row) => row[1], true], ["last 24 hours", (row) => row[2], true]], [
        ["output tokens", number(sum(recent, 1, (one) => one.tokens)), number(sum(samples, 120, (one) => one.tokens))],
        ["cached share of prompt tokens", percent(mean(recent)), percent(mean(samples))]], "")),
      today && card("Accounts", h("div", { class: "row" }, days, h("a", { href: `usage?by=day,account,model&from=${since(days.value)}&format=csv`, download: "usage.csv" }, "Export as CSV")), table([...(days.value === "1" ? [] : [["day (UTC)", (row) => row.day]]),
        ["account", (row) => row.account || "no known key"], ["model", (row) => row.model], ["requests", (row) => number(row.requests), true], ["prompt tokens", (row) => number(row.prompt_tokens), true], ["cached", (row) => number(row.cached_tokens), true],
        ["output tokens", (row) => number(row.output_tokens), true], [today.currency, (row) => row.cost === null ? "" : String(Number(row.cost)), true]], today.usage, "There is no usage in this time.")),
      session.is_admin && !session.sees_usage && card("Accounts", h("p", { class: "soft" }, "Usage of accounts is not recorded: set ", h("code", null, "ledger.directory"), " in the router's file, and start it again.")),
      h("p", { class: "soft" }, "The counts of requests and tokens are kept in this process's memory for a day; the columns of 24 hours advance every two minutes."));
  }
  const timer = setInterval(() => { if (document.activeElement !== days) read(); }, 5000);
  read();
  return { node: h("div", null, session.issues_keys && keys(session.sees_usage), node), leave: () => clearInterval(timer) };
}

const since = (days) => new Date(Date.now() - 864e5 * (Number(days) - 1)).toISOString().slice(0, 10);

async function ledger(days) {
  try {
    const answer = await fetch(`usage?by=${days === "1" ? "" : "day,"}account,model&from=${since(days)}`);
    return answer.ok ? await answer.json() : null;
  } catch { return null; }
}

function mean(samples) {
  const shares = samples.map((sample) => sample.cached_share).filter((share) => share !== null);
  return shares.length ? shares.reduce((sum, share) => sum + share, 0) / shares.length : null;
}
