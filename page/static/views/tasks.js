// Tasks besides chat: embeddings of texts, documents ranked for a query, decisions with probabilities.

import { announce, card, h, show, table } from "../dom.js";
import { color } from "../chart.js";
import { field } from "../manage.js";
import { post } from "../stream.js";
import { number, percent } from "../words.js";

const lines = (box) => box.value.split("\n").map((line) => line.trim()).filter(Boolean);
const area = (rows, value) => h("textarea", { rows, value });

export const TASKS = { embeddings: ["Embeddings", embeddings], rerank: ["Rerank", rerank], decisions: ["Decision", decisions] };

export function task(name, model, key, copyAs) {
  const { path, node, body, draw } = TASKS[name][1](), result = h("div", { "aria-live": "polite" });
  const made = () => ({ model: model.value, ...body() });
  async function run() {
    const began = performance.now();
    try {
      const answer = await post(`v1/${path}`, made(), key.value);
      show(result, h("p", { class: "soft" }, `from ${answer.site}, ${Math.round(performance.now() - began)} ms, ${number(answer.told.usage?.total_tokens ?? answer.told.usage?.prompt_tokens ?? 0)} tokens`), draw(answer.told));
      announce("the answer is here");
    } catch (error) { show(result, h("p", { class: "bad", role: "alert" }, error.message)); }
  }
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); run(); } }, node, h("div", { class: "row" }, h("button", { class: "main" }, "Send"), h("span", { class: "grow" }), copyAs(path, made)));
  return card(TASKS[name][0], form, result);
}

function embeddings() {
  const texts = area(4, "a cat sleeps\na kitten naps\nthe train is late");
  return {
    path: "embeddings", node: field("Texts, one a line", texts), body: () => ({ input: lines(texts) }),
    draw: ({ data }) => {
      const vectors = data.map((one) => one.embedding), norm = (one) => Math.sqrt(one.reduce((sum, value) => sum + value * value, 0));
      const cosine = (a, b) => vectors[a].reduce((sum, value, i) => sum + value * vectors[b][i], 0) / (norm(vectors[a]) * norm(vectors[b]) || 1);
      const found = lines(texts);
      return [h("p", null, `${vectors.length} vectors of ${vectors[0].length} numbers. Their similarity (cosine):`), h("div", { class: "wide" }, table([["text", (i) => found[i]], ...vectors.map((_, k) => [`${k + 1}`, (i) => cosine(i, k).toFixed(2), true]),
        ["begins with", (i) => h("span", { class: "mono soft" }, vectors[i].slice(0, 3).map((value) => value.toFixed(3)).join(", "))]], vectors.map((_, i) => i), ""))];
    },
  };
}

function rerank() {
  const query = h("input", { value: "Which city has a harbour?" }), documents = area(4, "Rotterdam is a port.\nMadrid is far from the sea.\nBread is baked early.");
  return {
    path: "rerank", node: [field("Query", query), field("Documents, one a line", documents)], body: () => ({ query: query.value, documents: lines(documents) }),
    draw: ({ results }) => table([["document", (one) => lines(documents)[one.index]], ["relevance", (one) => one.relevance_score.toFixed(3), true], ["", (one) => bar(one.relevance_score)]], results, ""),
  };
}

function decisions() {
  const state = area(3, "The parcel has not arrived, and I want my money back."), question = h("input", { value: "Is the customer angry?" });
  const kind = h("select", { onchange: () => { listed.hidden = kind.value === "predicate"; } }, [["predicate", "yes or no"], ["choice", "one of several"], ["score", "a level"]].map(([value, text]) => h("option", { value }, text)));
  const options = area(3, "refund\nreplacement\nneither"), listed = h("div", { hidden: true }, field("Choices or levels, one a line", options));
  return {
    path: "decisions", node: [field("Text", state), field("Question", question), field("Answer", kind), listed],
    body: () => {
      const asked = { type: kind.value, instructions: question.value };
      if (kind.value === "choice") asked.choices = lines(options).map((value) => ({ value }));
      if (kind.value === "score") asked.levels = lines(options).map((label) => ({ label }));
      return { input: state.value, questions: [asked] };
    },
    draw: ({ answers: [one] }) => {
      const rows = one.probabilities?.map((each) => [each.value !== undefined && each.label === undefined ? each.value : each.label, each.probability]) ?? [["yes", one.probability], ["no", 1 - one.probability]];
      return [h("p", null, one.choice !== undefined ? `${one.choice}, with a confidence of ${percent(one.confidence)}` : one.score !== undefined ? `level ${one.score.toFixed(2)}, with a confidence of ${percent(one.confidence)}` : `${percent(one.probability)} yes`),
        table([["answer", (row) => String(row[0])], ["probability", (row) => percent(row[1]), true], ["", (row) => bar(row[1])]], rows, "")];
    },
  };
}

const bar = (share) => h("div", { class: "bar timing", role: "img", "aria-label": percent(share) }, h("span", { style: { background: color(0), width: `${100 * Math.max(0, Math.min(1, share))}%` } }));
