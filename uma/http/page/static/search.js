/** Search in all conversations: which have all the words, where one has most of them side by side, and their marks there. */

/** @typedef {{conversation: Conversation, id: string | null, snippet: string}} Found `id`: of the message; null where the title has all the words. */

/** Of a text that is found so much is shown before it, and in all. */
const BEFORE_CHARS = 20;
const SNIPPET_CHARS = 90;
/** Places of words that are looked at in a text, and marked in a message. */
const MAX_PLACES = 500;

/** The words of what is sought, in lower case. @param {string} text */
export const wordsOf = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);

/** Marks of Markdown: an address behind its words, what begins a line or a fence, and what stands around words. */
const MARKS = /(?<=\])\([^)\s]*\)?|!?\[(?=[^\]]*\]\()|(?<=\[[^\]]*)\](?=\()|^\s*(?:#{1,6}|>+)\s|^\s*[-*+]\s|^\s*\|[|:\s-]*$|`+|(?<!\w)(?:\*+|_+|~~)(?=\S)|(?<=\S)(?:\*+|_+|~~)(?!\w)/gm;

/** How many of the words a text has. @param {string} lower @param {string[]} words */
const count = (lower, words) => words.filter((word) => lower.includes(word)).length;

/** @param {Conversation} conversation @param {string[]} words @returns {Found | null} Null: it has not all of them. */
export function find(conversation, words) {
  const title = conversation.title.toLowerCase();
  if (count(title, words) === words.length) return { conversation, id: null, snippet: "" };
  const texts = Object.values(conversation.messages).map(({ id, text, files = [] }) => {
    const whole = [text, ...files.map((file) => `${file.name}: ${file.text}`)].join("\n");
    return { id, whole, lower: whole.toLowerCase() };
  });
  if (!words.every((word) => title.includes(word) || texts.some(({ lower }) => lower.includes(word)))) return null;
  const best = texts.reduce((one, other) => (count(other.lower, words) > count(one.lower, words) ? other : one));
  const from = (/** @type {number} */ at) => best.lower.slice(at, at + SNIPPET_CHARS - BEFORE_CHARS);
  const [place = 0] = placesOf(best.lower, words)
    .map(([at]) => at)
    .sort((a, b) => count(from(b), words) - count(from(a), words) || a - b);
  const start = Math.max(0, place - BEFORE_CHARS);
  const snippet = best.whole.slice(start, start + 2 * SNIPPET_CHARS).replace(MARKS, "").replace(/\s+/g, " ").slice(0, SNIPPET_CHARS);
  return { conversation, id: best.id, snippet: `${start ? "…" : ""}${snippet}` };
}

/** Where a text has the words: begin and end of each. @param {string} lower @param {string[]} words */
function placesOf(lower, words) {
  /** @type {[number, number][]} */
  const places = [];
  for (const word of words)
    for (let at = lower.indexOf(word); at >= 0 && places.length < MAX_PLACES; at = lower.indexOf(word, at + word.length))
      places.push([at, at + word.length]);
  return places;
}

/** Mark the words in a message, and have the part that has most of them be seen. @param {HTMLElement} element @param {string[]} words */
export function mark(element, words) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  /** @type {Range[]} */
  const ranges = [];
  let [best, most] = [/** @type {Element | null} */ (element), 0];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const lower = (node.textContent ?? "").toLowerCase();
    for (const [begin, end] of placesOf(lower, words)) {
      const range = new Range();
      range.setStart(node, begin);
      range.setEnd(node, Math.min(end, node.textContent?.length ?? 0));
      ranges.push(range);
    }
    const here = node.parentElement?.closest(".hidden, footer") ? 0 : count(lower, words);
    if (here > most) [best, most] = [node.parentElement, here];
  }
  // Without a change of the page, which is drawn again at any time.
  CSS.highlights?.set("found", new Highlight(...ranges));
  best?.scrollIntoView({ block: "center" });
}
