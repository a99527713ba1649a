// Usage: what accounts have used today, where a router keeps a ledger and one may read it, and what this process counts over the last day.

import { card, h, show, table } from "../dom.js";
import { history } from "../network.js";
import { number, percent } from "../words.js";

export function usage(session) {
  const node = h("div", null, h("p", { class: "soft" }, "Reading the last day."));
  async function read() {
    const samples = (await history("24h")) ?? [];
    const recent = (await history("5m")) ?? [];
    const today = session.sees_usage ? await ledger() : null;
    const sum = (list, step, read) => Math.round(list.reduce((total, sample) => total + step * read(sample), 0));
    const words = [...new Set([...samples, ...recent].flatMap((sample) => Object.keys(sample.requests)))].sort();
    const rows = words.map((word) => ({ word, day: sum(samples, 120, (one) => one.requests[word] ?? 0), now: sum(recent, 1, (one) => one.requests[word] ?? 0) }));
    show(node, card("Requests by how they ended", table([["outcome", (row) => row.word], ["last 5 minutes", (row) => number(row.now), true], ["last 24 hours", (row) => number(row.day), true]], rows, "No request has ended yet.")),
      card("Tokens", table([["", (row) => row[0]], ["last 5 minutes", (row) => row[1], true], ["last 24 hours", (row) => row[2], true]], [
        ["tokens of answers", number(sum(recent, 1, (one) => one.tokens)), number(sum(samples, 120, (one) => one.tokens))],
        ["of prompts cached, on average", percent(mean(recent)), percent(mean(samples))]], "")),
      today && card("Accounts, today (UTC)", table([["account", (row) => row.account || "without a known key"], ["model", (row) => row.model], ["requests", (row) => number(row.requests), true], ["of prompts", (row) => number(row.prompt_tokens), true], ["cached", (row) => number(row.cached_tokens), true],
        ["of answers", (row) => number(row.output_tokens), true], [today.currency, (row) => row.cost === null ? "" : String(Number(row.cost)), true]], today.usage, "Nothing has been used today.")),
      h("p", { class: "soft" }, "The counts of requests and tokens are kept in this process's memory for a day; the columns of 24 hours advance every two minutes."));
  }
  const timer = setInterval(read, 5000);
  read();
  return { node, leave: () => clearInterval(timer) };
}

async function ledger() {
  const today = new Date().toISOString().slice(0, 10);
  try {
    const answer = await fetch(`usage?by=account,model&from=${today}`);
    return answer.ok ? await answer.json() : null;
  } catch { return null; }
}

function mean(samples) {
  const shares = samples.map((sample) => sample.cached_share).filter((share) => share !== null);
  return shares.length ? shares.reduce((sum, share) => sum + share, 0) / shares.length : null;
}
