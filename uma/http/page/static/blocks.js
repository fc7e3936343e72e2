/** The one place where HTML becomes part of the page: blocks of Markdown, sanitized. */

import { colour, highlighter } from "./colours.js";
import { copy, h, iconButton, number } from "./dom.js";
import { temml, typeset } from "./formulas.js";
import { Markdown } from "./markdown.js";
import { morph } from "./morph.js";

DOMPurify.setConfig({
  ALLOWED_TAGS: [
    ...["p", "h3", "h4", "h5", "h6", "blockquote", "hr", "br", "ul", "ol", "li", "pre", "code", "span", "strong", "em", "s"],
    ...["details", "summary", "sub", "sup", "kbd", "b", "i", "u", "del", "ins", "mark", "small", "a", "table", "thead", "tbody", "tr", "th", "td", "#text"],
  ],
  ALLOWED_ATTR: ["href", "title", "start", "class", "data-language"],
  ADD_URI_SAFE_ATTR: ["start", "data-language"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  // Nodes, and not HTML that is parsed once more: what was looked at is what is shown.
  RETURN_DOM_FRAGMENT: true,
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.localName !== "a") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** What tells a block that needs a library. @type {[RegExp, import("./library.js").Library<any>][]} */
const NEEDS = [[/<span class="formula"/, temml], [/<code data-language="[^"]/, highlighter]];
/** For so long at a stretch blocks are made of a text that is complete: thousands of formulas take seconds. */
const MOST_MS = 200;
/** So many formulas of one block are typeset. */
const MAX_FORMULAS = 500;

/** Shows a text's blocks, and touches those only that changed. */
export class Blocks {
  constructor() {
    this.element = h("div", { class: "blocks" });
    this.element.addEventListener("click", ({ target }) => {
      const from = target instanceof Element && target.closest(".footnote button")?.parentElement;
      const other = from && (from.matches(".is-told") ? ":not(.is-told)" : ".is-told");
      if (from) this.notes(`[title="${CSS.escape(from.title)}"]${other}`)[0]?.querySelector("button")?.focus();
    });
    /** @type {string[]} */
    this.shown = [];
    this.markdown = new Markdown();
    this.isWhole = false;
    /** Nothing is to be done for the text that is shown. */
    this.isFinal = false;
    /** Libraries that it waits for. @type {Promise<void> | undefined} */
    this.loading = undefined;
  }

  /** Where it takes long, what is missing is made when it is called again. @param {string} text @param {boolean} isWhole Nothing comes after it. */
  show(text, isWhole) {
    if (!text.startsWith(this.markdown.text)) this.markdown = new Markdown();
    if (isWhole) this.markdown.finish(text);
    else this.markdown.grow(text);
    const began = performance.now();
    const { blocks } = this.markdown;
    this.isWhole = isWhole;
    this.load(blocks);
    if (this.loading && !this.shown.length && this.element.hasChildNodes()) return; // a kept text is laid out once
    const parts = [...this.element.children];
    let fresh = 0;
    const made = blocks.findIndex((html, index) => {
      if (this.shown[index] === html) return false;
      if (fresh++ && performance.now() - began > MOST_MS) return true;
      const block = h("div", { class: "block" });
      block.append(DOMPurify.sanitize(html));
      dress(block);
      block.dir = "auto"; // at the end: with each change the browser would look for the direction again
      if (parts[index]) morph(parts[index], block);
      else this.element.append(block);
      return false;
    });
    for (const part of parts.slice(blocks.length)) part.remove();
    this.numberNotes();
    this.isFinal = isWhole && made < 0 && !this.loading;
    this.shown = made < 0 ? blocks : [...blocks.slice(0, made), ...this.shown.slice(made, blocks.length)];
  }

  /** Load what these need, and show them again with it: until then formulas stand as they are written. @param {string[]} blocks */
  load(blocks) {
    const lacking = NEEDS.filter(([sign, library]) => !library.isTried && blocks.some((html) => sign.test(html)));
    if (!lacking.length || this.loading) return;
    this.loading = Promise.all(lacking.map(([, library]) => library.load())).then(() => {
      this.loading = undefined;
      this.shown = this.shown.map(() => "");
      this.show(this.markdown.text, this.isWhole);
    });
  }

  /** Marks of footnotes, and where these are told. @param {string} which @returns {NodeListOf<HTMLElement>} */
  notes(which) {
    return this.element.querySelectorAll(`.footnote${which}`);
  }

  /** Footnotes have numbers in the order of their marks, which lead to what they say and back. */
  numberNotes() {
    const told = new Set(Array.from(this.notes(".is-told"), ({ title }) => title));
    const names = new Set(Array.from(this.notes(""), ({ title }) => title).filter((title) => told.has(title)));
    const numbers = new Map([...names].map((title, at) => [title, number(at + 1)]));
    for (const note of this.notes("")) {
      const text = numbers.get(note.title);
      if (!text || note.querySelector("button")?.textContent === text) continue;
      const label = note.matches(".is-told") ? `Back from footnote ${text}` : `Footnote ${text}`;
      note.replaceChildren(h("button", { type: "button", "aria-label": label }, text));
    }
  }

  /** Plain text, until there are blocks. @param {string} text */
  showPlain(text) {
    this.element.replaceChildren(h("div", { class: "block plain", dir: "auto" }, text));
  }
}

/** Formulas are typeset, code gets a bar with its language and a copy button; what is too wide can be scrolled, also by keyboard. @param {HTMLElement} block */
function dress(block) {
  for (const formula of [...block.querySelectorAll(".formula")].slice(0, MAX_FORMULAS)) typeset(formula);
  // An address that leads nowhere from here, as a file's beside the text: its words alone.
  for (const link of block.querySelectorAll("a:not([href])")) link.replaceWith(...link.childNodes);
  for (const code of block.querySelectorAll("pre > code")) {
    const pre = /** @type {HTMLElement} */ (code.parentElement);
    const language = code.getAttribute("data-language") ?? "";
    colour(code, language);
    pre.tabIndex = 0;
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
    const button = iconButton("copy", "Copy the code", () => copy(button, code.textContent ?? ""), "copy-code");
    const frame = h("div", { class: "code", dir: "ltr" }); // whatever language surrounds it
    pre.replaceWith(frame);
    frame.append(h("div", { class: "code-bar" }, h("span", {}, language && h("span", { class: "hidden" }, "Code in "), `${language || "text"}\n`), button), pre);
  }
  for (const table of block.querySelectorAll("table")) {
    const frame = h("div", { class: "table", tabindex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
}
