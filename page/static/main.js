// The frame of the page: views by the URL's hash, the feed, keyboard shortcuts, the color theme, and the sign-in.

import { announce, h, show } from "./dom.js";
import { connect, disconnect, network, watch } from "./network.js";
import { overview } from "./views/overview.js";
import { playground } from "./views/playground.js";
import { routing } from "./views/routing.js";
import { models } from "./views/models.js";
import { sites } from "./views/sites.js";
import { functions } from "./views/functions.js";
import { usage } from "./views/usage.js";
import { requests } from "./views/requests.js";
import { timeline } from "./views/timeline.js";

const VIEWS = [["overview", "Overview", overview], ["playground", "Playground", playground], ["routing", "Routing", routing],
  ["models", "Models", models], ["sites", "Sites", sites], ["functions", "Functions", functions], ["usage", "Keys and usage", usage], ["requests", "Requests", requests], ["timeline", "Timeline", timeline]];

export const session = { name: "", is_admin: false, key: "" }; // the key is for the playground, and only in this tab's memory
const view = document.getElementById("view"), link = document.getElementById("link"), who = document.getElementById("who");
let leave = () => {}, isOpen = false; // true once there is a session and the feed has started

// The routing view is for routers only; requests are shown to admins only.
const views = () => VIEWS.filter(([one]) => (one !== "routing" || network.name === "router") && (one !== "requests" || session.is_admin));

function open() {
  const [name] = location.hash.slice(1).split("?");
  const [id, title, make] = views().find(([one]) => one === name) ?? VIEWS[0];
  leave();
  document.title = `${title} · Pilotlight`;
  show(document.getElementById("tabs"), views().map(([one, text], i) =>
    h("a", { href: `#${one}`, "aria-current": one === id ? "page" : null, title: `${text} (${i + 1})` }, text)));
  const made = make(session); // {node, update(), leave()}
  show(view, h("h1", { class: id === "overview" ? "unseen" : null }, title), made.node);
  const stop = made.update ? watch(made.update) : () => {};
  made.update?.();
  leave = () => { stop(); made.leave?.(); };
}

function linkState(state) {
  link.textContent = { live: "live", lost: "connection lost, trying again", closed: "signed out or stopped" }[state];
  link.className = state === "live" ? "good" : "bad";
  if (state !== "live") announce(link.textContent);
  if (state === "closed") setTimeout(enter, 2000);
}

async function enter() {
  let answer;
  try { answer = await fetch("page/session"); } catch { linkState("lost"); setTimeout(enter, 2000); return; }
  if (answer.status === 401 || answer.status === 403) { disconnect(); door(answer.status === 403 ? (await answer.json()).error.message : ""); return; }
  Object.assign(session, await answer.json());
  who.hidden = session.name === "this machine";
  if (session.key) who.title = session.name;
  connect(linkState, () => { isOpen = true; open(); });
}

function door(reason = "") {
  leave(); leave = () => {};
  isOpen = false;
  who.hidden = true;
  link.textContent = "a key is needed";
  const key = h("input", { type: "password", name: "key", autocomplete: "off", required: true, "aria-label": "Key", class: "grow" });
  const form = h("form", { class: "card" },
    h("h1", null, "Sign in"), h("p", null, "This network requires a key. A key with the scope admin may also change the network; one with metrics may only view it. ", h("code", null, "pilotlight keys create"), " makes one."),
    h("div", { class: "row" }, key, h("button", { class: "main" }, "Sign in")), reason && h("p", { class: "bad", role: "alert" }, reason));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const answer = await fetch("page/session", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ key: key.value.trim() }) });
    if (answer.ok) { session.key = key.value.trim(); await enter(); } else door((await answer.json()).error.message);
  });
  show(view, form);
  key.focus();
}

who.addEventListener("click", async () => { await fetch("page/session", { method: "DELETE" }); session.key = ""; location.reload(); });

function theme(name) { document.documentElement.dataset.theme = name; try { localStorage.setItem("theme", name); } catch { /* not kept */ } }
let kept = null;
try { kept = localStorage.getItem("theme"); } catch { /* private windows may refuse */ }
theme(kept ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

addEventListener("hashchange", () => { if (isOpen) open(); });
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, dialog")) return;
  const chosen = views()[Number(event.key) - 1];
  if (chosen) location.hash = chosen[0];
  if (event.key === "/") { const field = view.querySelector("input[type=search]"); if (field) { event.preventDefault(); field.focus(); } }
  if (event.key === "?") help();
});

function help() {
  const box = h("dialog", { "aria-label": "Keys" }, h("h2", null, "Keys"),
    h("p", null, `1 to ${views().length}: views. / : filter. Ctrl+Enter: send. Esc: stop an answer. ? : this help.`), h("form", { method: "dialog" }, h("button", null, "Close")));
  document.body.append(box);
  box.addEventListener("close", () => box.remove());
  box.showModal();
}

enter();
