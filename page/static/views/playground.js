// A chat with a model of the network, and other tasks. The conversation stays in this browser.

import { announce, card, h, show } from "../dom.js";
import { models, network } from "../network.js";
import { clients, copies } from "../copies.js";
import { chat } from "../stream.js";
import { ms, number } from "../words.js";
import { ask } from "./routing.js";
import { TASKS, task } from "./tasks.js";

const KEPT = "conversation";

export function playground(session) {
  let turns = restore(), going = null;
  const talk = h("div", { "aria-label": "Conversation" });
  const model = h("select", { "aria-label": "Model" }), site = h("select", { "aria-label": "Site" }), system = field("textarea", "System prompt", { rows: 2 });
  const where = h("p", null, h("label", null, "Site ", site));
  const temperature = field("input", "Temperature", { type: "number", min: 0, max: 2, step: 0.1, value: 0.7 });
  const topP = field("input", "Top p", { type: "number", min: 0.01, max: 1, step: 0.01, value: 1 });
  const most = field("input", "Most tokens", { type: "number", min: 1, value: 256 });
  const seed = field("input", "Seed", { type: "number", placeholder: "random" });
  const tools = field("textarea", "Tools (JSON list)", { rows: 3, class: "mono", spellcheck: "false" });
  const schema = field("textarea", "JSON schema of the answer", { rows: 3, class: "mono", spellcheck: "false" });
  const logprobs = h("input", { type: "checkbox" });
  const key = h("input", { type: "password", autocomplete: "off", value: session.key, "aria-label": "Key" });
  const said = h("textarea", { rows: 3, "aria-label": "Message", placeholder: "Say something (Ctrl+Enter sends)" });
  const images = h("input", { type: "file", accept: "image/*", multiple: true, "aria-label": "Images" });
  const send = h("button", { class: "main", type: "button", onclick: () => ask_() }, "Send");
  const stop = h("button", { type: "button", disabled: true, onclick: () => going?.abort() }, "Stop");
  const again = h("button", { type: "button", onclick: () => { while (turns.at(-1)?.role === "assistant") turns.pop(); run(); } }, "Again");
  const clear = h("button", { type: "button", onclick: () => { going?.abort(); turns = []; keep(); drawTalk(); } }, "Clear");
  const copyAs = (path, made) => {
    const box = h("select", { "aria-label": "Copy the request as", onchange: () => {
      const as = box.value, asked = as && made();
      box.value = "";
      if (asked) navigator.clipboard?.writeText(copies(path, asked, base())[as]).then(() => announce(`copied as ${as}`));
    } }, h("option", { value: "" }, "Copy as"), clients(path).map((as) => h("option", { value: as }, as)));
    return box;
  };
  const trouble = h("p", { class: "bad", role: "alert" });
  const why = h("button", { type: "button", onclick: () => { const body = tryBody(); if (body) { ask(body); location.hash = "routing"; } } }, "Why this site?");

  said.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask_(); } });
  const onEscape = (event) => { if (event.key === "Escape") going?.abort(); };
  addEventListener("keydown", onEscape);

  async function ask_() {
    if (!said.value.trim() || going) return;
    const text = said.value, files = [...images.files];
    said.value = images.value = "";
    const parts = await Promise.all(files.map(async (file) => ({ type: "image_url", image_url: { url: await dataUrl(file) } })));
    turns.push({ role: "user", content: parts.length ? [...parts, { type: "text", text }] : text });
    run();
  }

  function body() {
    const messages = turns.filter((turn) => !turn.failed).map(({ role, content, tool_calls, tool_call_id }) =>
      ({ role, content: content ?? "", ...(tool_calls?.length && { tool_calls }), ...(tool_call_id && { tool_call_id }) }));
    if (system.box.value.trim()) messages.unshift({ role: "system", content: system.box.value });
    const made = { model: model.value, messages, stream: true, stream_options: { include_usage: true }, temperature: Number(temperature.box.value), top_p: Number(topP.box.value), max_tokens: Number(most.box.value) };
    if (seed.box.value) made.seed = Number(seed.box.value);
    if (tools.box.value.trim()) made.tools = parsed(tools.box.value, "the tools");
    if (schema.box.value.trim()) made.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(schema.box.value, "the schema") } };
    if (logprobs.checked) Object.assign(made, { logprobs: true, top_logprobs: 5 });
    return made;
  }

  function tryBody() {
    trouble.textContent = "";
    try { return body(); } catch (error) { trouble.textContent = error.message; return null; }
  }

  async function run() {
    const request = tryBody();
    if (!request || going) return;
    going = new AbortController();
    stop.disabled = false; send.disabled = again.disabled = true;
    const turn = { role: "assistant", content: "", thought: "", tool_calls: [], tokens: [], facts: {} };
    turns.push(turn);
    const began = performance.now();
    let first = 0, drawn = false;
    const draw = () => { if (!drawn) { drawn = true; requestAnimationFrame(() => { drawn = false; drawTalk(); }); } };
    try {
      for await (const event of chat(request, key.value, going.signal, site.value)) {
        if (event.route !== undefined) { turn.facts = { site: event.site, route: event.route }; continue; }
        take(turn, event);
        if (!first && event.choices?.length) { first = performance.now(); turn.facts.first_ms = first - began; }
        if (event.usage) turn.facts.usage = event.usage;
        draw();
      }
    } catch (error) {
      if (error.name === "AbortError") turn.facts.stopped = true;
      else { trouble.textContent = error.message; turn.failed = !turn.content && !turn.tool_calls.length; }
    }
    turn.facts.whole_ms = performance.now() - began;
    going = null;
    stop.disabled = true; send.disabled = again.disabled = false;
    if (turn.failed) turns.pop();
    keep();
    drawTalk();
    announce("the answer has ended");
  }

  function drawTalk() {
    show(talk, turns.length ? turns.map((turn) => drawTurn(turn, (result, call) => {
      turns.push({ role: "tool", content: result, tool_call_id: call.id });
      const asked = turns.findLast((one) => one.role === "assistant")?.tool_calls ?? [];
      if (asked.every((one) => turns.some((other) => other.tool_call_id === one.id))) run(); else drawTalk();
    }, turns)) : h("p", { class: "soft" }, "There are no messages yet."));
  }

  function update() {
    where.hidden = network.name !== "router";
    why.hidden = where.hidden || !session.is_admin;
    choices(site, ["", ...network.sites.map((one) => one.name)], "chosen by the router");
    choices(model, models().map((one) => one.name), "");
  }

  function choices(box, names, nothing) {
    const chosen = box.value;
    if (names.join() === [...box.options].map((one) => one.value).join()) return;
    show(box, names.map((name) => h("option", { value: name }, name || nothing)));
    if (names.includes(chosen)) box.value = chosen;
  }

  function keep() { try { sessionStorage.setItem(KEPT, JSON.stringify(turns)); } catch { /* too long, or the browser forbids it: the conversation is not stored */ } }
  const chatting = card("", talk, trouble, said, h("div", { class: "row" }, send, stop, again, clear, images, h("span", { class: "grow" }), why, copyAs("chat/completions", tryBody)));
  const talking = h("div", null, where, system.node, temperature.node, topP.node, most.node, seed.node, tools.node, schema.node, h("p", { class: "row" }, h("label", null, logprobs, "log-probabilities (hover over a token)")));
  const left = h("div", null, chatting);
  const kind = h("select", { onchange: () => {
    talking.hidden = kind.value !== "chat";
    show(left, kind.value === "chat" ? chatting : task(kind.value, model, key, copyAs));
  } }, [["chat", "Chat"], ...Object.entries(TASKS).map(([name, [title]]) => [name, title])].map(([value, text]) => h("option", { value }, text)));
  drawTalk();
  return {
    node: h("div", { class: "split" }, left,
      card("Settings", h("p", null, h("label", null, "Task ", kind)), h("p", null, h("label", null, "Model ", model)), talking, session.name !== "this machine" && h("label", null, "Key ", key))),
    update, leave: () => { going?.abort(); removeEventListener("keydown", onEscape); },
  };
}

function take(turn, event) {
  const [choice] = event.choices ?? [];
  if (!choice) return;
  const delta = choice.delta ?? {};
  turn.content += delta.content ?? "";
  turn.thought += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const one of choice.logprobs?.content ?? []) turn.tokens.push([one.token, one.logprob, one.top_logprobs?.map((other) => [other.token, other.logprob]) ?? []]);
  for (const call of delta.tool_calls ?? []) {
    const known = turn.tool_calls[call.index] ??= { id: call.id, type: "function", function: { name: "", arguments: "" } };
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) turn.facts.finish = choice.finish_reason;
}

function drawTurn(turn, answerTool, turns) {
  return h("div", { class: `turn ${turn.role}` },
    turn.thought && h("details", { class: "thought", open: !turn.content }, h("summary", null, "Reasoning"), turn.thought),
    turn.tokens?.length ? turn.tokens.map(drawToken) : Array.isArray(turn.content) ? turn.content.map(drawPart) : turn.content,
    turn.tool_calls?.map((call) => {
      const answered = turns.some((other) => other.tool_call_id === call.id);
      const result = h("input", { "aria-label": `Result of ${call.function.name}`, placeholder: "its result, then Enter", class: "mono" });
      result.addEventListener("keydown", (event) => { if (event.key === "Enter") answerTool(result.value, call); });
      return h("div", { class: "mono" }, `${call.function.name}(${call.function.arguments}) `, !answered && turn.facts.finish && result);
    }),
    turn.facts && h("div", { class: "facts" }, facts(turn.facts)));
}

function drawPart(part) {
  return part.type === "text" ? part.text : h("img", { src: part.image_url.url, alt: "An image of this message" });
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = Object.assign(new FileReader(), { onload: () => resolve(reader.result), onerror: () => reject(reader.error) });
    reader.readAsDataURL(file);
  });
}

function drawToken([token, logprob, others]) {
  const list = others.map(([other, its]) => `${JSON.stringify(other)} ${(100 * Math.exp(its)).toFixed(1)} %`).join("\n");
  return h("span", { class: "token", tabindex: 0, title: `${(100 * Math.exp(logprob)).toFixed(1)} %\n${list}`, style: { opacity: 0.45 + 0.55 * Math.exp(logprob) } }, token);
}

function facts({ site, route, first_ms, whole_ms, usage, finish, stopped }) {
  const tokens = usage?.completion_tokens, cached = usage?.prompt_tokens_details?.cached_tokens;
  const rate = tokens > 1 && first_ms ? (1000 * (tokens - 1)) / (whole_ms - first_ms) : 0;
  return [site && `from ${site}`, first_ms && `first token ${ms(first_ms)}`, rate && `${number(Math.round(rate))} tokens/s`, tokens && `${tokens} tokens`, usage && `${usage.prompt_tokens} of prompt, ${cached ?? 0} cached`,
    finish && finish !== "stop" && `ended: ${finish}`, stopped && "stopped", route].filter(Boolean).join(" · ");
}

function field(tag, text, props) {
  const box = h(tag, props);
  return { box, node: h("p", null, h("label", null, h("span", { class: "soft" }, text), h("br"), box)) };
}

function parsed(text, what) {
  try { return JSON.parse(text); } catch (error) { throw new Error(`${what} must be JSON: ${error.message}`); }
}

function restore() {
  try { return JSON.parse(sessionStorage.getItem(KEPT)) ?? []; } catch { return []; }
}

const base = () => new URL("./", location.href).href;
