/** Small helpers to build and find elements. Text is always set as text. */

/** @typedef {string | Node | null | undefined | false} Child */

/**
 * An element with attributes and children. `class`, `aria-…` and the like are attributes; `on…` are listeners.
 *
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number | boolean | EventListener | undefined>} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child) element.append(child);
  return element;
}

/**
 * The element of this id, which the page has, as what it is.
 *
 * @template {Element} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
export function byId(id, kind) {
  const element = document.getElementById(id);
  if (!(element instanceof kind)) throw new Error(`#${id} is no ${kind.name}`);
  return element;
}

/** @param {string} name One of the symbols in index.html. @returns {SVGSVGElement} */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/**
 * A button that is an icon, with its name for screen readers.
 *
 * @param {string} name
 * @param {string} label
 * @param {() => void} onClick
 * @param {string} [more] Further classes.
 */
export function iconButton(name, label, onClick, more = "") {
  const attributes = {
    type: "button",
    class: `icon-button ${more}`,
    "aria-label": label,
    title: label,
    onclick: onClick,
  };
  return h("button", attributes, icon(name));
}

const announcer = () => byId("announcer", HTMLElement);

/** Have screen readers say something. @param {string} text */
export function announce(text) {
  announcer().textContent = text;
}

/**
 * A short notice in the corner, with at most one thing to do about it.
 *
 * @param {string} text
 * @param {{label: string, run: () => void}} [action]
 */
export function toast(text, action) {
  const box = h("div", { class: "toast" }, h("span", {}, text));
  const close = () => box.remove();
  if (action) {
    const run = () => {
      close();
      action.run();
    };
    box.append(h("button", { type: "button", class: "link-button", onclick: run }, action.label));
  }
  byId("toasts", HTMLElement).append(box);
  setTimeout(close, action ? 10_000 : 5_000);
}

/** Copy to the clipboard, and show on the button that it happened. @param {HTMLElement} button @param {string} text */
export async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    toast("The browser does not let this page copy: mark the text and copy it by hand.");
    return;
  }
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"));
  announce("Copied");
  setTimeout(() => button.replaceChildren(...before), 1_500);
}

/** Offer a file to be saved. @param {string} name @param {string} text */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1_000);
}

/** `12,345` and the like, in the page's language. @param {number} value @param {number} [digits] */
export function number(value, digits = 0) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A time for people: `85 ms`, `1.2 s`. @param {number} ms */
export function duration(ms) {
  return ms < 1_000 ? `${number(ms)} ms` : `${number(ms / 1_000, ms < 10_000 ? 1 : 0)} s`;
}
