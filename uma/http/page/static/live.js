/** The live view: what the engine does, four times a second, from one stream of snapshots that all viewers share. */

import { act, ApiError, ask, stream } from "./api.js";
import { announce, byId, copyOf, duration, h, number, say } from "./dom.js";
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
  ["length", "length limit"],
  ["cancelled", "cancelled"],
]);
const NONE = "–";
const KINDS = /** @type {const} */ (["interactive", "normal", "background"]);
const IDLE = "Ask something in the chat, or send requests from any program: each gets a row here.";
/** What changes all the time is told to screen readers this often. */
const ANNOUNCE_MS = 15_000;

/** Frames of the last minute, each as wide as a unit of the tile's drawing; and how high that is. */
const [TREND, TREND_HEIGHT] = [240, 24];

/** A figure with its name, a second line, and its last minute. Each has its place from the beginning. */
class Tile {
  /** @param {string} name @param {number} full What is at least as high as the drawing. */
  constructor(name, full) {
    const [element, part] = copyOf("tile");
    this.full = full;
    /** @type {number[]} */
    this.past = [];
    this.trend = /** @type {SVGPolygonElement} */ (element.querySelector("polygon"));
    byId("tiles", HTMLElement).append(element);
    part("tile-name").textContent = name;
    this.value = part("tile-value");
    this.unit = part("tile-unit");
    this.note = part("tile-note");
  }

  /** @param {number} now */
  trace(now) {
    this.past = [...this.past, now].slice(-TREND);
    const most = Math.max(this.full, ...this.past);
    const begin = TREND - this.past.length;
    const points = this.past.map((each, at) => `${begin + at},${TREND_HEIGHT - (TREND_HEIGHT * each) / most}`);
    this.trend.setAttribute("points", [`${begin},${TREND_HEIGHT}`, ...points, `${TREND - 1},${TREND_HEIGHT}`].join(" "));
  }

  /** @param {string} value @param {string} unit @param {string} note */
  show(value, unit, note) {
    say(this.value, value);
    say(this.unit, unit);
    say(this.note, note);
  }
}

/** A time that is known within its bucket alone: two digits of it. @param {number} ms */
function about(ms) {
  return `${ms >= MOST_MS ? "over " : ""}${duration(Number(ms.toPrecision(2)))}`;
}

/** A time to come: a guess has no hundredths. @param {number} ms */
const soon = (ms) => `${number(Math.max(0.1, ms / 1_000), ms < 10_000 ? 1 : 0)} s`;

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
      written: new Tile("Writing", 10),
      read: new Tile("Reading", 10),
      first: new Tile("First word after", 1_000),
      cells: new Tile("KV cache", 1),
    };
    /** Which of several models had a first word last, and how many each has had. @type {[string, Map<string, number>]} */
    this.firsts = ["", new Map()];
    /** A line for each of several models. */
    this.models = byId("live-models", HTMLElement);
    /** What happens, in words. */
    this.words = byId("live-words", HTMLElement);
    this.hint = byId("live-hint", HTMLElement);
    this.saidAt = -Infinity;
    this.history = new HistoryPanel();
    this.lanes = new Lanes(byId("lanes", HTMLElement), (id) => this.can(id));
    this.count = byId("lanes-count", HTMLElement);
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
    const hurry = () => void act(`${path}/answer`, "POST").catch(() => {}); // it has ended meanwhile
    return {
      stop: () => act(path, "DELETE"),
      hurry: this.info()?.capabilities.reasoning ? hurry : undefined,
      howEnded: how,
    };
  }

  /** Nothing is heard of the server: what is shown is of before. @param {string} why */
  miss(why) {
    const { heardAt } = this;
    const words = `${why} Retrying …${heardAt ? ` Figures as of ${heardAt.toLocaleTimeString("en-GB")}.` : ""}`;
    say(this.state, words); // screen readers say it once, not at each attempt
    this.state.hidden = !(this.words.hidden = this.hint.hidden = true);
    this.element.classList.toggle("is-stale", heardAt !== undefined);
  }

  /** @param {Frame} frame */
  take(frame) {
    this.heardAt = new Date();
    if (this.history.element.hidden && this.info()?.history) void this.history.load();
    this.state.hidden = !(this.words.hidden = this.hint.hidden = false);
    this.element.classList.remove("is-stale");
    // A server that was started again has another clock, and counts from zero: what was before says nothing about it.
    const isOther = this.frame && (frame.at_ms < this.frame.at_ms || frame.metrics.requests_total < this.frame.metrics.requests_total);
    if (isOther) this.lanes.clear();
    if (isOther) for (const tile of Object.values(this.tiles)) tile.past = [];
    this.frame = frame;
    this.showTiles(frame);
    const { shown, all, unread } = this.lanes.take(frame);
    say(this.count, shown < all ? `${number(shown)} of ${number(all)} shown` : "");
    const [words, hint] = wordsOf(frame, this.info()?.limits.max_sequences ?? 0, unread);
    if (this.words.textContent !== words && Date.now() - this.saidAt > ANNOUNCE_MS) {
      announce(words);
      this.saidAt = Date.now();
    }
    say(this.words, words);
    say(this.hint, hint);
    this.words.dataset.load = sumOf(frame.figures) ? "full" : frame.figures.running ? "busy" : "idle";
    this.models.hidden = frame.models.length < 2 && frame.models.every(({ figures }) => figures); // the tiles say it
    this.models.replaceChildren(...frame.models.map(lineOf));
    this.element.dataset.frames = String(Number(this.element.dataset.frames ?? 0) + 1);
  }

  /** @param {Frame} frame */
  showTiles({ figures, metrics, models }) {
    const { written, read, first, cells } = this.tiles;
    const { tokens_generated_total: all, prefill_tokens_total: ever } = metrics;
    // A model that is full waits, however empty the others are: of several that run the fullest is told.
    const busy = models.filter((model) => model.figures?.running);
    /** @type {Omit<LiveModel, "requests">[]} */
    const caches = models.length ? (busy.length ? busy : models) : [{ name: "", ...metrics }];
    const fullest = caches.reduce((one, other) => (shareOf(other) > shareOf(one) ? other : one));
    const { name, kv_cells_used: used = 0, kv_cells_total: most = 0 } = fullest;
    written.show(all ? number(figures.written_per_sec) : NONE, "tokens/s", `${number(all)} in all`);
    const share = figures.cached_share ? `${number(100 * figures.cached_share)} % of prompts cached` : `${number(ever)} in all`;
    read.show(ever ? number(figures.read_per_sec) : NONE, "tokens/s", share);
    if (most) cells.show(number(100 * shareOf(fullest)), "% full", `${name && `${name}: `}${number(used)} of ${number(most)} tokens`);
    else cells.show(NONE, "", "no model is loaded");
    // Of several models that have too few together, those of the one with the latest are told.
    const known = models.flatMap(({ name, figures: own }) => (own?.first_token_ms ? [{ of: `, ${name}`, ...own.first_token_ms }] : []));
    const [last, counts] = this.firsts;
    const now = known.find(({ of, count }) => count > (counts.get(of) ?? 0))?.of ?? last;
    this.firsts = [now, new Map(known.map(({ of, count }) => [of, count]))];
    const times = figures.first_token_ms ? { of: "", ...figures.first_token_ms } : (known.find(({ of }) => of === now) ?? known[0]);
    written.trace(figures.written_per_sec);
    read.trace(figures.read_per_sec);
    first.trace(times ? (times.p50 ?? times.last) : 0);
    cells.trace(shareOf(fullest));
    if (!times) return first.show(NONE, "", "none yet");
    const [value, unit] = about(times.p50 ?? times.last).split(/ (?=s$)/);
    const slow = `median of ${number(times.count)}, one in 20 over ${about(times.p95 ?? 0).replace("over ", "")}`;
    first.show(value, unit, times.p50 === null ? `latest request${times.of}` : slow);
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
function lineOf({ name, figures, load, waiting: queued = 0, ...cache }) {
  const { running, written_per_sec: written = 0, first_token_ms: first, slot_every_ms: every } = figures ?? {};
  const waiting = figures ? sumOf(figures) : queued;
  const cells = [
    figures ? (running ? `${number(running)} running` : "idle") : load,
    waiting ? `${number(waiting)} waiting${every ? `, ${waiting > 1 ? "the last " : ""}starts in about ${soon(waiting * every)}` : ""}` : "",
    written >= 0.5 ? `${number(written)} tokens/s` : "",
    first ? `first word after ${about(first.p50 ?? first.last)}` : "",
    cache.kv_cells_total ? `KV cache ${number(100 * shareOf(cache))} % full` : "",
  ];
  return h("li", {}, h("b", { dir: "auto" }, name), ...cells.flatMap((each) => [" ", h("span", {}, each)]));
}

/** How full a model's KV cache is. @param {Pick<LiveModel, "kv_cells_used" | "kv_cells_total">} cache */
const shareOf = ({ kv_cells_used: used = 0, kv_cells_total: most = 0 }) => (most ? used / most : 0);

/** @param {Figures} figures */
const sumOf = (figures) => KINDS.reduce((sum, kind) => sum + figures[`waiting_${kind}`], 0);

/** What happens, and how long it takes until the last one begins. @param {Frame} frame @param {number} most Requests that can run at once; of several models each has slots of its own. @param {number} unread Prompts that wait to be read. @returns {[string, string]} */
function wordsOf({ figures, models }, most, unread) {
  const { running, slot_every_ms: every } = figures;
  const loads = models.filter((model) => model.waiting);
  const loading = loads.reduce((sum, model) => sum + (model.waiting ?? 0), 0);
  const waiting = sumOf(figures);
  if (!running && !waiting) return ["Idle", IDLE];
  const time = every && waiting && !loading ? [`The last one begins in about ${duration(1_000 * Math.ceil((waiting * every) / 1_000))}.`] : [];
  const bound = most && waiting && running >= most && !models.length ? [`At most ${number(most)} run at once (--max-sequences).`] : [];
  const prompts = unread ? [unread === 1 ? "1 prompt waits to be read." : `${number(unread)} prompts wait to be read.`] : [];
  const load = loading ? [`${number(loading)} for a model to load.`] : [];
  const counts = [running && `${number(running)} running`, waiting && `${number(waiting)} waiting`].filter(Boolean).join(", ");
  const whose = loading && loading === waiting ? `: loading ${loads.map(({ name }) => name).join(", ")}` : "";
  return [counts + whose, [...load, ...time, ...bound, ...prompts].join(" ") || (waiting ? "Each begins once a slot is free." : "")];
}
