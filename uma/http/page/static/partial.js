/** The last words of a text that grows, as they will be: half of a link, of bold or of code would be seen as its marks. */

/** Where no mark of Markdown counts: formulas, escaped signs, code and links; where one is not closed, in all that follows. */
const OPAQUE = /\\\((?:[^]*?\\\)|[^]*)|\\\[(?:[^]*?\\\]|[^]*)|\$\$(?:[^]*?\$\$|[^]*)|\\[^]|(`+)(?!`)(?:[^]*?[^`]\1(?!`)|[^]*)|!?\[[^[\]]*\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*(?:\s(?:"[^"]*"|'[^']*'))?\)/g;
const LINK = /(?<![\w\])])!?\[(?!\^[^\]]+\]$)([^[\]]*)(?:\](?:\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*(?:\([^()\s]*)?(?:\s["']?[^)]*)?)?)?$/;
const UNPAIRED = /<(sub|sup|kbd|b|i|u|s|em|strong|mark|small|del|ins)>[^<]*$/i;
/** So few signs in brackets can be a task’s, or a footnote’s. */
const SHORT_CHARS = 2;
/** A line that is nothing yet but what a list, a heading, a fence, a table’s rule begins with. */
const MARKS = /(^|\n)[ \t>]*(?:[-=*+#|]{1,6}|\d{1,9}[.)]?|[`~]{1,2}|[`~]{3,}[^\n`]*)[ \t]*$/;

/** A text without its last line, where that has no words yet. @param {string} text */
export const withWords = (text) => text.replace(MARKS, "$1");

/** A paragraph as if what is open in it was closed. @param {string} text */
export function closed(text) {
  if (/^\|[^\n]*(?:\n[|:\s-]*)?$/.test(text)) return ""; // a table, once its rule is there
  let [end, code] = [text.length, ""];
  let plain = text.replace(OPAQUE, (part, run = "", at) => {
    const inner = run ? part.slice(run.length).replace(/`+$/, "") : "";
    const isOpen = run ? part.length < 2 * run.length || !part.endsWith(run) : /^(?:\\[([]|\$\$)/.test(part) && !/..(?:\\[)\]]|\$\$)$/s.test(part);
    if (isOpen) [end, code] = inner.trim() ? [at + run.length + inner.length, run] : [at, ""];
    return "x".repeat(part.length);
  });
  [text, plain] = [text.slice(0, end) + code, plain.slice(0, end) + code.replaceAll("`", "x")];
  const [whole = "", words = ""] = LINK.exec(plain) ?? [];
  const [start, from] = [plain.length - whole.length, plain.length - whole.length + whole.indexOf("[") + 1];
  const shown = words.length > SHORT_CHARS ? from + words.length : from;
  if (whole) [text, plain] = [text.slice(0, start) + text.slice(from, shown), plain.slice(0, start) + plain.slice(from, shown)];
  const half = plain.search(/(?:\\|\$|(?<!~)~|<[^\s<>]*)$/);
  if (half >= 0) [text, plain] = [text.slice(0, half), plain.slice(0, half)];
  /** @type {string[]} */
  const open = [];
  for (const { 0: run, index } of plain.matchAll(/\*+|_+|~~+/g)) {
    const [before = " ", after] = [plain[index - 1], plain[index + run.length]];
    let left = run.length;
    if (/\S/.test(before) && !(run[0] === "_" && /\w/.test(after ?? "")))
      while (left && open.at(-1)?.startsWith(run[0])) {
        const last = /** @type {string} */ (open.pop());
        if (last.length > left) open.push(last.slice(after === undefined ? 0 : left));
        if (last.length > left) break;
        left -= last.length;
      }
    if (left && after === undefined) text = text.slice(0, index + run.length - left); // half of an end, or a beginning
    else if (left === run.length && /\S/.test(after) && !/\w/.test(before)) open.push(run);
  }
  const tag = UNPAIRED.exec(plain)?.[1];
  return (open.length || tag ? text.trimEnd() : text) + open.reverse().join("") + (tag ? `</${tag}>` : "");
}
