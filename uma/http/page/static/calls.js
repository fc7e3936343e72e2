/** A model's call of a tool, which it has written into its text: a folded block with the tool's name. So is a result. */

import { parsed } from "./local.js";

const OPEN = /^<tool_(call|response)>/;
/** In a call that is no JSON, or not yet. */
const NAME = /"name"\s*:\s*"([^"]{1,100})"|<function=([^>]{1,100})>/;

/** Have `parser` fold calls. @param {markdown.Parser} parser */
export function foldCalls(parser) {
  parser.block.ruler.before("table", "call", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
  parser.renderer.rules.call = (tokens, index) => {
    const { content, markup } = tokens[index];
    const name = NAME.exec(content)?.slice(1).find(Boolean) ?? "a tool";
    const { escapeHtml } = parser.utils;
    const code = `<pre><code data-language="json">${escapeHtml(content)}</code></pre>`;
    return `<details class="call"><summary>${markup === "response" ? "Tool result" : `Tool call: ${escapeHtml(name)}`}</summary>${code}</details>\n`;
  };
}

/** Whether a code block is a call. @param {string} content */
export function isCall(content) {
  const { name, arguments: given, parameters = given } = parsed(content) ?? {};
  return typeof name === "string" && typeof parameters === "object";
}

/** One that is not closed (yet) goes on to the end. @param {markdown.StateBlock} state @param {number} start @param {number} end @param {boolean} silent */
function block(state, start, end, silent) {
  const from = state.bMarks[start] + state.tShift[start];
  const [open, kind] = OPEN.exec(state.src.slice(from, from + 20)) ?? [];
  if (!open || silent) return Boolean(open);
  const close = open.replace("<", "</");
  let after = start + 1;
  const isOpen = (/** @type {number} */ line) => !state.src.slice(from, state.eMarks[line]).includes(close);
  while (after < end && isOpen(after - 1)) after++;
  state.line = after;
  const token = Object.assign(state.push("call", "", 0), { map: [start, after], markup: kind });
  token.content = state.src.slice(from + open.length, state.eMarks[after - 1]).split(close)[0].trim();
  return true;
}
