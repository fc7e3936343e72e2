/** Files beside a message that is being written: their text, and each with its name and a way to take it away. */

import { h, icon, iconButton, number } from "./dom.js";
import { thumbnail } from "./pictures.js";

/** In text there is none of these: all control characters but tabs, line ends, form feeds and escapes. */
const NO_TEXT = /[\0-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\ufffd]/;
/** Of so many bytes at the beginning the encoding is told. */
const LOOKED_AT_BYTES = 4_096;
const BYTES_A_TOKEN = 4;
const MOST_CHARS_A_TOKEN = 8;
/** A text that is longer than this is measured, and where it was pasted it can be a file instead. */
export const LONG_CHARS = 4_096;
/** It is measured once nothing was typed for so long. */
export const MEASURE_MS = 400;

/** A file's text in whatever encoding it has; null where it is none. @param {ArrayBuffer} data @returns {string | null} */
export function textOf(data) {
  for (const encoding of encodingsOf(new Uint8Array(data, 0, Math.min(data.byteLength, LOOKED_AT_BYTES)))) {
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
  // UTF-16 without its mark: of European text every other byte is 0.
  const zeros = [0, 0];
  head.forEach((byte, at) => (zeros[at % 2] += byte === 0 ? 1 : 0));
  if (zeros[1] > head.length / 8 && zeros[1] > 4 * zeros[0]) return ["utf-16le"];
  if (zeros[0] > head.length / 8 && zeros[0] > 4 * zeros[1]) return ["utf-16be"];
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
  const fault = isTooLong(file, most) && h("span", { class: "fault" }, `Too long: the context window is ${number(most)}`);
  return [icon("file"), h("span", {}, name), h("span", { class: "extent" }, extent), ...(fault ? [fault] : [])];
}

/** Whether a model surely cannot read it whole: of a text that is not counted, by how long tokens can be. @param {Attachment} file @param {number} most */
export const isTooLong = ({ text, tokens = text.length / MOST_CHARS_A_TOKEN }, most) => tokens > most;

/** What a person is told of a document that the model cannot read whole. @param {Attachment | undefined} tooLong */
export const unsendable = (tooLong) => (tooLong ? `Remove “${tooLong.name}” to send.` : "");

/** Show `files` in `list`. @param {HTMLElement} list @param {Attachment[]} files @param {(file: Attachment) => void} remove @param {number} [most] As for `labelOf`. */
export function showFiles(list, files, remove, most) {
  const items = files.map((file) => {
    const label = file.image ? [thumbnail(file)] : labelOf(file, most);
    const away = iconButton("x", `Remove ${file.name}`, () => remove(file), "small");
    return h("li", { class: file.image ? "file is-picture" : "file", title: file.name }, ...label, away);
  });
  list.replaceChildren(...items);
  list.hidden = !items.length;
}

/** Have the tokens be counted of those whose are not known, then call `done` with each. @param {Attachment[]} files @param {(text: string) => Promise<number | undefined>} count @param {(file: Attachment, tokens: number | undefined) => void} done */
export function countTokens(files, count, done) {
  for (const file of files) if (file.text && file.tokens === undefined) void count(file.text).then((tokens) => done(file, tokens));
}
