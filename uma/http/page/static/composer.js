/** The box at the bottom: a message, files beside it, and the button that sends or stops. */

import { Extent, LONG_CHARS } from "./attachments.js";
import { readFile, Unreadable } from "./documents.js";
import { announce, byId, clearToasts, copyOf, DOUBLE_CLICK_MS, h, icon, number, rebuild, say, toast } from "./dom.js";
import { Drafts, joined } from "./drafts.js";
import { isPicture, pictureOf } from "./pictures.js";

/** A document can be much more than its text. */
const MAX_FILE_BYTES = 100_000_000;
const MAX_INPUT_PX = 240;
/** A longer text is a file: a browser lays all of the box out again at each key. */
const MAX_BOX_CHARS = 32_768;
/** Files that a notice names. */
const MAX_NAMED = 3;

export class Composer {
  /** @param {{send: (text: string, files: Attachment[]) => void, stop: () => void, blind: () => string, openSettings: () => void, count: (text: string) => Promise<number | undefined>, model: () => string, editLast: () => void}} does */
  constructor(does) {
    this.does = does;
    this.input = byId("input", HTMLTextAreaElement);
    this.button = byId("send", HTMLButtonElement);
    this.queuer = byId("queue", HTMLButtonElement);
    this.list = byId("attached", HTMLUListElement);
    this.chips = byId("chips", HTMLButtonElement);
    const parts = { list: this.list, extent: byId("extent", HTMLElement), fault: byId("unsendable", HTMLElement) };
    /** What is in the box and beside it. */
    this.extent = new Extent(parts, {
      count: async (text) => {
        const [model, tokens] = [does.model(), await does.count(text)];
        return model === does.model() ? tokens : undefined;
      },
      most: () => this.maxTokens,
      changed: () => this.fit(),
      removed: () => this.input.focus(),
    });
    /** The one whose message this is; none before the first is shown. @type {{id: string, isNew: boolean} | undefined} */
    this.conversation = undefined;
    this.drafts = new Drafts(() => this.writing);
    this.isAnswering = this.isUndecided = false;
    this.queue = byId("queued", HTMLUListElement);
    /** Why the box has a text that was to be sent. */
    this.notice = byId("given-back", HTMLElement);
    this.clickedAt = -Infinity;
    this.maxBytes = Infinity;
    this.maxTokens = Infinity;
    /** The model whose tokens the files are told in. */
    this.countedFor = "";
    /** Files that are still being read, which a message waits for. */
    this.reading = 0;
    this.sees = false;
    const form = byId("composer", HTMLFormElement);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.click();
    });
    this.input.enterKeyHint = isTouch() ? "enter" : "send";
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" && !this.input.value && !event.isComposing) this.editLast();
      // A touch screen's keyboard has no other way to a new line, and the button is beside it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch()) return;
      event.preventDefault();
      if (!this.isAnswering) this.act();
      else this.enqueue();
    });
    this.input.addEventListener("input", () => this.fit());
    this.listenForFiles(form);
    this.chips.addEventListener("click", () => this.does.openSettings());
    this.queuer.addEventListener("click", () => this.enqueue());
    this.fit();
  }

  /** The button that sends is then the one that stops. */
  click() {
    if (performance.now() - this.clickedAt < DOUBLE_CLICK_MS) return;
    this.act();
    this.clickedAt = performance.now(); // only now: a second click has waited for as long as the first one took
  }

  act() {
    if (this.isAnswering) return this.does.stop();
    if (!this.canSend) return;
    const { text, files } = this.draft;
    this.fill({ text: "", files: [] });
    this.does.send(text.trim(), files);
  }

  /** What is in the box. @returns {Draft} */
  get draft() {
    return { text: this.input.value, files: this.extent.files };
  }

  get hasSome() {
    return Boolean(this.input.value.trim() || this.extent.files.length);
  }

  get canSend() {
    return this.hasSome && !this.reading && !this.extent.tooLong;
  }

  /** Put this into the box. @param {Draft} draft */
  fill({ text, files }) {
    clearToasts("attach");
    say(this.notice, "");
    this.input.value = text;
    this.extent.files = files;
    this.fit();
    this.count();
  }

  /** @param {[string, Draft][]} queued */
  setQueue(queued) {
    this.drafts.queued = queued;
    this.drafts.keep(); // a page that is put away and killed must not send again what was sent meanwhile
    this.showQueue();
  }

  /** @param {Draft[]} gone */
  unqueue(...gone) {
    this.setQueue(this.drafts.queued.filter(([, draft]) => !gone.includes(draft)));
  }

  /** Have what is in the box be sent once the answer ends. */
  enqueue() {
    if (!this.canSend || !this.conversation) return;
    const { text, files } = this.draft;
    this.setQueue([...this.drafts.queued, [this.conversation.id, { text: text.trim(), files, isQueued: true }]]);
    this.fill({ text: "", files: [] });
    announce("Queued. The up arrow key edits it.");
    this.focus(); // the button is gone
  }

  /** Take these out of the queue, into their conversation's box and before what is there. @param {string} id @param {Draft[]} queued */
  giveBack(id, queued = this.drafts.queueOf(id)) {
    if (!queued.length) return;
    this.unqueue(...queued);
    if (id !== this.conversation?.id) return this.drafts.leave(id, joined([...queued, this.drafts.take(id)]));
    this.fill(joined([...queued, this.draft]));
  }

  /** What its conversation sends next, which is queued no more. @param {string} id */
  next(id) {
    const [first] = this.drafts.queueOf(id);
    if (first) this.unqueue(first);
    return first;
  }

  showQueue() {
    const id = this.conversation?.id ?? "";
    const rows = this.drafts.queueOf(id).map((draft) => {
      const [row, part] = copyOf("queued-row");
      const words = [draft.text, ...draft.files.map(({ name }) => name)].filter(Boolean).join(" · ");
      row.title = part("what").textContent = words;
      if (this.isUndecided) part("when").textContent = "Waits until you choose an answer";
      const act = (/** @type {string} */ name, /** @type {string} */ label, /** @type {() => void} */ run) => {
        part(name).setAttribute("aria-label", `${label} “${words}”`);
        part(name).onclick = () => {
          run();
          this.focus();
        };
      };
      act("edit-it", "Edit", () => this.giveBack(id, [draft]));
      act("drop-it", "Do not send", () => this.unqueue(draft));
      return row;
    });
    rebuild(this.queue, () => this.queue.replaceChildren(...rows), () => this.focus());
    this.queue.hidden = !rows.length;
  }

  /** What is queued last, or else the last question. */
  editLast() {
    const last = this.drafts.queueOf(this.conversation?.id ?? "").at(-1);
    if (last && this.conversation) this.giveBack(this.conversation.id, [last]);
    else this.does.editLast();
  }

  /** Show what was begun in this conversation. @param {string} id @param {boolean} isNew */
  show(id, isNew) {
    const isSame = id === this.conversation?.id;
    if (!isSame) for (const [name, draft] of this.writing) this.drafts.leave(name, draft);
    this.conversation = { id, isNew };
    if (isSame) return;
    this.fill(this.drafts.take(isNew ? "" : id));
    this.showQueue();
  }

  /** The same, and the conversation that it is for. @returns {[string, Draft][]} */
  get writing() {
    if (!this.conversation) return [];
    const { id, isNew } = this.conversation;
    return [[isNew ? "" : id, this.draft]];
  }

  /** Whether the button stops or sends. @param {boolean} isAnswering @param {boolean} isUndecided What is queued waits until the person has chosen an answer. */
  setAnswering(isAnswering, isUndecided) {
    const [wasAnswering, wasUndecided] = [this.isAnswering, this.isUndecided];
    Object.assign(this, { isAnswering, isUndecided });
    if (isUndecided !== wasUndecided) this.showQueue();
    // A button that is disabled loses the focus.
    if (!isAnswering && document.activeElement === this.button) this.focus();
    if (this.button.classList.toggle("is-stop", isAnswering) !== wasAnswering) {
      this.button.setAttribute("aria-label", isAnswering ? "Stop the answer" : "Send");
      this.button.replaceChildren(icon(isAnswering ? "stop" : "send"));
    }
    this.fit();
  }

  /** For whatever has no better place for the focus. A touch screen's keyboard stays away until the box is touched. */
  focus() {
    (isTouch() ? byId("main", HTMLElement) : this.input).focus({ preventScroll: true });
  }

  /** As high as its text, up to a bound; and the button is there when there is something to send. */
  fit() {
    this.extent.write(this.input.value);
    // A long text is as high as it can be, and is not laid out to learn so.
    if (!this.extent.isLong) this.input.style.height = "auto";
    this.input.style.height = `${this.extent.isLong ? MAX_INPUT_PX : Math.min(this.input.scrollHeight, MAX_INPUT_PX)}px`;
    this.queuer.hidden = !this.isAnswering || !this.canSend;
    this.button.disabled = !this.isAnswering && !this.canSend;
    if (this.hasSome) return;
    clearToasts("paste");
    say(this.notice, "");
  }

  /** @param {HTMLFormElement} form */
  listenForFiles(form) {
    const picker = byId("attach-file", HTMLInputElement);
    byId("attach", HTMLButtonElement).addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      this.attach([...(picker.files ?? [])]);
      picker.value = "";
    });
    // Anywhere on the page: a browser opens a file that a page does not take, and the chat is gone.
    const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files");
    const frame = (/** @type {boolean} */ isShown) => document.body.classList.toggle("is-target", isShown && form.checkVisibility());
    document.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      frame(true);
    });
    document.addEventListener("dragleave", ({ relatedTarget }) => relatedTarget === null && frame(false));
    document.addEventListener("drop", (event) => {
      frame(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      if (form.checkVisibility()) this.attach([...(event.dataTransfer?.files ?? [])]);
    });
    this.input.addEventListener("paste", (event) => {
      // Programs that copy text often add a picture of it: the text is what is meant.
      const pasted = event.clipboardData;
      const text = pasted?.getData("text/plain") ?? "";
      if (text.length > LONG_CHARS) this.offerFile(text);
      else if (!text && pasted?.files.length) this.attach([...pasted.files]);
    });
    this.input.addEventListener("beforeinput", (event) => {
      const { length } = event.data ?? "";
      if (length <= LONG_CHARS || length + this.input.value.length <= MAX_BOX_CHARS) return;
      event.preventDefault();
      void this.attach([fileOf(event.data ?? "")]);
      toast("This text is too long for the box: it is attached as a file.", undefined, "paste");
    });
  }

  /** What was pasted is long: it can be a file beside the message. @param {string} text */
  offerFile(text) {
    const pasted = text.replace(/\r\n?/g, "\n");
    const run = () => {
      this.input.value = this.input.value.replace(pasted, () => "");
      this.fit();
      void this.attach([fileOf(pasted)]);
    };
    toast("This is a long text.", { label: "Attach as a file", run }, "paste");
  }

  /** Whether the model takes pictures. @param {boolean} sees */
  setSight(sees) {
    this.sees = sees;
    const label = sees ? "Attach pictures or documents" : "Attach a document";
    const button = byId("attach", HTMLButtonElement);
    button.setAttribute("aria-label", label);
    button.title = label;
  }

  /** @param {File[]} files */
  async attach(files) {
    /** @type {string[]} */
    const refused = [];
    /** @type {Set<string>} */
    const reasons = new Set();
    const home = this.extent.files; // another conversation can be shown before all are read
    clearToasts("attach");
    for (const file of files) {
      this.reading++;
      this.list.hidden = false;
      this.list.append(h("li", { class: "file" }, h("span", { class: "pulse" }), file.name));
      try {
        const found = { name: file.name, ...(await this.read(file)) };
        const isSame = (/** @type {Attachment} */ { name, text, image }) => name === found.name && text === found.text && image === found.image;
        if (home.some(isSame)) throw new Unreadable("It is attached already.");
        home.push(found);
        announce(`${file.name} attached`);
      } catch (error) {
        if (!(error instanceof Unreadable)) throw error;
        refused.push(file.name);
        reasons.add(error.message);
      } finally {
        this.reading--;
      }
      this.extent.show();
    }
    this.count();
    if (refused.length) toast(`Not attached: ${named(refused)}. ${[...reasons].join(" ")}`, undefined, "attach");
    this.input.focus();
  }

  /** Tell of how many tokens the files and a long text are, for the model that answers now. */
  count() {
    const [{ typed, files }, model] = [this.extent, this.does.model()];
    if (model !== this.countedFor) for (const each of [typed, ...files]) delete each.tokens;
    this.countedFor = model;
    this.extent.count();
  }

  /** A file's text, or its picture. Throws `Unreadable`. @param {File} file @returns {Promise<{text: string, image?: string}>} */
  async read(file) {
    if (!file.size) throw new Unreadable("It is empty.");
    if (isPicture(file)) {
      if (!this.sees) throw new Unreadable(this.does.blind());
      const image = await pictureOf(file);
      if (image) return { text: "", image };
      throw new Unreadable("The browser cannot read this picture.");
    }
    const text = file.size > MAX_FILE_BYTES ? null : await readFile(file);
    if (text === null || new Blob([text]).size > this.maxBytes)
      throw new Unreadable(`A file can have at most ${number(Math.round(this.maxBytes / 1_000))} KB.`);
    return { text };
  }
}

/** A text that was put into the box, as a file beside it. @param {string} text */
function fileOf(text) {
  return new File([text.replace(/\r\n?/g, "\n")], "pasted.txt", { type: "text/plain" });
}

function isTouch() {
  return matchMedia("(pointer: coarse)").matches;
}

/** The first few names, and how many more there are. @param {string[]} names */
function named(names) {
  const more = names.length - MAX_NAMED;
  return names.slice(0, MAX_NAMED).join(", ") + (more > 0 ? ` and ${number(more)} more` : "");
}
