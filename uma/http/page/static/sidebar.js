/** The list of conversations, the menu of what can be done with one, and the way to both on narrow screens. */

import { arrange, byId, h, icon, iconButton } from "./dom.js";
import { keep, kept } from "./local.js";

const NARROW = "(max-width: 52rem)";
/** Where it is kept that the list is hidden on a wide screen, too. */
const HIDDEN_KEY = "uma.sidebar";

/** @param {number} at */
function when(at) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - new Date(at).setHours(0, 0, 0, 0)) / 86_400_000);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days < 7) return "This week";
  return new Date(at).toLocaleDateString("en-GB", { month: "long", year: "numeric" });
}

export class Sidebar {
  /** @param {{open: (id: string) => void, acts: (id: string) => Act[]}} does */
  constructor(does) {
    this.does = does;
    this.element = byId("sidebar", HTMLElement);
    this.list = byId("conversations", HTMLElement);
    this.menu = byId("entry-menu", HTMLElement);
    this.opener = byId("open-sidebar", HTMLButtonElement);
    this.scrim = byId("scrim", HTMLElement);
    this.narrow = matchMedia(NARROW);
    /** The conversation that is shown. @type {string | undefined} */
    this.current = undefined;
    document.body.classList.toggle("has-no-list", kept(HIDDEN_KEY) === "hidden");
    this.opener.addEventListener("click", () => (this.narrow.matches ? this.show(true) : this.toggle()));
    byId("close-sidebar", HTMLButtonElement).addEventListener("click", () => this.show(false));
    this.scrim.addEventListener("click", () => this.show(false));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.element.classList.contains("is-open") || event.defaultPrevented) return;
      event.preventDefault(); // it is the list that closes, not the answer that ends
      this.show(false);
    });
    this.narrow.addEventListener("change", () => this.show(false));
    this.menu.addEventListener("keydown", (event) => {
      const items = [...this.menu.querySelectorAll("button")];
      const at = items.findIndex((each) => each === document.activeElement);
      const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      items.at(to % items.length)?.focus();
    });
    this.menu.addEventListener("focusout", ({ relatedTarget }) => {
      if (relatedTarget instanceof Node && !this.menu.contains(relatedTarget)) this.menu.hidePopover();
    });
    this.show(false);
  }

  /** Show the list, or hide it. */
  toggle() {
    if (this.narrow.matches) return this.show(!this.element.classList.contains("is-open"));
    const isHidden = document.body.classList.toggle("has-no-list");
    keep(HIDDEN_KEY, isHidden ? "hidden" : null);
    this.show(false);
  }

  /** On narrow screens the list lies over the page, and is out of reach while it is closed. @param {boolean} isShown */
  show(isShown) {
    const isDrawer = this.narrow.matches;
    const wasShown = this.element.classList.contains("is-open");
    this.element.classList.toggle("is-open", isDrawer && isShown);
    this.element.inert = isDrawer && !isShown;
    this.element.role = isDrawer ? "dialog" : "complementary";
    this.element.ariaModal = isDrawer ? "true" : null;
    // What lies under the list is out of reach while it is open, the way around the list too.
    for (const under of ["page", "skip"]) byId(under, HTMLElement).inert = isDrawer && isShown;
    this.scrim.hidden = !(isDrawer && isShown);
    this.opener.setAttribute("aria-expanded", String(isDrawer && isShown));
    if (!isDrawer) return;
    if (isShown) this.element.querySelector("button")?.focus();
    else if (wasShown) this.opener.focus();
  }

  /** What is there stays and is changed: of a button that is built again between a press and its release, a click is lost. @param {Conversation[]} conversations The newest first. @param {string | undefined} current @param {Set<string>} answering */
  render(conversations, current, answering) {
    const before = new Map([...this.list.children].map((each) => [keyOf(each), each]));
    const sorted = [...conversations].sort((a, b) => Number(b.pinned ?? false) - Number(a.pinned ?? false));
    /** @type {Element[]} */
    const parts = [];
    let heading = "";
    for (const each of sorted) {
      const place = each.pinned ? "Pinned" : when(each.updated);
      if (place !== heading) {
        heading = place;
        parts.push(before.get(heading) ?? h("p", { class: "list-head" }, heading));
      }
      const entry = before.get(each.id) ?? this.entry(each.id);
      update(entry, each.title || "New chat", each.id === current, answering.has(each.id));
      parts.push(entry);
    }
    byId("no-conversations", HTMLElement).hidden = parts.length > 0;
    arrange(this.list, parts);
    if (current !== this.current) this.list.querySelector(".entry:has([aria-current])")?.scrollIntoView({ block: "nearest" });
    this.current = current;
  }

  /** A conversation's button, and the one for what can be done with it. @param {string} id */
  entry(id) {
    const open = () => (this.does.open(id), this.show(false));
    const pulse = h("span", { class: "pulse", role: "img", "aria-label": "answering" });
    const button = h("button", { type: "button", class: "conversation", onclick: open }, h("span", { class: "name", dir: "auto" }), pulse);
    const more = iconButton("more", "", () => this.openMenu(more, id, button), "small");
    return h("div", { class: "entry", "data-id": id }, button, more);
  }

  /** @param {HTMLElement} button @param {string} id @param {HTMLElement | null} shown What shows its name in the list. */
  openMenu(button, id, shown) {
    const items = this.does.acts(id).map(({ label, icon: name, isDanger, run }) => {
      const act = () => (this.menu.hidePopover(), run(shown));
      return h("button", { type: "button", class: isDanger ? "danger" : "", onclick: act }, name && icon(name), label);
    });
    this.menu.replaceChildren(...items);
    this.menu.showPopover({ source: button }); // Escape gives the focus back to it
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

/** @param {Element} entry @param {string} title @param {boolean} isCurrent @param {boolean} isAnswering */
function update(entry, title, isCurrent, isAnswering) {
  const [button, more] = entry.querySelectorAll("button");
  const [name, pulse] = button.children;
  if (name.textContent !== title) {
    name.textContent = title;
    more.setAttribute("aria-label", `More for ${title}`);
    more.title = "More";
  }
  button.ariaCurrent = isCurrent ? "true" : null;
  pulse.toggleAttribute("hidden", !isAnswering);
}
