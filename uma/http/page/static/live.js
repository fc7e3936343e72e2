/** The live view: what the engine does, four times a second, from one stream of snapshots that all viewers share. */

import { act, ApiError, ask, onContact, stream } from "./api.js";
import { byId, copyOf, duration, h, loaded, number } from "./dom.js";
import { HistoryPanel } from "./history.js";
import { Lanes } from "./lanes.js";

const RETRY_MS = 1_500;
/** The server sends four frames a second, some later where the engine computes for long at a stretch. */
const SILENCE_MS = 10_000;
/** The last bound of the server's times: what lies beyond is not known closer. */
const MOST_MS = 60_000;
/** By the reason that the server tells. */
const ENDS = new Map([
  ["stop", "finished"],
  ["length", "finished at its length limit"],
  ["cancelled", "cancelled, or its program disconnected"],
]);
const NONE = "–";
const NO_BREAK = "\u00a0";
const KINDS = /** @type {const} */ (["interactive", "normal", "background"]);

/** A figure with its name, and a second line. */
class Tile {
  /** @param {string} name */
  constructor(name) {
    const [element, part] = copyOf("tile");
    this.element = element;
    part("tile-name").textContent = name;
    this.value = part("tile-value");
    this.unit = part("tile-unit");
    this.note = part("tile-note");
  }

  /** @param {string} value @param {string} unit @param {string} note @param {boolean} [isTold] Whether there is something to tell; what was shown once keeps its place. */
  show(value, unit, note, isTold = true) {
    this.element.hidden &&= !isTold;
    this.value.textContent = value;
    this.unit.textContent = unit;
    this.note.textContent = note;
  }

  /** @param {number} speed @param {number} total What was done in all. */
  showSpeed(speed, total) {
    this.show(total ? number(speed) : NONE, "tokens/s", `${number(total)} in all`);
  }
}

/** A part of a bar, and its line in the legend. */
class Part {
  /** @param {string} kind @param {string} name */
  constructor(kind, name) {
    this.count = h("b", {}, "–");
    this.bar = h("span", { class: `bar-part is-${kind}` });
    this.element = h("li", {}, h("span", { class: `swatch is-${kind}` }), this.count, ` ${name}`);
  }

  /** @param {number} count @param {number} total */
  show(count, total) {
    this.count.textContent = number(count);
    this.element.hidden = !count;
    this.bar.style.width = `${(100 * count) / Math.max(1, total)}%`;
  }
}

/** A time that is known within its bucket alone: two digits of it. @param {number} ms */
function about(ms) {
  const known = ms < 10 ? ms : Number(ms.toPrecision(2)); // `duration` rounds the former to one digit, and once is enough
  return `${ms >= MOST_MS ? "over " : ""}${duration(known)}`;
}

export class LiveView {
  /** @param {(id: string) => Own | undefined} own What can be done with the answer of this page's that is this request. @param {() => Info | undefined} info */
  constructor(own, info = () => undefined) {
    this.element = byId("live-view", HTMLElement);
    this.own = own;
    this.info = info;
    /** Requests that are this viewer's, from wherever they came. @type {Set<string>} */
    this.mine = new Set();
    /** The last that was heard. @type {Frame | undefined} */
    this.frame = undefined;
    this.isShown = false;
    /** When the newest frame came. @type {Date | undefined} */
    this.heardAt = undefined;
    this.tiles = {
      tokens: new Tile("Writing"),
      prompt: new Tile("Reading"),
      first: new Tile("First token"),
      between: new Tile("Between tokens"),
      cache: new Tile("Cache hits"),
      preempted: new Tile("Preemptions"),
    };
    this.cells = {
      used: new Part("used", "used by requests"),
      cached: new Part("cached", "cached for later prompts"),
      free: new Part("free", "free"),
    };
    this.tiles.cache.element.hidden = this.tiles.preempted.element.hidden = true;
    byId("tiles", HTMLElement).append(...Object.values(this.tiles).map((tile) => tile.element));
    byId("cells", HTMLElement).append(...Object.values(this.cells).map((part) => part.bar));
    byId("cells-legend", HTMLElement).append(...Object.values(this.cells).map((part) => part.element));
    this.layout = byId("cells-layout", HTMLElement);
    /** A line for each of several models. */
    this.models = byId("live-models", HTMLElement);
    /** What happens, in words. */
    this.words = byId("live-words", HTMLElement);
    this.nothing = byId("live-nothing", HTMLElement);
    this.history = new HistoryPanel();
    this.lanes = new Lanes(byId("lanes", HTMLElement), (id) => this.can(id));
    this.axis = byId("live-axis", HTMLElement);
    this.state = byId("live-state", HTMLElement);
    document.addEventListener("visibilitychange", () => this.run());
    window.addEventListener("resize", () => this.repaint());
  }

  /** Frames are asked for only while the view is on the screen. @param {boolean} isShown */
  setShown(isShown) {
    this.isShown = isShown;
    if (isShown && !this.history.element.hidden) void this.history.load();
    this.run();
  }

  run() {
    const isWanted = this.isShown && document.visibilityState === "visible";
    if (isWanted && !this.watching) {
      this.watching = new AbortController();
      void this.watch(this.watching.signal);
    } else if (!isWanted && this.watching) {
      this.watching.abort();
      this.watching = undefined;
    }
  }

  /** @param {AbortSignal} signal */
  async watch(signal) {
    while (!signal.aborted) {
      try {
        for await (const { name, data } of stream("live", { signal, silenceMs: SILENCE_MS }))
          if (name === "frame") this.take(data);
          else if (name === "own") this.mine = new Set(data.ids);
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof ApiError)) throw error;
        this.miss(error.message);
        onContact.check(); // it tells of a server that is gone sooner than the next look
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  /** What can be done with a request. @param {string} id @returns {Own | undefined} */
  can(id) {
    const own = this.own(id);
    // Of several prompts of one request each has a number behind the id.
    const whole = this.mine.has(id) ? id : id.replace(/-\d+$/, "");
    const how = () => howEnded(whole);
    if (own || !this.mine.has(whole)) return own && { ...own, howEnded: how };
    const path = `v1/requests/${encodeURIComponent(id)}`; // on the socket a client chooses it
    const hurry = () => void act(`${path}/answer`, "POST").catch(() => {});
    return {
      stop: () => void act(path, "DELETE").catch(() => {}), // it has ended meanwhile
      hurry: this.info()?.capabilities.reasoning ? hurry : undefined,
      howEnded: how,
    };
  }

  /** Nothing is heard of the server: what is shown is of before. @param {string} why */
  miss(why) {
    const { heardAt } = this;
    const words = heardAt
      ? `${why} Retrying … Figures as of ${heardAt.toLocaleTimeString("en-GB")}.`
      : `${why} Retrying …`;
    // Screen readers say it once, not at each attempt.
    if (this.state.textContent !== words) this.state.textContent = words;
    this.state.hidden = false;
    this.element.classList.toggle("is-stale", heardAt !== undefined);
  }

  /** @param {Frame} frame */
  take(frame) {
    this.heardAt = new Date();
    if (this.history.element.hidden && this.info()?.history) void this.history.load();
    this.state.hidden = true;
    this.element.classList.remove("is-stale");
    // A server that was started again has another clock, and counts from zero: what was before says nothing about it.
    const isOther = this.frame && (frame.at_ms < this.frame.at_ms || frame.metrics.requests_total < this.frame.metrics.requests_total);
    if (isOther) this.lanes.clear();
    this.frame = frame;
    this.showTiles(frame);
    this.showBars(frame);
    this.lanes.take(frame);
    this.words.textContent = wordsOf(frame, this.info()?.limits.max_sequences ?? 0);
    this.models.hidden = !frame.models.length;
    this.models.replaceChildren(...frame.models.map(lineOf));
    this.nothing.hidden = this.lanes.lanes.size > 0 || frame.figures.running > 0 || frame.models.some(({ waiting }) => waiting);
    this.words.hidden = !this.nothing.hidden;
    this.axis.hidden = !this.lanes.lanes.size;
    this.element.dataset.frames = String(Number(this.element.dataset.frames ?? 0) + 1);
  }

  /** @param {Frame} frame */
  showTiles(frame) {
    const [{ figures, metrics }, { tiles }] = [frame, this];
    tiles.tokens.showSpeed(figures.written_per_sec, metrics.tokens_generated_total);
    tiles.prompt.showSpeed(figures.read_per_sec, metrics.prefill_tokens_total);
    this.showPercentiles(tiles.first, "first_token_ms", frame);
    this.showPercentiles(tiles.between, "between_tokens_ms", frame);
    const share = 100 * (figures.cached_share ?? 0);
    tiles.cache.show(number(share), "%", "of prompt tokens", share >= 0.5);
    const { preemptions_total: paused } = metrics;
    tiles.preempted.show(number(paused), "", paused === 1 ? "request paused for others" : "requests paused for others", paused > 0);
  }

  /** Of several models that have too few together, those of the one with most are told. @param {Tile} tile @param {"first_token_ms" | "between_tokens_ms"} key @param {Frame} frame */
  showPercentiles(tile, key, { figures, models }) {
    const known = models.flatMap(({ name, figures: own }) => (own?.[key] ? [{ of: `, ${name}`, ...own[key] }] : []));
    const times = figures[key] ? { of: "", ...figures[key] } : known.sort((one, other) => other.count - one.count)[0];
    if (!times) return tile.show(NONE, "", "none yet");
    const { count, last, p50, p95, p99, of } = times;
    const all = this.info()?.models ? ", all models" : "";
    if (p50 === null) return tile.show(...split(about(last)), `the last of ${number(count)}${of}`);
    const words = [`median of ${number(count)}${all}`, `p95 ${about(p95 ?? 0)}`, `p99 ${about(p99 ?? 0)}`];
    tile.show(...split(about(p50)), words.map((each) => each.replaceAll(" ", NO_BREAK)).join(", "));
  }

  /** @param {Frame} frame */
  showBars(frame) {
    const { metrics } = frame;
    const total = metrics.kv_cells_total;
    byId("cells-panel", HTMLElement).hidden = !total; // no model is loaded
    const cached = Math.min(metrics.cache_evictable_size, metrics.kv_cells_used);
    this.cells.used.show(metrics.kv_cells_used - cached, total);
    this.cells.cached.show(cached, total);
    this.cells.free.show(Math.max(0, total - metrics.kv_cells_used), total);
    const share = metrics.kv_cells_share ?? total;
    const one = share < total ? `${number(share)} tokens per request` : "shared by all requests";
    this.layout.textContent = frame.models.filter(({ figures }) => figures).length > 1 ? "of all models" : one;
  }

  repaint() {
    if (this.isShown) this.lanes.paint();
  }
}

/** How a request has ended, as the server explains it. @param {string} id */
async function howEnded(id) {
  const { reason } = await ask(`why/${encodeURIComponent(id)}`).catch(() => ({ reason: "" }));
  return ENDS.get(reason) ?? (/^E_/.test(reason) ? `failed (${reason})` : "ended");
}

/** What one of several models does, each figure in a column of its own. @param {LiveModel} model */
function lineOf({ name, figures, loading_percent: percent, waiting: queued = 0 }) {
  const { running, written_per_sec: written = 0, first_token_ms: first, slot_every_ms: every } = figures ?? {};
  const waiting = figures ? sumOf(figures) : queued;
  const cells = [
    figures ? (running ? `${number(running)} running` : "idle") : `loading: ${loaded(percent)}`,
    waiting ? `${number(waiting)} waiting${every ? ` (${duration(Math.ceil(waiting * every))})` : ""}` : "",
    written >= 0.5 ? `${number(written)} tokens/s` : "",
    first ? `first token ${about(first.p50 ?? first.last)}` : "",
  ];
  return h("li", {}, h("b", { dir: "auto" }, name), ...cells.flatMap((each) => [" ", h("span", {}, each)]));
}

/** @param {Figures} figures */
const sumOf = (figures) => KINDS.reduce((sum, kind) => sum + figures[`waiting_${kind}`], 0);

/** What happens, and how long it takes until the last one begins. @param {Frame} frame @param {number} most Requests that can run at once; of several models each has slots of its own. */
function wordsOf({ figures, models }, most) {
  const { running, slot_every_ms: every } = figures;
  const loading = models.reduce((sum, model) => sum + (model.waiting ?? 0), 0);
  const waiting = sumOf(figures) + loading;
  const runs = `${number(running)} ${running === 1 ? "request" : "requests"} running`;
  if (!waiting) return `${running ? runs : "Idle"}.`;
  const told = KINDS.flatMap((kind) => (figures[`waiting_${kind}`] ? [`${number(figures[`waiting_${kind}`])} ${kind}`] : []));
  if (loading) told.push(`${number(loading)} for a model to load`);
  const time = every && !loading ? `: the last begins in about ${duration(Math.ceil(waiting * every))}` : "";
  const bound = most && running >= most && !models.length ? ` At most ${number(most)} run at once (--max-sequences).` : "";
  return `${runs}, ${number(waiting)} waiting (${told.join(", ")})${time}.${bound}`;
}

/** A figure and its unit. @param {string} text @returns {[string, string]} */
function split(text) {
  const at = text.lastIndexOf(" ");
  return [text.slice(0, at), text.slice(at + 1)];
}
