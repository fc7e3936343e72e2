/** A conversation as a tree of messages, without any of the page: what is asked, edited, answered again, branched. */

import { fileOf } from "./pictures.js";

/** A unique id that cannot be guessed. */
export function freshId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @param {Settings} settings @param {string} [model] @returns {Conversation} */
export function newConversation(settings, model) {
  return {
    ...(model && { model }),
    id: freshId(),
    title: "",
    updated: Date.now(),
    settings: structuredClone(settings),
    messages: {},
    leaf: null,
  };
}

/** The messages of the branch that is shown, first to last. @param {Conversation} conversation @returns {Message[]} */
export function branch(conversation) {
  return pathTo(conversation, conversation.leaf);
}

/** @param {Conversation} conversation @param {string | null} id @returns {Message[]} */
export function pathTo(conversation, id) {
  const found = [];
  for (let at = conversation.messages[id ?? ""]; at; at = conversation.messages[at.parent ?? ""]) found.push(at);
  return found.reverse();
}

/** Add a message below `parent`, and show its branch. @param {Conversation} conversation @param {Pick<Message, "parent" | "role" | "text"> & Partial<Message>} message @returns {Message} */
export function add(conversation, message) {
  // Later than what stands beside it, also where the clock was set back.
  const beside = versions(conversation).get(message.parent) ?? [];
  const at = Math.max(Date.now(), ...beside.map((each) => each.at + 1));
  const whole = { id: freshId(), at, ...message };
  conversation.messages[whole.id] = whole;
  conversation.leaf = whole.id;
  conversation.updated = Date.now();
  if (!conversation.title && whole.role === "user") conversation.title = titleOf(whole);
  return whole;
}

/** Marks of Markdown in a title: what begins a line, a fence, and what stands around words and addresses. */
const MARKS = /^\s*(?:#{1,6}|>+|[-*+])\s+|^\s*(?:```|~~~).*|(\*\*|~~|`+)(.+?)\1|!?\[([^\]]+)\]\([^)\s]*\)/g;

/** @param {Pick<Message, "text" | "files">} message */
export function titleOf(message) {
  const lines = (message.text || message.files?.[0]?.name || "").slice(0, 1_000).split("\n");
  const line = lines.map((each) => each.replace(MARKS, "$2$3").trim()).find(Boolean) ?? "";
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}

/** All messages by their parent: those of one stand in each other's place, the oldest first. @param {Conversation} conversation */
export function versions(conversation) {
  /** @type {Map<string | null, Message[]>} */
  const found = new Map();
  for (const message of Object.values(conversation.messages)) {
    const beside = found.get(message.parent);
    if (beside) beside.push(message);
    else found.set(message.parent, [message]);
  }
  for (const each of found.values()) each.sort((a, b) => a.at - b.at || (a.id < b.id ? -1 : 1));
  return found;
}

/** Show the branch through `id`, as far as it goes. @param {Conversation} conversation @param {string} id */
export function show(conversation, id) {
  const all = versions(conversation);
  let at = id;
  for (let below = all.get(at); below; below = all.get(at)) at = below[below.length - 1].id;
  conversation.leaf = at;
}

/** A new conversation that begins with the branch as far as `id`. @param {Conversation} conversation @param {string} id */
export function branchOff(conversation, id) {
  const copy = newConversation(conversation.settings, conversation.model);
  copy.title = `${conversation.title} (branch)`;
  for (const message of pathTo(conversation, id)) {
    copy.messages[message.id] = { ...structuredClone(message), token: undefined };
    copy.leaf = message.id;
  }
  return copy;
}

/** A picture is as much for a model to read as so many characters, as a rule. */
const PICTURE_CHARS = 2_000;
/**
 * What the model is given: instructions, and the turns of a path, with the thinking of earlier ones: the model's template
 * decides what of it the model sees. A question that got no answer is not among it: what was wrong with it would be wrong
 * again, and many templates refuse two questions in a row.
 *
 * @param {Conversation} conversation
 * @param {Message[]} path
 */
export function asked(conversation, path) {
  const { settings } = conversation;
  const spoken = path
    .filter((each, index, all) => (each.role === "user" ? all[index + 1]?.role !== "assistant" || all[index + 1].text : each.text))
    .map((each) => ({
      role: /** @type {string} */ (each.role),
      content: contentOf(each),
      ...(each.thinking && { reasoning: each.thinking }),
      ...(picturesOf(each).length && { media: picturesOf(each).map(({ image }) => fileOf(image)) }),
    }));
  // A call, what its tool told and the answer are one turn: many templates take no two of one role.
  const turns = spoken.slice(0, 1);
  for (const each of spoken.slice(1)) {
    const last = turns[turns.length - 1];
    if (each.role === "assistant" && last.role === "assistant") last.content += `\n\n${each.content}`;
    else turns.push(each);
  }
  return settings.system.trim() ? [{ role: "system", content: settings.system.trim() }, ...turns] : turns;
}

/** Whether the question above `answer` is less than what the model was given before it. @param {Conversation} conversation @param {Message} answer */
export function isOutgrown(conversation, answer) {
  const turns = asked(conversation, pathTo(conversation, answer.parent));
  const length = (/** @type {typeof turns[0]} */ { content, media = [] }) => content.length + PICTURE_CHARS * media.length;
  const [question = 0, ...before] = turns.map(length).reverse();
  return before.reduce((sum, each) => sum + each, 0) > question;
}

/** A message's pictures. @param {Message} message */
export function picturesOf({ files = [] }) {
  return files.flatMap(({ name, image }) => (image ? [{ name, image }] : []));
}

/** A message's text with its files, each in a fence that nothing in it can end; without its pictures. @param {Message} message */
export function contentOf(message) {
  const texts = (message.files ?? []).filter(({ image }) => !image);
  const files = texts.map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...files, message.text].filter(Boolean).join("\n\n");
}

/** The messages of `theirs`, another copy of the conversation, that `mine` lacks or has less of. @param {Conversation} mine @param {Conversation} theirs */
export function news(mine, theirs) {
  return Object.values(theirs.messages).filter((each) => extent(each) > extent(mine.messages[each.id]));
}

/** How far a message has come: a question is there or not, an answer grows and then ends. @param {Message | undefined} message */
function extent(message) {
  if (!message) return -1;
  if (message.done || message.isEdited) return Infinity;
  return message.text.length + (message.thinking ?? "").length + (message.failure || message.isStopped ? 0.5 : 0);
}
