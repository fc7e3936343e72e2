/** Conversations as a file, and what is believed of a conversation that comes from outside: from a file, or from the
 * browser's store, where another version of the page may have put it. */

import { parsed } from "./local.js";
import { isAttachment } from "./pictures.js";
import { isRecord, readSettings } from "./settings.js";
import { branch, contentOf, freshId, picturesOf, show, titleOf } from "./tree.js";

const FORMAT = "uma-conversations";
const FORMS = "an export of this page, ChatGPT’s conversations.json, or OpenAI’s or Anthropic’s messages: [{\"role\": \"user\", \"content\": \"…\"}]";
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
    messages: Object.fromEntries(Object.entries(each.messages).map(([id, message]) => [id, { ...message, token: undefined }])),
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

/** What `exportJson` or another program wrote, with fresh ids, and what was left out of it. Throws `ImportError`. @param {string} text @param {Info} [info] The server's, for the settings' ranges. */
export function importJson(text, info) {
  const file = parsed(text);
  if (file === undefined) throw new ImportError("The file is not JSON.");
  /** @type {Set<string>} */
  const dropped = new Set();
  const all = file?.format === FORMAT ? file.version === 1 && file.conversations : adopted(file, dropped);
  if (!Array.isArray(all)) throw new ImportError(`It must be ${FORMS}.`);
  if (!all.length) throw new ImportError("The file has no conversation.");
  const conversations = all.map((/** @type {any} */ raw, /** @type {number} */ index) => {
    const fault = faultOf(raw);
    if (fault) throw new ImportError(`Conversation ${index + 1} of the file is damaged: ${fault}.`);
    return withFreshIds(mended(raw, info, dropped));
  });
  return { conversations: /** @type {Conversation[]} */ (conversations), dropped: [...dropped] };
}

/** Other programs' conversations as ours. @param {any} file @param {Set<string>} dropped @returns {any[] | null} Null: they have another form. */
function adopted(file, dropped) {
  const all = Array.isArray(file) && !file[0]?.role ? file : [file];
  const found = all.map((raw) => {
    const list = Array.isArray(raw) ? raw : raw?.messages;
    if (isRecord(raw?.mapping)) return treeOf(Object.values(raw.mapping).filter(isRecord), raw, dropped);
    if (!Array.isArray(list)) return null;
    return treeOf(list.map((message, at) => ({ id: `${at}`, parent: `${at - 1}`, message })), raw, dropped);
  });
  return found.includes(null) ? null : found.flatMap((each) => each ?? []);
}

/** ChatGPT's nodes as a conversation: each has a message with a role, an author or none. @param {any[]} nodes @param {any} raw @param {Set<string>} dropped */
function treeOf(nodes, { title, update_time, current_node: leaf, system: before }, dropped) {
  /** @type {Record<string, any>} */
  const messages = {};
  /** Parents of those that are left out, in whose place they stand. @type {Map<string, string>} */
  const above = new Map();
  let system = textOf(before ?? "", dropped); // Anthropic's
  nodes.forEach(({ id, parent, message }, order) => {
    const { content, author, role = author?.role, recipient = "all", tool_calls: calls, function_call: call } = message ?? {};
    const text = textOf(content, dropped);
    if (calls?.length || call || recipient !== "all") dropped.add("calls of tools");
    if (text && recipient === "all" && (role === "user" || role === "assistant"))
      messages[id] = { id, parent, role, text, at: 1_000 * (message.create_time ?? 0) + order, isImported: true, thinking: message.reasoning_content };
    else above.set(id, parent);
    if (message && (message.role === "system" || message.role === "developer")) system = text; // ChatGPT's own are not for others
    else if (text && role !== "user" && role !== "assistant" && role !== "system") dropped.add(`messages of the role ${role}`);
  });
  for (const each of Object.values(messages)) {
    for (let left = above.size; left > 0 && above.has(each.parent); left--) each.parent = above.get(each.parent);
    if (!messages[each.parent]) each.parent = null;
  }
  const first = Object.values(messages).find(({ role }) => role === "user");
  return first ? [{ title: title || titleOf(first), updated: 1_000 * update_time, settings: { system }, messages, leaf }] : [];
}

/** @param {any} content @param {Set<string>} dropped @returns {string} */
function textOf(content, dropped) {
  const parts = typeof content === "string" ? [content] : Array.isArray(content) ? content : [content?.parts ?? content?.text ?? []].flat();
  const texts = parts.map((/** @type {any} */ part) => part?.text ?? part);
  if (texts.some((text) => typeof text !== "string")) dropped.add("pictures and other parts of messages");
  return texts.filter((text) => text && typeof text === "string").join("\n\n");
}

/** @param {any} raw @returns {raw is Conversation} */
export function isConversation(raw) {
  return typeof raw?.id === "string" && !faultOf(raw);
}

/** The same, without what is wrong with its title, leaf, settings and figures. @param {Conversation} raw @param {Info} [info] @param {Set<string>} [dropped] Is given the names of what was left out. @returns {Conversation} */
export function mended(raw, info, dropped = new Set()) {
  const conversation = {
    ...raw,
    title: typeof raw.title === "string" ? raw.title.slice(0, 200) : "",
    updated: Number.isFinite(raw.updated) ? raw.updated : Date.now(),
    settings: readSettings(raw.settings, info, dropped),
    pinned: raw.pinned === true,
    model: typeof raw.model === "string" ? raw.model.slice(0, 200) : undefined,
  };
  for (const message of Object.values(conversation.messages)) {
    if (!isDone(message.done)) dropped.add("figures of an answer");
    if (!isTokens(message.tokens)) dropped.add("probabilities of an answer's tokens");
    if (!isDone(message.done)) delete message.done;
    if (!isTokens(message.tokens)) delete message.tokens;
    if (typeof message.failure?.message !== "string") delete message.failure;
    if (typeof message.model !== "string") delete message.model;
    if (!Number.isFinite(message.at)) message.at = 0;
  }
  if (raw.leaf === null || !Object.hasOwn(raw.messages, raw.leaf)) showNewest(conversation);
  return conversation;
}

/** One of a file as another one than any that is here: nothing of it is being written. @param {Conversation} conversation @returns {Conversation} */
function withFreshIds(conversation) {
  const ids = new Map(Object.keys(conversation.messages).map((id) => [id, freshId()]));
  const idOf = (/** @type {string | null} */ id) => ids.get(id ?? "") ?? null;
  const messages = Object.values(conversation.messages).map((each) => {
    const id = /** @type {string} */ (idOf(each.id));
    return [id, { ...each, id, parent: idOf(each.parent), token: undefined }];
  });
  return { ...conversation, id: freshId(), messages: Object.fromEntries(messages), leaf: idOf(conversation.leaf) };
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
    if (each?.id !== id) return "a message’s id is not the one that it is listed by";
    if (typeof each.text !== "string") return "a message has no text";
    if (each.role !== "user" && each.role !== "assistant")
      return "a message’s role is neither user nor assistant";
    if (!isOptional(each.thinking, "string")) return "an answer's thinking is no text";
    if (!(each.files ?? []).every?.(isAttachment)) return "an attached file has no name, no text, or is no picture";
    if (each.parent != null && !(typeof each.parent === "string" && Object.hasOwn(raw.messages, each.parent)))
      return "a message’s parent is missing";
  }
  return hasLoop(raw.messages) ? "its messages form a loop" : null;
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
    [done.usage.reasoning_tokens, done.seed, done.loading_ms].every((each) => isOptional(each, "number")) &&
    [done.reason, done.summary].every((each) => isOptional(each, "string")) &&
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
