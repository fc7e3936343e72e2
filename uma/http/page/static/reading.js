/** Conversations as a file, and what is believed of a conversation that comes from outside: from a file, or from the
 * browser's store, where another version of the page may have put it. */

import { isAttachment } from "./pictures.js";
import { isRecord, readSettings } from "./settings.js";
import { branch, contentOf, freshId, newConversation, picturesOf, show } from "./tree.js";

const FORMAT = "uma-conversations";
const FIGURES = {
  usage: ["prompt_tokens", "cached_tokens", "completion_tokens"],
  metrics: ["queue_ms", "ttft_ms", "decode_ms", "tokens_per_second", "batch_size"],
};

/** A file that is none of ours. Its message is for the person. */
export class ImportError extends Error {}

/** @param {Conversation[]} conversations */
export function exportJson(conversations) {
  const clean = conversations.map((each) => ({
    ...each,
    messages: Object.fromEntries(
      Object.entries(each.messages).map(([id, message]) => [id, { ...message, token: undefined }]),
    ),
  }));
  return `${JSON.stringify({ format: FORMAT, version: 1, conversations: clean }, null, 2)}\n`;
}

/** The branch that is shown, to be read: questions with their files and pictures, and answers. @param {Conversation} conversation */
export function exportMarkdown(conversation) {
  const turns = branch(conversation)
    .filter(({ role, text }) => role === "user" || text)
    .map((each) => `## ${each.role === "user" ? "You" : (each.model ?? "Answer")}\n\n${withPictures(each)}\n`);
  return [`# ${conversation.title || "New chat"}\n`, ...turns].join("\n");
}

/** @param {Message} message */
function withPictures(message) {
  const pictures = picturesOf(message).map(({ name, image }) => `![${name.replace(/[[\]\\\n]/g, " ")}](${image})`);
  return [...pictures, contentOf(message)].filter(Boolean).join("\n\n");
}

/**
 * What `exportJson` wrote, with fresh ids, and what was left out of it because its values are wrong. Throws `ImportError`.
 *
 * @param {string} text
 * @param {Info} [info] The server's, for the settings' ranges.
 */
export function importJson(text, info) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new ImportError("The file is not JSON.");
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations))
    throw new ImportError("The file holds no conversations that this page exported.");
  if (!file.conversations.length) throw new ImportError("The file is an export without any conversation.");
  /** @type {Set<string>} */
  const dropped = new Set();
  const conversations = file.conversations.map((/** @type {any} */ raw, /** @type {number} */ index) => {
    const fault = faultOf(raw);
    if (fault) throw new ImportError(`Conversation ${index + 1} of the file is damaged: ${fault}.`);
    return withFreshIds(raw, info, dropped);
  });
  return { conversations: /** @type {Conversation[]} */ (conversations), dropped: [...dropped] };
}

/** @param {any} raw @returns {raw is Conversation} */
export function isConversation(raw) {
  return typeof raw?.id === "string" && !faultOf(raw);
}

/** The same, without what is wrong with its title, leaf, settings and figures. @param {Conversation} raw @returns {Conversation} */
export function mended(raw) {
  const conversation = {
    ...raw,
    title: readTitle(raw.title),
    updated: Number.isFinite(raw.updated) ? raw.updated : 0,
    settings: readSettings(raw.settings),
    pinned: raw.pinned === true,
    model: typeof raw.model === "string" ? raw.model : undefined,
  };
  for (const message of Object.values(conversation.messages)) {
    if (!isDone(message.done)) delete message.done;
    if (!isTokens(message.tokens)) delete message.tokens;
    if (typeof message.failure?.message !== "string") delete message.failure;
  }
  if (raw.leaf === null || !Object.hasOwn(raw.messages, raw.leaf)) showNewest(conversation);
  return conversation;
}

/** @param {any} raw Without faults. @param {Info | undefined} info @param {Set<string>} dropped @returns {Conversation} */
function withFreshIds(raw, info, dropped) {
  const model = typeof raw.model === "string" ? raw.model : undefined;
  const conversation = newConversation(readSettings(raw.settings, info, dropped), model);
  conversation.title = readTitle(raw.title);
  if (Number.isFinite(raw.updated)) conversation.updated = raw.updated;
  if (raw.pinned === true) conversation.pinned = true;
  const ids = new Map(Object.keys(raw.messages).map((id) => [id, freshId()]));
  for (const each of Object.values(raw.messages)) {
    const id = /** @type {string} */ (ids.get(each.id));
    conversation.messages[id] = { ...readMessage(each, dropped), id, parent: ids.get(each.parent) ?? null };
  }
  const leaf = ids.get(raw.leaf);
  if (leaf) conversation.leaf = leaf;
  else showNewest(conversation);
  return conversation;
}

/** @param {any} raw @param {Set<string>} dropped @returns {Omit<Message, "id" | "parent">} */
function readMessage(raw, dropped) {
  const { role, text, thinking, files, done, model, tokens } = raw;
  if (!isTokens(tokens)) dropped.add("probabilities of an answer's tokens");
  if (!isDone(done)) dropped.add("figures of an answer");
  return {
    role,
    text,
    at: Number.isFinite(raw.at) ? raw.at : 0,
    ...(thinking && { thinking }),
    ...(raw.isEdited === true && { isEdited: true }),
    ...(isTokens(tokens) && tokens && { tokens }),
    ...(typeof model === "string" && { model: model.slice(0, 200) }),
    ...(files && { files: files.map(plain) }),
    ...(isDone(done) && done && { done }),
  };
}

/** @param {Attachment} file */
function plain({ name, text, image }) {
  return { name, text, ...(image && { image }) };
}

/** @param {unknown} title */
function readTitle(title) {
  return typeof title === "string" ? title.slice(0, 200) : "";
}

/** @param {Conversation} conversation */
function showNewest(conversation) {
  const all = Object.values(conversation.messages);
  conversation.leaf = null;
  if (all.length) show(conversation, all.reduce((newest, each) => (each.at >= newest.at ? each : newest)).id);
}

/** Why its messages are no tree of messages; null where they are one. @param {any} raw @returns {string | null} */
function faultOf(raw) {
  if (!isRecord(raw?.messages)) return "it has no messages";
  for (const [id, each] of Object.entries(raw.messages)) {
    if (each?.id !== id) return "a message has not the id that it is listed by";
    if (typeof each.text !== "string") return "a message has no text";
    if (each.role !== "user" && each.role !== "assistant")
      return "a message is neither a question nor an answer";
    if (!isOptional(each.thinking, "string")) return "an answer's thinking is no text";
    if (!(each.files ?? []).every?.(isAttachment)) return "an attached file has no name, no text, or is no picture";
    if (each.parent != null && !(typeof each.parent === "string" && Object.hasOwn(raw.messages, each.parent)))
      return "a message follows one that is not there";
  }
  return hasLoop(raw.messages) ? "its messages follow each other in a circle" : null;
}

/** @param {Record<string, Message>} messages Each parent is among them. */
function hasLoop(messages) {
  const sound = new Set();
  for (const message of Object.values(messages)) {
    const path = new Set();
    for (let at = message; !sound.has(at.id); at = messages[at.parent]) {
      if (path.has(at.id)) return true;
      path.add(at.id);
      if (at.parent == null) break;
    }
    for (const id of path) sound.add(id);
  }
  return false;
}

/** Whether these are figures that can be shown, or none at all. @param {any} done @returns {done is Done | undefined} */
function isDone(done) {
  if (done === undefined) return true;
  const isNumber = (/** @type {unknown} */ value) => Number.isFinite(value);
  return (
    isRecord(done) &&
    Object.entries(FIGURES).every(([part, names]) => names.every((name) => isNumber(done[part]?.[name]))) &&
    isOptional(done.usage.reasoning_tokens, "number") &&
    isOptional(done.seed, "number") &&
    isOptional(done.loading_ms, "number") &&
    isOptional(done.reason, "string") &&
    isOptional(done.summary, "string") &&
    (done.warnings ?? []).every?.((/** @type {unknown} */ each) => typeof each === "string") === true
  );
}

/** Whether these are tokens with their probabilities, or none at all. @param {any} tokens @returns {tokens is TokenChance[] | undefined} */
function isTokens(tokens) {
  const isPair = (/** @type {any} */ each) => Array.isArray(each) && typeof each[0] === "string" && Number.isFinite(each[1]);
  if (tokens === undefined) return true;
  return Array.isArray(tokens) && tokens.every((each) => isPair(each) && Array.isArray(each[2]) && each[2].every(isPair));
}

/** @param {unknown} value @param {string} type */
function isOptional(value, type) {
  return value === undefined || typeof value === type;
}
