/** Which answers hold a stream. A browser has six connections to a server, for all its windows together, and Stop, new
 * questions and the live view need some of them. So the answer on the screen holds a stream, and all others share one in
 * turns: the server keeps an answer for a minute after its reader is gone. */

/** @typedef {import("./run.js").Run} Run */

const TURN_MS = 1_000;
/** All answers have had their turn within this time: half of what the server waits for a reader. */
const ROUND_MS = 30_000;

export class Turns {
  constructor() {
    /** The answer on the screen. @type {Run | undefined} */
    this.shown = undefined;
    /** When each open stream began, the oldest first. @type {Map<Run, number>} */
    this.open = new Map();
    /** What lets each go that waits, the one that waits longest first. @type {Map<Run, () => void>} */
    this.waiting = new Map();
    this.timer = 0;
  }

  /** @param {Run | undefined} run */
  show(run) {
    this.shown = run;
    this.settle();
  }

  /** Wait for the turn of `run`. @param {Run} run @returns {Promise<void>} */
  async begin(run) {
    await new Promise((resolve) => {
      this.waiting.set(run, () => resolve(undefined));
      this.settle();
    });
  }

  /** The stream of `run` is closed, or it waits no more. @param {Run} run */
  end(run) {
    this.waiting.delete(run);
    this.open.delete(run);
    this.settle();
  }

  /** Give and end turns; called at each change and each event, for the timers of a window in the background are late. */
  settle() {
    for (const run of [...this.waiting.keys()]) if (this.isFirst(run)) this.start(run);
    const [next] = this.waiting.keys();
    if (!this.sharing.length && next) this.start(next);
    const [holder, ...more] = this.sharing;
    for (const run of more) run.pauseStream();
    if (!holder || !this.waiting.size) return;
    const turn = Math.min(TURN_MS, ROUND_MS / this.waiting.size);
    const left = turn - (Date.now() - (this.open.get(holder) ?? 0));
    if (left <= 0) holder.pauseStream();
    else if (!this.timer)
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        this.settle();
      }, left);
  }

  /** The open streams of answers that have to share one. */
  get sharing() {
    return [...this.open.keys()].filter((run) => !this.isFirst(run));
  }

  /** @param {Run} run */
  isFirst(run) {
    return run === this.shown || !run.hasArrived || run.isStopping;
  }

  /** @param {Run} run */
  start(run) {
    const go = this.waiting.get(run);
    this.waiting.delete(run);
    this.open.set(run, Date.now());
    go?.();
  }
}
