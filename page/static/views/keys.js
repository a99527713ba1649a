// Keys and accounts. A new key is shown once; a revoked key is refused at once.

import { card, h, show, table } from "../dom.js";
import { act, call, choice, confirmed, copy, dialog, field } from "../manage.js";

const SCOPES = [["models", "use models"], ["metrics", "view this page"], ["deploy", "deploy functions"], ["admin", "everything"]];

export function keys(hasLedger) {
  const list = h("div"), told = h("p", { class: "soft", role: "status" });
  const say = (text) => show(told, text);

  async function read() {
    let found;
    try { ({ keys: found } = await call("GET", "manage/keys")); } catch (error) { say(error.message); return; }
    show(list, table([
      ["key", (one) => h("b", null, one.name)], ["account", (one) => one.account], ["scopes", (one) => one.scopes.join(", ")],
      ["state", (one) => h("span", { class: one.state.startsWith("known") || one.state.startsWith("expires") ? "good" : "bad" }, one.state)],
      ["from", (one) => (one.is_issued ? "this page or pilotlight manage" : "the router's file")],
      ["", (one) => one.is_issued && one.state !== "revoked" && h("button", { type: "button", "aria-label": `revoke ${one.name}`, onclick: () => revoke(one.name) }, "revoke")],
    ], found, "There are no keys. Create one: clients send it as Authorization: Bearer KEY."));
  }

  async function revoke(name) {
    if (!(await confirmed(`Revoke ${name}? Its clients are refused at once.`, "revoke"))) return;
    await act(say, `revoke ${name}`, async () => { await call("DELETE", `manage/keys/${encodeURIComponent(name)}`); await read(); return `${name} is refused from now on`; });
  }

  function create() {
    const name = h("input", { required: true, pattern: "[a-z0-9][a-z0-9._\\-]{0,62}", title: "small letters, digits, - . and _", autocomplete: "off" });
    const scopes = SCOPES.map(([value, text]) => [h("input", { type: "checkbox", value, checked: value === "models" }), `${value}: ${text}`]);
    const account = h("input", { placeholder: "an account with the key's name", autocomplete: "off" });
    const days = choice([["", "never"], ["1", "after a day"], ["30", "after 30 days"], ["365", "after a year"]]);
    // Daily limits need a ledger.
    const limits = [["requests_per_min", "Requests per minute"], ["tokens_per_min", "Tokens per minute"], ...(hasLedger ? [["tokens_per_day", "Tokens per day"], ["cost_per_day", "Cost per day"]] : [])]
      .map(([name, text]) => [name, text, h("input", { type: "number", min: 1, placeholder: "no limit" })]);
    const trouble = h("p", { class: "bad", role: "alert" });
    const form = h("form", null, field("Name", name), h("fieldset", null, h("legend", null, "Scopes"), scopes.map(([box, text]) => h("p", null, h("label", null, box, ` ${text}`)))),
      h("div", { class: "grid" }, field("Account", account), field("Expires", days), limits.map(([, text, box]) => field(text, box))), trouble,
      h("div", { class: "row end" }, h("button", { type: "button", onclick: () => box.close() }, "Cancel"), h("button", { class: "main" }, "Create")));
    const box = dialog("New key", form);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const fields = { name: name.value, scopes: scopes.filter(([one]) => one.checked).map(([one]) => one.value), ...(account.value && { account: account.value }), ...(days.value && { expires_days: Number(days.value) }),
        ...Object.fromEntries(limits.filter(([, , one]) => one.value).map(([name, , one]) => [name, Number(one.value)])) };
      try { shown(await call("POST", "manage/keys", fields), form, box); } catch (error) { show(trouble, error.message); }
    });
  }

  function shown(made, form, box) {
    const line = `curl ${new URL("./", location.href).href}v1/models -H "authorization: Bearer ${made.key}"`;
    form.replaceWith(h("div", null, h("p", null, `The key ${made.name} is valid from now on. It is shown only now: `), h("pre", { class: "key mono", tabindex: 0 }, made.key),
      h("p", { class: "soft" }, "Try it:"), h("pre", { class: "mono", tabindex: 0 }, line), h("div", { class: "row end" }, copy(made.key, "Copy the key"), copy(line, "Copy the command"), h("button", { type: "button", class: "main", onclick: () => box.close() }, "Done"))));
    read();
  }

  read();
  return card("Keys", h("div", { class: "row" }, h("button", { type: "button", class: "main", onclick: create }, "New key"), told), list);
}
