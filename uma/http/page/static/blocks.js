/** The one place where HTML becomes part of the page: blocks that the server rendered and sanitized. */

import { copy, h, icon } from "./dom.js";
import { typeset } from "./formulas.js";
import { morph } from "./morph.js";

/** @typedef {{createHTML: (html: string) => any}} Policy */

/** @type {{createPolicy: (name: string, rules: Policy) => Policy} | undefined} */
const trusted = Reflect.get(globalThis, "trustedTypes");
const policy = trusted?.createPolicy("uma-blocks", { createHTML: (html) => html });

/** Shows a list of blocks, and touches those only that changed. */
export class Blocks {
  constructor() {
    this.element = h("div", { class: "blocks" });
    /** @type {string[]} */
    this.shown = [];
  }

  /** @param {string[]} blocks The server's. */
  show(blocks) {
    blocks.forEach((html, index) => {
      if (this.shown[index] === html) return;
      const block = h("div", { class: "block", dir: "auto" });
      block.innerHTML = policy ? policy.createHTML(html) : html;
      dress(block);
      if (index < this.element.children.length) morph(this.element.children[index], block);
      else this.element.append(block);
    });
    while (this.element.children.length > blocks.length) this.element.lastElementChild?.remove();
    this.shown = [...blocks];
  }

  /** Plain text, until there are blocks. @param {string} text */
  showText(text) {
    this.element.replaceChildren(h("div", { class: "block plain", dir: "auto" }, text));
    this.shown = [];
  }
}

/** Formulas are typeset, code gets a bar with its language and a copy button; what is too wide can be scrolled, also by keyboard. @param {HTMLElement} block */
function dress(block) {
  for (const formula of block.querySelectorAll(".formula")) {
    const math = typeset(formula.textContent ?? "");
    if (math) formula.replaceChildren(math);
  }
  for (const code of block.querySelectorAll("pre > code")) {
    const pre = /** @type {HTMLElement} */ (code.parentElement);
    const language = code.getAttribute("data-language") ?? "";
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
    const button = h(
      "button",
      { type: "button", class: "copy-code", "aria-label": "Copy the code", title: "Copy the code" },
      icon("copy"),
    );
    button.addEventListener("click", () => copy(button, code.textContent ?? ""));
    const frame = h("div", { class: "code", dir: "ltr" }); // whatever language surrounds it
    pre.replaceWith(frame);
    frame.append(h("div", { class: "code-bar" }, h("span", {}, language || "text"), button), pre);
  }
  for (const table of block.querySelectorAll("table")) {
    const frame = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
}
