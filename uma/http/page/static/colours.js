/** Colours of code, by highlight.js. Its spans and texts are made here, one by one: the sanitizer would take ten times as
 * long for them, and a long block is coloured several times a second while it grows. Nothing else can come of its HTML. */

import { h } from "./dom.js";
import { Library } from "./library.js";

/** @type {Library<Highlighter>} */
export const highlighter = new Library("highlight.mjs");

/** Longer code has no colours. */
const MAX_CHARS = 32_768;
/** @type {Record<string, string>} */
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };

/** @param {Element} code @param {string} language A name that highlight.js may not know. */
export function colour(code, language) {
  const text = code.textContent ?? "";
  if (!highlighter.own?.getLanguage(language) || text.length > MAX_CHARS) return;
  const { value } = highlighter.own.highlight(text, { language, ignoreIllegals: true });
  /** The spans that are open. @type {(Element | DocumentFragment)[]} */
  const open = [document.createDocumentFragment()];
  for (const [, name, end, words] of value.matchAll(/<span class="([\w -]+)">|(<\/span>)|([^<]+|<)/g)) {
    if (name) open.push(h("span", { class: name }));
    else if (end && open.length > 1) open.at(-2)?.append(/** @type {Node} */ (open.pop()));
    else if (words) open.at(-1)?.append(words.replace(/&(?:amp|lt|gt|quot|#x27);/g, (each) => ENTITIES[each]));
  }
  if (open[0].textContent === text) code.replaceChildren(open[0]);
}
