/** A conversation as a tree of messages, without any of the page: what is asked, edited, answered again, branched. */

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */
/** @typedef {import("./types.js").Settings} Settings */
/** @typedef {import("./types.js").Attachment} Attachment */

const FORMAT = "uma-conversations";

/** A unique id that cannot be guessed. */
export function freshId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
}

/** @param {Settings} settings @returns {Conversation} */
export function newConversation(settings) {
  return {
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
  for (
    let at = id ? conversation.messages[id] : undefined;
    at;
    at = at.parent ? conversation.messages[at.parent] : undefined
  )
    found.unshift(at);
  return found;
}

/**
 * Add a message below `parent`, and show its branch.
 *
 * @param {Conversation} conversation
 * @param {Pick<Message, "parent" | "role" | "text"> & Partial<Message>} message
 * @returns {Message}
 */
export function add(conversation, message) {
  const whole = { id: freshId(), at: Date.now(), ...message };
  conversation.messages[whole.id] = whole;
  conversation.leaf = whole.id;
  conversation.updated = Date.now();
  if (!conversation.title && whole.role === "user") conversation.title = titleOf(whole);
  return whole;
}

/** @param {Message} message */
function titleOf(message) {
  const line = (message.text || message.files?.[0]?.name || "").trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}

/** The message and those that stand in its place in other branches. @param {Conversation} conversation @param {Message} message */
export function siblings(conversation, message) {
  const all = Object.values(conversation.messages);
  return all
    .filter((each) => each.parent === message.parent)
    .sort((a, b) => a.at - b.at || (a.id < b.id ? -1 : 1));
}

/** Show the branch through `id`, as far as it goes. @param {Conversation} conversation @param {string} id */
export function show(conversation, id) {
  let at = id;
  for (;;) {
    const below = Object.values(conversation.messages).filter((each) => each.parent === at);
    if (!below.length) break;
    at = below.reduce((latest, each) => (each.at >= latest.at ? each : latest)).id;
  }
  conversation.leaf = at;
}

/** A new conversation that begins with the branch as far as `id`. @param {Conversation} conversation @param {string} id */
export function branchOff(conversation, id) {
  const copy = newConversation(conversation.settings);
  copy.title = `${conversation.title} (branch)`;
  for (const message of pathTo(conversation, id)) {
    copy.messages[message.id] = { ...structuredClone(message), token: undefined };
    copy.leaf = message.id;
  }
  return copy;
}

/**
 * What the model is given: instructions, and the turns of a path. The thinking of earlier turns is not among it: the
 * templates of models that think leave it out themselves. Nor is a question that got no answer: what was wrong with it
 * would be wrong again, and many templates refuse two questions in a row.
 *
 * @param {Settings} settings
 * @param {Message[]} path
 */
export function asked(settings, path) {
  const turns = path
    .filter((each, index) => (each.role === "user" ? !isUnanswered(path[index + 1]) : each.text))
    .map((each) => ({ role: /** @type {string} */ (each.role), content: contentOf(each) }));
  return settings.system.trim() ? [{ role: "system", content: settings.system.trim() }, ...turns] : turns;
}

/** @param {Message | undefined} next What stands below a question; nothing below the last, which is to be answered. */
function isUnanswered(next) {
  return next?.role === "assistant" && !next.text;
}

/** A message's text with its files, each in a fence that nothing in it can end. @param {Message} message */
function contentOf(message) {
  const files = (message.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...files, message.text].filter(Boolean).join("\n\n");
}

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

/** What `exportJson` wrote, with fresh ids. Throws an `Error` that says what is wrong. @param {string} text @returns {Conversation[]} */
export function importJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations))
    throw new Error("The file holds no conversations that this page exported.");
  return file.conversations.map(readConversation);
}

/** @param {any} raw @returns {Conversation} */
function readConversation(raw) {
  const { system = "", priority = 1, sampling = {}, reasoning } = raw.settings ?? {};
  const lane = /** @type {-1 | 0 | 1} */ ([-1, 0, 1].includes(priority) ? priority : 1);
  const conversation = newConversation({
    system: String(system),
    priority: lane,
    sampling: readSampling(sampling),
    reasoning: reasoning === "off" ? "off" : "auto",
  });
  conversation.title = String(raw.title ?? "").slice(0, 200);
  if (Number.isFinite(raw.updated)) conversation.updated = raw.updated;
  for (const each of Object.values(raw.messages ?? {})) {
    const message = readMessage(each);
    conversation.messages[message.id] = message;
  }
  for (const message of Object.values(conversation.messages))
    if (message.parent !== null && !conversation.messages[message.parent])
      throw new Error("A message has no parent.");
  checkForLoops(conversation);
  if (typeof raw.leaf === "string" && conversation.messages[raw.leaf]) conversation.leaf = raw.leaf;
  return conversation;
}

/** @param {Conversation} conversation */
function checkForLoops(conversation) {
  for (const message of Object.values(conversation.messages)) {
    let steps = Object.keys(conversation.messages).length;
    for (let at = message; at.parent !== null; at = conversation.messages[at.parent])
      if (steps-- <= 0) throw new Error("The messages go in a circle.");
  }
}

/** @param {any} raw @returns {Message} */
function readMessage(raw) {
  if (
    typeof raw?.id !== "string" ||
    typeof raw.text !== "string" ||
    !["user", "assistant"].includes(raw.role)
  )
    throw new Error("A message has no id, no text or no known role.");
  /** @type {Message} */
  const message = {
    id: raw.id,
    parent: typeof raw.parent === "string" ? raw.parent : null,
    role: raw.role,
    text: raw.text,
    at: Number(raw.at) || 0,
  };
  if (typeof raw.thinking === "string") message.thinking = raw.thinking;
  if (Array.isArray(raw.files))
    message.files = raw.files.map((/** @type {any} */ file) => ({
      name: String(file.name),
      text: String(file.text),
    }));
  if (raw.done?.usage && raw.done.metrics) message.done = raw.done;
  return message;
}

/** @param {any} raw */
function readSampling(raw) {
  /** @type {import("./types.js").Sampling} */
  const found = {};
  for (const [name, value] of Object.entries(raw))
    if (
      typeof value === "number" ||
      (Array.isArray(value) && value.every((each) => typeof each === "string"))
    )
      found[name] = value;
  return found;
}
