/** What a failed answer means for its reader: what is wrong and what to do, in words that need no knowledge of the
 * server. The server's own words, which are for its operator, are kept beside these. */

import { number } from "./dom.js";

const TOO_LONG = "This is longer than the model’s context window. Shorten the question, remove a file, or start a new chat.";
const FULL = "This conversation is longer than the model’s context window. Drop the oldest messages, have the model summarize them, or start a new chat.";
const BUSY = "The server is busy.";
const STOPPED = "The server was stopped or restarted before the answer was complete.";

/** By code: of a stream's last event, or of a refusal over HTTP. @type {Record<string, string>} */
const WORDS = {
  E_LIMIT_PROMPT_TOO_LARGE: TOO_LONG,
  E_PROTO_FRAME_TOO_LARGE: TOO_LONG,
  context_length_exceeded: TOO_LONG,
  request_too_large: TOO_LONG,
  E_LIMIT_OVERLOADED: BUSY,
  E_HTTP_RATE: BUSY,
  rate_limit_exceeded: BUSY,
  E_RUNTIME_SHUTDOWN: STOPPED,
  E_CONNECTION: STOPPED,
  service_unavailable: STOPPED,
  model_not_found: "This model is not on the server any more: choose another one above, then try again.",
  invalid_api_key: "This server needs an API key. Enter one, then try again.",
  403: "Your key does not allow this. Use another key, or reset the settings.",
};
const OWN_RATE = "Your key has used its tokens for this minute.";
/** What a key's own bound says (uma/net/quota.py), and what that means: others on the server have nothing to do with it. @type {[RegExp, string][]} */
const BOUNDS = [
  [/\(max_concurrent\)/, "Your key allows no more answers at once: wait for one to end, or stop one."],
  [/\(max_tokens_per_minute\)/, OWN_RATE],
  [/^max_tokens: .* may generate /, "Your key allows shorter answers only: open “Settings” and lower “Max tokens”."],
  [/^priority: .* may use /, "Your key allows no such priority: choose a lower one in the settings."],
];
const BAD_REQUESTS = ["400", "unsupported_parameter", "E_PROTO_BAD_REQUEST", "E_HTTP_UNSUPPORTED"];

/** The tokens of a prompt that is too long, and those that there can be. */
const EXTENT = /([\d,]+) tokens do not fit the context of ([\d,]+)/;

/** @param {Failure} failure @param {boolean} isOutgrown Most of what the model was given stands before the question. @param {Info} [info] @returns {{words: string, detail: string, isFull?: boolean, isTooLong?: boolean}} `detail` is empty where `words` are all there is; full: a shorter question does not help; too long: nothing else does. */
export function explain({ code, message, retry_after_ms: retry }, isOutgrown, info) {
  if (code === "gone" || code === "unreachable") return { words: message, detail: "" };
  const [, size, most] = EXTENT.exec(message) ?? [];
  const longer = info?.models?.find(({ fits, context_length: length }) => fits && length > (info.limits.n_ctx || Infinity))?.name;
  const extent = size ? `There are ${size} tokens, and at most ${most} fit.${longer ? ` More fit into ${longer}.` : ""}` : "";
  if (WORDS[code] === TOO_LONG && (isOutgrown || extent))
    return { words: `${isOutgrown ? FULL : TOO_LONG} ${extent}`.trim(), detail: extent ? "" : message, isFull: isOutgrown, isTooLong: !isOutgrown };
  const words = boundOf(message) ?? WORDS[code] ?? (BAD_REQUESTS.includes(code) ? wrong(message, info) : "The answer failed.");
  const when = [BUSY, OWN_RATE, STOPPED, "The answer failed."].includes(words) ? ` ${again(retry)}` : "";
  return { words: words + when, detail: message, isTooLong: words === TOO_LONG };
}

/** Why a question waits that is asked again by itself. @param {Failure} failure @param {number} ms Until then. */
export function busy({ message }, ms) {
  return `${boundOf(message) ?? BUSY} Retrying in ${number(Math.ceil(ms / 1_000))} s.`;
}

/** @param {string} message */
function boundOf(message) {
  return BOUNDS.find(([form]) => form.test(message))?.[1];
}

/** @param {string} message Begins with the field that is wrong, where it is one. @param {Info | undefined} info */
function wrong(message, info) {
  if (/this model does not support image /.test(message)) return `The conversation has pictures. ${blind(info)} You can also edit the question to remove them, or start a new chat.`;
  if (/^(sampling|priority|reasoning)\b/i.test(message)) return "The server does not accept one of the settings. Correct it in the settings, or reset them.";
  return "The model does not accept this conversation. Edit the question, or start a new chat.";
}

/** That the model sees no pictures, and which one does. @param {Info | undefined} info */
export function blind(info) {
  const other = info?.models?.find(({ fits, vision }) => fits && vision)?.name;
  return `This model cannot see pictures${other ? `, but ${other} can: choose it above` : ", and no model here can"}.`;
}

/** @param {number | null | undefined} retry In milliseconds. */
function again(retry) {
  const seconds = Math.ceil((retry ?? 0) / 1_000);
  return seconds <= 1 ? "Try again in a moment." : `Try again in ${number(seconds)} s.`;
}
