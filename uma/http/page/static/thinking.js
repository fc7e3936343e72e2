/** A model's thinking: a folded part of its own above the answer, which grows while the model thinks. */

import { announce, h, number } from "./dom.js";

/** Answers whose thinking was unfolded: it stays so when they are shown again. @type {WeakSet<Message>} */
const unfolded = new WeakSet();

export class Thinking {
  /** @param {Message} message */
  constructor(message) {
    this.message = message;
    this.label = h("summary");
    this.words = document.createTextNode("");
    this.element = h(
      "details",
      { class: "thinking", hidden: true, open: unfolded.has(message) },
      this.label,
      h("div", { class: "thoughts", dir: "auto" }, this.words),
    );
    this.element.addEventListener("toggle", () => {
      if (this.element.open) unfolded.add(message);
      else unfolded.delete(message);
    });
  }

  /** Show what the message has. @param {boolean} isThinking Whether the answer has not begun yet. */
  show(isThinking) {
    const { thinking = "", done } = this.message;
    if (thinking && this.element.hidden && isThinking) announce("The model is thinking.");
    this.element.hidden = !thinking;
    // Appended, so that what is marked in it stays marked.
    if (thinking.startsWith(this.words.data)) this.words.appendData(thinking.slice(this.words.length));
    else this.words.data = thinking;
    const tokens = done?.usage.reasoning_tokens;
    const extent = tokens ? `, ${number(tokens)} ${tokens === 1 ? "token" : "tokens"}` : "";
    const words = isThinking ? ["Thinking …", h("span", { class: "pulse" })] : [`Thinking${extent}`];
    if (this.label.textContent !== words[0]) this.label.replaceChildren(...words);
  }
}
