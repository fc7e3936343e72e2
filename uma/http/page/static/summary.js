/** The model's summary of a conversation's oldest turns, which it is given in their place. */

import { h, toast } from "./dom.js";
import { Run } from "./run.js";
import { asked, freshId, given, youngerHalf } from "./tree.js";

/** What the model is asked below the turns. */
const WISH =
  "Summarise our conversation so far in at most 200 words, so that it can be gone on with: what was asked for, what was found, names, numbers and decisions. Write the summary alone.";
const MAX_TOKENS = 512;
/** Of the context a summary takes no more than this share. */
const MAX_SHARE = 0.125;

export class Summary {
  /** @param {Conversation} conversation @param {Message[]} path What is shown. @param {import("./turns.js").Turns} turns */
  constructor(conversation, path, turns) {
    this.conversation = conversation;
    this.from = youngerHalf(conversation, path);
    const turnsGiven = given(conversation, path);
    this.oldest = turnsGiven.slice(0, turnsGiven.findIndex(({ id }) => id === this.from));
    /** What is written; no part of the conversation. @type {Message} */
    this.message = { id: freshId(), parent: null, role: "assistant", text: "", at: Date.now() };
    this.turns = turns;
    this.words = h("p", { dir: "auto" }, "The model summarises the oldest turns …");
    /** How far it is. */
    this.element = h("div", { class: "summary is-writing", "aria-busy": "true" }, h("h3", {}, "Summary"), this.words);
  }

  /** Whether something is older than what has to stay. */
  get isPossible() {
    return this.oldest.length > 0;
  }

  /** Have it written. @param {Info | undefined} info @returns {Run} To be followed. */
  begin(info) {
    const { conversation, message } = this;
    message.token = freshId();
    delete message.failure;
    const most = Math.floor(MAX_SHARE * (info?.limits.n_ctx ?? Infinity));
    const body = {
      model: conversation.model,
      messages: [...asked(conversation, this.oldest), { role: "user", content: WISH }],
      sampling: { temperature: 0, max_tokens: Math.max(1, Math.min(MAX_TOKENS, most)) },
      reasoning: info?.capabilities.reasoning_switch ? "off" : undefined,
      token: message.token,
    };
    this.run = new Run(message, this.turns, body);
    return this.run;
  }

  /** It is written, or not: only a whole one takes the turns' place. @returns {boolean} Whether it has. */
  end() {
    const { conversation, message } = this;
    const isWhole = message.done?.reason === "stop" || message.done?.reason === "length";
    if (conversation.from === this.from) return false; // another window was there first
    if (message.failure) toast(`There is no summary: ${message.failure.message}`);
    else if (isWhole && !message.text.trim()) toast("There is no summary: the model wrote nothing.");
    if (message.failure || !isWhole || !message.text.trim()) return false;
    leaveOut(conversation, this.from, message.text.trim());
    return true;
  }

  /** What there is of it. */
  show() {
    const words = this.run?.isStopping ? "Stopping …" : this.message.text;
    if (words) this.words.textContent = words;
  }
}

/** From now on the model is given the turns from this one on, and a summary of the others. @param {Conversation} conversation @param {string | null} from @param {string} [summary] */
export function leaveOut(conversation, from, summary) {
  const { from: earlier, fromAt, summary: text } = conversation;
  conversation.before = { from: earlier, fromAt, summary: text };
  Object.assign(conversation, { from, fromAt: Date.now(), summary });
}

/** As it was before the last time. @param {Conversation} conversation */
export function takeBack(conversation) {
  const { from, fromAt, summary } = conversation.before ?? {};
  Object.assign(conversation, { from, fromAt, summary, before: undefined });
}

/** What stands above is given no more, or the summary is given for it. @param {Conversation} conversation @param {() => void} undo */
export function border({ summary, before }, undo) {
  const button = before && h("button", { type: "button", class: "link-button", onclick: undo }, "Undo");
  if (!summary)
    return h("div", { class: "border" }, h("p", {}, "The model is no longer given what stands above."), button);
  return h(
    "div",
    { class: "border has-summary" },
    h("div", { class: "summary" }, h("h3", {}, "Summary"), h("p", { dir: "auto" }, summary)),
    h("p", {}, "The model wrote this, and is given it instead of what stands above."),
    button,
  );
}
