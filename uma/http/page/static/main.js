/** The page: puts its parts together, and says which view is shown. */

import { ApiError, ask, currentKey, faultOfKey, onContact, onUnauthorized, setKey, watchKey } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { listenForDecisions } from "./decide.js";
import { announce, button, byId, copy, clearToasts, download, h, number, say, toast } from "./dom.js";
import { blind } from "./failures.js";
import { LiveView } from "./live.js";
import { keep, kept } from "./local.js";
import { Palette } from "./palette.js";
import { Picker } from "./picker.js";
import { exportJson, exportMarkdown, ImportError, importJson } from "./reading.js";
import { find, wordsOf } from "./search.js";
import { fieldsOf, fillSettings, ofNewChats, showSettings, summary } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { versions } from "./tree.js";

/** Shares of the context from which a conversation's is told, and from which it counts as nearly full. */
const TOLD_SHARE = 0.5;
const FULL_SHARE = 0.8;
const THEMES = ["system", "light", "dark"];
const THEME_KEY = "uma.theme";
const MODEL_KEY = "uma.model";
const RETRY_MS = 2_000;
/** So often it is looked whether the server is still there. */
const LOOK_MS = 15_000;
/** Conversations that a search lists, and those that are listed before anything is sought. */
const MAX_FOUND = 30;
const FEW = 5;

/** @type {Info | undefined} */
let info;
/** The model that it was asked for; nothing: the default. @type {string | undefined} */
let infoOf;
let isKeyDismissed = false;
/** The server was there, and is not any more. */
let isAway = false;
let retry = 0;
/** Before the address was followed, it says what is to be shown, not what is. */
let isRouted = false;

function suggestions() {
  if (info?.capabilities.chat === false)
    return ["Once upon a time, there was a fox", "The capital of France is", "def fibonacci(n):"];
  return info?.model.is_builtin
    ? ["Tell me a story about a fox", "What is UMA?", "How do I serve my own model?"]
    : [
        "Explain what a KV cache does",
        "Write a haiku about waiting in a queue",
        "Show me a Python function that merges two sorted lists",
      ];
}

const chat = new Chat({
  onChange: refresh,
  focus: () => composer.focus(),
  begin,
  defaults: ofNewChats,
  model: () => kept(MODEL_KEY) ?? undefined,
  ended: () => info?.models && void connect(),
  suggestions,
  info: () => info,
  count,
  stopped: ({ id }) => composer.giveBack(id),
  over: sendNext,
});
const palette = new Palette();
const picker = new Picker({
  choose: (name) => {
    keep(MODEL_KEY, name);
    chat.change({ model: name });
    composer.focus();
  },
  changed: () => palette.show(),
});
const composer = new Composer({
  send: (text, files) => chat.send(text, files),
  stop: () => chat.stop(),
  blind: () => blind(info),
  openSettings: () => editSettings(),
  count,
  model: modelName,
  editLast: () => chat.editLast(),
});
const sidebar = new Sidebar({ open: (id) => go(`#c/${id}`), acts });
const live = new LiveView((id) => chat.own(id), () => info);
const heading = byId("title", HTMLElement);

/** Everything around the thread. */
function refresh() {
  const isLive = location.hash === "#live";
  const title = isLive ? "Live" : chat.current.title || "New chat";
  heading.textContent = title;
  composer.show(chat.current.id, !chat.conversations.includes(chat.current));
  document.title = `${title} · UMA`;
  composer.setAnswering(chat.running.length > 0, chat.isUndecided(chat.current));
  const chosen = summary(chat.current.settings);
  say(byId("chosen", HTMLElement), chosen || "Settings"); // what a press has hit must be there at its release
  composer.chips.setAttribute("aria-label", `Settings: ${chosen || "the defaults"}`);
  sidebar.render(chat.newestFirst, chat.current.id, chat.answering);
  byId("menu", HTMLButtonElement).hidden = isLive || !chat.conversations.includes(chat.current);
  byId("open-settings", HTMLElement).hidden = isLive;
  byId("live-dot", HTMLElement).hidden = !chat.answering.size;
  byId("export-all", HTMLButtonElement).disabled = !chat.conversations.length;
  showLoss(isLive ? "" : chat.loss);
  showGauge();
  showModel();
  if (info?.models && chat.current.model !== infoOf) void connect();
  if (!isLive && isRouted) noteAddress();
}

/** An answer has ended: what was entered meanwhile is sent; behind a failure it is left to the person. @param {Conversation} home */
function sendNext(home) {
  const last = home.leaf ? home.messages[home.leaf] : undefined;
  const isRunning = Boolean(last?.token);
  if (!isRunning && !last?.done && !last?.isStopped && composer.drafts.queueOf(home.id).length) {
    composer.giveBack(home.id);
    if (home === chat.current) say(composer.notice, "Not sent: the answer before it failed.");
    else toast(`An answer failed: what was queued behind it is back in the box of “${home.title}”.`, undefined, "queue");
  }
  const next = isRunning || chat.isUndecided(home) ? undefined : composer.next(home.id);
  if (next) chat.send(next.text, next.files, home);
  else refresh();
}

/** Which model answers. A conversation's can be one that the server has no more. */
function showModel() {
  const button = byId("model", HTMLButtonElement);
  button.hidden = !info || location.hash === "#live";
  const isHere = !info?.models || info.models.some(({ name }) => name === modelName());
  const name = isHere ? modelName() : `${modelName()} (not available)`;
  const words = isAway ? "Server not reachable" : name;
  say(button, words);
  document.body.classList.toggle("is-away", isAway);
  button.setAttribute("aria-label", `Model: ${words}`);
  palette.show();
}

function modelName() {
  return (info?.models && (chat.current.model ?? info.models[0]?.name)) ?? info?.model.called ?? "";
}

/** Whether the model that answers is there: of several it can be one that its first question loads. */
function isLoaded() {
  return !info?.models || info.models.find(({ name }) => name === modelName())?.state === "loaded";
}

function chooseModel() {
  const label = info?.models ? "Find, or type OWNER/NAME to pull" : "The model of this server";
  palette.open(label, (text) => picker.entries(info, modelName(), text));
  void connect();
}

/** Tokens of a text, where the model that answers is there to count them. @param {string} text @returns {Promise<number | undefined>} */
async function count(text) {
  if (!isLoaded()) return undefined;
  return ask("tokenize", { model: (info?.models && modelName()) || undefined, content: text }).then(({ count }) => count, () => undefined);
}

/** Search for anything: conversations by what was said in them, models, settings, actions. */
function search() {
  sidebar.show(false);
  prepareSettings();
  palette.open("Search conversations, models, settings and actions", (text) => {
    const words = wordsOf(text);
    const has = (/** @type {string} */ where) => words.every((word) => where.toLowerCase().includes(word));
    const isShown = (/** @type {Conversation} */ each) => each === chat.current && location.hash !== "#live";
    const conversations = chat.newestFirst
      .flatMap((each) => (words.length || !isShown(each) ? (find(each, words) ?? []) : []))
      .slice(0, words.length ? MAX_FOUND : FEW)
      .map(({ conversation, id, snippet }) => ({
        group: "Conversations",
        label: conversation.title || "New chat",
        note: snippet,
        run: () => {
          go(`#c/${conversation.id}`);
          if (id) void chat.reveal(id, words);
          composer.focus();
        },
      }));
    const doing = actions().filter(({ label, also = "" }) => has(`${label} ${also}`));
    if (!words.length) return [...conversations, ...doing];
    const settings = [...fieldsOf()]
      .filter(([_, { textContent }]) => has(textContent ?? ""))
      .map(([label]) => ({ group: "Settings", label, run: () => editSettings(label) }));
    // Where one is called so, its group comes before those that have the words somewhere.
    const isNamed = (/** @type {Entry[]} */ group) => Number(group.some(({ label }) => label.toLowerCase().startsWith(text.toLowerCase())));
    const groups = [conversations, doing, settings, picker.entries(info, modelName(), text)];
    return groups.sort((one, other) => isNamed(other) - isNamed(one)).flat();
  });
}

/** What can be done, each with its keys, if any. @returns {Entry[]} */
function actions() {
  const isKept = chat.conversations.includes(chat.current);
  const own = isKept ? acts(chat.current.id).map(({ label, run }) => ({ label: `This conversation: ${label[0].toLowerCase()}${label.slice(1)}`, run: () => run(null) })) : [];
  const last = chat.lastAnswer;
  const click = (/** @type {string} */ id) => () => byId(id, HTMLElement).click();
  return [
    { label: "New chat", state: "Ctrl Shift O", run: begin },
    ...(last ? [{ label: "Regenerate the last answer", also: "again retry", run: () => chat.actions.again(last) }] : []),
    ...(last && (versions(chat.current).get(last.parent) ?? []).length > 1 ? [{ label: "Compare the versions of the last answer", run: () => chat.actions.compare(last) }] : []),
    { label: "Copy the last answer", state: "Ctrl Shift C", run: copyLast },
    { label: "Show or hide the list of conversations", state: "Ctrl Shift S", also: "sidebar", run: () => sidebar.toggle() },
    { label: "Choose a model", run: chooseModel },
    { label: "Settings", also: "preferences options instructions", run: () => editSettings() },
    { label: "Live view", run: click("tab-live") },
    { label: "Chat", run: click("tab-chat") },
    { label: "Decide about a text", run: click("decide") },
    { label: "Keyboard shortcuts", state: "Ctrl /", also: "keys help ?", run: () => byId("keys", HTMLDialogElement).showModal() },
    { label: "Change theme", also: "dark light colours mode", run: changeTheme },
    { label: "Import conversations", run: click("import") },
    { label: "Export all conversations", run: click("export-all") },
    ...own,
  ].map((each) => ({ group: "Actions", ...each }));
}

/** @param {string} loss Why the conversation that is shown is lost with the page, if it is. */
function showLoss(loss) {
  byId("loss", HTMLElement).hidden = !loss;
  say(byId("loss-words", HTMLElement), loss);
}

/** How full the context is, from half of it on; and the way on, before it is full. */
function showGauge() {
  const most = info?.limits.n_ctx ?? 0;
  const share = most && !chat.running.length ? chat.used / most : 0;
  const gauge = byId("gauge", HTMLElement);
  gauge.hidden = share < TOLD_SHARE;
  const words = `${number(Math.min(100, 100 * share))} % of context used`;
  gauge.title = `${number(chat.used)} of ${number(most)} tokens`;
  byId("gauge-meter", HTMLMeterElement).value = share;
  byId("gauge-words", HTMLElement).textContent = words;
  byId("nearly-full", HTMLElement).hidden = share < FULL_SHARE || (chat.current.settings.truncation ?? "off") !== "off";
}

/** The name of a file of today's. @param {string} what @param {string} end */
const fileName = (what, end) => `${what || "conversation"} ${new Date().toLocaleDateString("sv")}.${end}`;

/** @param {Conversation} conversation */
function exportOne(conversation) {
  download(fileName(conversation.title, "json"), exportJson([conversation]));
}

/** What can be done with a conversation of the list. @param {string} id @returns {Act[]} */
function acts(id) {
  const one = chat.conversations.find((each) => each.id === id);
  if (!one) return [];
  const pin = () => {
    one.pinned = !one.pinned;
    void chat.save(one);
    refresh();
  };
  return [
    { label: one.pinned ? "Unpin" : "Pin", icon: "pin", run: pin },
    { label: "Rename", icon: "edit", run: (entry) => rename(one, entry ?? heading) },
    { label: "Export as JSON", icon: "down", run: () => exportOne(one) },
    { label: "Export as Markdown", icon: "down", run: () => download(fileName(one.title, "md"), exportMarkdown(one), "text/markdown") },
    { label: "Delete", icon: "x", isDanger: true, run: () => removeOne(one) },
  ];
}

/** A reload, the way back, or the address in another window lead to the conversation that is shown. */
function noteAddress() {
  const isNew = !chat.conversations.includes(chat.current);
  const address = isNew ? "#chat" : `#c/${chat.current.id}`;
  if (location.hash === address && Boolean(history.state?.isNew) === isNew) return;
  // A step of its own, unless it stands for the same: a new chat that was given its first question, one that is gone.
  if (addressed()) history.pushState({ isNew }, "", address);
  else history.replaceState({ isNew }, "", address);
}

/** The conversation of the address, where there is one. */
function addressed() {
  const id = location.hash.startsWith("#c/") ? location.hash.slice(3) : undefined;
  return chat.conversations.find((each) => each.id === id);
}

/** @param {string} hash */
function go(hash) {
  if (location.hash !== hash) history.pushState(null, "", hash);
  route();
}

function route() {
  isRouted = true;
  const isLive = location.hash === "#live";
  byId("live-view", HTMLElement).hidden = !isLive;
  for (const id of ["tab-chat", "tab-live"]) byId(id, HTMLElement).removeAttribute("aria-current");
  byId(isLive ? "tab-live" : "tab-chat", HTMLElement).setAttribute("aria-current", "page");
  live.setShown(isLive);
  const found = addressed();
  if (found && found !== chat.current) chat.open(found.id);
  // Without one, the conversation stays, and what is begun in it: the live view's way back leads here.
  else if (history.state?.isNew && chat.conversations.includes(chat.current)) chat.open();
  chat.setShown(!isLive);
  refresh();
}

/** A new chat. */
function begin() {
  chat.open();
  clearToasts();
  sidebar.show(false);
  go("#chat");
  composer.focus();
}

async function copyLast() {
  const last = chat.lastAnswer;
  if (!last) toast("There is no answer to copy yet.", undefined, "copy");
  else if (await copy(heading, last.text)) toast("The last answer is copied.", undefined, "copy");
}

function prepareSettings() {
  byId("key-section", HTMLElement).hidden = !currentKey();
  fillSettings(chat.current.settings, info, (settings) => chat.change({ settings }));
}

/** @param {string} [label] The field that is sought. */
function editSettings(label) {
  prepareSettings();
  showSettings(label);
}

function changeTheme() {
  const at = THEMES.indexOf(document.documentElement.dataset.theme ?? "system");
  const theme = THEMES[(at + 1) % THEMES.length];
  setTheme(theme);
  keep(THEME_KEY, theme);
}

/** @param {string} theme */
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = byId("theme", HTMLButtonElement);
  button.title = `Theme: ${theme}`;
  button.setAttribute("aria-label", button.title);
  live.repaint();
}

async function importFile() {
  const input = byId("import-file", HTMLInputElement);
  const file = input.files?.[0];
  input.value = "";
  if (!file) return;
  sidebar.show(false);
  let found;
  try {
    found = importJson(await file.text(), info);
  } catch (error) {
    if (!(error instanceof ImportError || error instanceof DOMException)) throw error;
    const why = error instanceof ImportError ? error.message : "The browser could not read the file: choose it again.";
    return toast(`Nothing was imported from ${file.name}. ${why}`, undefined, "import");
  }
  const { dropped } = found;
  const known = new Set(chat.conversations.map(signature));
  const conversations = found.conversations.filter((each) => !known.has(signature(each)));
  const twice = found.conversations.length - conversations.length;
  const left = twice ? ` ${number(twice)} ${twice === 1 ? "is" : "are"} here already.` : "";
  if (!conversations.length) return toast(`Nothing was imported from ${file.name}.${left}`, undefined, "import");
  chat.addAll(conversations);
  go(`#c/${conversations[0].id}`);
  clearToasts("deleted"); // what was deleted can be among them: to undo it would bring it back twice
  const count = conversations.length === 1 ? "1 conversation" : `${number(conversations.length)} conversations`;
  const loss = dropped.length ? ` Left out, as it cannot be used here: ${dropped.join(", ")}.` : "";
  toast(`${count} imported.${left}${loss}`, undefined, "import");
}

/** Equal for the same conversation, whatever its ids. @param {Conversation} conversation */
function signature({ title, messages }) {
  return JSON.stringify([title, Object.values(messages).map(({ role, text, at }) => [role, text, at])]);
}

/** @param {Conversation} named Another window can delete it meanwhile. @param {HTMLElement} shown What shows its name. */
function rename(named, shown) {
  const input = h("input", { class: "title-input", dir: "auto", "aria-label": "Name of the conversation", maxlength: 200 });
  input.value = named.title;
  let isOver = false;
  const end = (/** @type {boolean} */ isKept) => {
    if (isOver) return;
    isOver = true; // taking the focus away ends it once more
    if (isKept && input.value.trim()) named.title = input.value.trim();
    input.remove();
    shown.classList.remove("hidden");
    void chat.save(named);
    refresh();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault(); // Escape ends this, not the answer
    end(event.key === "Enter");
    (shown === heading ? byId("menu", HTMLElement) : shown).focus();
  });
  input.addEventListener("blur", () => end(true));
  shown.after(input);
  shown.classList.add("hidden"); // and not taken away: screen readers know the page by it
  input.select();
}

/** @param {Conversation} gone */
function removeOne(gone) {
  const wasShown = gone === chat.current;
  chat.remove(gone);
  if (wasShown) go("#chat");
  else refresh();
  composer.focus();
  const undo = () => {
    chat.addAll([gone]);
    go(`#c/${gone.id}`);
    composer.focus();
  };
  toast(`“${gone.title || "New chat"}” deleted.`, { label: "Undo", run: undo }, "deleted");
}

/** A request was refused for its key, or for the lack of one. @param {string} path What was asked for. */
function missKey(path) {
  const banner = byId("banner", HTMLElement);
  banner.classList.remove("is-neutral");
  const enter = button("Enter the key", () => askForKey(), "link-button");
  if (!banner.querySelector("button")) banner.replaceChildren("This server needs an API key. ", enter);
  banner.hidden = false;
  // The live view asks again and again: only a person's question opens a dialog that was closed.
  if (isKeyDismissed && path !== "answers") return;
  askForKey(undefined, currentKey() ? "The server does not accept this key. Enter another one." : "");
}

/** @param {string} [title] @param {string} [fault] What is wrong with the last one. */
function askForKey(title = "This server needs an API key", fault = "") {
  const dialog = byId("key-dialog", HTMLDialogElement);
  if (dialog.open) return;
  isKeyDismissed = false;
  byId("key-title", HTMLElement).textContent = title;
  byId("key-fault", HTMLElement).textContent = fault;
  byId("key", HTMLInputElement).value = "";
  dialog.showModal();
}

/** The dialog for a key: it is kept, or dismissed; and what can be done in the settings with the one that is kept. */
function listenForKey() {
  const dialog = byId("key-dialog", HTMLDialogElement);
  const act = (/** @type {string} */ id, /** @type {() => void} */ run) =>
    byId(id, HTMLElement).addEventListener("click", () => {
      byId("settings", HTMLDialogElement).close();
      run();
    });
  act("change-key", () => askForKey("Change key"));
  act("forget-key", () => {
    setKey("");
    toast("The key is deleted from this browser.");
    void connect();
  });
  byId("key-form", HTMLFormElement).addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key", HTMLInputElement).value.trim();
    const why = faultOfKey(key);
    byId("key-fault", HTMLElement).textContent = why;
    if (why) return;
    setKey(key);
    dialog.close();
    void connect().then(() => (composer.focus(), chat.askAgain()));
  });
  byId("key-later", HTMLElement).addEventListener("click", () => {
    isKeyDismissed = true;
    dialog.close();
  });
  dialog.addEventListener("cancel", () => (isKeyDismissed = true));
  watchKey(() => {
    dialog.close();
    void connect();
  });
}

/** Learn which server answers; where none does, say so and try again. */
async function connect() {
  const banner = byId("banner", HTMLElement);
  clearTimeout(retry);
  const model = (infoOf = chat.current.model);
  try {
    const found = await ask(model ? `info?model=${encodeURIComponent(model)}` : "info");
    banner.hidden = true;
    if (model !== infoOf) return; // another conversation is shown by now
    info = found;
    isAway = false;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) return;
    clearTimeout(retry);
    retry = window.setTimeout(connect, RETRY_MS);
    const wasAway = isAway;
    isAway = Boolean(info) && error.status === 0;
    if (isAway && !wasAway) announce("The server is not reachable.");
    if (isAway) return showModel();
    const { percent } = error.failure;
    const bar = percent !== undefined && h("progress", { max: 100, value: percent, "aria-label": "Model loaded" });
    banner.replaceChildren(...(bar ? [error.message, bar] : [`${error.message} Retrying …`]));
    banner.classList.toggle("is-neutral", Boolean(bar));
    banner.hidden = false;
    return;
  }
  if (!info) return;
  forgetModel();
  composer.maxBytes = info.limits.max_prompt_bytes;
  composer.maxTokens = info.limits.n_ctx || Infinity;
  composer.setSight(info.capabilities.vision ?? false);
  composer.count();
  const isBase = info.capabilities.chat === false;
  byId("base", HTMLElement).hidden = !isBase;
  composer.input.placeholder = isBase ? "Begin a text" : "Ask something";
  chat.welcome();
  showModel();
  // What loads, or is loaded by another window, is followed for as long as it is looked at.
  if (palette.dialog.open && info.models) retry = window.setTimeout(connect, RETRY_MS);
}

/** A new conversation is not held with a model that this server does not have. */
function forgetModel() {
  const { model } = chat.current;
  const isHere = info?.models?.some(({ name }) => name === model);
  if (!model || isHere || chat.conversations.includes(chat.current)) return;
  delete chat.current.model;
  infoOf = undefined;
}

function listen() {
  byId("skip", HTMLElement).addEventListener("click", (event) => {
    event.preventDefault(); // the address says which view is shown, and that view's content is meant
    byId("main", HTMLElement).focus();
  });
  const outgrow = (/** @type {Settings["truncation"]} */ truncation) => () => (chat.outgrow(truncation), composer.focus());
  const clicks = {
    "new-chat": begin,
    "open-settings": () => editSettings(),
    theme: changeTheme,
    menu: () => sidebar.openMenu(byId("menu", HTMLElement), chat.current.id, null),
    title: () => chat.conversations.includes(chat.current) && rename(chat.current, heading),
    model: chooseModel,
    search,
    "export-lost": () => exportOne(chat.current),
    "without-oldest": outgrow("auto"),
    "with-summary": outgrow("compact"),
    "export-all": () => download(fileName("uma-conversations", "json"), exportJson(chat.conversations)),
    import: () => byId("import-file", HTMLElement).click(),
  };
  for (const [id, run] of Object.entries(clicks)) byId(id, HTMLElement).addEventListener("click", run);
  listenForDecisions(modelName, isLoaded);
  byId("import-file", HTMLElement).addEventListener("change", importFile);
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target instanceof Element && event.target.matches("input, textarea, select");
    const hasShift = event.shiftKey && event.key !== "/"; // which some keyboards have with Shift
    const isOwn = (event.ctrlKey || event.metaKey) && !event.altKey;
    const pressed = event.key === "?" && !isTyping ? "Ctrl /" : `${isOwn ? "Ctrl " : ""}${hasShift ? "Shift " : ""}${event.key.toUpperCase()}`;
    const run = pressed === "Ctrl K" ? search : actions().find(({ state }) => state === pressed)?.run;
    if (run) {
      event.preventDefault();
      if (!document.querySelector("dialog[open]")) run();
    }
    if (event.key !== "Escape" || event.defaultPrevented || event.isComposing) return;
    if (!byId("chat-view", HTMLElement).hidden && !document.querySelector("dialog[open], :popover-open"))
      chat.stop();
  });
  // Not hashchange, which comes later: what happens in between would note the address of what is shown still.
  window.addEventListener("popstate", route);
  window.addEventListener("online", connect);
  setInterval(() => info && document.visibilityState === "visible" && void connect(), LOOK_MS);
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && connect());
  onContact.check = connect;
  onUnauthorized.ask = missKey;
  listenForKey();
}

setTheme(kept(THEME_KEY) ?? "system");
listen();
void connect();
await chat.start();
for (const [id] of composer.drafts.queued) if (!chat.answering.has(id)) composer.giveBack(id);
if (!location.hash && chat.answering.size) history.replaceState(null, "", `#c/${[...chat.answering][0]}`);
route();
document.documentElement.dataset.ready = "true"; // from now on it is seen, and can have the focus
composer.focus();
