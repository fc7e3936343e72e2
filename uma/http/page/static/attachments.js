/** What is beside a message that is being written: files, each with its name and a way to take it away; and how much of it
 * all, the text included, a model has to read. */

import { h, icon, iconButton, number, say } from "./dom.js";
import { thumbnail } from "./pictures.js";

/** In text there is none of these: all control characters but tabs, line ends, form feeds and escapes. */
const NO_TEXT = /[\0-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\ufffd]/;
const BYTES_A_TOKEN = 4;
const MOST_CHARS_A_TOKEN = 8;
/** A text that is longer than this is measured, and where it was pasted it can be a file instead. */
export const LONG_CHARS = 4_096;
/** It is measured once nothing was typed for so long. */
const MEASURE_MS = 400;

/** A file's text in whatever encoding it has; null where it is none. @param {ArrayBuffer} data @returns {string | null} */
export function textOf(data) {
  for (const encoding of encodingsOf(new Uint8Array(data))) {
    try {
      const text = new TextDecoder(encoding, { fatal: true }).decode(data);
      if (!NO_TEXT.test(text)) return text;
    } catch {
      // it is in another one
    }
  }
  return null;
}

/** The encodings that a file can have which begins like this, the likeliest first. @param {Uint8Array} head */
function encodingsOf(head) {
  if (head[0] === 0xff && head[1] === 0xfe) return ["utf-16le"];
  if (head[0] === 0xfe && head[1] === 0xff) return ["utf-16be"];
  return ["utf-8", "windows-1252"]; // which Latin-1 is a part of
}

/** A file's name, and how much a model has to read of it. @param {Attachment} file @param {number} [most] Tokens that the model can read. */
export function labelOf(file, most = Infinity) {
  const { name, text, tokens } = file;
  const bytes = new Blob([text]).size;
  const size = bytes < 1_000 ? `${bytes} bytes` : `${number(bytes / 1_000, bytes < 10_000 ? 1 : 0)} KB`;
  // While no model is there to count them: about as many as texts have as a rule.
  const known = tokens ?? Number((bytes / BYTES_A_TOKEN).toPrecision(2));
  const extent = `${size} · ${tokens === undefined ? "about " : ""}${number(known)} tokens`;
  const isSure = isTooLong(file, most);
  const words = `${isSure ? "Too" : "Probably too"} long: the context window is ${number(most)}`;
  const fault = (isSure || known > most) && h("span", { class: "fault" }, words);
  return [icon("file"), h("span", {}, name), h("span", { class: "extent" }, extent), ...(fault ? [fault] : [])];
}

/** Whether a model surely cannot read it whole: of a text that is not counted, by how long tokens can be. @param {Attachment} file @param {number} most */
const isTooLong = ({ text, tokens = text.length / MOST_CHARS_A_TOKEN }, most) => tokens > most;

export class Extent {
  /** @param {Record<"list" | "extent" | "fault", HTMLElement>} parts Where it shows the files, how long a long text is, and what cannot be sent. @param {{count: (text: string) => Promise<number | undefined>, most: () => number, changed: () => void, removed: () => void}} does `most`: tokens that the model can read. `removed` follows `changed` where a person has removed a file. */
  constructor(parts, does) {
    this.parts = parts;
    this.does = does;
    /** @type {Attachment} */
    this.typed = { name: "Your text", text: "" };
    /** @type {Attachment[]} */
    this.files = [];
  }

  /** What the model cannot read whole: the message waits until it is shorter. */
  get tooLong() {
    return [this.typed, ...this.files].find((each) => isTooLong(each, this.does.most()));
  }

  get isLong() {
    return this.typed.text.length > LONG_CHARS;
  }

  /** The text is this now. At each key: a long one is measured only once the keys rest. @param {string} text */
  write(text) {
    if (text === this.typed.text) return;
    this.typed = { name: this.typed.name, text };
    clearTimeout(this.measuring);
    if (this.isLong) this.measuring = setTimeout(() => this.count(), MEASURE_MS);
    else this.parts.extent.replaceChildren();
    this.warn();
  }

  /** Have the tokens be counted of all whose are not known, and show what is known. */
  count() {
    this.show();
    for (const each of this.isLong ? [this.typed, ...this.files] : this.files)
      if (each.text && each.tokens === undefined)
        void this.does.count(each.text).then((tokens) => {
          each.tokens ??= tokens;
          if (each === this.typed || this.files.includes(each)) this.show();
        });
  }

  show() {
    const { list, extent } = this.parts;
    const most = this.does.most();
    const items = this.files.map((file) => {
      const remove = () => {
        this.files.splice(this.files.indexOf(file), 1);
        this.show();
        this.does.removed();
      };
      const label = file.image ? [thumbnail(file)] : labelOf(file, most);
      const away = iconButton("x", `Remove ${file.name}`, remove, "small");
      return h("li", { class: file.image ? "file is-picture" : "file", title: file.name }, ...label, away);
    });
    list.replaceChildren(...items);
    list.hidden = !items.length;
    extent.replaceChildren(...(this.isLong ? labelOf(this.typed, most) : []));
    this.warn();
    this.does.changed();
  }

  warn() {
    const { tooLong } = this;
    const what = tooLong === this.typed ? "Shorten your text" : `Remove “${tooLong?.name}”`;
    say(this.parts.fault, tooLong ? `${what} to send.` : "");
  }
}
