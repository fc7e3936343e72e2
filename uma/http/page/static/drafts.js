/** What was begun and not sent yet, and what is sent once an answer ends. It outlives a reload of its window, and is no
 * other window's: two of them would overwrite each other's. Where the browser keeps nothing, it lasts as long as the
 * page. */

import { parsed } from "./local.js";
import { isAttachment } from "./pictures.js";

const KEY = "uma.drafts";

export class Drafts {
  /** @param {() => [string, Draft][]} writing What is being written, which is kept with the others. */
  constructor(writing) {
    this.writing = writing;
    const all = kept();
    /** By conversation; all new ones share one, of the empty name. @type {Map<string, Draft>} */
    this.drafts = new Map();
    for (const [name, draft] of all.filter(([, { isQueued }]) => !isQueued)) this.leave(name, joined([this.take(name), draft]));
    /** What each conversation's answer is waited for with, the oldest first. @type {[string, Draft][]} */
    this.queued = all.filter(([, { isQueued }]) => isQueued);
    // Both: a page that is put away on a phone hears nothing of its end, one that is reloaded is not hidden before.
    addEventListener("pagehide", () => this.keep());
    document.addEventListener("visibilitychange", () => this.keep());
  }

  /** What is to be gone on with; it is no draft any more. @param {string} name @returns {Draft} */
  take(name) {
    const draft = this.drafts.get(name) ?? { text: "", files: [] };
    this.drafts.delete(name);
    return draft;
  }

  /** What this conversation sends as its answers end. @param {string} name */
  queueOf(name) {
    return this.queued.flatMap(([each, draft]) => (each === name ? [draft] : []));
  }

  /** @param {string} name @param {Draft} draft */
  leave(name, draft) {
    if (draft.text || draft.files.length) this.drafts.set(name, draft);
  }

  keep() {
    const all = [...this.drafts, ...this.writing(), ...this.queued];
    // Without its files nothing is sent by itself: it is a draft then.
    const texts = all.map(([name, { text }]) => [name, { text, files: [] }]);
    if (!put(all)) put(texts); // files can be larger than what a browser keeps for a window
  }
}

/** Several as one, which can still be parted. @param {Draft[]} drafts @returns {Draft} */
export function joined(drafts) {
  return { text: drafts.map(({ text }) => text).filter(Boolean).join("\n\n"), files: drafts.flatMap(({ files }) => files) };
}

/** @returns {[string, Draft][]} */
function kept() {
  try {
    return (parsed(sessionStorage.getItem(KEY)) ?? []).filter(isEntry);
  } catch {
    return [];
  }
}

/** @param {any} entry @returns {entry is [string, Draft]} */
function isEntry(entry) {
  const [name, draft] = entry;
  return typeof name === "string" && typeof draft.text === "string" && draft.files.every(isAttachment);
}

/** @param {unknown} drafts */
function put(drafts) {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(drafts));
    return true;
  } catch {
    return false;
  }
}
