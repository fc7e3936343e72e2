/** Small values, kept in this browser (localStorage); where it keeps none, in this page alone. */

import { toast } from "./dom.js";

/** What the browser did not take. @type {Map<string, string | null>} */
const unkept = new Map();
let isTold = false;

/** @param {string} name @returns {string | null} */
export function kept(name) {
  const value = unkept.get(name);
  if (value !== undefined) return value;
  try {
    return localStorage.getItem(name);
  } catch {
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
    if (!isTold) toast("The browser’s storage is full or blocked: settings are lost when the page is closed.");
    isTold = true;
  }
}
