/** The list of conversations, the search in all of them, and the way to both on narrow screens. */

import { arrange, byId, h, icon, iconButton } from "./dom.js";

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {{label: string, icon?: string, isDanger?: boolean, run: (entry: HTMLElement) => void}} Act What can be done with a conversation. */

const NARROW = "(max-width: 52rem)";
const EMPTY = "Conversations stay in this browser and are listed here.";
const NOTHING = "Nothing found.";
/** Of a text that is found so much is shown before it, and in all. */
const BEFORE_CHARS = 20;
const SNIPPET_CHARS = 90;

/** @param {number} at */
function when(at) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - new Date(at).setHours(0, 0, 0, 0)) / 86_400_000);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days < 7) return "This week";
  return new Date(at).toLocaleDateString("en-GB", { month: "long", year: "numeric" });
}

/** What is searched, by conversation; made again when it has changed. @type {WeakMap<Conversation, {updated: number, texts: string[]}>} */
const searched = new WeakMap();

/** Title and texts. @param {Conversation} conversation */
function textsOf(conversation) {
  const { updated, title, messages } = conversation;
  const known = searched.get(conversation);
  if (known?.updated === updated) return [title, ...known.texts];
  const texts = Object.values(messages).flatMap(({ text, files = [] }) => [text, ...files.map(({ name }) => name)]);
  searched.set(conversation, { updated, texts });
  return [title, ...texts];
}

/**
 * Where a conversation has all these words: null where it has not, else a text around the first of them; empty where the
 * title has them.
 *
 * @param {Conversation} conversation @param {string[]} words In lower case.
 */
function find(conversation, words) {
  if (!words.length) return "";
  const texts = textsOf(conversation);
  const lower = texts.map((each) => each.toLowerCase());
  if (!words.every((word) => lower.some((text) => text.includes(word)))) return null;
  if (words.every((word) => lower[0].includes(word))) return "";
  const at = lower.findIndex((text, index) => index > 0 && words.some((word) => text.includes(word)));
  const place = Math.min(...words.map((word) => lower[at].indexOf(word)).filter((found) => found >= 0));
  const start = Math.max(0, place - BEFORE_CHARS);
  return `${start ? "…" : ""}${texts[at].slice(start, start + SNIPPET_CHARS).replace(/\s+/g, " ")}`;
}

export class Sidebar {
  /** @param {{open: (id: string) => void, changed: () => void, acts: (id: string) => Act[]}} does */
  constructor(does) {
    this.does = does;
    this.element = byId("sidebar", HTMLElement);
    this.list = byId("conversations", HTMLElement);
    this.search = byId("search", HTMLInputElement);
    this.menu = byId("entry-menu", HTMLElement);
    this.opener = byId("open-sidebar", HTMLButtonElement);
    this.scrim = byId("scrim", HTMLElement);
    this.narrow = matchMedia(NARROW);
    this.opener.addEventListener("click", () => this.show(true));
    byId("close-sidebar", HTMLButtonElement).addEventListener("click", () => this.show(false));
    this.scrim.addEventListener("click", () => this.show(false));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.element.classList.contains("is-open") || event.defaultPrevented) return;
      event.preventDefault(); // it is the list that closes, not the answer that ends
      this.show(false);
    });
    this.narrow.addEventListener("change", () => this.show(false));
    this.listenForSearch();
    this.show(false);
  }

  listenForSearch() {
    const clear = () => {
      this.search.value = "";
      this.does.changed();
    };
    this.search.addEventListener("input", () => this.does.changed());
    this.search.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape" && this.search.value) {
        event.preventDefault(); // neither the answer nor the list
        clear();
      } else if (event.key === "Enter" && this.search.value.trim())
        this.list.querySelector("button")?.click();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || document.querySelector("dialog[open]"))
        return;
      event.preventDefault();
      this.show(true);
      this.search.select();
    });
  }

  /** On narrow screens the list lies over the page, and is out of reach while it is closed. @param {boolean} isShown */
  show(isShown) {
    const isDrawer = this.narrow.matches;
    const wasShown = this.element.classList.contains("is-open");
    this.element.classList.toggle("is-open", isDrawer && isShown);
    this.element.inert = isDrawer && !isShown;
    // What lies under the list is out of reach while it is open, the way around the list too.
    for (const under of ["page", "skip"]) byId(under, HTMLElement).inert = isDrawer && isShown;
    this.scrim.hidden = !(isDrawer && isShown);
    this.opener.setAttribute("aria-expanded", String(isDrawer && isShown));
    if (!isDrawer) return;
    if (isShown) byId("new-chat", HTMLButtonElement).focus();
    else if (wasShown) this.opener.focus();
  }

  /**
   * What is there stays and is changed: of a button that is built again between a press and its release, a click is lost.
   *
   * @param {Conversation[]} conversations The newest first.
   * @param {string | undefined} current
   * @param {Set<string>} answering
   */
  render(conversations, current, answering) {
    const before = new Map([...this.list.children].map((each) => [keyOf(each), each]));
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = conversations.map((each) => ({ each, text: find(each, words) })).filter(({ text }) => text !== null);
    found.sort((a, b) => Number(b.each.pinned ?? false) - Number(a.each.pinned ?? false));
    /** @type {Element[]} */
    const parts = [];
    let heading = "";
    for (const { each, text } of found) {
      const place = each.pinned ? "Pinned" : when(each.updated);
      if (place !== heading) {
        heading = place;
        parts.push(before.get(heading) ?? h("p", { class: "list-head" }, heading));
      }
      const entry = before.get(each.id) ?? this.entry(each.id);
      update(entry, each.title || "New chat", text ?? "", {
        isCurrent: each.id === current,
        isAnswering: answering.has(each.id),
      });
      parts.push(entry);
    }
    const none = conversations.length ? NOTHING : EMPTY;
    if (!parts.length) parts.push(before.get(none) ?? h("p", { class: "list-empty" }, none));
    arrange(this.list, parts);
  }

  /** A conversation's button, and the one for what can be done with it. @param {string} id */
  entry(id) {
    const open = () => {
      this.does.open(id);
      this.show(false);
    };
    const more = iconButton("more", "", () => this.openMenu(more, id), "small");
    return h(
      "div",
      { class: "entry", "data-id": id },
      h(
        "button",
        { type: "button", class: "conversation", onclick: open },
        h("span", { class: "name", dir: "auto" }),
        h("span", { class: "snippet", dir: "auto" }),
      ),
      more,
    );
  }

  /** @param {HTMLElement} button @param {string} id */
  openMenu(button, id) {
    const entry = /** @type {HTMLElement} */ (button.parentElement);
    const items = this.does.acts(id).map(({ label, icon: name, isDanger, run }) => {
      const act = () => {
        this.menu.hidePopover();
        run(entry);
      };
      const attributes = { type: "button", class: isDanger ? "danger" : "", onclick: act };
      return h("button", attributes, name && icon(name), label);
    });
    this.menu.replaceChildren(...items);
    this.menu.showPopover();
    const { right, bottom } = button.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.menu;
    this.menu.style.left = `${Math.max(8, Math.min(right, innerWidth - 8) - offsetWidth)}px`;
    this.menu.style.top = `${Math.max(8, Math.min(bottom + 4, innerHeight - offsetHeight - 8))}px`;
    items[0]?.focus();
  }
}

/** What a part of the list stands for: a conversation's id, or a text. @param {Element} part */
function keyOf(part) {
  return part.getAttribute("data-id") ?? part.textContent ?? "";
}

/** @param {Element} entry @param {string} title @param {string} snippet @param {{isCurrent: boolean, isAnswering: boolean}} state */
function update(entry, title, snippet, { isCurrent, isAnswering }) {
  const [button, more] = entry.querySelectorAll("button");
  const [name, found, pulse] = button.children;
  if (name.textContent !== title) {
    name.textContent = title;
    more.setAttribute("aria-label", `More for ${title}`);
    more.title = "More";
  }
  if (found.textContent !== snippet) found.textContent = snippet;
  if (isCurrent) button.setAttribute("aria-current", "true");
  else button.removeAttribute("aria-current");
  if (isAnswering && !pulse)
    button.append(h("span", { class: "pulse", role: "img", "aria-label": "answering" }));
  else if (!isAnswering) pulse?.remove();
}
