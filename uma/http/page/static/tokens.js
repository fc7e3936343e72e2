/** An answer's tokens, each marked by how likely the model found it, with what was likely in its place. */

import { h, number } from "./dom.js";

/** Least chances of the marks, from none to the strongest. */
const LEAST = [0.9, 0.6, 0.3, 0.1, 0];

/** @param {number} logprob */
function chance(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share >= 0.1 || share === 0 ? number(share, share < 10 ? 1 : 0) : "under 0.1"} %`;
}

/** A token's text where spaces and line breaks are to be seen. @param {string} text */
function spelled(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(a part of a character)";
}

export class Tokens {
  constructor() {
    this.text = h("div", { class: "tokens", role: "group", "aria-label": "Tokens by their probability. The arrow keys go from one to the next.", dir: "auto" });
    this.told = h("div", { class: "token-told", hidden: true, "aria-live": "polite" });
    const marks = LEAST.map((least, level) =>
      h("span", {}, h("span", { class: `token is-${level}` }, level ? `under ${number(100 * LEAST[level - 1])} %` : `${number(100 * least)} % and more`)),
    );
    this.element = h("div", { class: "token-view", hidden: true }, this.text, this.told, h("p", { class: "token-key" }, "Probability: ", ...marks));
    this.count = 0;
    /** @type {TokenChance[]} */
    this.tokens = [];
    this.text.addEventListener("keydown", (event) => this.step(event));
    this.text.addEventListener("focusin", ({ target }) => {
      this.tell(target);
      this.told.scrollIntoView({ block: "nearest" });
    });
    this.text.addEventListener("pointerover", ({ target }) => this.tell(target));
    this.text.addEventListener("pointerleave", () => this.tell(document.activeElement));
    this.text.addEventListener("focusout", () => this.tell(null));
  }

  /** Show these; those that are shown already stay as they are. @param {TokenChance[]} tokens @param {string} before What stands before the first of them. */
  show(tokens, before) {
    this.tokens = tokens;
    if (tokens.length < this.count || !this.text.hasChildNodes()) {
      this.text.replaceChildren(before);
      this.count = 0;
    }
    for (; this.count < tokens.length; this.count++) {
      const [text, logprob] = tokens[this.count];
      const level = LEAST.findIndex((least) => Math.exp(logprob) >= least);
      const at = { class: `token is-${level}`, tabindex: this.count ? -1 : 0, "data-at": this.count };
      this.text.append(h("span", at, text));
    }
  }

  /** @param {KeyboardEvent} event */
  step(event) {
    const { target: from } = event;
    if (!(from instanceof HTMLElement) || !from.dataset.at) return;
    const last = this.count - 1;
    const places = { ArrowRight: Number(from.dataset.at) + 1, ArrowLeft: Number(from.dataset.at) - 1, Home: 0, End: last };
    const at = Reflect.get(places, event.key);
    if (at === undefined) return;
    event.preventDefault();
    const to = this.text.querySelector(`[data-at="${Math.max(0, Math.min(last, at))}"]`);
    if (!(to instanceof HTMLElement)) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }

  /** What is known of the token that is pointed at, or has the focus. @param {EventTarget | null} target */
  tell(target) {
    const token = target instanceof HTMLElement && this.text.contains(target) ? target : null;
    const known = token?.dataset.at ? this.tokens[Number(token.dataset.at)] : undefined;
    this.told.hidden = !known;
    if (!known || !token) return;
    const [text, logprob, others] = known;
    const row = (/** @type {string} */ name, /** @type {number} */ value) =>
      h("tr", {}, h("td", {}, h("code", {}, spelled(name))), h("td", {}, chance(value)));
    const rows = others.map(([name, value]) => row(name, value));
    this.told.replaceChildren(
      h("p", {}, h("code", {}, spelled(text)), ` ${chance(logprob)}`),
      rows.length > 0 && h("table", {}, h("caption", {}, "Most likely here"), h("tbody", {}, ...rows)) || "",
    );
    // Below the token, within the answer. Where it stood before, it could be narrower than its words.
    this.told.style.left = "0";
    const most = this.element.clientWidth - this.told.offsetWidth;
    this.told.style.left = `${Math.max(0, Math.min(token.offsetLeft, most))}px`;
    this.told.style.top = `${token.offsetTop + token.offsetHeight + 4}px`;
  }
}
