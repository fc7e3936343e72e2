/** A list in a dialog that is searched as one types: conversations, models and actions (Ctrl K), or the models alone. */

import { byId, h } from "./dom.js";
import { morph } from "./morph.js";

export class Palette {
  constructor() {
    this.dialog = byId("palette", HTMLDialogElement);
    this.input = byId("palette-input", HTMLInputElement);
    this.list = byId("palette-list", HTMLElement);
    this.nothing = byId("palette-nothing", HTMLElement);
    /** @type {(text: string) => Entry[]} */
    this.find = () => [];
    /** @type {Entry[]} */
    this.found = [];
    this.at = -1;
    this.input.addEventListener("input", () => {
      this.at = -1;
      this.show();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "ArrowDown" || event.key === "ArrowUp") this.step(event.key === "ArrowDown" ? 1 : -1);
      else if (event.key === "Enter") this.take(this.at);
      else return;
      event.preventDefault();
    });
    this.list.addEventListener("click", ({ target }) => {
      const option = target instanceof Element && target.closest("[role=option]");
      if (option) this.take(Number(option.id.replace("found-", "")));
    });
    this.dialog.addEventListener("click", ({ target }) => target === this.dialog && this.dialog.close());
  }

  /** @param {string} label What can be found. @param {(text: string) => Entry[]} find */
  open(label, find) {
    this.find = find;
    this.at = -1;
    this.input.value = "";
    this.input.placeholder = label;
    this.input.setAttribute("aria-label", label);
    if (!this.dialog.open) this.dialog.showModal();
    this.input.focus();
    this.reveal();
  }

  /** Show what is found now; what stays the same is not touched, so that no press is lost. */
  show() {
    if (!this.dialog.open) return;
    const [text, chosen] = [this.input.value.trim(), this.found[this.at]?.label];
    this.found = this.find(text);
    // A model that is loaded meanwhile changes its place.
    if (this.found[this.at]?.label !== chosen) this.at = this.found.findIndex(({ label }) => label === chosen);
    if (this.at < 0 && !text) this.at = this.found.findIndex(({ isCurrent }) => isCurrent);
    if (!this.found[this.at] || this.found[this.at].isDisabled)
      this.at = this.found.findIndex(({ isDisabled }) => !isDisabled);
    /** @type {HTMLElement[]} */
    const groups = [];
    this.found.forEach((entry, index) => {
      if (entry.group !== this.found[index - 1]?.group)
        groups.push(h("div", { role: "group", "aria-label": entry.group }, h("div", { class: "list-head", "aria-hidden": "true" }, entry.group)));
      groups.at(-1)?.append(optionOf(entry, index, index === this.at));
    });
    const list = /** @type {HTMLElement} */ (this.list.cloneNode());
    list.append(...groups);
    morph(this.list, list);
    this.nothing.textContent = this.found.length ? "" : "Nothing found.";
    this.input.setAttribute("aria-activedescendant", this.at < 0 ? "" : `found-${this.at}`);
  }

  /** @param {1 | -1} by */
  step(by) {
    const count = this.found.length;
    for (let steps = 0, at = this.at; steps < count; steps++) {
      at = (at + by + count) % count;
      if (this.found[at].isDisabled) continue;
      this.at = at;
      break;
    }
    this.reveal();
  }

  reveal() {
    this.show();
    this.list.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }

  /** @param {number} index */
  take(index) {
    const entry = this.found[index];
    if (!entry || entry.isDisabled) return;
    this.dialog.close();
    entry.run();
  }
}

/** @param {Entry} entry @param {number} index @param {boolean} isSelected */
function optionOf({ label, note = "", state, isCurrent, isDisabled }, index, isSelected) {
  return h(
    "div",
    {
      role: "option",
      class: "found",
      id: `found-${index}`,
      "aria-selected": String(isSelected),
      "aria-current": isCurrent && "true",
      "aria-disabled": isDisabled && "true",
    },
    h("span", { class: "name", dir: "auto" }, label),
    state ? h("span", { class: "state" }, state) : null,
    h("span", { class: "snippet", dir: "auto" }, note),
  );
}
