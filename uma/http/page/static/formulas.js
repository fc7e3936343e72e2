/** Formulas in Markdown: `\(…\)`, `\[…\]`, `$…$` and `$$…$$`. Markdown would take their backslashes and underscores for
 * its own, so the parser leaves them as they are written, as the text of a span, which is typeset at the end. */

import { Library } from "./library.js";

/** @type {Library<Temml>} */
export const temml = new Library("temml.js");

/** The end of a formula in brackets is sought no further: there can be thousands that are never closed. */
const MAX_CHARS = 4_096;
/** Largest sizes that a formula can ask for, in em and in points: none covers what is around it. */
const MAX_SIZE = [10, 100];
/** @type {Record<string, string>} */
const INLINE = { "\\(": "\\)", "\\[": "\\]" };
/** @type {Record<string, string>} */
const DISPLAYED = { "\\[": "\\]", $$: "$$" };
/** Environments that are a formula without brackets around them. */
const BARE = /^\\begin\{((?:align|equation|gather|multline)\*?)\}/;
const DOLLARS = /\$\$(?:\\.|[^$\\])+\$\$|\$(?=\S)((?:\\.|[^$\\\n])+)(?<=\S)\$(?![\p{L}\p{N}_$])/suy;
/** Between two dollars, one of these tells a formula from "$HOME or $" and the like. */
const SIGNS = /[\\^_=]/;
/** So does the first without the second: `n + m - 1`, which has spaces; `2n` is one too. */
const [OPERATION, WORD] = [/[-+*/<>]/, /\p{L}{3}/u];
/** What begins so ends a formula that was never closed. */
const OTHER_BLOCK = /^(?:```|~~~|#{1,6}\s)/;

/** Have `parser` leave formulas as they are. @param {markdown.Parser} parser */
export function keepFormulas(parser) {
  parser.inline.ruler.before("escape", "formula", inline);
  parser.block.ruler.before("table", "formula", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
  parser.renderer.rules.formula = (tokens, index) =>
    `<span class="formula">${parser.utils.escapeHtml(tokens[index].content)}</span>`;
}

/** Typeset a formula in its place; one that is not understood stays the text that it is. @param {Element} formula */
export function typeset(formula) {
  const source = formula.textContent ?? "";
  const isBare = BARE.test(source);
  const displayMode = isBare || source.startsWith("$$") || source.startsWith("\\[");
  const ends = isBare ? 0 : source.startsWith("$") && !displayMode ? 1 : 2;
  if (source.length > MAX_CHARS || !temml.own) return;
  const how = { displayMode, throwOnError: true, trust: false, maxSize: MAX_SIZE };
  try {
    const math = document.createElement("span");
    temml.own.render(source.slice(ends, source.length - ends), math, how);
    formula.replaceChildren(...math.childNodes);
  } catch {
    // Not only Temml's own errors: of what is no formula it also raises others (`x^<` a TypeError, deep brackets a RangeError).
  }
}

/** A formula from here on. @param {markdown.StateInline} state @param {boolean} silent */
function inline(state, silent) {
  const end = endOf(state.src, state.pos);
  if (end < 0 || end > state.posMax) return false;
  if (!silent) state.push("formula", "", 0).content = state.src.slice(state.pos, end);
  state.pos = end;
  return true;
}

/** Where the formula that begins at `start` ends; -1 where none does. @param {string} text @param {number} start */
function endOf(text, start) {
  const near = text.slice(start, start + MAX_CHARS);
  const closer = INLINE[near.slice(0, 2)] ?? bareEnd(near);
  if (closer) {
    const at = near.indexOf(closer, 2);
    return at < 0 ? -1 : start + at + closer.length;
  }
  if (text[start] !== "$" || /[\p{L}\p{N}$]/u.test(text[start - 1] ?? "")) return -1;
  DOLLARS.lastIndex = start;
  const match = DOLLARS.exec(text);
  return match && (match[1] === undefined || isFormula(match[1])) ? DOLLARS.lastIndex : -1;
}

/** What ends a formula that is a bare environment. @param {string} text */
function bareEnd(text) {
  const name = BARE.exec(text)?.[1];
  return name && `\\end{${name}}`;
}

/** Whether what stands between two dollars is one, and the dollars no prices or names of variables. @param {string} inner */
function isFormula(inner) {
  if (SIGNS.test(inner) || (OPERATION.test(inner) && !WORD.test(inner))) return true;
  return /^\d+[a-z]$/.test(inner) || !/^\d|\s/.test(inner);
}

/** A paragraph that begins with a formula of several lines, whatever block its lines would begin otherwise. It ends with
 * the formula's last line. A formula that is not closed (yet) ends as a paragraph does: what is a block of its own does
 * not depend on what comes later. @param {markdown.StateBlock} state @param {number} start @param {number} end @param {boolean} silent */
function block(state, start, end, silent) {
  const first = lineOf(state, start);
  const closer = DISPLAYED[first.slice(0, 2)] ?? bareEnd(first);
  const isCode = state.sCount[start] - state.blkIndent >= 4;
  if (!closer || first.slice(2).includes(closer) || isCode) return false;
  if (silent) return true;
  let after = start + 1;
  while (after < end && !endsBefore(state, after)) {
    after++;
    if (lineOf(state, after - 1).includes(closer)) break;
  }
  state.line = after;
  state.push("formula_open", "p", 1).map = [start, after]; // no "paragraph", which a tight list would run on
  const content = state.push("inline", "", 0);
  content.content = state.getLines(start, after, state.blkIndent, false).trim();
  content.children = [];
  state.push("formula_close", "p", -1);
  return true;
}

/** @param {markdown.StateBlock} state @param {number} line */
function endsBefore(state, line) {
  const isOutside = state.sCount[line] < state.blkIndent;
  return state.isEmpty(line) || isOutside || OTHER_BLOCK.test(lineOf(state, line));
}

/** @param {markdown.StateBlock} state @param {number} line */
export function lineOf(state, line) {
  return state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
}
