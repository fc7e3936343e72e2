/** Small values, kept in this browser (localStorage); where it keeps none, in this page alone. */

import { toast } from "./dom.js";

/** What the browser did not take. @type {Map<string, string | null>} */
const unkept = new Map();
let isTold = false;

/** Say that something is lost with the page; once, for it is the same for everything. @param {string} what */
export function tellLoss(what) {
  if (!isTold) toast(what);
  isTold = true;
}

/** @param {string} name @returns {string | null} */
export function kept(name) {
  const value = unkept.get(name);
  if (value !== undefined) return value;
  try {
    return localStorage.getItem(name);
  } catch {
    tellLoss(
      "This browser keeps nothing for this page: conversations and settings are lost when it is closed.",
    );
    return null;
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
    tellLoss("This browser has no room to keep settings: they are lost when the page is closed.");
  }
}
