// Make elements from plain values. Texts become text nodes, so no text of the network is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

export function show(node, ...children) {
  // The content may be drawn again each second: keep the focus on the control of the same name.
  const focused = node.contains(document.activeElement) ? document.activeElement.ariaLabel : null;
  node.replaceChildren(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  if (focused) [...node.querySelectorAll("[aria-label]")].find((one) => one.ariaLabel === focused)?.focus({ preventScroll: true });
}

export function announce(text) {
  document.getElementById("announce").textContent = text;
}

export function table(columns, rows, empty) {
  // columns: [title, function that returns a row's value, true for numbers]
  if (!rows.length) return h("p", { class: "soft" }, empty);
  const kind = (column) => ({ class: column[2] ? "number" : null });
  return h("table", null,
    h("thead", null, h("tr", null, columns.map((column) => (column[0] ? h("th", { ...kind(column), scope: "col" }, column[0]) : h("td"))))),
    h("tbody", null, rows.map((row) => h("tr", null, columns.map((column) => h("td", kind(column), column[1](row)))))));
}

export const card = (title, ...children) => h("section", { class: "card" }, title && h("h2", null, title), children);
