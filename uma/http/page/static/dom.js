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

/** The element of this id, which the page has, as what it is. @template {Element} T @param {string} id @param {new () => T} kind @returns {T} */
export function byId(id, kind) {
  const element = document.getElementById(id);
  if (!(element instanceof kind)) throw new Error(`#${id} is no ${kind.name}`);
  return element;
}

/** A copy of a template of index.html, and what finds its parts by their class. @param {string} id @returns {[HTMLElement, (part: string) => HTMLElement]} */
export function copyOf(id) {
  const element = /** @type {HTMLElement} */ (byId(id, HTMLTemplateElement).content.firstElementChild?.cloneNode(true));
  return [element, (part) => /** @type {HTMLElement} */ (element.querySelector(`.${part}`))];
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

/** A button that is words. @param {string} label @param {() => void} onclick @param {string} [kind] Its class. */
export function button(label, onclick, kind = "button") {
  return h("button", { type: "button", class: kind, onclick }, label);
}

/** A button that is an icon, with its name for screen readers. @param {string} name @param {string} label @param {() => void} onClick @param {string} [more] Further classes. */
export function iconButton(name, label, onClick, more = "") {
  return h("button", { type: "button", class: `icon-button ${more}`, "aria-label": label, title: label, onclick: onClick }, icon(name));
}

/** A click so soon after another is the second of a double click, and not meant for what the first one has brought there. */
export const DOUBLE_CLICK_MS = 500;

/** The controls that can have the focus. */
const CONTROLS = "button, summary, input, textarea, a[href], [tabindex]";

/** What a control is known by after its part of the page was built again. @param {Element} control */
function nameOf(control) {
  const home = control.closest("[data-id]");
  const id = home?.getAttribute("data-id") ?? "";
  return home === control ? id : `${id} ${control.getAttribute("aria-label") ?? control.textContent}`;
}

/** Build a part of the page again. Where the focus was in it, the same control has it afterwards. @param {HTMLElement} part @param {() => void} build @param {() => void} [otherwise] Where there is no such control any more. */
export function rebuild(part, build, otherwise) {
  const before = document.activeElement;
  const name = before && before !== part && part.contains(before) ? nameOf(before) : null;
  build();
  if (name === null || before?.isConnected) return;
  const same = [...part.querySelectorAll(CONTROLS)].find((each) => nameOf(each) === name);
  if (same instanceof HTMLElement) same.focus({ preventScroll: true });
  else otherwise?.();
}

/** Have `part` hold just these, and touch those only that are new or in the wrong place. @param {Element} part @param {Element[]} children */
export function arrange(part, children) {
  const focused = document.activeElement;
  const wanted = new Set(children);
  for (const each of [...part.children]) if (!wanted.has(each)) each.remove();
  for (const [index, child] of children.entries())
    if (part.children[index] !== child) part.insertBefore(child, part.children[index] ?? null);
  // What is moved loses the focus.
  if (focused instanceof HTMLElement && part.contains(focused)) focused.focus({ preventScroll: true });
}

const SAID_FOR_MS = 30_000;
/** A notice stays for as long as it takes to be read. */
const READ_CHAR_MS = 80;

/** Have screen readers say something, after what they have not said yet. @param {string} text */
export function announce(text) {
  const line = h("p", {}, text);
  byId("announcer", HTMLElement).append(line);
  setTimeout(() => line.remove(), SAID_FOR_MS);
}

/** A short notice below what is shown, with a place of its own, so that it lies on no words and on no button; with at most one thing to do about it. It takes the place of an earlier one of its topic. @param {string} text @param {{label: string, run: () => void}} [action] */
export function toast(text, action, topic = text) {
  clearToasts(topic);
  const box = h("div", { class: "toast", "data-action": action?.label, "data-topic": topic }, h("span", {}, text));
  const close = () => box.remove();
  if (action) {
    const run = () => (close(), action.run());
    box.append(button(action.label, run, "link-button"));
  }
  box.append(iconButton("x", "Dismiss", close, "small"));
  byId(byId("live-view", HTMLElement).hidden ? "toasts" : "live-toasts", HTMLElement).append(box);
  setTimeout(close, Math.max(action ? 10_000 : 5_000, READ_CHAR_MS * text.length));
}

/** Take away the notices of a topic, or those of what was shown before, but for what can still be undone. @param {string} [topic] */
export function clearToasts(topic) {
  const which = topic ? `[data-topic="${CSS.escape(topic)}"]` : ':not([data-action="Undo"])';
  for (const each of document.querySelectorAll(`.toast${which}`)) each.remove();
}

/** Copy to the clipboard, and show on the button that it happened. @param {HTMLElement} button @param {string} text @returns {Promise<boolean>} Whether it did. */
export async function copy(button, text) {
  const isCopied = await write(text);
  if (isCopied) announce("Copied");
  else toast("The browser blocks copying: select the text and copy it by hand.");
  if (!isCopied) return false;
  const use = button.querySelector("use");
  use?.setAttribute("href", "#i-check");
  setTimeout(() => use?.setAttribute("href", "#i-copy"), 1_500);
  return true;
}

/** @param {string} text @returns {Promise<boolean>} Whether it is in the clipboard. */
async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine there is no `navigator.clipboard`; what is selected can still be copied.
    const focused = document.activeElement;
    const area = h("textarea", { class: "hidden", "aria-hidden": "true", readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
    return isCopied;
  }
}

/** Set a text, where it is another one: the same would undo what is marked in it. @param {Element} element @param {string} text */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Offer a file to be saved. @param {string} name @param {string} text @param {string} [type] */
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1_000);
}

/** `12,345` and the like, in the page's language. @param {number} value @param {number} [digits] */
export function number(value, digits = 0) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A time for people, in seconds: `0.08 s`, `1.2 s`, `40 s`. @param {number} ms */
export function duration(ms) {
  return `${number(ms / 1_000, ms < 1_000 ? 2 : ms < 10_000 ? 1 : 0)} s`;
}
