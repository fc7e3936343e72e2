/** Conversations, kept in this browser and nowhere else (IndexedDB), and shared by all its windows: what one of them saves is joined to what the others have saved, and they are told of it. */

import { isConversation, mended } from "./reading.js";
import { news } from "./tree.js";

/** @typedef {{id: string, isDeleted: true}} Deleted Stands for a deleted conversation, so that no window brings it back. */

const STORE = "conversations";

const channel = new BroadcastChannel("uma.conversations");

/** @type {Promise<IDBDatabase> | undefined} */
let opened;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("uma", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => {
      // The browser closes it when the person clears the page's data; the next save then begins with an empty one.
      request.result.onclose = () => (opened = undefined);
      resolve(request.result);
    };
    request.onerror = () => reject(request.error);
  });
  return opened;
}

/** One transaction, until it is committed: a request can succeed, and the disk still have no room for it. @template T @param {IDBTransactionMode} mode @param {(objects: IDBObjectStore) => IDBRequest<T>} begin @returns {Promise<T>} */
async function transact(mode, begin) {
  const transaction = (await database()).transaction(STORE, mode);
  const request = begin(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** All conversations, the newest first, and how many more there are that cannot be read. */
export async function load() {
  /** @type {unknown[]} */
  const found = (await transact("readonly", (objects) => objects.getAll())).filter((each) => !isDeleted(each));
  const conversations = found.filter(isConversation).map((each) => mended(each));
  conversations.sort((a, b) => b.updated - a.updated);
  return { conversations, unreadable: found.length - conversations.length };
}

/** Join it to what other windows have saved of it. One that another window has deleted stays deleted. @param {Conversation} conversation @param {boolean} [isNew] It is kept although it was deleted before. */
export async function save(conversation, isNew = false) {
  await transact("readwrite", (objects) => {
    /** @type {IDBRequest<unknown>} */
    const before = objects.get(conversation.id);
    before.onsuccess = () => {
      if (isDeleted(before.result) && !isNew) return;
      const stored = isConversation(before.result) ? before.result : { ...conversation, messages: {} };
      const messages = { ...conversation.messages };
      for (const message of news(conversation, stored)) messages[message.id] = message;
      objects.put({ ...conversation, messages });
    };
    return before;
  });
  channel.postMessage({ saved: conversation.id });
}

/** @param {string} id */
export async function forget(id) {
  /** @type {Deleted} */
  const mark = { id, isDeleted: true };
  try {
    await transact("readwrite", (objects) => objects.put(mark));
  } catch {
    await transact("readwrite", (objects) => objects.delete(id)); // a full disk has no room for the mark
  }
  channel.postMessage({ deleted: id });
}

/** Be told of what other windows save and delete. @param {{saved: (conversation: Conversation) => void, deleted: (id: string) => void}} does */
export function watch(does) {
  channel.onmessage = async ({ data }) => {
    if (typeof data?.deleted === "string") does.deleted(data.deleted);
    if (typeof data?.saved !== "string") return;
    /** @type {unknown} */
    const found = await transact("readonly", (objects) => objects.get(data.saved)).catch(() => undefined);
    if (isConversation(found)) does.saved(mended(found));
  };
}

/** @param {any} found @returns {found is Deleted} */
function isDeleted(found) {
  return found?.isDeleted === true;
}
