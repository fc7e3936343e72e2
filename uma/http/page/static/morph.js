/** Changes a part of the page into another and keeps what is the same in both: with it stay the focus, what is marked,
 * what is unfolded and how far it is scrolled, where new elements in its place would have none of these. */

/** Make `from` like `to`, which is used up. Buttons stay as they are: the page makes them, and they show what was done. @param {Node} from @param {Node} to */
export function morph(from, to) {
  if (from instanceof HTMLButtonElement || from.isEqualNode(to)) return; // the browser compares much faster than this does
  if (from instanceof Text) grow(from, to.textContent ?? "");
  if (from instanceof Element && to instanceof Element) copyAttributes(from, to);
  const [before, after] = [[...from.childNodes], [...to.childNodes]];
  const more = document.createDocumentFragment();
  after.forEach((node, index) => {
    const old = before[index];
    if (!old) more.appendChild(node);
    else if (old.nodeName !== node.nodeName) from.replaceChild(node, old);
    else morph(old, node);
  });
  if (more.hasChildNodes()) from.appendChild(more);
  for (const old of before.slice(after.length)) from.removeChild(old);
}

/** What is appended leaves a selection in the text as it is. @param {Text} node @param {string} text */
function grow(node, text) {
  if (node.data === text) return;
  if (text.startsWith(node.data)) node.appendData(text.slice(node.length));
  else node.data = text;
}

/** @param {Element} from @param {Element} to */
function copyAttributes(from, to) {
  for (const { name } of [...from.attributes]) if (name !== "open" && !to.hasAttribute(name)) from.removeAttribute(name);
  for (const { name, value } of to.attributes) if (from.getAttribute(name) !== value) from.setAttribute(name, value);
}
