/** The sheet with a conversation's instructions and sampling settings, each with what it does. */

import { byId, copyOf, h, number, say } from "./dom.js";
import { keep, kept, parsed } from "./local.js";

/** Nothing is set: the server's and the model's own sampling holds. @type {Settings} */
export const DEFAULTS = { system: "", priority: 1, sampling: {}, reasoning: "auto", truncation: "off" };

const MAX_STOPS = 16;
const NEW_CHATS_KEY = "uma.new-chats";
const PRESETS_KEY = "uma.presets";
/** What a server tells at most, where it is not known yet. */
const MAX_LOGPROBS = 20;
/** Beyond this a browser counts in steps, and writes what no server takes for a whole number. */
const MAX_WHOLE = Number.MAX_SAFE_INTEGER;

/** Numbers that most people change first: the others are folded until one of them is set. */
const FIRST = ["temperature", "max_tokens"];
/** Sampling that the chip tells by name; of all others it tells how many are set. */
const NAMED = ["temperature", "max_tokens", "logprobs"];

const MAX_ANSWERS = 4;
/** @typedef {{name: string, label: string, help: string, isWhole: boolean, empty?: string}} Field Without `empty` a field that is empty shows the server's default. */

/** Numbers between the whole ones count too. */
const ANY = false;
const WHOLE = true;
/** @type {Field[]} */
const FIELDS = /** @type {[string, string, string, boolean, string?][]} */ ([
  ["temperature", "Temperature", "How freely the next token is drawn. 0 always takes the likeliest one.", ANY],
  ["top_p", "Top p", "Draws only from the likeliest tokens that together have this probability. 1 is off.", ANY],
  ["min_p", "Min p", "Leaves out tokens that are less likely than this share of the likeliest one. 0 is off.", ANY],
  ["top_k", "Top k", "Draws only from this many of the likeliest tokens. 0 is off.", WHOLE],
  ["repetition_penalty", "Repetition penalty", "Over 1, tokens among the last 64 become less likely.", ANY],
  ["frequency_penalty", "Frequency penalty", "Lowers a token once for every time it occurs among the last 64.", ANY],
  ["presence_penalty", "Presence penalty", "Lowers a token that occurs among the last 64, however often.", ANY],
  ["max_tokens", "Max tokens", "Longest answer. Empty: the server’s limit, which is shown.", WHOLE],
  ["min_tokens", "Min tokens", "Shortest answer: it does not end before.", WHOLE, "0"],
  ["answers", "Answers at once", `Up to ${MAX_ANSWERS} versions of each answer, side by side.`, WHOLE, "1"],
  ["seed", "Seed", "The same seed draws the same answer again. Empty: a new one each time.", WHOLE, "random"],
  ["logprobs", "Token probabilities", "Colours tokens by their probability, and shows this many alternatives.", WHOLE, "off"],
]).map(([name, label, help, isWhole, empty]) => ({ name, label, help, isWhole, empty }));

const LANES = [1, 0, -1];

/** The numbers that a setting can be; without a server that tells, as far as it is known. @param {string} name @param {Info | undefined} info */
function rangeOf(name, info) {
  const { minimum = -Infinity, maximum = Infinity } = info?.sampling[name] ?? {};
  // The server takes what is over 0, and a field has no bound that is left out itself.
  if (name === "repetition_penalty") return { minimum: 0.01, maximum };
  if (FIELDS.some((field) => field.name === name && !field.isWhole)) return { minimum, maximum };
  const most = Math.min(maximum, MAX_WHOLE);
  // An answer without a token, which only reads the prompt, would show nothing.
  if (name === "max_tokens") return { minimum: 1, maximum: info?.limits.max_tokens || most };
  if (name === "answers") return { minimum: 1, maximum: MAX_ANSWERS };
  if (name === "logprobs") return { minimum: 0, maximum: info ? (info.capabilities.max_logprobs ?? -1) : MAX_LOGPROBS };
  return { minimum: Math.max(0, minimum), maximum: most };
}

/** Settings from outside, without what is none of this page's or out of its range. @param {any} raw @param {Info} [info] @param {Set<string>} [dropped] Is given the names of what was left out. @returns {Settings} */
export function readSettings(raw, info, dropped = new Set()) {
  const { system = "", priority = 1, sampling = {}, reasoning, truncation, answers = 1 } = raw ?? {};
  if (!isRecord(sampling)) dropped.add("sampling");
  if (typeof system !== "string") dropped.add("system prompt");
  if (!LANES.includes(priority)) dropped.add("priority");
  const found = Object.entries(isRecord(sampling) ? sampling : {}).filter(([name, value]) => {
    const isKept = name === "stop" ? isStop(value) : name === "json_schema" ? isRecord(value) : isInRange(name, value, info);
    if (!isKept) dropped.add(name);
    return isKept;
  });
  return {
    system: typeof system === "string" ? system : "",
    priority: LANES.includes(priority) ? priority : 1,
    sampling: Object.fromEntries(found.sort()), // of the same settings there is one text
    reasoning: reasoning === "off" ? "off" : "auto",
    truncation: truncation === "auto" || truncation === "compact" ? truncation : "off",
    ...(typeof raw?.unread === "string" && { unread: raw.unread }),
    ...(Number.isInteger(answers) && answers > 1 && { answers: Math.min(answers, MAX_ANSWERS) }),
  };
}

/** What new chats begin with. */
export const ofNewChats = () => readSettings(parsed(kept(NEW_CHATS_KEY)));

/** @param {string} name @param {any} value @param {Info | undefined} info */
function isInRange(name, value, info) {
  const field = FIELDS.find((each) => each.name === name);
  const { minimum, maximum } = rangeOf(name, info);
  const isNumber = field?.isWhole ? Number.isInteger(value) : Number.isFinite(value);
  return Boolean(field) && isNumber && value >= minimum && value <= maximum;
}

/** @param {unknown} value @returns {value is Record<string, any>} */
export function isRecord(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** @param {any} value */
function isStop(value) {
  return Array.isArray(value) && value.length <= MAX_STOPS && value.every((each) => each && typeof each === "string");
}

/** What the person has set, in a few words. @param {Settings} settings */
export function summary(settings) {
  const { temperature } = settings.sampling;
  const parts = temperature === undefined ? [] : [`temperature ${temperature}`];
  if (settings.sampling.max_tokens) parts.push(`at most ${number(Number(settings.sampling.max_tokens))} tokens`);
  if (settings.priority !== 1) parts.push(settings.priority ? "background" : "normal priority");
  if (settings.reasoning === "off") parts.push("no thinking");
  if (settings.truncation === "auto") parts.push("drops old messages");
  if (settings.truncation === "compact") parts.push("summarizes old messages");
  if (settings.system.trim()) parts.push("system prompt");
  if (settings.unread) parts.push("schema not set");
  if (settings.sampling.logprobs !== undefined) parts.push("probabilities");
  if ((settings.answers ?? 1) > 1) parts.push(`${number(settings.answers ?? 1)} answers`);
  const more = Object.keys(settings.sampling).filter((name) => !NAMED.includes(name)).length;
  if (more) parts.push(`${number(more)} more`);
  return parts.join(" · ");
}

/** Fill the sheet. Changes count at once. @param {Settings} settings @param {Info | undefined} info @param {(settings: Settings) => void} onChange @param {string} preset The name of the preset that was chosen. @param {Settings} [before] Those that a reset has replaced. */
export function fillSettings(settings, info, onChange, preset = "", before = undefined) {
  const draft = structuredClone(settings);
  const [scope, use] = [byId("scope", HTMLElement), byId("for-new-chats", HTMLButtonElement)];
  const tell = () => {
    use.hidden = JSON.stringify(ofNewChats()) === JSON.stringify(readSettings(draft));
    say(scope, `All of this is for this conversation${use.hidden ? ", and new chats begin with the same." : ". New chats begin with other settings."}`);
  };
  const changed = () => (onChange(structuredClone(draft)), tell());
  const load = (/** @type {Settings} */ chosen, preset = "", /** @type {Settings | undefined} */ before = undefined) => {
    Object.assign(draft, { answers: undefined, unread: undefined }, chosen);
    changed();
    fillSettings(draft, info, onChange, preset, before);
  };
  const system = byId("system", HTMLTextAreaElement);
  system.value = draft.system;
  system.oninput = () => {
    draft.system = system.value;
    changed();
  };
  use.onclick = () => (keep(NEW_CHATS_KEY, JSON.stringify(draft)), tell(), scope.focus());
  tell();
  presets(preset, draft, info, load);
  byId("thinking-choice", HTMLFieldSetElement).hidden = !info?.capabilities.reasoning_switch;
  choices(draft, changed);
  const reset = byId("reset", HTMLButtonElement);
  reset.textContent = before ? "Undo the reset" : "Reset to defaults";
  const fresh = () => load({ ...structuredClone(DEFAULTS), system: draft.system }, "", structuredClone(draft));
  reset.onclick = () => (before ? load(before) : fresh());
  const had = FIELDS.filter(({ name }) => name !== "logprobs" || (info?.capabilities.max_logprobs ?? -1) >= 0);
  for (const [id, isFirst] of /** @type {[string, boolean][]} */ ([["numbers", true], ["more-numbers", false]])) {
    const fields = had.filter(({ name }) => FIRST.includes(name) === isFirst);
    byId(id, HTMLElement).replaceChildren(...fields.map((field) => numberField(field, draft, info, changed)));
  }
  stops(draft, changed);
  schema(draft, changed);
  byId("schema-field", HTMLElement).hidden = !info?.capabilities.grammars?.includes("json_schema");
  const folded = Object.fromEntries(Object.entries(draft.sampling).filter(([name]) => !FIRST.includes(name)));
  if (summary({ ...draft, system: "", reasoning: "auto", sampling: folded })) byId("more-settings", HTMLElement).setAttribute("open", "");
}

/** Each field of the sheet, by what it is called. @returns {Map<string, HTMLElement>} */
export function fieldsOf() {
  /** @type {NodeListOf<HTMLElement>} */
  const found = document.querySelectorAll("#settings .field:not([hidden], [hidden] *)");
  return new Map(Array.from(found, (field) => [field.querySelector("label, legend")?.textContent ?? "", field]));
}

/** Show the sheet, at the field that is called so. @param {string} [label] */
export function showSettings(label = "") {
  const dialog = byId("settings", HTMLDialogElement);
  if (!dialog.open) dialog.showModal();
  const field = fieldsOf().get(label);
  field?.closest("details")?.setAttribute("open", "");
  const input = field?.querySelector("input:checked, input[type=number], input[type=text], textarea, button");
  if (input instanceof HTMLElement) input.focus();
  field?.scrollIntoView({ block: "center" });
}

/** @returns {Record<string, any>} What people have kept under a name. */
function keptPresets() {
  const found = parsed(kept(PRESETS_KEY));
  return isRecord(found) ? found : {};
}

/** Instructions and settings under a name of one's own. @param {string} chosen @param {Settings} draft @param {Info | undefined} info @param {(settings: Settings, preset: string) => void} load */
function presets(chosen, draft, info, load, told = "") {
  const all = keptPresets();
  const names = Object.keys(all);
  const [choice, input] = [byId("preset", HTMLSelectElement), byId("preset-name", HTMLInputElement)];
  const [put, remove] = [byId("save-preset", HTMLButtonElement), byId("delete-preset", HTMLButtonElement)];
  const save = (/** @type {Record<string, any>} */ changed, /** @type {string} */ preset, /** @type {string} */ words) => {
    keep(PRESETS_KEY, JSON.stringify(changed));
    presets(preset, draft, info, load, words);
    input.focus();
  };
  const none = h("option", { value: "" }, "Choose a preset …");
  choice.replaceChildren(none, ...names.map((name) => h("option", { value: name }, name)));
  choice.onchange = () => choice.value && load(readSettings(all[choice.value], info), choice.value);
  choice.value = input.value = chosen;
  byId("preset-told", HTMLElement).textContent = told;
  const name = () => input.value.trim();
  put.onclick = () => name() && save({ ...all, [name()]: draft }, name(), "Saved.");
  const others = () => Object.fromEntries(Object.entries(all).filter(([each]) => each !== name()));
  remove.onclick = () => name() in all && save(others(), "", "Deleted.");
  choice.hidden = remove.hidden = !names.length;
}

/** A setting that is a text, and what is wrong with it. @param {string} name @param {string} text @param {(text: string) => string} set Sets it, and says what is wrong. */
function textField(name, text, set) {
  const [area, fault] = [byId(`set-${name}`, HTMLTextAreaElement), byId(`set-${name}-fault`, HTMLElement)];
  const tell = (/** @type {string} */ words) => {
    fault.textContent = words;
    area.setAttribute("aria-invalid", String(words !== ""));
  };
  area.value = text;
  tell("");
  area.oninput = () => tell(set(area.value));
}

/** A schema that is no JSON (yet) is kept as it was typed. @param {Settings} draft @param {() => void} changed */
function schema(draft, changed) {
  const { unread, sampling } = draft;
  const set = (/** @type {string} */ text) => {
    const fault = text.trim() && faultOfSchema(text);
    delete draft.sampling.json_schema;
    draft.unread = fault ? text : undefined;
    if (text.trim() && !fault) draft.sampling.json_schema = JSON.parse(text);
    changed();
    return fault;
  };
  textField("json_schema", unread ?? (sampling.json_schema ? JSON.stringify(sampling.json_schema, null, 1) : ""), set);
  if (unread) byId("set-json_schema-fault", HTMLElement).textContent = faultOfSchema(unread);
}

/** Why this is no JSON Schema, and in which line. @param {string} text */
function faultOfSchema(text) {
  const words = faultOfJson(text);
  if (!words) return isRecord(JSON.parse(text)) ? "" : "Not set: it must be an object, as {“type”: …}.";
  // Some browsers name the line, others the token: the first lines that have this fault end with its line.
  const lines = text.split("\n");
  const at = lines.findIndex((_, index) => faultOfJson(lines.slice(0, index + 1).join("\n")) .startsWith("Unexpected token"));
  const line = /line (\d+)/.exec(words)?.[1] ?? (at < 0 ? lines.length : at + 1);
  return `Not set: line ${line} is no JSON: ${words.replace(/^JSON.parse: |, (\.{3})?".*$| in JSON.*$| at line.*$/gs, "")}.`;
}

/** The browser's words for what is wrong with JSON. @param {string} text */
function faultOfJson(text) {
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return String(error instanceof Error && error.message);
  }
}

/** Settings that are one of a few, which stand in the sheet. @param {Settings} draft @param {() => void} changed */
function choices(draft, changed) {
  for (const radio of document.querySelectorAll("#settings [type=radio]")) {
    if (!(radio instanceof HTMLInputElement)) continue;
    const { name, value } = radio;
    radio.checked = value === String(Reflect.get({ ...DEFAULTS, ...draft }, name));
    radio.onchange = () => {
      Object.assign(draft, { [name]: name === "priority" ? Number(value) : value });
      changed();
    };
  }
}

/** @param {Field} field @param {Settings} draft @param {Info | undefined} info @param {() => void} changed */
function numberField(field, draft, info, changed) {
  const { minimum, maximum } = rangeOf(field.name, info);
  const id = `set-${field.name}`;
  const [element, part] = copyOf("number-field");
  const [label, input, fault, help] = ["label", "value", "fault", "help"].map(part);
  if (!(input instanceof HTMLInputElement)) throw new Error("#number-field has no input");
  Object.assign(input, { id, min: minimum, max: maximum, inputMode: field.isWhole ? "numeric" : "decimal" });
  input.step = field.isWhole ? "1" : "any";
  input.placeholder = field.empty ?? String(info?.sampling[field.name]?.default ?? "");
  input.setAttribute("aria-describedby", (help.id = `${id}-help`));
  input.setAttribute("aria-errormessage", (fault.id = `${id}-fault`));
  label.setAttribute("for", id);
  label.textContent = field.label;
  help.textContent = field.help;
  const check = () => {
    const { valid } = input.validity;
    input.setAttribute("aria-invalid", String(!valid));
    fault.textContent = valid ? "" : `Not set: it must be a ${field.isWhole ? "whole " : ""}number from ${minimum.toLocaleString("en")} to ${maximum.toLocaleString("en")}.`;
  };
  const home = /** @type {Record<string, any>} */ (field.name === "answers" ? draft : draft.sampling);
  input.value = String(home[field.name] ?? "");
  input.addEventListener("input", () => {
    check();
    // What is on its way to a number that is too large must not stay set: 500 of a 5000.
    if (input.value === "" || !input.validity.valid) delete home[field.name];
    else home[field.name] = Number(input.value);
    changed();
  });
  return element;
}

/** @param {Settings} draft @param {() => void} changed */
function stops(draft, changed) {
  const given = draft.sampling.stop;
  const set = (/** @type {string} */ text) => {
    const lines = text.split("\n").filter(Boolean);
    if (lines.length) draft.sampling.stop = lines.slice(0, MAX_STOPS);
    else delete draft.sampling.stop;
    changed();
    const isTooMany = lines.length > MAX_STOPS;
    return isTooMany ? `Only the first ${MAX_STOPS} of these ${number(lines.length)} stop sequences are set.` : "";
  };
  textField("stop", Array.isArray(given) ? given.join("\n") : "", set);
}
