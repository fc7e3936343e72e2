/** What a minute of frames says: rates, percentiles, shares. Pure: frames in, numbers out. */

/** @typedef {import("./types.js").Frame} Frame */
/** @typedef {import("./types.js").Buckets} Buckets */
/** @typedef {{ms: number, isOver: boolean}} Quantile Over: it is more than this, the last bound. */

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

  /** What a counter grew by within the last `ms`. @param {string} name @param {number} [ms] */
  growth(name, ms = WINDOW_MS) {
    return this.newest.metrics[name] - this.before(ms).metrics[name];
  }

  /** A counter's growth a second. @param {string} name @param {number} ms */
  rate(name, ms) {
    const elapsed = this.newest.at_ms - this.before(ms).at_ms;
    return elapsed > 0 ? (this.growth(name, ms) * 1_000) / elapsed : 0;
  }

  /** The rate at each frame, over the second before it, with its age in milliseconds. @param {string} name */
  rates(name) {
    const points = [];
    for (let index = 1; index < this.frames.length; index++) {
      const from = this.frames[Math.max(0, index - 1_000 / INTERVAL_MS)];
      const to = this.frames[index];
      const value = ((to.metrics[name] - from.metrics[name]) * 1_000) / (to.at_ms - from.at_ms);
      points.push({ age_ms: this.newest.at_ms - to.at_ms, value });
    }
    return points;
  }

  /**
   * A percentile of a histogram: of the last minute, or since the start where the minute has no observation; null
   * where there is none at all.
   *
   * @param {string} name @param {number} share From 0 to 1.
   * @returns {Quantile | null}
   */
  percentile(name, share) {
    const now = this.newest.metrics[name];
    const then = this.before(WINDOW_MS).metrics[name];
    return quantile(now, then, share) ?? quantile(now, {}, share);
  }

  /** @param {number} ms */
  before(ms) {
    const from = this.newest.at_ms - ms;
    return this.frames.find((each) => each.at_ms >= from) ?? this.newest;
  }
}

/**
 * Interpolated within its bucket, as Prometheus does; of what lies beyond the last bound only that is known.
 *
 * @param {Buckets | undefined} now @param {Buckets} then @param {number} share
 * @returns {Quantile | null}
 */
export function quantile(now, then, share) {
  if (!now) return null;
  const bounds = Object.keys(now)
    .filter((bound) => bound !== "inf")
    .map(Number)
    .sort((a, b) => a - b);
  const count = (/** @type {string | number} */ bound) => now[bound] - (then[bound] ?? 0);
  const total = count("inf");
  if (total <= 0) return null;
  const rank = share * total;
  let low = 0;
  let below = 0;
  for (const bound of bounds) {
    const upTo = count(bound);
    if (upTo >= rank)
      return { ms: low + ((bound - low) * (rank - below)) / Math.max(1, upTo - below), isOver: false };
    low = bound;
    below = upTo;
  }
  return { ms: low, isOver: true };
}
