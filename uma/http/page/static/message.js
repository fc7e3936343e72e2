/** One message on the screen: a question with its files, or an answer with its figures, and what can be done with it. */

import { showFiles } from "./attachments.js";
import { Blocks } from "./blocks.js";
import { announce, copy, duration, h, icon, iconButton, number } from "./dom.js";
import { explain } from "./failures.js";
import { Thinking } from "./thinking.js";

/** @typedef {import("./types.js").Attachment} Attachment */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {import("./run.js").Run} Run */

/**
 * @typedef {object} Actions What a message asks its conversation to do.
 * @property {(message: Message, text: string, files: Attachment[]) => void} resend
 * @property {(message: Message) => void} again
 * @property {(message: Message) => void} branchOff
 * @property {() => void} begin A new chat.
 * @property {(message: Message) => boolean} isOutgrown Most of what the model was given for this answer stands before the question.
 * @property {(id: string) => void} show
 */

/** Questions whose edit was begun: it goes on where they are shown again. @type {WeakMap<Message, {text: string, files: Attachment[]}>} */
const edits = new WeakMap();

/** @param {Message} message @param {Message[]} siblings @param {Actions} actions */
function switcher(message, siblings, actions) {
  if (siblings.length < 2) return null;
  const at = siblings.findIndex((each) => each.id === message.id);
  const step = (/** @type {number} */ by) => () => actions.show(siblings[at + by].id);
  const previous = iconButton("left", "Previous version", step(-1), "small");
  const next = iconButton("right", "Next version", step(1), "small");
  previous.disabled = at === 0;
  next.disabled = at === siblings.length - 1;
  const label = `Version ${at + 1} of ${siblings.length}`;
  return h(
    "span",
    { class: "versions", role: "group", "aria-label": label },
    previous,
    h("span", {}, `${at + 1}/${siblings.length}`),
    next,
  );
}

/** @param {Message} message @param {Message[]} siblings @param {Actions} actions */
export function question(message, siblings, actions) {
  const bubble = h("div", { class: "bubble", dir: "auto" }, message.text);
  const files = (message.files ?? []).map((file) => h("span", { class: "file" }, icon("file"), file.name));
  const edit = iconButton("edit", "Edit and send again", () => editing(article, message, actions).focus());
  const copyButton = iconButton("copy", "Copy the question", () => copy(copyButton, message.text));
  const article = h(
    "article",
    { class: "message user", "data-id": message.id },
    h("h2", { class: "hidden" }, "You"),
    files.length > 0 && h("div", { class: "files" }, ...files),
    message.text !== "" && bubble,
    h("footer", { class: "actions" }, switcher(message, siblings, actions), edit, copyButton),
  );
  if (edits.has(message)) editing(article, message, actions);
  return article;
}

/** Have the question be edited in its place. @param {HTMLElement} article @param {Message} message @param {Actions} actions @returns {HTMLElement} The text's box. */
function editing(article, message, actions) {
  const before = [...article.childNodes];
  const input = h("textarea", { class: "edit", dir: "auto", "aria-label": "Your question", rows: 3 });
  const list = h("ul", { class: "attached", "aria-label": "Attached files" });
  const edit = edits.get(message) ?? { text: message.text, files: message.files ?? [] };
  edits.set(message, edit);
  input.value = edit.text;
  input.addEventListener("input", () => (edit.text = input.value));
  const show = () =>
    showFiles(list, edit.files, (file) => {
      edit.files = edit.files.filter((each) => each !== file);
      show();
      input.focus();
    });
  show();
  const cancel = () => {
    edits.delete(message);
    article.replaceChildren(...before);
    article.classList.remove("is-edited");
    article.querySelector("button")?.focus();
  };
  const send = () => {
    if (!edit.text.trim() && !edit.files.length) return;
    edits.delete(message);
    actions.resend(message, edit.text.trim(), edit.files);
  };
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  const buttons = [
    h("button", { type: "button", class: "button", onclick: cancel }, "Cancel"),
    h("button", { type: "button", class: "button primary", onclick: send }, "Send again"),
  ];
  article.classList.add("is-edited");
  const editor = h(
    "div",
    { class: "editor" },
    h("h2", { class: "hidden" }, "You"),
    input,
    list,
    h("div", { class: "edit-foot" }, ...buttons),
  );
  editor.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    event.preventDefault(); // it is this that ends, not the answer
    cancel();
  });
  article.replaceChildren(editor);
  return input;
}

/** An answer, while it is written and after. */
export class AnswerView {
  /** @param {Message} message @param {Message[]} siblings @param {Actions} actions */
  constructor(message, siblings, actions) {
    this.message = message;
    this.siblings = siblings;
    this.actions = actions;
    this.thinking = new Thinking(message);
    this.blocks = new Blocks();
    this.status = h("div", { class: "status" });
    this.foot = h("footer", { class: "answer-foot" });
    this.element = h(
      "article",
      { class: "message assistant", "data-id": message.id },
      h("h2", { class: "hidden" }, "Answer"),
      this.thinking.element,
      this.blocks.element,
      this.status,
      this.foot,
    );
    if (!message.token) this.finish();
  }

  /** A finished answer's blocks. @param {string[] | undefined} blocks */
  showBlocks(blocks) {
    if (blocks) this.blocks.show(blocks);
    else this.blocks.showText(this.message.text);
  }

  /** @param {Run} run */
  follow(run) {
    this.thinking.show(!run.isOver && !run.message.text);
    if (run.lastEventId) this.blocks.show(run.blocks);
    // Until the server has told of it, what the browser kept of it is shown.
    else if (!this.blocks.element.hasChildNodes() && run.message.text) this.showBlocks(undefined);
    this.element.classList.toggle("is-writing", !run.isOver);
    this.element.setAttribute("aria-busy", String(!run.isOver));
    this.announceUpTo(run, run.isOver ? run.blocks.length : run.blocks.length - 1);
    if (run.isOver) this.finish();
    else this.status.replaceChildren(...statusOf(run));
  }

  /** Say the blocks that do not change any more. @param {Run} run @param {number} count */
  announceUpTo(run, count) {
    if (count <= run.announced) return;
    const settled = [...this.blocks.element.children].slice(run.announced, count);
    run.announced = count;
    announce(settled.map((each) => each.textContent ?? "").join("\n"));
  }

  finish() {
    this.element.classList.remove("is-writing");
    this.element.setAttribute("aria-busy", "false");
    this.status.replaceChildren();
    this.thinking.show(false);
    const { message, actions } = this;
    const copyButton = iconButton("copy", "Copy the answer", () => copy(copyButton, message.text));
    const buttons = h(
      "div",
      { class: "actions" },
      switcher(message, this.siblings, actions),
      message.text !== "" && copyButton,
      iconButton("again", "Answer again", () => actions.again(message)),
      iconButton("branch", "Branch off into a new chat", () => actions.branchOff(message)),
    );
    this.foot.replaceChildren(
      ...[failureOf(message, actions), endOf(message)].filter((each) => each !== null),
      h("div", { class: "foot-row" }, buttons, figures(message)),
    );
  }
}

/** @param {Run} run */
function statusOf(run) {
  const pulse = h("span", { class: "pulse" });
  if (run.waitsFor === "loading")
    return [pulse, "The model is still being loaded. This goes on as soon as it is ready …"];
  if (run.waitsFor && run.hasArrived)
    return [pulse, "The connection broke off. Picking the answer up again …"];
  if (run.waitsFor)
    return [pulse, "The server does not answer. The question is sent as soon as it does …"];
  if (run.message.text || run.message.thinking) return [];
  const { prompt_tokens: prompt, computed_tokens: computed = 0 } = run.progress;
  if (!run.hasArrived) return [pulse, "Sending the question …"];
  if (!prompt) return [pulse, "Waiting for its turn …"];
  if (prompt < 256 || computed >= prompt) return [pulse];
  const share = h("progress", { max: prompt, value: computed, "aria-label": "Prompt read" });
  return [share, `Reading the prompt: ${number(computed)} of ${number(prompt)} tokens`];
}

/** @param {Message} message @param {Actions} actions */
function failureOf(message, actions) {
  if (!message.failure) return null;
  const { words, detail, isFull } = explain(message.failure, actions.isOutgrown(message));
  const act = () => (isFull ? actions.begin() : actions.again(message));
  const label = isFull ? "New chat" : "Try again";
  const button = h("button", { type: "button", class: "button", onclick: act }, label);
  const told = detail && h("p", { class: "detail" }, `The server said: ${detail}`);
  return h("div", { class: "failure", role: "alert" }, h("div", {}, h("p", {}, words), told), button);
}

/** An answer's end, for screen readers; a failure speaks for itself. @param {Message} message */
export function spokenEnd({ done, isStopped }) {
  const count = done?.usage.completion_tokens ?? 0;
  const extent = done ? `: ${number(count)} ${count === 1 ? "token" : "tokens"}` : "";
  if (isStopped || done?.reason === "cancelled") return `The answer was stopped${extent}.`;
  if (done?.reason === "length") return `The answer was cut at its greatest length${extent}.`;
  return done ? `The answer is complete${extent}.` : "";
}

/** Why an answer ended, where it did not end by itself. @param {Message} message */
function endOf(message) {
  const { done } = message;
  const words = [
    (message.isStopped || done?.reason === "cancelled") && "Stopped.",
    done?.reason === "length" && greatestLength(message, done),
    ...(done?.warnings ?? []),
    !(done || message.failure || message.isStopped || message.token) && "This answer was not finished.",
  ].filter(Boolean);
  return words.length ? h("p", { class: "note" }, words.join(" ")) : null;
}

/** @param {Message} message @param {import("./types.js").Done} done */
function greatestLength({ mostTokens }, { usage }) {
  if (mostTokens && usage.completion_tokens >= mostTokens)
    return "The answer reached its greatest length (most tokens, in the settings).";
  if (mostTokens === undefined) return "The answer reached its greatest length."; // from before this was kept
  const tokens = number(usage.prompt_tokens + usage.completion_tokens);
  return `The answer ends here: with ${tokens} tokens, the conversation or the answer is as long as the model or the server allows. A new chat has space again.`;
}

/** @param {Message} message */
function figures({ done }) {
  if (!done) return null;
  const { usage, metrics, seed } = done;
  const figure = (/** @type {string} */ value, /** @type {string} */ name, /** @type {string} */ title) =>
    h("span", { title }, h("b", {}, value), ` ${name}`);
  return h(
    "p",
    { class: "figures" },
    figure(
      number(metrics.tokens_per_second, 1),
      "tokens/s",
      `${number(usage.completion_tokens)} tokens in ${duration(metrics.decode_ms)}`,
    ),
    figure(
      duration(metrics.ttft_ms),
      "to the first token",
      `of which ${duration(metrics.queue_ms)} in the queue`,
    ),
    figure(
      `${number(usage.cached_tokens)} of ${number(usage.prompt_tokens)}`,
      "prompt tokens cached",
      "These were computed for an earlier request and did not have to be read again",
    ),
    figure(
      number(usage.completion_tokens),
      "tokens",
      `computed beside at most ${metrics.batch_size - 1} other requests${seed === undefined ? "" : `, drawn with seed ${seed}`}`,
    ),
  );
}
