/** Connections that die without a word: a cable that is pulled, a machine that sleeps, a proxy that drops what it carries.
 * Neither side is told, so a stream that has been silent for too long counts as one that broke off. */

/** Maximum silence of an answer's stream while its connection holds; `HEARTBEAT_SEC` in endpoints.py. */
export const HEARTBEAT_MS = 10_000;
/** Silence after which a connection counts as lost: two heartbeats are missing, and the second has had time to be late. */
export const SILENCE_MS = 2.5 * HEARTBEAT_MS;
/** The server begins to reply at once. After a loss the browser sends more requests over connections of the same fate, one
 * after the other, as long as it has any left: each costs this time. */
export const REPLY_MS = 5_000;

export class Silence {
  /** @param {AbortSignal} [signal] What ends the request for other reasons. */
  constructor(signal) {
    this.ending = new AbortController();
    /** For the request: it ends at `signal`, and after too long a silence. */
    this.signal = signal ? AbortSignal.any([signal, this.ending.signal]) : this.ending.signal;
  }

  /** Wait for `sign`, which `signal` ends with an error, for so long. @template T @param {Promise<T>} sign @param {number} limitMs @returns {Promise<T>} */
  async bounds(sign, limitMs) {
    const timer = setTimeout(() => this.ending.abort(), limitMs);
    try {
      return await sign;
    } finally {
      clearTimeout(timer);
    }
  }
}
