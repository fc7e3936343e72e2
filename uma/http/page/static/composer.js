/** The box at the bottom: a message, files beside it, and the button that sends or stops. */

import { showFiles, textOf } from "./attachments.js";
import { announce, byId, DOUBLE_CLICK_MS, icon, number, toast } from "./dom.js";
import { Drafts } from "./drafts.js";
import { isPicture, pictureOf } from "./pictures.js";

const MAX_FILE_BYTES = 1_000_000;
const MAX_INPUT_PX = 240;
/** Files that a notice names. */
const MAX_NAMED = 3;

export class Composer {
  /** @param {{send: (text: string, files: Attachment[]) => void, stop: () => void, openSettings: () => void}} does */
  constructor(does) {
    this.does = does;
    this.input = byId("input", HTMLTextAreaElement);
    this.button = byId("send", HTMLButtonElement);
    this.list = byId("attached", HTMLUListElement);
    this.chips = byId("chips", HTMLButtonElement);
    /** @type {Attachment[]} */
    this.files = [];
    /** The one whose message this is; none before the first is shown. @type {{id: string, isNew: boolean} | undefined} */
    this.conversation = undefined;
    this.drafts = new Drafts(() => this.writing);
    this.isAnswering = false;
    /** What is in the box is sent as soon as the answer is complete. */
    this.isNext = false;
    this.hint = byId("hint", HTMLElement);
    this.clickedAt = -Infinity;
    this.maxBytes = MAX_FILE_BYTES;
    this.sees = false;
    const form = byId("composer", HTMLFormElement);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.click();
    });
    this.input.enterKeyHint = isTouch() ? "enter" : "send";
    this.input.addEventListener("keydown", (event) => {
      // A touch screen's keyboard has no other way to a new line, and the button is beside it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch()) return;
      event.preventDefault();
      if (!this.isAnswering) this.act();
      else if (this.hasSome) this.setNext(!this.isNext);
    });
    this.input.addEventListener("input", () => this.fit());
    this.listenForFiles(form);
    this.chips.addEventListener("click", () => this.does.openSettings());
    this.fit();
  }

  /** The button that sends is then the one that stops. */
  click() {
    if (performance.now() - this.clickedAt < DOUBLE_CLICK_MS) return;
    this.act();
    this.clickedAt = performance.now(); // only now: a second click has waited for as long as the first one took
  }

  act() {
    if (this.isAnswering) {
      this.does.stop();
      return;
    }
    if (!this.hasSome) return;
    const [text, files] = [this.input.value.trim(), this.files];
    this.input.value = "";
    this.files = [];
    this.showFiles();
    this.fit();
    this.does.send(text, files);
  }

  get hasSome() {
    return Boolean(this.input.value.trim() || this.files.length);
  }

  /** @param {boolean} isNext */
  setNext(isNext) {
    this.isNext = isNext;
    const words = isNext
      ? "This is sent as soon as the answer is complete. Enter takes it back."
      : this.isAnswering
        ? "Enter sends this once the answer is complete, Escape stops the answer."
        : "Enter sends, Shift and Enter begin a new line.";
    if (this.hint.textContent === words) return;
    this.hint.textContent = words;
    if (isNext) announce(words);
  }

  /** Show what was begun in this conversation. @param {string} id @param {boolean} isNew */
  show(id, isNew) {
    const isSame = id === this.conversation?.id;
    if (!isSame) for (const [name, draft] of this.writing) this.drafts.leave(name, draft);
    this.conversation = { id, isNew };
    if (isSame) return;
    this.isNext = false;
    const { text, files } = this.drafts.take(isNew ? "" : id);
    this.input.value = text;
    this.files = files;
    this.showFiles();
  }

  /** What is in the box, and the conversation that it is for. @returns {[string, import("./drafts.js").Draft][]} */
  get writing() {
    if (!this.conversation) return [];
    const { id, isNew } = this.conversation;
    return [[isNew ? "" : id, { text: this.input.value, files: this.files }]];
  }

  /** Whether the button stops or sends. @param {boolean} isAnswering @param {boolean} isWhole The last answer came to its own end. */
  setAnswering(isAnswering, isWhole) {
    const wasAnswering = this.isAnswering;
    this.isAnswering = isAnswering;
    // A button that is disabled loses the focus.
    if (!isAnswering && document.activeElement === this.button) this.focus();
    if (this.button.classList.toggle("is-stop", isAnswering) !== wasAnswering) {
      this.button.setAttribute("aria-label", isAnswering ? "Stop the answer" : "Send");
      this.button.replaceChildren(icon(isAnswering ? "stop" : "send"));
    }
    this.fit();
    const isDue = this.isNext && !isAnswering;
    this.setNext(this.isNext && isAnswering);
    if (isDue && isWhole) this.act();
  }

  /** For whatever has no better place for the focus. A touch screen's keyboard stays away until the box is touched. */
  focus() {
    (isTouch() ? byId("main", HTMLElement) : this.input).focus({ preventScroll: true });
  }

  /** As high as its text, up to a bound; and the button is there when there is something to send. */
  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, MAX_INPUT_PX)}px`;
    this.button.disabled = !this.isAnswering && !this.hasSome;
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
    document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    document.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      if (form.checkVisibility()) this.attach([...(event.dataTransfer?.files ?? [])]);
    });
    this.input.addEventListener("paste", (event) => {
      // Programs that copy text often add a picture of it: the text is what is meant.
      const pasted = event.clipboardData;
      if (pasted?.files.length && !pasted.types.includes("text/plain")) this.attach([...pasted.files]);
    });
  }

  /** Whether the model takes pictures. @param {boolean} sees */
  setSight(sees) {
    this.sees = sees;
    const label = sees ? "Attach pictures or text files" : "Attach a text file";
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
    for (const file of files) {
      const { text, image, fault } = await this.read(file);
      if (fault) {
        refused.push(file.name);
        reasons.add(fault);
        continue;
      }
      this.files.push({ name: file.name, text, ...(image && { image }) });
      announce(`${file.name} attached`);
    }
    if (refused.length)
      toast(`Not attached: ${named(refused)}. ${[...reasons].join(" ")}`, { label: "Close", run: () => {} });
    this.showFiles();
    this.input.focus();
  }

  /** A file's text, or its picture; or why it is none for the model. @param {File} file @returns {Promise<{text: string, image?: string, fault: string}>} */
  async read(file) {
    if (isPicture(file)) {
      if (!this.sees) return { text: "", fault: "The model sees no images." };
      const image = await pictureOf(file);
      return image ? { text: "", image, fault: "" } : { text: "", fault: "The browser cannot read this picture." };
    }
    if (file.size > this.maxBytes) {
      const most = number(Math.round(this.maxBytes / 1_000));
      return { text: "", fault: `The server takes no file over ${most} KB.` };
    }
    const text = await file.arrayBuffer().then(textOf, () => null);
    return text === null ? { text: "", fault: "The model reads text only." } : { text, fault: "" };
  }

  showFiles() {
    showFiles(this.list, this.files, (file) => {
      this.files = this.files.filter((each) => each !== file);
      this.showFiles();
      this.input.focus();
    });
    this.fit();
  }
}

function isTouch() {
  return matchMedia("(pointer: coarse)").matches;
}

/** The first few names, and how many more there are. @param {string[]} names */
function named(names) {
  const more = names.length - MAX_NAMED;
  return names.slice(0, MAX_NAMED).join(", ") + (more > 0 ? ` and ${number(more)} more` : "");
}
