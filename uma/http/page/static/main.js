/** The page: puts its parts together, and says which view is shown. */

import { ApiError, ask, onUnauthorized, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { byId, download, h, icon, number, toast } from "./dom.js";
import { LiveView } from "./live.js";
import { DEFAULTS, openSettings, summary } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { exportJson, importJson } from "./tree.js";

/** @typedef {import("./types.js").Settings} Settings */

const THEMES = ["system", "light", "dark"];
const SETTINGS_KEY = "uma.settings";
const RETRY_MS = 2_000;

/** @type {import("./types.js").Info | undefined} */
let info;

/** The settings that were chosen last, for new conversations. @returns {Settings} */
function defaults() {
  try {
    const kept = JSON.parse(localStorage.getItem(SETTINGS_KEY) ?? "null");
    return kept?.sampling ? { ...kept, system: "" } : structuredClone(DEFAULTS);
  } catch {
    return structuredClone(DEFAULTS);
  }
}

function suggestions() {
  return info?.model.is_builtin
    ? ["Tell me a story about a fox", "What is UMA?", "How do I serve my own model?"]
    : [
        "Explain what a KV cache does",
        "Write a haiku about waiting in a queue",
        "Show me a Python function that merges two sorted lists",
      ];
}

const chat = new Chat({ onChange: refresh, focus: () => composer.focus(), defaults, suggestions });
const composer = new Composer({
  send: (text, files) => chat.send(text, files),
  stop: () => chat.stop(),
  openSettings: editSettings,
});
const sidebar = new Sidebar((id) => go(`#c/${id}`));
const live = new LiveView(byId("live-view", HTMLElement));

/** Everything around the thread. */
function refresh() {
  const isLive = location.hash === "#live";
  const title = isLive ? "Live" : chat.current.title || "New chat";
  byId("title", HTMLElement).textContent = title;
  document.title = `${title} · UMA`;
  composer.setAnswering(Boolean(chat.running));
  composer.chips.replaceChildren(icon("tune"), summary(chat.current.settings));
  composer.chips.setAttribute("aria-label", `Instructions and sampling: ${summary(chat.current.settings)}`);
  sidebar.render(
    [...chat.conversations].sort((a, b) => b.updated - a.updated),
    chat.current.id,
    chat.answering,
  );
  byId("menu", HTMLDetailsElement).hidden = isLive || !chat.conversations.includes(chat.current);
  byId("open-settings", HTMLElement).hidden = isLive;
  byId("live-dot", HTMLElement).hidden = !chat.answering.size;
  byId("export-all", HTMLButtonElement).disabled = !chat.conversations.length;
  // A reload, or the address in another window, leads back to this conversation.
  if (!isLive && chat.conversations.includes(chat.current))
    history.replaceState(null, "", `#c/${chat.current.id}`);
}

/** @param {string} hash */
function go(hash) {
  if (location.hash === hash) route();
  else location.hash = hash;
}

function route() {
  const isLive = location.hash === "#live";
  byId("chat-view", HTMLElement).hidden = isLive;
  byId("live-view", HTMLElement).hidden = !isLive;
  byId("tab-chat", HTMLElement).toggleAttribute("aria-current", false);
  byId("tab-live", HTMLElement).toggleAttribute("aria-current", false);
  byId(isLive ? "tab-live" : "tab-chat", HTMLElement).setAttribute("aria-current", "page");
  live.setShown(isLive);
  const id = location.hash.startsWith("#c/") ? location.hash.slice(3) : undefined;
  if (!isLive && (id !== chat.current.id || !chat.thread.hasChildNodes()))
    chat.open(id ?? (location.hash === "#chat" ? chat.current.id : undefined));
  refresh();
}

function editSettings() {
  openSettings(chat.current.settings, info, (settings) => {
    localStorage.setItem(SETTINGS_KEY, JSON.stringify(settings));
    chat.setSettings(settings);
  });
}

/** @param {string} theme */
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("uma.theme", theme);
  const words = theme === "system" ? "as the system has them" : theme;
  const button = byId("theme", HTMLButtonElement);
  button.setAttribute("aria-label", `Colours: ${words}`);
  button.title = `Colours: ${words}`;
  live.repaint();
}

async function importFile() {
  const input = byId("import-file", HTMLInputElement);
  const file = input.files?.[0];
  input.value = "";
  if (!file) return;
  try {
    const found = importJson(await file.text());
    chat.addAll(found);
    if (found.length) go(`#c/${found[0].id}`);
    toast(`${number(found.length)} ${found.length === 1 ? "conversation" : "conversations"} imported.`);
  } catch (error) {
    toast(`${file.name} cannot be imported. ${error instanceof Error ? error.message : ""}`);
  }
}

function rename() {
  const title = byId("title", HTMLElement);
  const input = h("input", {
    class: "title-input",
    "aria-label": "Name of the conversation",
    maxlength: 200,
  });
  input.value = chat.current.title;
  let isOver = false;
  const end = (/** @type {boolean} */ isKept) => {
    if (isOver) return;
    isOver = true; // taking the focus away ends it once more
    if (isKept && input.value.trim()) chat.current.title = input.value.trim();
    input.replaceWith(title);
    void chat.save(chat.current);
    refresh();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault(); // Escape ends this, not the answer
    end(event.key === "Enter");
    byId("menu", HTMLElement).querySelector("summary")?.focus();
  });
  input.addEventListener("blur", () => end(true));
  title.replaceWith(input);
  input.select();
}

function removeCurrent() {
  const gone = chat.current;
  chat.remove(gone);
  go("#chat");
  composer.focus();
  const undo = () => {
    chat.addAll([gone]);
    go(`#c/${gone.id}`);
    composer.focus();
  };
  toast(`“${gone.title || "New chat"}” deleted.`, { label: "Undo", run: undo });
}

/** Ask for the key that this server wants. */
function askForKey() {
  const dialog = byId("key-dialog", HTMLDialogElement);
  if (dialog.open) return;
  const input = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const save = (/** @type {Event} */ event) => {
    event.preventDefault();
    setKey(input.value.trim());
    dialog.close();
    void connect();
  };
  const form = h(
    "form",
    { class: "sheet-body", onsubmit: save },
    h("h2", { id: "key-title" }, "This server needs a key"),
    h("p", {}, "Make one with “uma key new NAME” on the server’s machine. This browser keeps it."),
    h("label", { for: "key" }, "Key"),
    input,
    h("button", { class: "button primary" }, "Go on"),
  );
  dialog.replaceChildren(form);
  dialog.showModal();
}

/** Learn which server answers; where none does, say so and try again. */
async function connect() {
  const banner = byId("banner", HTMLElement);
  try {
    info = await ask("info");
    banner.hidden = true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) return;
    banner.textContent = `${error.message} Trying again …`;
    banner.hidden = false;
    setTimeout(connect, RETRY_MS);
    return;
  }
  if (!info) return;
  composer.maxBytes = info.limits.max_prompt_bytes;
  const { name, quantization, parameters } = info.model;
  const size =
    parameters >= 1e9
      ? `${number(parameters / 1e9, 1)} B`
      : `${number(parameters / 1e6, parameters < 1e7 ? 1 : 0)} M`;
  byId("model-card", HTMLElement).replaceChildren(
    h("b", {}, name),
    h("span", {}, `${size} parameters · ${quantization} · ${number(info.limits.n_ctx)} tokens of context`),
  );
  if (!chat.thread.hasChildNodes()) chat.render();
}

function listen() {
  byId("new-chat", HTMLButtonElement).addEventListener("click", () => {
    chat.open();
    sidebar.show(false);
    history.replaceState(null, "", "#chat");
    route();
    composer.input.focus();
  });
  byId("open-settings", HTMLElement).addEventListener("click", editSettings);
  byId("theme", HTMLElement).addEventListener("click", () => {
    const at = THEMES.indexOf(document.documentElement.dataset.theme ?? "system");
    setTheme(THEMES[(at + 1) % THEMES.length]);
  });
  const menu = byId("menu", HTMLDetailsElement);
  const choose = (/** @type {string} */ id, /** @type {() => void} */ run) =>
    byId(id, HTMLButtonElement).addEventListener("click", () => {
      menu.open = false;
      run();
    });
  choose("rename", rename);
  choose("export", () =>
    download(`${chat.current.title || "conversation"}.json`, exportJson([chat.current])),
  );
  choose("delete", removeCurrent);
  byId("export-all", HTMLElement).addEventListener("click", () =>
    download("uma-conversations.json", exportJson(chat.conversations)),
  );
  byId("import", HTMLElement).addEventListener("click", () => byId("import-file", HTMLInputElement).click());
  byId("import-file", HTMLElement).addEventListener("change", importFile);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || event.isComposing) return;
    if (menu.open) {
      menu.open = false;
      menu.querySelector("summary")?.focus();
    } else if (!byId("chat-view", HTMLElement).hidden && !document.querySelector("dialog[open]")) chat.stop();
  });
  document.addEventListener("click", (event) => {
    if (event.target instanceof Node && !menu.contains(event.target)) menu.open = false;
  });
  window.addEventListener("hashchange", route);
  window.addEventListener("online", connect);
  onUnauthorized.ask = askForKey;
}

setTheme(localStorage.getItem("uma.theme") ?? "system");
listen();
void connect();
await chat.start();
if (!location.hash && chat.answering.size) history.replaceState(null, "", `#c/${[...chat.answering][0]}`);
route();
composer.input.focus({ preventScroll: true });
document.documentElement.dataset.ready = "true";
