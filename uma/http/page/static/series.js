/** The frames of the last minute: what lines are drawn of. The figures themselves are the server's. */

export const WINDOW_MS = 60_000;
export const INTERVAL_MS = 250;

/** The frames of the last minute, the newest last. */
export class Series {
  constructor() {
    /** @type {Frame[]} */
    this.frames = [];
  }

  /** @param {Frame} frame @returns {boolean} Whether it comes from a server that was started again. */
  add(frame) {
    const newest = this.frames.at(-1);
    if (newest?.at_ms === frame.at_ms) return false; // the same snapshot, on a new stream
    // Its clock begins anywhere, and its counters at zero: what was before says nothing about it.
    const isRestarted =
      newest !== undefined &&
      (frame.at_ms < newest.at_ms || frame.metrics.requests_total < newest.metrics.requests_total);
    if (isRestarted) this.frames = [];
    this.frames.push(frame);
    while (frame.at_ms - this.frames[0].at_ms > WINDOW_MS) this.frames.shift();
    return isRestarted;
  }

  get newest() {
    return this.frames[this.frames.length - 1];
  }

  /** What a counter grew by within the minute. @param {string} name */
  growth(name) {
    return this.newest.metrics[name] - this.frames[0].metrics[name];
  }

  /** A speed at each frame, with its age in milliseconds. @param {"written_per_sec" | "read_per_sec"} name */
  line(name) {
    return this.frames.map(({ at_ms, figures }) => ({ age_ms: this.newest.at_ms - at_ms, value: figures[name] }));
  }
}
