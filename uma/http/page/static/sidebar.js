/** The list of conversations, and the way to it on narrow screens. */

import { arrange, byId, h } from "./dom.js";

/** @typedef {import("./types.js").Conversation} Conversation */

const NARROW = "(max-width: 52rem)";
const EMPTY = "Conversations stay in this browser and are listed here.";

/** @param {number} at */
function when(at) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - new Date(at).setHours(0, 0, 0, 0)) / 86_400_000);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  return days < 7 ? "This week" : "Earlier";
}

export class Sidebar {
  /** @param {(id: string) => void} open */
  constructor(open) {
    this.open = open;
    this.element = byId("sidebar", HTMLElement);
    this.list = byId("conversations", HTMLElement);
    this.opener = byId("open-sidebar", HTMLButtonElement);
    this.scrim = byId("scrim", HTMLElement);
    this.narrow = matchMedia(NARROW);
    this.opener.addEventListener("click", () => this.show(true));
    byId("close-sidebar", HTMLButtonElement).addEventListener("click", () => this.show(false));
    this.scrim.addEventListener("click", () => this.show(false));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.element.classList.contains("is-open")) return;
      event.preventDefault(); // it is the list that closes, not the answer that ends
      this.show(false);
    });
    this.narrow.addEventListener("change", () => this.show(false));
    this.show(false);
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
    /** @type {Element[]} */
    const parts = [];
    let heading = "";
    for (const each of conversations) {
      if (when(each.updated) !== heading) {
        heading = when(each.updated);
        parts.push(before.get(heading) ?? h("p", { class: "list-head" }, heading));
      }
      const entry = before.get(each.id) ?? this.entry(each.id);
      update(entry, each.title || "New chat", each.id === current, answering.has(each.id));
      parts.push(entry);
    }
    if (!parts.length)
      parts.push(before.get(EMPTY) ?? h("p", { class: "list-empty" }, EMPTY));
    arrange(this.list, parts);
  }

  /** A conversation's button. @param {string} id */
  entry(id) {
    const open = () => {
      this.open(id);
      this.show(false);
    };
    return h(
      "button",
      { type: "button", class: "conversation", "data-id": id, onclick: open },
      h("span", { class: "name", dir: "auto" }),
    );
  }
}

/** What a part of the list stands for: a conversation's id, or a text. @param {Element} part */
function keyOf(part) {
  return part.getAttribute("data-id") ?? part.textContent ?? "";
}

/** @param {Element} entry @param {string} title @param {boolean} isCurrent @param {boolean} isAnswering */
function update(entry, title, isCurrent, isAnswering) {
  const [name, pulse] = entry.children;
  if (name.textContent !== title) name.textContent = title;
  if (isCurrent) entry.setAttribute("aria-current", "true");
  else entry.removeAttribute("aria-current");
  if (isAnswering && !pulse)
    entry.append(h("span", { class: "pulse", role: "img", "aria-label": "answering" }));
  else if (!isAnswering) pulse?.remove();
}
