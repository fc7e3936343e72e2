/** Markdown as HTML, block by block, also while it grows: a block that is followed by another one does not change any
 * more, so only the text from the last block on is parsed again. `blocks.js` makes parts of the page of it. */

import { foldCalls, isCall } from "./calls.js";
import { keepFormulas, lineOf } from "./formulas.js";
import { closed, withWords } from "./partial.js";

/** A block that grows beyond this is plain text, for it is parsed several times a second. */
const MAX_BLOCK_CHARS = 32_768;
/** A finished text up to this length is parsed once as a whole, so that its references hold everywhere. */
const MAX_WHOLE_CHARS = 262_144;
/** So many tags a text can have, and a block of it that grows: from the block on that has more, it is plain text. A browser
 * takes seconds for a table of ten thousand lines, and is frozen meanwhile. */
const MAX_TAGS = 20_000;
/** A block of its own costs as much as so many tags. */
const BLOCK_TAGS = 5;
/** A table's cell of at most so many characters stands on one line. */
const SHORT_CELL_CHARS = 16;
/** A tag's other half is so near. */
const MAX_SPAN_CHARS = 4_096;
/** Overrides of direction: what is read would not be what stands there. */
const OVERRIDES = /[\u202d\u202e]/g;
/** Quotes within quotes whose text markdown-it would leave out, for `maxNesting`. */
const DEEP_QUOTES = /^((?: {0,3}> ?){12})[> ]*>/gm;
/** The page's own headings are of level 1 and 2, so a text's begin at 3. */
const HEADING_OFFSET = 2;

const parser = markdownit("commonmark", { html: false, linkify: true, maxNesting: 20 });
parser.enable(["table", "strikethrough", "linkify"]).disable(["html_block", "html_inline"]);
// No images but their words: one that the model names would tell a stranger's server that it was read.
parser.renderer.rules.image = (tokens, index) =>
  escaped(`[picture: ${[tokens[index].content, tokens[index].attrGet("src")?.match(/^https?:\/\/([^/?#]+)/i)?.[1]].filter(Boolean).join(", ")}]`);
// Addresses with a scheme alone: "main.py" and "node.js" would be links too.
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.linkify.add("ftp:", null).add("//", null); // the sanitizer leaves no address of these
keepFormulas(parser);
foldCalls(parser);
parser.core.ruler.after("block", "partial", ({ tokens, env }) => {
  const last = tokens.findLast(({ type, nesting, content }) => !nesting && (type !== "inline" || content));
  if (env.isGrowing && last?.type === "inline") last.content = closed(last.content);
});
/** The few tags that stand in texts which are no HTML, each with its other half near, and references to footnotes. */
const MARK = /<(\/?(?:sub|sup|kbd|b|i|strong|em|u|s|del|ins|mark|small)|br)\s*\/?>|\[\^([^\]\s]{1,40})\](:?)/iy;
parser.inline.ruler.before("link", "mark", (state, silent) => {
  MARK.lastIndex = state.pos;
  const match = MARK.exec(state.src);
  if (!match) return false;
  const [, tag, note, colon] = match;
  if (tag && !isPaired(state, tag.toLowerCase())) return false;
  const isTold = colon && state.pos === 0; // else it is the sentence's
  const mark = () => `<sup class="footnote${isTold ? " is-told" : ""}" title="${escaped(note)}">${escaped(note)}</sup>`;
  if (!silent) state.push("html_inline", "", 0).content = tag ? `<${tag.toLowerCase()}>` : mark();
  state.pos = MARK.lastIndex - (colon && !isTold ? 1 : 0);
  return true;
});
// What a footnote says is a paragraph where it stands; as a reference it could be an address, and vanish.
parser.block.ruler.before("reference", "footnote", (state, start, _, silent) => {
  if (!/^\[\^[^\]\s]{1,40}\]:/.test(lineOf(state, start))) return false;
  if (silent) return true;
  state.line = start + 1;
  state.push("paragraph_open", "p", 1).map = [start, state.line];
  Object.assign(state.push("inline", "", 0), { content: lineOf(state, start).trim(), children: [] });
  state.push("paragraph_close", "p", -1);
  return true;
}, { alt: ["paragraph"] });
parser.renderer.rules.fence = parser.renderer.rules.code_block = (tokens, index) => {
  const { content, info } = tokens[index];
  if (isCall(content)) return parser.renderer.rules.call?.(tokens, index) ?? "";
  const [language] = info.trim().split(/\s+/);
  return `<pre><code data-language="${escaped(language)}">${escaped(content)}</code></pre>\n`;
};

/** @param {markdown.StateInline} state @param {string} tag */
function isPaired({ src, pos }, tag) {
  const isEnd = tag.startsWith("/");
  const near = isEnd ? src.slice(Math.max(0, pos - MAX_SPAN_CHARS), pos) : src.slice(pos, pos + MAX_SPAN_CHARS);
  return tag === "br" || near.toLowerCase().includes(isEnd ? `<${tag.slice(1)}>` : `</${tag}>`);
}

/** @param {string} text */
const escaped = (text) => parser.utils.escapeHtml(text);

/** `heading`: the level of the last one. @typedef {{html: string, start: number, tags: number, heading: number}} Block */

/** The blocks of a text, and where each begins in it. @param {string} text @param {markdown.Env} env */
function parse(text, env) {
  const lines = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) lines.push(at + 1);
  /** @type {Block[]} */
  const blocks = [];
  /** @type {markdown.Token[]} */
  let group = [];
  const tokens = parser.parse(text.replace(OVERRIDES, "\ufffd").replace(DEEP_QUOTES, "$1"), env); // no line more or less
  for (const [index, token] of tokens.entries()) {
    dress(token, env);
    if (tokens[index - 2]?.type === "list_item_open") markTask(token, tokens[index - 2]);
    const cell = tokens[index - 1];
    if (/^t[hd]_open/.test(cell?.type) && token.content.length <= SHORT_CELL_CHARS)
      cell.attrs = [["class", `${cell.attrGet("class") ?? ""} is-short`.trim()]];
    group.push(token);
    if (token.level > 0 || token.nesting > 0) continue;
    const html = parser.renderer.render(group, parser.options, env);
    blocks.push({ html, start: lines[group[0].map?.[0] ?? 0], tags: BLOCK_TAGS + html.split("<").length, heading: env.heading });
    group = [];
  }
  return blocks;
}

/** The blocks of a text that has so many tags before them, as plain text from the first on that has too many. @param {Block[]} blocks @param {string} text @param {number} tags */
function bounded(blocks, text, tags) {
  const at = blocks.findIndex((block) => (tags += block.tags) > MAX_TAGS);
  if (at < 0) return blocks;
  const rest = blocks[at].start;
  return [...blocks.slice(0, at), { html: `<pre>${escaped(text.slice(rest))}</pre>`, start: rest, tags: BLOCK_TAGS, heading: 0 }];
}

/** An entry of a list that is done, or to be done. @param {markdown.Token} token @param {markdown.Token} item */
function markTask({ children }, item) {
  const first = children?.[0];
  const match = first && /^\[([ xX])\] /.exec(first.content);
  if (!match) return;
  first.content = `${match[1] === " " ? "☐" : "☑"} ${first.content.slice(match[0].length)}`;
  item.attrs = [["class", "task"]];
}

/** Headings below the page's own, each at most a level below the one before it; a table's alignment and the digits of a list's numbers as classes, since styles are not allowed. @param {markdown.Token} token @param {markdown.Env} env */
function dress(token, env) {
  if (token.type === "list_item_open" && token.info.length > 1) token.attrs = [["class", `digits-${token.info.length}`]];
  if (token.type === "heading_open") env.heading = Math.min(6, Number(token.tag[1]) + HEADING_OFFSET, env.heading + 1);
  if (token.type === "heading_open" || token.type === "heading_close") token.tag = `h${env.heading}`;
  const style = token.attrGet("style");
  if (style) token.attrs = [["class", `align-${style.split(":")[1]}`]];
}

/** A text's blocks as HTML, which has not been sanitized yet. */
export class Markdown {
  constructor() {
    this.text = "";
    /** @type {string[]} */
    this.blocks = [];
    /** Blocks that do not change any more. */
    this.settled = 0;
    /** Tags that they have. */
    this.tags = 0;
    /** Where the text after them begins. */
    this.begin = 0;
    /** @type {markdown.Env} */
    this.env = { heading: HEADING_OFFSET };
    this.isWhole = false;
  }

  /** The text has grown. @param {string} text It begins with what it was the last time. @param {boolean} [isWhole] */
  grow(text, isWhole = false) {
    this.text = text;
    this.env.isGrowing = !isWhole;
    const tail = text.replace(/\r\n?/g, "\n").slice(this.begin);
    if (tail.length > MAX_BLOCK_CHARS) {
      this.blocks = [...this.blocks.slice(0, this.settled), `<pre>${escaped(tail)}</pre>`];
      return;
    }
    const { heading } = this.env; // of what is settled
    const found = bounded(parse(isWhole ? tail : withWords(tail), this.env), tail, this.tags);
    this.blocks = [...this.blocks.slice(0, this.settled), ...found.map(({ html }) => html)];
    // A line that is still being written can turn from a block of its own into more of the block before it.
    const complete = tail.lastIndexOf("\n") + 1;
    const last = Math.max(0, found.findLastIndex(({ start }) => start < complete));
    this.begin += found[last]?.start ?? 0;
    this.settled += last;
    this.env.heading = found[last - 1]?.heading ?? heading;
    for (const { tags } of found.slice(0, last)) this.tags += tags;
  }

  /** The text is complete: its blocks as a whole parse has them. @param {string} text */
  finish(text) {
    if (text.length > MAX_WHOLE_CHARS) return this.grow(text, true);
    if (this.isWhole && text === this.text) return;
    this.text = text;
    this.isWhole = true;
    const whole = text.replace(/\r\n?/g, "\n");
    this.blocks = bounded(parse(whole, { heading: HEADING_OFFSET }), whole, 0).map(({ html }) => html);
  }
}
