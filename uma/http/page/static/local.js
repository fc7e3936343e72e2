/** Small values, kept in this browser (localStorage); where it keeps none, in this page alone. */

import { toast } from "./dom.js";

/** What the browser did not take. @type {Map<string, string | null>} */
const unkept = new Map();
/** The browser lets this page have no localStorage at all. */
let isBlocked = false;
let isTold = false;

/** Say what is lost with the page, where something is. @param {boolean} keepsConversations */
export function tellLosses(keepsConversations) {
  const lost = [...(keepsConversations ? [] : ["conversations"]), ...(isBlocked ? ["settings"] : [])].join(" and ");
  if (lost) toast(`This browser keeps no ${lost} for this page: they are lost when it is closed.`);
}

/** @param {string} name @returns {string | null} */
export function kept(name) {
  const value = unkept.get(name);
  if (value !== undefined) return value;
  try {
    return localStorage.getItem(name);
  } catch {
    isBlocked = true;
    return null;
  }
}

/** What a text says as JSON; undefined where it is none. @param {string | null} text @returns {any} */
export function parsed(text) {
  try {
    return JSON.parse(text ?? "");
  } catch {
    return undefined;
  }
}

/** @param {string} name @param {string | null} value Null: forget it. */
export function keep(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
    unkept.delete(name);
  } catch {
    unkept.set(name, value);
    if (!isBlocked && !isTold)
      toast("The browser’s storage is full: settings are lost when the page is closed.");
    isTold = true;
  }
}
