/** The list of conversations, and the way to it on narrow screens. */

import { byId, h, rebuild } from "./dom.js";

/** @typedef {import("./types.js").Conversation} Conversation */

const NARROW = "(max-width: 52rem)";

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

  /** @param {Conversation[]} conversations The newest first. @param {string | undefined} current @param {Set<string>} answering */
  render(conversations, current, answering) {
    /** @type {HTMLElement[]} */
    const parts = [];
    let heading = "";
    for (const each of conversations) {
      if (when(each.updated) !== heading) {
        heading = when(each.updated);
        parts.push(h("p", { class: "list-head" }, heading));
      }
      const link = h(
        "button",
        {
          type: "button",
          class: "conversation",
          "data-id": each.id,
          "aria-current": each.id === current ? "true" : undefined,
        },
        h("span", { class: "name", dir: "auto" }, each.title || "New chat"),
      );
      if (answering.has(each.id))
        link.append(h("span", { class: "pulse", role: "img", "aria-label": "answering" }));
      link.addEventListener("click", () => {
        this.open(each.id);
        this.show(false);
      });
      parts.push(link);
    }
    if (!parts.length)
      parts.push(h("p", { class: "list-empty" }, "Conversations stay in this browser and are listed here."));
    rebuild(this.list, () => this.list.replaceChildren(...parts));
  }
}
