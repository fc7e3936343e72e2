/** The last requests of the server, where it keeps them: a list that can be searched, and each as it was sent. */

import { ApiError, ask } from "./api.js";
import { byId, duration, h, number } from "./dom.js";

/** @typedef {{number: number, model: string, origin: string, came_at: number, took_ms: number, reason: string, prompt_tokens: number, cached_tokens: number, completion_tokens: number}} Head */

const LISTED = 20;

export class HistoryPanel {
  constructor() {
    this.element = byId("history", HTMLElement);
    this.input = byId("history-search", HTMLInputElement);
    this.list = byId("history-list", HTMLUListElement);
    this.more = byId("history-more", HTMLButtonElement);
    this.note = byId("history-note", HTMLElement);
    /** @type {Head[]} */
    this.heads = [];
    this.input.addEventListener("change", () => this.load());
    this.more.addEventListener("click", () => this.load(this.heads.at(-1)?.number));
  }

  /** Show what there is now. @param {number} [before] The number of the last that is shown: those before it are added. */
  async load(before) {
    this.element.hidden = false;
    const query = new URLSearchParams({ limit: String(LISTED) });
    if (this.input.value.trim()) query.set("search", this.input.value.trim());
    if (before) query.set("before", String(before));
    try {
      const { data, has_more } = await ask(`v1/history?${query}`);
      this.heads = before ? [...this.heads, ...data] : data;
      this.list.replaceChildren(...this.heads.map((head) => this.row(head)));
      this.more.hidden = !has_more;
      this.note.textContent = this.heads.length ? "" : "Nothing found.";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.note.textContent = error.message;
    }
  }

  /** @param {Head} head */
  row(head) {
    const { number: name, model, origin, came_at, took_ms, reason } = head;
    const at = new Date(1_000 * came_at).toLocaleString("en-GB", { dateStyle: "short", timeStyle: "medium" });
    const cached = head.cached_tokens ? ` (${number(head.cached_tokens)} cached)` : "";
    const extent = `prompt ${number(head.prompt_tokens)}${cached} · answer ${number(head.completion_tokens)} tokens · ${duration(took_ms)} · ${reason}`;
    const summary = h("summary", {}, h("b", {}, `${name} `), [at, model, origin].filter(Boolean).join(" · "), h("span", {}, extent));
    const whole = h("details", {}, summary);
    whole.addEventListener("toggle", () => whole.open && whole.children.length === 1 && void this.show(head, whole));
    return h("li", {}, whole);
  }

  /** A request whole, and where its prompt parts from the one before it of the same program. @param {Head} head @param {HTMLElement} into */
  async show({ number: name, model, origin }, into) {
    const before = this.heads.find((each) => each.number < name && each.model === model && each.origin === origin);
    try {
      const { prompt, answer, parting } = await ask(`v1/history/${name}${before ? `?against=${before.number}` : ""}`);
      const text = (/** @type {string} */ title, /** @type {string} */ words) => [
        h("h3", {}, title),
        h("pre", { tabindex: 0, role: "region", "aria-label": `${title} of ${name}`, dir: "auto" }, words),
      ];
      const parted = parting && `The first ${number(parting.common)} tokens are those of request ${before?.number}; then, in ${parting.places[1]}, “${parting.tokens[1]}” is in place of “${parting.tokens[0]}”.`;
      into.append(parted ? h("p", {}, parted) : "", ...text("Prompt", prompt), ...text("Answer", answer));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      into.append(h("p", { class: "fault" }, error.message));
    }
  }
}
