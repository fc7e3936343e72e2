/** Questions to the server: JSON both ways, and streams of server-sent events, read by hand so that they can be asked
 * for with POST and with a key. */

import { keep, kept } from "./local.js";
import { REPLY_MS, Silence, SILENCE_MS } from "./silence.js";

const KEY = "uma.key";

/** The server said no, or was not there (`status` 0). */
export class ApiError extends Error {
  /** @param {number} status @param {Failure} failure */
  constructor(status, failure) {
    super(failure.message);
    this.status = status;
    this.failure = failure;
  }
}

/** Why no key can be like this; null where one can. @param {string} key */
export function faultOfKey(key) {
  const odd = key.match(/[^\x21-\x7e]/u);
  if (!odd) return null;
  const what = /\s/.test(odd[0]) ? "space or line break" : `“${odd[0]}”`;
  return `A key has no ${what} in it: copy it again, as “uma key new” printed it.`;
}

/** @param {string} key Without a fault. Empty: forget it. */
export function setKey(key) {
  keep(KEY, key || null);
}

/** The key that requests are sent with. One that cannot be sent is none. */
export function currentKey() {
  const key = kept(KEY) ?? "";
  return faultOfKey(key) ? "" : key;
}

/** What is called when a key is missing or wrong, with the path that was asked for. @type {{ask: (path: string) => void}} */
export const onUnauthorized = { ask: () => {} };

/** What is called when the server can be another than before: it was away, or has something new to do. @type {{check: () => void}} */
export const onContact = { check: () => {} };
let wasAway = false;

/** Be told when another window of this browser has been given a key, or has forgotten it. @param {() => void} run */
export function watchKey(run) {
  addEventListener("storage", ({ key }) => (key === KEY || key === null) && run());
}

/**
 * @param {string} path Below `ui/api/`, or one of the API for all programs: `tokenize`, or what begins with `v1/` or `api/`.
 * @param {{method?: string, body?: unknown, signal?: AbortSignal, headers?: Record<string, string>}} [options]
 * @param {AbortSignal} [given] The caller's own signal: what it ends is no lost connection.
 * @returns {Promise<Response>}
 */
async function request(path, options = {}, given = options.signal) {
  const { method = options.body === undefined ? "GET" : "POST", body, signal } = options;
  const key = currentKey();
  /** @type {Record<string, string>} */
  const access = key ? { Authorization: `Bearer ${key}` } : {};
  const init = { method, signal, headers: { ...access, ...options.headers } };
  if (body !== undefined) {
    init.headers["Content-Type"] = "application/json";
    Object.assign(init, { body: JSON.stringify(body) });
  }
  const asked = new Request(/^(?:v1\/|api\/|tokenize$)/.test(path) ? path : `ui/api/${path}`, init); // outside: what is wrong with it is no lost connection
  let response;
  try {
    response = await fetch(asked);
  } catch (error) {
    if (given?.aborted) throw error;
    throw lost(path, "The server does not answer. Is it running?");
  }
  if (response.ok) {
    if (!path.startsWith("info") && (wasAway || path === "answers" || path === "live")) onContact.check();
    wasAway = false;
    return response;
  }
  if (response.status === 401 && key === currentKey()) onUnauthorized.ask(path);
  throw new ApiError(response.status, await failureOf(response));
}

/** The server is not there, of which the whole page is told. @param {string} path @param {string} message */
function lost(path, message) {
  wasAway = true;
  if (!path.startsWith("info")) onContact.check();
  return new ApiError(0, { code: "unreachable", message });
}

/** @param {Response} response @returns {Promise<Failure>} */
async function failureOf(response) {
  const retry = Number(response.headers.get("retry-after-ms")) || null;
  const [load, percent] = ["x-uma-load", "x-uma-loading-percent"].map((name) => response.headers.get(name));
  if (load) return { code: "loading", message: `The model: ${load}.`, retry_after_ms: retry, load, percent: Number(percent) };
  const { code, message } = (await response.json().catch(() => undefined))?.error ?? {};
  const words = String(message ?? `The server answered ${response.status}.`);
  return { code: String(code ?? response.status), message: words, retry_after_ms: retry };
}

/** @param {string} path @param {unknown} [body] @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function ask(path, body, signal) {
  return (await request(path, { body, signal })).json();
}

/** Have the server do something that it answers nothing to. @param {string} path @param {"POST" | "DELETE"} method */
export async function act(path, method) {
  await request(path, { method });
}

/** A download that goes on tells so ten times a second; the hub can be silent for longer than an answer. */
const PULL_SILENCE_MS = 300_000;

/** The lines of an answer in NDJSON. @param {string} path @param {unknown} body @returns {AsyncGenerator<any, void, void>} */
export async function* lines(path, body) {
  for await (const line of parts(path, "\n", { body, silenceMs: PULL_SILENCE_MS })) yield JSON.parse(line);
}

/**
 * The events of a stream, until it ends. Throws `ApiError` where it cannot be had, breaks off, or is silent for too long.
 *
 * @param {string} path
 * @param {{body?: unknown, signal?: AbortSignal, lastEventId?: string, onOpen?: (response: Response) => void, silenceMs?: number}} [options]
 *   `onOpen` is called once the server has the request. `silenceMs` is the longest silence of a stream that still lives.
 * @returns {AsyncGenerator<ServerEvent, void, void>}
 */
export async function* stream(path, options = {}) {
  for await (const part of parts(path, "\n\n", options)) {
    const event = parse(part);
    if (event) yield event;
  }
}

/** @param {string} path @param {string} end What each part ends with. @param {Parameters<typeof stream>[1]} options @returns {AsyncGenerator<string, void, void>} */
async function* parts(path, end, { body, signal, lastEventId, onOpen, silenceMs = SILENCE_MS } = {}) {
  const more = lastEventId ? { "Last-Event-ID": lastEventId } : undefined;
  const silence = new Silence(signal);
  const asking = request(path, { body, signal: silence.signal, headers: more }, signal);
  // How long a question takes to be sent depends on its files: only what has no body must be answered in time.
  const response = await (body === undefined ? silence.bounds(asking, REPLY_MS) : asking);
  onOpen?.(response);
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await silence.bounds(reader.read(), silenceMs);
      if (done) return;
      const whole = (text + value).split(end);
      text = whole.pop() ?? "";
      yield* whole;
    }
  } catch (error) {
    if (signal?.aborted || error instanceof ApiError) throw error;
    throw lost(path, "The connection to the server was lost.");
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/** @param {string} part @returns {ServerEvent | null} */
function parse(part) {
  const event = { id: "", name: "message", data: "" };
  for (const line of part.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event.data ? { ...event, data: JSON.parse(event.data) } : null;
}
