/** The choice among the models of a server that has several: which are loaded, and which fit into its memory. */

import { byId, h, number } from "./dom.js";

/** @typedef {import("./types.js").ListedModel} ListedModel */

const TOO_LARGE = "Too large for this server";
/** What the list is divided into, in this order: a model stands in the first that it belongs to. @type {[string, (model: ListedModel) => boolean][]} */
const GROUPS = [
  ["Loaded", ({ state }) => state === "loaded" || state === "loading"],
  ["Loaded when it is asked", ({ fits }) => fits],
  [TOO_LARGE, () => true],
];

export class Picker {
  /** @param {(name: string) => void} choose */
  constructor(choose) {
    this.select = byId("model", HTMLSelectElement);
    this.select.addEventListener("change", () => choose(this.select.value));
    this.shown = "";
  }

  /** A conversation's model can be one that the server has no more. @param {ListedModel[] | undefined} models @param {string | undefined} chosen */
  show(models, chosen) {
    this.select.hidden = !models;
    byId("model-name", HTMLElement).hidden = Boolean(models);
    // A list that is open closes when it is built again.
    const state = JSON.stringify([models, chosen]);
    if (!models || state === this.shown) return;
    this.shown = state;
    const left = new Set(models);
    const groups = GROUPS.map(([label, belongs]) => {
      const own = [...left].filter(belongs);
      for (const each of own) left.delete(each);
      return own.length ? h("optgroup", { label, disabled: label === TOO_LARGE }, ...own.map(option)) : null;
    });
    const isHere = !chosen || models.some(({ name }) => name === chosen);
    const gone = isHere ? null : h("option", { value: chosen }, `${chosen} (not here)`);
    this.select.replaceChildren(...[gone, ...groups].filter((each) => each !== null));
    this.select.value = chosen ?? models[0]?.name ?? "";
  }
}

/** @param {ListedModel} model */
function option({ name, size_bytes: size, loading_percent: percent, vision }) {
  const words = percent === null ? sizeOf(size) : `loading, ${number(percent)} %`;
  return h("option", { value: name }, `${name} · ${words}${vision ? " · sees pictures" : ""}`);
}

/** @param {number} bytes */
function sizeOf(bytes) {
  return bytes >= 1e9 ? `${number(bytes / 1e9, 1)} GB` : `${number(bytes / 1e6, bytes < 1e7 ? 1 : 0)} MB`;
}
