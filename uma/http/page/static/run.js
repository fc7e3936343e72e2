/** An answer that is being written: asked for once, followed to its end, picked up again after a reload or a lost
 * connection. What the message holds in the end is in the message; what is only to be seen meanwhile is here. */

import { act, ApiError, stream } from "./api.js";
import { freshId } from "./tree.js";

/** @typedef {import("./turns.js").Turns} Turns */

const GONE = "The rest of this answer is lost: the server was restarted, or this page was closed or offline for over a minute.";
/** How thinking begins that the model’s chat template does not declare, so that the server tells it as the answer’s beginning. */
const THOUGHT = /^\s*<think>\s*/;
const THOUGHT_ENDS = "</think>";
/** The server keeps an answer for so long after its reader is gone; see `KEEP_SEC` in answers.py. */
const KEPT_MS = 60_000;
const OVERLOADED = "E_LIMIT_OVERLOADED";
const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 2_000;
/** A server that is busy is asked again so often, with at least this pause. */
const MAX_REFUSALS = 50;
const BUSY_MS = 1_000;
/** A stopped answer waits for its last event, with its figures, no longer than this. */
const STOP_MS = 3_000;
/** Pauses before the server is told to stop: a question on its way can reach it after the first time. */
const STOP_PAUSES_MS = [0, 300, 1_000, 3_000, 10_000, 30_000];

/** @param {number} ms */
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Run {
  /** @param {Message} message The answer, with its resume token. @param {Turns} turns @param {Record<string, unknown>} [body] What to ask; without it the answer is picked up where it is. */
  constructor(message, turns, body) {
    this.message = message;
    this.turns = turns;
    /** Kept until there is some text: a question that is refused, or fails in a full queue, is asked again. */
    this.body = body;
    this.refusals = 0;
    /** Why it is asked again. @type {Failure | undefined} */
    this.refusal = undefined;
    /** When it is tried again. */
    this.waitsUntil = 0;
    this.token = message.token;
    /** Whether the server is known to have the question. */
    this.hasArrived = body === undefined;
    /** Blocks that screen readers have been given. */
    this.announced = 0;
  /** How far the prompt is read, or what it waits for, while there is no text. @type {Progress} */
    this.progress = {};
    /** The request's id, as the live view has it. */
    this.request = "";
    this.isOver = false;
    this.isStopping = false;
    this.isHurried = false;
    /** What it waits for before it tries again. @type {"" | "connection" | "loading" | "turn"} */
    this.waitsFor = "";
    this.beganAt = Date.now();
    this.loadsSince = Date.now();
    this.noteLoad();
    /** Called after each change. @type {() => void} */
    this.onChange = () => {};
    this.lastEventId = this.written = "";
    this.tries = 0;
    this.brokeOffAt = 0;
    /** @type {(nothing?: undefined) => void} */
    this.markOver = () => {};
    this.over = new Promise((resolve) => (this.markOver = resolve));
  }

  /** Follow the answer to its end. Never throws: what goes wrong is in `message.failure`. */
  async follow() {
    while (!this.isOver) {
      const problem = await this.listen();
      if (problem && !this.isOver) await this.recover(problem);
    }
    this.onChange();
  }

  /** Take events until the stream ends. @returns {Promise<ApiError | undefined>} Why it ended, where that is a problem. */
  async listen() {
    this.connection = new AbortController();
    const { signal } = this.connection;
    try {
      await Promise.race([this.turns.begin(this), this.over]);
      if (this.isOver) return undefined;
      for await (const event of this.events(signal)) this.take(event);
      return new ApiError(0, { code: "unreachable", message: "The answer was interrupted." });
    } catch (error) {
      if (signal.aborted) return undefined;
      if (!(error instanceof ApiError)) throw error;
      return error;
    } finally {
      this.turns.end(this);
    }
  }

  /** @param {AbortSignal} signal */
  events(signal) {
    const onOpen = (/** @type {Response} */ response) => {
      this.request = response.headers.get("x-uma-request") ?? "";
      if (!this.hasArrived) this.noteArrival();
    };
    if (!this.hasArrived) return stream("answers", { body: this.body, signal, onOpen });
    return stream(`answers/${this.token}`, { lastEventId: this.lastEventId, signal, onOpen });
  }

  /** How much of its model is loaded, that in words, and since when: until something is, it waits, as behind another one. @param {number} [percent] @param {string} [load] */
  noteLoad(percent, load = "") {
    if (!this.loadedPercent) this.loadsSince = Date.now();
    this.loadedPercent = percent;
    this.load = load;
  }

  noteArrival() {
    this.hasArrived = true;
    delete this.message.isUnsent;
    this.turns.settle();
  }

  /** Go on after a problem, where that helps. @param {ApiError} error */
  async recover(error) {
    const { status, failure } = error;
    this.noteLoad(failure.percent, failure.load);
    if (failure.code === "loading") await this.pause("loading", failure.retry_after_ms ?? FIRST_PAUSE_MS);
    // It was asked for before, and only the answer to that was lost.
    else if (status === 400 && !this.hasArrived && failure.message.startsWith("token:")) this.noteArrival();
    else if (status === 429 && this.body && this.refusals++ < MAX_REFUSALS) {
      this.renew(this.body);
      this.refusal = failure;
      await this.pause("turn", Math.max(BUSY_MS, failure.retry_after_ms ?? 0));
    } else if (status !== 0) this.fail(error);
    else {
      this.brokeOffAt ||= Date.now();
      if (this.hasArrived && Date.now() - this.brokeOffAt > KEPT_MS) this.fail(error);
      else await this.pause("connection", Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** this.tries++));
    }
  }

  /** Ask once more, as another answer: the server knows the last one as failed. @param {Record<string, unknown>} body */
  renew(body) {
    this.token = this.message.token = freshId();
    this.message.isUnsent = true;
    this.hasArrived = false;
    this.body = { ...body, token: this.token };
    this.lastEventId = "";
    this.progress = {};
  }

  /** @param {"connection" | "loading" | "turn"} reason @param {number} ms */
  async pause(reason, ms) {
    this.waitsFor = reason;
    this.waitsUntil = Date.now() + ms;
    for (let left = ms; left > 0 && !this.isOver; left = this.waitsUntil - Date.now()) {
      this.onChange();
      await Promise.race([sleep(Math.min(left, 1_000)), this.over]);
    }
  }

  /** Let go of the stream until it is this answer's turn again. */
  pauseStream() {
    this.connection?.abort();
  }

  /** Whether the model thinks, and can be told to answer. */
  get canHurry() {
    return Boolean(this.message.thinking) && !this.message.text && !this.isHurried && !this.isOver;
  }

  /** Have the model think no further. What cannot be told to the server changes nothing. */
  async answerNow() {
    this.isHurried = true;
    this.onChange();
    await act(`answers/${this.token}/answer`, "POST").catch(() => (this.isHurried = false));
  }

  /** End the answer at its next token; a second time, or where the server has not got the question yet, at once. */
  async stop() {
    if (this.isOver) return;
    if (!this.hasArrived || this.isStopping || this.waitsFor === "loading") this.endAsStopped();
    if (this.isStopping) return;
    this.isStopping = true;
    this.onChange();
    this.turns.settle();
    setTimeout(() => this.endAsStopped(), STOP_MS);
    for (const pause of STOP_PAUSES_MS) {
      await sleep(pause);
      try {
        await act(`answers/${this.token}`, "DELETE");
        return;
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        this.endAsStopped();
        if (error.status !== 0 && (error.status !== 404 || this.hasArrived)) return;
      }
    }
  }

  endAsStopped() {
    if (this.isOver) return;
    this.message.isStopped = true;
    this.end();
    this.pauseStream();
    this.onChange();
  }

  /** @param {ServerEvent} event */
  take({ id, name, data }) {
    if (this.isOver) return;
    this.waitsFor = "";
    this.tries = this.brokeOffAt = 0;
    if (name === "update") {
      if (data.text || data.thinking) this.body = undefined;
      if (!this.lastEventId) {
        this.written = "";
        delete this.message.tokens;
        if (!this.message.continues) delete this.message.thinking;
      }
      this.lastEventId = id;
      this.written += data.text;
      const begins = THOUGHT.exec(this.written)?.[0].length;
      const ends = begins === undefined ? -1 : this.written.indexOf(THOUGHT_ENDS, begins);
      if (begins !== undefined) this.message.thinking = this.written.slice(begins, ends < 0 ? undefined : ends);
      this.message.text = begins === undefined ? this.written : ends < 0 ? "" : this.written.slice(ends + THOUGHT_ENDS.length).trimStart();
      if (data.thinking) this.message.thinking = (this.message.thinking ?? "") + data.thinking;
      if (data.tokens) this.message.tokens = [...(this.message.tokens ?? []), ...data.tokens];
    } else if (name === "progress") {
      this.progress = data;
      this.noteLoad(data.loading_percent, data.load);
      if (data.loading_percent !== undefined) this.waitsFor = "loading";
    } else if (name === "done") {
      this.message.done = data;
      this.message.request = this.request;
      this.end();
    } else if (name === "failed") {
      if (data.code === OVERLOADED && this.body) throw new ApiError(429, data);
      this.message.failure = data;
      this.end();
    }
    this.onChange();
    this.turns.settle();
  }

  /** @param {ApiError} error */
  fail(error) {
    const isGone = error.status === 404 && this.hasArrived;
    this.message.failure = isGone ? { code: "gone", message: Date.now() - this.brokeOffAt < KEPT_MS ? "The rest of this answer is lost: the server was restarted." : GONE } : error.failure;
    this.end();
  }

  end() {
    this.isOver = true;
    delete this.message.token;
    delete this.message.isUnsent;
    this.markOver();
  }
}
