/** Conversations, kept in this browser and nowhere else (IndexedDB). */

/** @typedef {import("./types.js").Conversation} Conversation */

const STORE = "conversations";

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** @type {Promise<IDBDatabase> | undefined} */
let opened;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("uma", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

/** @param {IDBTransactionMode} mode */
async function objects(mode) {
  return (await database()).transaction(STORE, mode).objectStore(STORE);
}

/** All conversations, the newest first. @returns {Promise<Conversation[]>} */
export async function load() {
  /** @type {Conversation[]} */
  const found = await done((await objects("readonly")).getAll());
  return found.sort((a, b) => b.updated - a.updated);
}

/** @param {Conversation} conversation */
export async function save(conversation) {
  await done((await objects("readwrite")).put(structuredClone(conversation)));
}

/** @param {string} id */
export async function forget(id) {
  await done((await objects("readwrite")).delete(id));
}
