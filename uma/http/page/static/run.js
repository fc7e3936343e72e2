/** An answer that is being written: asked for once, followed to its end, picked up again after a reload or a lost
 * connection. What the message holds in the end is in the message; what is only to be seen meanwhile is here. */

import { ApiError, remove, stream } from "./api.js";

/** @typedef {import("./types.js").Message} Message */

const GONE =
  "The server has no more of this answer: it was started again, or the page was closed for too long.";
const MAX_TRIES = 8;
const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 8_000;

export class Run {
  /** @param {Message} message The answer, with its resume token. */
  constructor(message) {
    this.message = message;
    /** The blocks so far, as sanitized HTML. @type {string[]} */
    this.blocks = [];
    /** How far the prompt is read, while there is no text. @type {{prompt_tokens?: number, computed_tokens?: number}} */
    this.progress = {};
    this.isOver = false;
    this.isReconnecting = false;
    /** Called after each change. @type {() => void} */
    this.onChange = () => {};
    this.lastEventId = "";
  }

  /**
   * Follow the answer to its end. Never throws: what goes wrong is in `message.failure`.
   *
   * @param {unknown} [body] What to ask; without it the answer is picked up where it is.
   */
  async follow(body) {
    let tries = 0;
    while (!this.isOver) {
      try {
        for await (const event of this.events(body)) {
          tries = 0;
          this.take(event);
        }
        if (!this.isOver) throw new ApiError(0, { code: "E_CONNECTION", message: "The answer broke off." });
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        tries += 1;
        if (error.status !== 0 || tries > MAX_TRIES) this.fail(error);
        else await this.pause(tries);
      }
      body = undefined;
    }
    this.onChange();
  }

  /** End the answer at its next token. */
  async stop() {
    try {
      await remove(`answers/${this.message.token}`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.fail(error);
      this.onChange();
    }
  }

  /** @param {unknown} body */
  events(body) {
    if (body !== undefined) return stream("answers", { body });
    return stream(`answers/${this.message.token}`, { lastEventId: this.lastEventId });
  }

  /** @param {import("./api.js").ServerEvent} event */
  take({ id, name, data }) {
    this.isReconnecting = false;
    if (name === "update") {
      if (!this.lastEventId) {
        this.message.text = "";
        delete this.message.thinking;
      }
      this.lastEventId = id;
      this.message.text += data.text;
      if (data.thinking) this.message.thinking = (this.message.thinking ?? "") + data.thinking;
      for (const [index, html] of Object.entries(data.blocks)) this.blocks[Number(index)] = html;
      this.blocks.length = data.count;
    } else if (name === "progress") this.progress = data;
    else if (name === "done") {
      this.message.done = data;
      this.end();
    } else if (name === "failed") {
      this.message.failure = data;
      this.end();
    }
    this.onChange();
  }

  /** @param {ApiError} error */
  fail(error) {
    const isGone = error.status === 404;
    this.message.failure = isGone ? { ...error.failure, message: GONE } : error.failure;
    this.end();
  }

  end() {
    this.isOver = true;
    delete this.message.token;
  }

  /** @param {number} tries */
  async pause(tries) {
    this.isReconnecting = true;
    this.onChange();
    const pause = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** (tries - 1));
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}
