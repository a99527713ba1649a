// Calls of the management API, which `pilotlight manage` uses too, and dialogs that ask before something is removed.

import { announce, h } from "./dom.js";

export async function call(method, path, fields) {
  const body = fields && { headers: { "content-type": "application/json" }, body: JSON.stringify(fields) };
  const answer = await fetch(path, { method, ...body });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error.message);
  return told;
}

export const operate = (site, fields) => call("POST", `manage/sites/${encodeURIComponent(site)}`, fields);

export async function act(told, what, work) {
  let text;
  try { text = (await work()) ?? `${what}: started`; } catch (error) { text = `${what}: ${error.message}`; }
  announce(text);
  told(text);
}

export function button(session, action, site, model, told, question) {
  if (!session.is_admin) return null;
  const what = model ? `${action} ${model} at ${site}` : `${action} ${site}`;
  return h("button", {
    type: "button", "aria-label": what,
    onclick: async ({ target }) => {
      if (question && !(await confirmed(question, action))) return;
      target.disabled = true;
      await act(told, what, async () => { await operate(site, { action, model }); });
      target.disabled = false;
    },
  }, action);
}

export function dialog(title, ...children) {
  const box = h("dialog", { "aria-label": title }, h("h2", null, title), children);
  document.body.append(box);
  box.addEventListener("close", () => box.remove());
  box.showModal();
  return box;
}

export function confirmed(question, verb) {
  return new Promise((resolve) => {
    const box = dialog(question, h("form", { method: "dialog", class: "row end" }, h("button", { value: "" }, "Cancel"), h("button", { class: "main", value: "yes" }, verb)));
    box.addEventListener("close", () => resolve(box.returnValue === "yes"));
  });
}

export const field = (text, box, hint) => h("p", null, h("label", null, h("span", { class: "soft" }, text), h("br"), box), hint && h("span", { class: "soft" }, ` ${hint}`));

export const choice = (options, more) => h("select", more, options.map(([value, text]) => h("option", { value }, text ?? value)));

export const copy = (text, what) => h("button", { type: "button", onclick: ({ target }) => navigator.clipboard?.writeText(text).then(() => { target.textContent = "copied"; }) }, what);
