/** The text of files that are more than text: PDF by pdf.js in a worker, Word files by their XML, pages by the sanitizer.
 * Each is bounded in time and size: a file can be made to be neither read nor given up. */

import { textOf } from "./attachments.js";
import { addressOf, trusted } from "./library.js";

/** A PDF that takes longer to be read is given up. */
const READ_MS = 30_000;
/** Largest size of a Word file's XML, which can be a thousandth of that in the file. */
const MAX_XML_BYTES = 20_000_000;
/** So many tags the sanitizer looks at in a second. */
const MAX_TAGS = 100_000;
/** An archive is unpacked in parts of so many bytes, each of which can become a thousand times as large. */
const PART_BYTES = 16_384;
/** Tags that begin a line, in a page. */
const LINES = /<\/?(?:address|article|aside|blockquote|br|dd|div|dl|dt|figcaption|figure|footer|form|h[1-6]|header|hr|li|main|nav|ol|p|pre|section|table|tr|ul)\b/gi;
/** What a Word file's text is made of: a piece of it, a tab, or the end of a line, of a table's cell, of a paragraph. */
const PIECES = /<w:t(?: [^<>]*)?>([^<]*)<\/w:t>|<w:(tab)\/>|<w:(?:br|cr)\b[^<>]*>|<\/w:p>\s*(<\/w:tc>)?|<\/w:tr>/g;
/** @type {Record<string, string>} */
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'" };

/** A file that has no text for a model. Its message is for the person. */
export class Unreadable extends Error {}

/** A file's text. Throws `Unreadable`. @param {File} file */
export async function readFile(file) {
  const data = await file.arrayBuffer().catch(() => {
    throw new Unreadable("The browser could not read it.");
  });
  const head = new TextDecoder("latin1").decode(data.slice(0, 1_024));
  const isPdf = head.includes("%PDF-");
  const damaged = () => {
    throw new Unreadable("The file is damaged.");
  };
  const isArchive = head.startsWith("PK\x03\x04");
  const text = isPdf ? await textOfPdf(data) : isArchive ? await textOfWord(data).catch(damaged) : textOf(data);
  if (text === null) throw new Unreadable("Only text, PDF, Word (.docx) and HTML can be attached.");
  if (isPdf && !text.trim()) throw new Unreadable("The PDF has no text: its pages are pictures.");
  return /\.x?html?$/i.test(file.name) || file.type === "text/html" ? textOfHtml(text) : text;
}

/** @param {ArrayBuffer} data */
async function textOfPdf(data) {
  const { getDocument, PDFWorker } = await import(addressOf("pdf.mjs"));
  const port = new Worker(trusted("pdf.worker.mjs"), { type: "module" });
  const late = new Promise((_, reject) =>
    setTimeout(() => reject(new Unreadable("Reading it takes too long.")), READ_MS),
  );
  try {
    return await Promise.race([pagesOf(getDocument({ data, worker: PDFWorker.create({ port }), cMapUrl: addressOf("cmaps/") })), late]);
  } catch (error) {
    if (error instanceof Unreadable) throw error;
    const isLocked = error instanceof Error && error.name === "PasswordException";
    throw new Unreadable(isLocked ? "The PDF is locked with a password." : "The PDF is damaged.");
  } finally {
    port.terminate();
  }
}

/** @param {{promise: Promise<any>}} task Of pdf.js. @returns {Promise<string>} */
async function pagesOf(task) {
  const pdf = await task.promise;
  const pages = [];
  for (let number = 1; number <= pdf.numPages; number++) {
    const { items } = await (await pdf.getPage(number)).getTextContent();
    pages.push(items.map((/** @type {any} */ { str = "", hasEOL }) => (hasEOL ? `${str}\n` : str)).join(""));
  }
  return pages.join("\n\n");
}

/** The text of a Word file; null of another archive. @param {ArrayBuffer} data */
async function textOfWord(data) {
  const xml = await unpacked(data, "word/document.xml");
  if (xml === null) return null;
  const words = xml.replace(/^[^]*?<w:body>/, "").matchAll(PIECES);
  return Array.from(words, ([, text, tab, cell]) => {
    if (text === undefined) return tab || cell ? "\t" : "\n";
    return text.replace(/&(#x?)?(\w+);/g, (known, sign, name) =>
      sign ? String.fromCodePoint(parseInt(name, sign === "#" ? 10 : 16)) : (ENTITIES[name] ?? known),
    );
  }).join("");
}

/** One file of an archive as text; null where there is none of this name. @param {ArrayBuffer} data @param {string} name @returns {Promise<string | null>} */
async function unpacked(data, name) {
  const { Unzip, UnzipInflate, unzipSync } = await import(addressOf("fflate.mjs"));
  const decoder = new TextDecoder();
  /** @type {[string | null, number]} */
  let [text, size] = [null, 0];
  const zip = new Unzip((/** @type {any} */ file) => {
    if (file.name !== name) return;
    file.ondata = (/** @type {Error | null} */ error, /** @type {Uint8Array} */ part) => {
      if (error || (size += part.length) > MAX_XML_BYTES) throw error ?? new RangeError("a file that is too large");
      text = (text ?? "") + decoder.decode(part, { stream: true });
    };
    file.start();
  });
  zip.register(UnzipInflate);
  for (let at = 0; at < data.byteLength; at += PART_BYTES)
    zip.push(new Uint8Array(data.slice(at, at + PART_BYTES)), at + PART_BYTES >= data.byteLength);
  let listed = 0; // by the archive's directory, which stands at its end: without it a part can be missing
  const filter = (/** @type {any} */ file) => void (listed += file.name === name ? file.originalSize : 0);
  unzipSync(new Uint8Array(data), { filter });
  if (listed !== size) throw new RangeError("a file that its directory does not tell");
  return text;
}

/** What can be read of a page. @param {string} html */
function textOfHtml(html) {
  if (html.split("<", MAX_TAGS).length === MAX_TAGS) throw new Unreadable("The page is too long.");
  const clean = DOMPurify.sanitize(html.replace(LINES, "\n$&").replace(/<t[dh]\b/gi, "\t$&"));
  const text = typeof clean === "string" ? clean : (clean.textContent ?? "");
  return text.replace(/[^\S\n\t]+/g, " ").replace(/\s*\n\s*\n\s*/g, "\n\n").replace(/ *\n */g, "\n").trim();
}
