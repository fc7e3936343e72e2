/** Markdown as HTML, block by block, also while it grows: a block that is followed by another one does not change any
 * more, so only the text from the last block on is parsed again. `blocks.js` makes parts of the page of it. */

import { keepFormulas } from "./formulas.js";

/** A block that grows beyond this is plain text, for it is parsed several times a second. */
const MAX_BLOCK_CHARS = 32_768;
/** A finished text up to this length is parsed once as a whole, so that its references hold everywhere. */
const MAX_WHOLE_CHARS = 262_144;
/** The page's own headings are of level 1 and 2, so a text's begin at 3. */
const HEADING_OFFSET = 2;

const parser = markdownit("commonmark", { html: false, linkify: true, maxNesting: 20 });
// No images: one that the model names would tell a stranger's server that it was read.
parser.enable(["table", "strikethrough", "linkify"]).disable(["image", "html_block", "html_inline"]);
// Addresses with a scheme alone: "main.py" and "node.js" would be links too.
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.linkify.add("ftp:", null).add("//", null); // the sanitizer leaves no address of these
keepFormulas(parser);
parser.renderer.rules.fence = parser.renderer.rules.code_block = (tokens, index) => {
  const { content, info } = tokens[index];
  const [language] = info.trim().split(/\s+/);
  return `<pre><code data-language="${escaped(language)}">${escaped(content)}</code></pre>\n`;
};

/** @param {string} text */
const escaped = (text) => parser.utils.escapeHtml(text);

/** The blocks of a text, and where each begins in it. @param {string} text @param {markdown.Env} env */
function parse(text, env) {
  const lines = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) lines.push(at + 1);
  /** @type {{html: string, start: number}[]} */
  const blocks = [];
  /** @type {markdown.Token[]} */
  let group = [];
  for (const token of parser.parse(text, env)) {
    dress(token);
    group.push(token);
    if (token.level > 0 || token.nesting > 0) continue;
    blocks.push({ html: parser.renderer.render(group, parser.options, env), start: lines[group[0].map?.[0] ?? 0] });
    group = [];
  }
  return blocks;
}

/** Headings below the page's own, and a table's alignment as classes, since styles are not allowed. @param {markdown.Token} token */
function dress(token) {
  if (token.type === "heading_open" || token.type === "heading_close")
    token.tag = `h${Math.min(6, Number(token.tag[1]) + HEADING_OFFSET)}`;
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
    /** Where the text after them begins. */
    this.begin = 0;
    /** @type {markdown.Env} */
    this.env = {};
  }

  /** The text has grown. @param {string} text It begins with what it was the last time. */
  grow(text) {
    this.text = text;
    const tail = text.replace(/\r\n?/g, "\n").slice(this.begin);
    if (tail.length > MAX_BLOCK_CHARS) {
      this.blocks = [...this.blocks.slice(0, this.settled), `<pre>${escaped(tail)}</pre>`];
      return;
    }
    const found = parse(tail, this.env);
    this.blocks = [...this.blocks.slice(0, this.settled), ...found.map(({ html }) => html)];
    // A line that is still being written can turn from a block of its own into more of the block before it.
    const complete = tail.lastIndexOf("\n") + 1;
    const last = Math.max(0, found.findLastIndex(({ start }) => start < complete));
    this.begin += found[last]?.start ?? 0;
    this.settled += last;
  }

  /** The text is complete: its blocks as a whole parse has them. @param {string} text */
  finish(text) {
    if (text.length > MAX_WHOLE_CHARS) return this.grow(text);
    this.text = text;
    this.blocks = parse(text.replace(/\r\n?/g, "\n"), {}).map(({ html }) => html);
  }
}
