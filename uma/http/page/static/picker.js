/** A server's models, as entries of the palette: what each is, which are loaded, which fit; and a way to get another one. */

import { ApiError, lines } from "./api.js";
import { number, toast } from "./dom.js";
import { wordsOf } from "./search.js";

const TOO_LARGE = "Too large for this server";
/** What the list is divided into, in this order: a model stands in the first that it belongs to. @type {[string, (model: ListedModel) => boolean][]} */
const GROUPS = [
  ["Loaded", ({ state }) => state === "loaded" || state === "loading"],
  ["Not loaded: the first question loads it", ({ fits }) => fits],
  [TOO_LARGE, () => true],
];
/** What `uma pull` takes. */
const HUB_NAME = /^\S+\/\S+$/;

export class Picker {
  /** @param {{choose: (name: string) => void, changed: () => void}} does */
  constructor(does) {
    this.does = does;
    /** What is being pulled, and how much of it is here in percent. @type {Map<string, number>} */
    this.pulls = new Map();
  }

  /** A conversation's model can be one that the server has no more. @param {Info | undefined} info @param {string} chosen @param {string} text @returns {Entry[]} */
  entries(info, chosen, text) {
    const models = info?.models ?? (info ? [onlyOf(info)] : []);
    const words = wordsOf(text);
    const found = models.filter(({ name }) => words.every((word) => name.toLowerCase().includes(word)));
    const entries = GROUPS.flatMap(([group], index) =>
      found
        .filter((each) => GROUPS.findIndex(([, belongs]) => belongs(each)) === index)
        .map((each) => this.entry(each, group, chosen)),
    );
    for (const [name, percent] of this.pulls)
      entries.push({ group: "Pulling", label: name, state: `${percent} %`, isDisabled: true, run() {} });
    if (info?.models && HUB_NAME.test(text) && !this.pulls.has(text)) {
      const note = "Downloads it from Hugging Face to the server.";
      entries.push({ group: "Pull another model", label: `Pull ${text}`, note, run: () => void this.pull(text) });
    }
    return entries;
  }

  /** @param {ListedModel} model @param {string} group @param {string} chosen @returns {Entry} */
  entry({ name, state, load, ...model }, group, chosen) {
    const note = [
      model.parameters && `${sizeOf(model.parameters, ["M", "B"])} parameters`,
      model.quantization,
      model.size_bytes && sizeOf(model.size_bytes, ["MB", "GB"]),
      model.context_length && `${number(model.context_length)} tokens of context`,
      model.vision && "sees pictures",
      model.thinks && "thinks",
      model.is_base && "base model",
    ];
    return {
      group,
      label: name,
      note: note.filter(Boolean).join(" · "),
      state: state === "loading" ? load : state === "loaded" ? "loaded" : "",
      isCurrent: name === chosen,
      isDisabled: group === TOO_LARGE,
      run: () => this.does.choose(name),
    };
  }

  /** @param {string} name */
  async pull(name) {
    this.pulls.set(name, 0);
    const tell = (/** @type {string} */ words) => toast(words, undefined, `pull ${name}`);
    tell(`Pulling ${name} …`);
    try {
      for await (const { error, total, completed } of lines("api/pull", { model: name })) {
        if (error) throw new ApiError(0, { code: "pull", message: error });
        if (total) this.pulls.set(name, Math.floor((100 * completed) / total));
        this.does.changed();
      }
      tell(`${name} is ready: choose it in the list of models.`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      tell(`${name} could not be pulled. ${error.message}`);
    } finally {
      this.pulls.delete(name);
      this.does.changed();
    }
  }
}

/** A server's one model. @param {Info} info @returns {ListedModel} */
function onlyOf({ model, capabilities, limits }) {
  const { called: name, parameters, quantization } = model;
  const is_base = capabilities.chat === false;
  const able = { vision: Boolean(capabilities.vision), thinks: Boolean(capabilities.reasoning), is_base };
  const more = { size_bytes: 0, state: /** @type {const} */ ("loaded"), load: "", fits: true };
  return { name, parameters, quantization, context_length: limits.n_ctx, ...able, ...more };
}

/** @param {number} count @param {[string, string]} units Of a million, of a billion. */
function sizeOf(count, [small, large]) {
  return count >= 1e9 ? `${number(count / 1e9, 1)} ${large}` : `${number(count / 1e6, count < 1e7 ? 1 : 0)} ${small}`;
}
