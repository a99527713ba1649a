// Data of functions: D1 databases and KV namespaces, a page at a time, read only.

import { card, h, show, table } from "../dom.js";
import { call, choice } from "../manage.js";
import { bytes } from "../words.js";

const ROWS = 50;

export function stores() {
  const list = h("div"), page = h("div", { "aria-live": "polite" });

  async function read() {
    let found;
    try { found = await call("GET", "manage/stores"); } catch (error) { show(list, h("p", { class: "bad", role: "alert" }, error.message)); return; }
    const rows = Object.entries(found.sites).flatMap(([site, all]) => all.map((one) => ({ site, ...one })));
    show(list, table([
      ["name", (one) => h("b", { class: "source" }, one.name)], ["kind", (one) => (one.kind === "d1" ? "D1 database" : "KV namespace")], ["site", (one) => one.site],
      ["owner", (one) => (one.owner === "@site" ? "the site's functions" : one.owner || "–")], ["size", (one) => bytes(one.bytes), true],
      ["", (one) => h("button", { type: "button", "aria-label": `look into ${one.name}`, onclick: () => look(one, {}) }, "look into")],
    ], rows, "No function keeps data yet: bind a D1 database or a KV namespace in its wrangler.toml."),
    Object.entries(found.unread).map(([site, reason]) => h("p", { class: "bad" }, `${site}: ${reason}`)));
  }

  async function look(store, asked) {
    const query = new URLSearchParams({ kind: store.kind, name: store.name, limit: ROWS, ...asked });
    let found;
    try { found = await call("GET", `manage/stores/${encodeURIComponent(store.site)}?${query}`); } catch (error) { show(page, h("p", { class: "bad", role: "alert" }, error.message)); return; }
    const tables = choice(found.tables.map((name) => [name]), { "aria-label": "Table", onchange: () => look(store, { table: tables.value }) });
    tables.value = found.table;
    const prefix = h("input", { class: "grow", value: asked.prefix ?? "", placeholder: "beginning of the keys", "aria-label": "Beginning of the keys" });
    const chosen = store.kind === "kv" ? { prefix: asked.prefix ?? "" } : { table: found.table };
    show(page, h("h3", null, `${store.name} at ${store.site}`),
      h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); look(store, { prefix: prefix.value }); } },
        store.kind === "kv" ? [prefix, h("button", null, "Show")] : found.tables.length > 0 && h("label", null, "Table ", tables),
        asked.after && h("button", { type: "button", onclick: () => look(store, chosen) }, "First page"), found.next && h("button", { type: "button", onclick: () => look(store, { ...chosen, after: found.next }) }, "Next page")),
      h("div", { class: "wide" }, table(found.columns.map((name, i) => [name || " ", (row) => (row[i] === null ? h("span", { class: "soft" }, "NULL") : h("span", { class: "mono" }, row[i]))]), found.rows,
        store.kind === "kv" ? "No key begins with this." : found.tables.length ? "The table is empty." : "The database has no tables.")));
  }

  read();
  return card("Data", list, page);
}
