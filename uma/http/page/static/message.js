/** One message on the screen: a question with its files, or an answer with its figures, and what can be done with it. */

import { Extent, labelOf } from "./attachments.js";
import { Blocks } from "./blocks.js";
import { ask, ApiError } from "./api.js";
import { announce, button, copy, duration, h, iconButton, number } from "./dom.js";
import { busy, explain } from "./failures.js";
import { openable, thumbnail } from "./pictures.js";
import { Thinking } from "./thinking.js";
import { Tokens } from "./tokens.js";

/** @typedef {import("./run.js").Run} Run */

/** So long a wait for the first word needs no words of its own. */
const WORDLESS_MS = 1_000;
/** So short a prompt is mostly read before one could say so. */
const SHORT_PROMPT_TOKENS = 256;

/** @type {Intl.DateTimeFormatOptions} */
const WHEN = { dateStyle: "medium", timeStyle: "short" };

/** Answers whose text is shown as it is read, though the tokens' probabilities are known. @type {WeakSet<Message>} */
const plainly = new WeakSet();

/** Questions whose edit was begun: it goes on where they are shown again. @type {WeakMap<Message, {text: string, files: Attachment[]}>} */
const edits = new WeakMap();

/** @param {Message} message @param {Message[]} siblings @param {Actions} actions */
function switcher(message, siblings, actions) {
  if (siblings.length < 2) return null;
  const at = siblings.findIndex((each) => each.id === message.id);
  if (actions.isCompared(message)) {
    const goesOn = actions.goesOn(message);
    const use = button(goesOn ? "Stop comparing" : "Use this one", () => actions.show(message.id), "link-button");
    const place = h("span", {}, `${at + 1} of ${siblings.length}`);
    return h("span", { class: "versions" }, place, use, goesOn && h("span", { class: "goes-on" }, "The chat goes on from here."));
  }
  const step = (/** @type {number} */ by) => () => actions.show(siblings[at + by].id);
  const previous = iconButton("left", "Previous version", step(-1), "small");
  const next = iconButton("right", "Next version", step(1), "small");
  previous.disabled = at === 0;
  next.disabled = at === siblings.length - 1;
  const label = `Version ${at + 1} of ${siblings.length}`;
  const compare = message.role === "assistant" && button("Compare", () => actions.compare(message), "link-button");
  const place = h("span", {}, `${at + 1}/${siblings.length}`);
  return h("span", { class: "versions", role: "group", "aria-label": label }, previous, place, next, compare);
}

/** What unfolds each question that is longer than is shown of it. @type {WeakMap<Element, HTMLElement>} */
const folded = new WeakMap();
const folding = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const more = folded.get(target);
    if (more && target.classList.contains("is-folded")) more.hidden = target.scrollHeight <= target.clientHeight + 1;
  }
});
/** Code in a question, between fences. */
const CODE = /^(```[^`\n]*\n[^]*?^```[^\S\n]*$\n?)/m;

/** A question's text as it was typed, but for its code. @param {string} text */
function spoken(text) {
  return text.split(CODE).map((part, index) => {
    if (index % 2 === 0) return part;
    const code = new Blocks();
    code.show(part, true);
    return code.element;
  });
}

/** @param {Message} message @param {Message[]} siblings @param {Actions} actions */
export function question(message, siblings, actions) {
  const bubble = h("div", { class: "bubble is-folded", dir: "auto" }, ...spoken(message.text));
  const more = h("button", { type: "button", class: "link-button unfold", hidden: true, "aria-expanded": "false" }, "Show all");
  more.onclick = () => {
    const isFolded = bubble.classList.toggle("is-folded");
    more.textContent = isFolded ? "Show all" : "Show less";
    more.setAttribute("aria-expanded", String(!isFolded));
  };
  folded.set(bubble, more);
  folding.observe(bubble);
  const files = (message.files ?? []).map((file) => openable(file, ...(file.image ? [thumbnail(file)] : labelOf(file))));
  const edit = iconButton("edit", "Edit and send again", () => editing(article, message, actions).focus());
  const copyButton = iconButton("copy", "Copy the question", () => copy(copyButton, message.text));
  const article = h(
    "article",
    { class: "message user", "data-id": message.id },
    h("h2", { class: "hidden" }, "You"),
    files.length > 0 && h("div", { class: "files" }, ...files),
    message.text !== "" && bubble,
    more,
    h("footer", { class: "actions" }, switcher(message, siblings, actions), edit, copyButton),
  );
  if (edits.has(message)) editing(article, message, actions);
  return article;
}

/** Have the question be edited, where it is shown. @param {HTMLElement} article @param {Message} message @param {Actions} actions */
export function edit(article, message, actions) {
  if (!edits.has(message)) editing(article, message, actions);
  article.querySelector("textarea")?.focus();
}

/** Have a question be edited in its place, or an answer. @param {HTMLElement} article @param {Message} message @param {Actions} actions @returns {HTMLElement} The text's box. */
function editing(article, message, actions) {
  const before = [...article.childNodes];
  const opener = document.activeElement; // the button below it, or the box
  const isAnswer = message.role === "assistant";
  const label = isAnswer ? "The answer" : "Your question";
  const input = h("textarea", { class: "edit", dir: "auto", "aria-label": label, rows: isAnswer ? 8 : 3 });
  const list = h("ul", { class: "attached", "aria-label": "Attached files" });
  const edit = edits.get(message) ?? { text: message.text, files: [...(message.files ?? [])] };
  edits.set(message, edit);
  input.value = edit.text;
  const [extent, fault] = ["file", "fault"].map((name) => h("p", { class: name, role: "status" }));
  const beside = new Extent({ list, extent, fault }, {
    count: actions.count,
    most: () => (isAnswer ? Infinity : actions.mostTokens()),
    changed: () => (last.disabled = Boolean(beside.tooLong)),
    removed: () => input.focus(),
  });
  beside.files = edit.files;
  input.addEventListener("input", () => {
    edit.text = input.value;
    beside.write(edit.text);
    last.disabled = Boolean(beside.tooLong);
  });
  const cancel = () => {
    edits.delete(message);
    article.replaceChildren(...before);
    article.classList.remove("is-edited");
    const isThere = opener?.isConnected && opener !== document.body;
    const next = isThere ? opener : article.querySelector("[aria-label^=Edit]");
    if (next instanceof HTMLElement) next.focus();
  };
  const send = () => {
    if ((!edit.text.trim() && !edit.files.length) || beside.tooLong) return;
    edits.delete(message);
    actions.resend(message, edit.text.trim(), edit.files);
  };
  const amend = (/** @type {boolean} */ goesOn) => () => {
    if (!edit.text.trim()) return;
    edits.delete(message);
    actions.amend(message, edit.text, goesOn);
  };
  input.addEventListener("keydown", (event) => {
    if (isAnswer || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  const last = isAnswer ? button("Save and continue", amend(true), "button primary") : button("Send again", send, "button primary");
  const buttons = [button("Cancel", cancel), isAnswer && button("Save", amend(false)), last];
  article.classList.add("is-edited");
  const heading = h("h2", { class: "hidden" }, isAnswer ? "Answer" : "You");
  const editor = h("div", { class: "editor" }, heading, input, list, extent, fault, h("div", { class: "edit-foot" }, ...buttons));
  editor.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    event.preventDefault(); // it is this that ends, not the answer
    cancel();
  });
  article.replaceChildren(editor);
  beside.write(edit.text);
  beside.count();
  input.addEventListener("focus", () => editor.scrollIntoView({ block: "nearest" })); // with its buttons
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
    this.tokens = new Tokens();
    /** When it is drawn again, while it is written. @type {number | undefined} */
    this.drawing = undefined;
    this.restMs = 0;
    this.status = h("div", { class: "status" });
    this.told = "";
    this.foot = h("footer", { class: "answer-foot" });
    const parts = [this.thinking.element, this.blocks.element, this.tokens.element, this.status, this.foot];
    const name = message.token ? "message assistant" : "message assistant is-kept";
    this.element = h("article", { class: name, "data-id": message.id }, h("h2", { class: "hidden" }, "Answer"), ...parts);
    if (!message.token) this.finish();
    if (edits.has(message)) editing(this.element, message, actions);
  }

  /** Its tokens in place of its text, where they are known and wanted. */
  showTokens() {
    const { message } = this;
    const { tokens = [], text } = message;
    const isShown = tokens.length > 0 && !message.isEdited && !plainly.has(message);
    if (isShown) {
      const written = tokens.map(([each]) => each).join("");
      this.tokens.show(tokens, text.endsWith(written) ? text.slice(0, text.length - written.length) : "");
    }
    this.tokens.element.hidden = !isShown;
    this.blocks.element.hidden = isShown;
  }

  /** The button that changes between the two. */
  tokensButton() {
    const { message } = this;
    if (!message.tokens?.length || message.isEdited) return null;
    const show = () => {
      toggle.setAttribute("aria-pressed", String(!plainly.has(message)));
      this.showTokens();
    };
    const toggle = button("Probabilities", () => (plainly.delete(message) || plainly.add(message), show()), "link-button");
    show();
    return toggle;
  }

  /** A finished answer's text as it is, until there is time to render it. */
  showPlain() {
    this.showTokens();
    this.blocks.showPlain(this.message.text);
  }

  /** @param {Run} run */
  follow(run) {
    this.thinking.show(!run.isOver && !run.message.text);
    this.blocks.show(run.message.text, run.isOver);
    this.showTokens();
    this.element.classList.toggle("is-writing", !run.isOver);
    this.element.setAttribute("aria-busy", String(!run.isOver));
    this.announceUpTo(run, this.blocks.shown.length - (run.isOver ? 0 : 1));
    if (run.isOver) this.finish();
    else this.showStatus(statusOf(run));
  }

  /** What is the same stays: of a button that is built again between a press and its release, a click is lost. @param {(Element | string)[]} parts */
  showStatus(parts) {
    const told = parts.map((each) => (typeof each === "string" ? each : each.outerHTML)).join();
    if (told === this.told && this.status.hasChildNodes()) return;
    this.told = told;
    this.status.replaceChildren(...parts);
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
      message.text !== "" && iconButton("edit", "Edit the answer", () => editing(this.element, message, actions).focus()),
      iconButton("again", "Regenerate", () => actions.again(message)),
      iconButton("branch", "Branch in a new chat", () => actions.branchOff(message)),
    );
    this.foot.replaceChildren(
      ...[failureOf(message, actions), endOf(message, actions)].filter((each) => each !== null),
      h("div", { class: "foot-row" }, buttons, this.tokensButton(), figures(message), whyButton(message, this.foot), madeBy(message)),
    );
  }
}

/** @param {Run} run @returns {(Element | string)[]} */
function statusOf(run) {
  const pulse = h("span", { class: "pulse" });
  if (run.waitsFor === "loading")
    return [
      h("progress", { max: 100, value: run.loadedPercent ?? 0, "aria-label": "Model loaded" }),
      `${run.message.model ?? "The model"}: ${run.load} …${run.loadedPercent ? ` ${number(Math.floor((Date.now() - run.loadsSince) / 1_000))} s` : ""}`,
    ];
  if (run.waitsFor === "turn" && run.refusal)
    return [pulse, busy(run.refusal, Math.max(0, run.waitsUntil - Date.now())), toLive()];
  if (run.waitsFor && document.body.classList.contains("is-away")) return [pulse, "Server not reachable. Retrying …"];
  if (run.waitsFor) return [pulse, run.hasArrived ? "Connection lost. Reconnecting …" : "The server does not answer. Retrying …"];
  if (run.isStopping) return [pulse, "Stopping …"];
  if (run.message.text) return [];
  if (run.message.thinking && run.isHurried) return [pulse, "The answer is about to begin …"];
  if (run.message.thinking) return [button("Answer now", () => void run.answerNow())];
  if (!run.hasArrived) return [pulse, "Sending …"];
  const { prompt_tokens: prompt = 0, computed_tokens: computed = 0, waits_for, ahead } = run.progress;
  if (waits_for || ahead !== undefined) return [pulse, waitOf(run.progress), toLive()];
  const isSlow = Date.now() - run.beganAt >= WORDLESS_MS;
  if (!prompt) return isSlow ? [pulse, "Waiting for the model …", toLive()] : [pulse];
  if (computed >= prompt) return isSlow ? [pulse, "The prompt is read, the answer begins …"] : [pulse];
  if (prompt < SHORT_PROMPT_TOKENS && !isSlow) return [pulse];
  const share = h("progress", { max: prompt, value: computed, "aria-label": "Prompt read" });
  return [share, `Reading the prompt: ${number(computed)} of ${number(prompt)} tokens`];
}

function toLive() {
  return h("a", { href: "#live" }, "See all requests");
}

/** @param {Progress} progress */
function waitOf({ waits_for, ahead, unread_before: unread }) {
  if (waits_for === "prompt")
    return `Waiting: another prompt is read first${unread ? `, ${number(unread)} tokens to go` : ""}.`;
  if (waits_for === "prefix") return "Waiting: another request reads the same beginning.";
  if (waits_for === "grammar") return "Waiting: the answer’s grammar is being recompiled.";
  if (waits_for === "reader") return "Waiting: this window takes the answer too slowly.";
  if (ahead === undefined) return "Waiting: a request of higher priority goes first.";
  if (!ahead) return "Waiting: next in the queue.";
  return `Waiting in the queue: ${number(ahead)} ${ahead === 1 ? "request" : "requests"} ahead.`;
}

/** @param {Message} message @param {Actions} actions */
function failureOf(message, actions) {
  if (!message.failure) return null;
  const { words, detail, isFull, isTooLong } = explain(message.failure, actions.isOutgrown(message), actions.info());
  const act = () => (isFull ? actions.begin() : isTooLong ? actions.edit(message) : actions.again(message));
  const label = isFull ? "New chat" : isTooLong ? "Edit the question" : "Try again";
  const shorter = isFull ? [button("Drop the oldest messages", () => actions.outgrow(message, "auto")), button("Summarize them", () => actions.outgrow(message, "compact"))] : [];
  const told = detail && h("p", { class: "detail" }, `The server said: ${detail}`);
  const ways = h("div", { class: "ways" }, ...shorter, button(label, act));
  return h("div", { class: "failure", role: "alert" }, h("p", {}, words), told, ways);
}

/** An answer's end, for screen readers; a failure speaks for itself. @param {Message} message */
export function spokenEnd({ done, isStopped }) {
  const count = done?.usage.completion_tokens ?? 0;
  const extent = done ? `: ${number(count)} ${count === 1 ? "token" : "tokens"}` : "";
  if (isStopped || done?.reason === "cancelled") return `The answer was stopped${extent}.`;
  if (done?.reason === "length") return `The answer was cut off at its limit${extent}.`;
  return done ? `The answer is complete${extent}.` : "";
}

/** Why an answer ended, where it did not end by itself, and the way to go on with it. @param {Message} message @param {Actions} actions */
function endOf(message, actions) {
  const { done } = message;
  const words = [
    (message.isStopped || done?.reason === "cancelled") && "Stopped.",
    done?.reason === "length" && greatestLength(message, done),
    ...(done?.warnings ?? []),
    message.isEdited && "Edited.",
    !(done || message.failure || message.isStopped || message.token || message.isEdited || message.isImported) &&
      "This answer was not finished.",
  ].filter(Boolean);
  const isCut = done?.reason !== "stop" && message.text !== "" && !message.isEdited && !message.isImported;
  const more = isCut && button("Continue", () => actions.goOn(message), "link-button");
  if (!words.length && !more) return null;
  const summary = done?.summary && h("details", { class: "summary" }, h("summary", {}, "Summary"), h("p", { dir: "auto" }, done.summary));
  return h("div", { class: "note-row" }, words.length > 0 && h("p", { class: "note" }, words.join(" ")), more, summary);
}

/** @param {Message} message @param {Done} done */
function greatestLength({ mostTokens }, { usage }) {
  if (mostTokens && usage.completion_tokens >= mostTokens)
    return `Cut off at the limit of ${number(mostTokens)} tokens (“Max tokens” in the settings).`;
  const tokens = number(usage.prompt_tokens + usage.completion_tokens);
  return `Cut off: with ${tokens} tokens, the context window is full, or the answer is at the server’s limit. Start a new chat for more space.`;
}

/** Which model wrote it, and when. @param {Message} message */
function madeBy({ done, model, at }) {
  if (!done) return null;
  const time = new Date(at).toLocaleTimeString("en-GB", { timeStyle: "short" });
  return h("span", { class: "made-by" }, model ? h("span", { class: "model" }, `${model} · `) : null, time);
}

/** A model is named where another one begins to answer; above the thread stands the one that answers now. @param {HTMLElement} thread @param {string | undefined} current */
export function nameModelsOnce(thread, current) {
  let before = `${current} · `;
  for (const each of thread.querySelectorAll(".made-by .model")) {
    each.toggleAttribute("hidden", each.textContent === before);
    before = each.textContent ?? "";
  }
}

/** Where the time of an answer went, in the server's words, as soon as one asks. @param {Message} message @param {HTMLElement} foot */
function whyButton({ request, done }, foot) {
  if (!request || !done) return null;
  const button = h("button", { type: "button", class: "link-button", "aria-expanded": "false" }, "Timing");
  button.onclick = async () => {
    const shown = foot.querySelector(".why");
    button.setAttribute("aria-expanded", String(!shown));
    if (shown) return shown.remove();
    const list = h("ul", { class: "why" }, h("li", {}, "…"));
    /** @type {(words: string, ...parts: string[]) => HTMLElement} */
    const line = (words, ...parts) =>
      h("li", { dir: "auto" }, ...words.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part)), parts.length > 0 && h("ul", {}, ...parts.map((each) => line(each))));
    const before = done.loading_ms ? [line(`${number(done.loading_ms / 1_000, 1)} s: the model was loaded first`)] : [];
    foot.append(list);
    try {
      const { lines } = await ask(`why/${encodeURIComponent(request)}`);
      list.replaceChildren(...before, ...lines.map((/** @type {[string, ...string[]]} */ each) => line(...each)));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      list.replaceChildren(...before, line("Not known any more: the server explains its last thousand requests."));
    }
    list.scrollIntoView({ block: "nearest" }); // of the last answer it would lie below what is seen
  };
  return button;
}

/** How fast it was written; all else that is known of it, as soon as one points there. @param {Message} message */
function figures({ done, model, at }) {
  if (!done) return null;
  const { usage, metrics, seed } = done;
  const figure = (/** @type {string} */ value, /** @type {string} */ name) => h("span", {}, h("b", {}, value), ` ${name}`);
  const beside = Math.max(0, metrics.batch_size - 1);
  return h(
    "div",
    { class: "figures", tabindex: 0, role: "group", "aria-label": "Figures of this answer" },
    metrics.tokens_per_second >= 0.05
      ? figure(number(metrics.tokens_per_second, metrics.tokens_per_second < 100 ? 1 : 0), "tokens/s")
      : figure(number(usage.completion_tokens), usage.completion_tokens === 1 ? "token" : "tokens"),
    h(
      "p",
      { class: "figures-more" },
      figure(duration(metrics.ttft_ms), `to the first token, ${duration(metrics.queue_ms)} of it in the queue`),
      figure(`${number(usage.cached_tokens)} of ${number(usage.prompt_tokens)}`, "prompt tokens from the cache"),
      figure(number(usage.completion_tokens), `tokens in ${duration(metrics.decode_ms)}`),
      beside > 0 && figure(number(beside), `other ${beside === 1 ? "request" : "requests"} at the same time, at most`),
      seed !== undefined && figure(String(seed), "seed"),
      h("span", {}, [model, new Date(at).toLocaleString("en-GB", WHEN)].filter(Boolean).join(" · ")),
    ),
  );
}
