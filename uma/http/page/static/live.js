/** The live view: what the engine does, four times a second, from one stream of snapshots that all viewers share. */

import { act, ApiError, ask, stream } from "./api.js";
import { byId, copyOf, duration, h, loaded, number } from "./dom.js";
import { HistoryPanel } from "./history.js";
import { Lanes } from "./lanes.js";
import { Series, WINDOW_MS } from "./series.js";

const RETRY_MS = 1_500;
/** The server sends four frames a second, some later where the engine computes for long at a stretch. */
const SILENCE_MS = 10_000;
/** The last bound of the server's times: what lies beyond is not known closer. */
const MOST_MS = 60_000;
/** By the reason that the server tells. */
const ENDS = new Map([
  ["stop", "finished"],
  ["length", "finished, as long as it could be"],
  ["cancelled", "stopped, or its program has gone"],
]);
const NO_BREAK = "\u00a0";

/** A figure with its name, a second line, and where it helps a line of the last minute. */
class Tile {
  /** @param {string} name @param {string} [line] The colour of its line: `decode` or `prefill`. */
  constructor(name, line) {
    const [element, part] = copyOf("tile");
    this.element = element;
    part("tile-name").textContent = name;
    this.value = part("tile-value");
    this.unit = part("tile-unit");
    this.note = part("tile-note");
    this.area = part("spark-area");
    this.line = part("spark-line");
    if (line) part("spark").classList.add(`is-${line}`);
    else part("spark").remove();
  }

  /** @param {string} value @param {string} unit @param {string} note @param {boolean} [isTold] Whether there is something to tell. */
  show(value, unit, note, isTold = true) {
    this.element.hidden = !isTold;
    this.value.textContent = value;
    this.unit.textContent = unit;
    this.note.textContent = note;
  }

  /** A speed: that of now, or the greatest that its line has. @param {{age_ms: number, value: number}[]} points The newest last. @param {number} total */
  showSpeed(points, total) {
    const [now, most] = [points.at(-1)?.value ?? 0, Math.max(...points.map(({ value }) => value))];
    const note = now >= 0.5 ? `${number(total)} since the start` : "the most of the last minute";
    this.show(number(now >= 0.5 ? now : most), "tokens/s", note, most >= 0.5);
    this.draw(points, Math.max(1, most));
  }

  /** @param {{age_ms: number, value: number}[]} points @param {number} most Their greatest value. */
  draw(points, most) {
    const spots = points.map(
      ({ age_ms, value }) =>
        `${(240 * (1 - age_ms / WINDOW_MS)).toFixed(1)},${(38 - (36 * value) / most).toFixed(1)}`,
    );
    const first = spots[0].split(",")[0];
    this.line.setAttribute("d", `M${spots.join("L")}`);
    this.area.setAttribute("d", `M${first},40L${spots.join("L")}L240,40Z`);
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
  /**
   * @param {(id: string) => Own | undefined} own What can be done with the answer of this page's that is this request.
   * @param {() => Info | undefined} info
   */
  constructor(own, info = () => undefined) {
    this.element = byId("live-view", HTMLElement);
    this.own = own;
    this.info = info;
    /** Requests that are this viewer's, from wherever they came. @type {Set<string>} */
    this.mine = new Set();
    this.series = new Series();
    this.isShown = false;
    /** When the newest frame came. @type {Date | undefined} */
    this.heardAt = undefined;
    this.tiles = {
      tokens: new Tile("Writing answers", "decode"),
      prompt: new Tile("Reading prompts", "prefill"),
      first: new Tile("Time to first token"),
      between: new Tile("Time between tokens"),
      cache: new Tile("Prompts from the cache"),
      preempted: new Tile("Preemptions"),
    };
    this.cells = {
      used: new Part("used", "tokens of running requests"),
      cached: new Part("cached", "kept for later prompts"),
      free: new Part("free", "free"),
    };
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
      ? `${why} Trying again … The figures are those of ${heardAt.toLocaleTimeString("en-GB")}, when it was last heard of.`
      : `${why} Trying again …`;
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
    if (this.series.add(frame)) this.lanes.clear();
    this.showTiles();
    this.showBars(frame);
    this.lanes.take(frame);
    const { running } = frame.figures;
    this.words.textContent = wordsOf(frame.figures, this.info()?.limits.max_sequences ?? 0);
    this.models.hidden = !frame.models.length;
    this.models.replaceChildren(...frame.models.map(lineOf));
    this.nothing.hidden = this.lanes.lanes.size > 0 || running > 0 || frame.models.some(({ waiting }) => waiting);
    this.words.hidden = !this.nothing.hidden;
    this.axis.hidden = !this.lanes.lanes.size;
    this.element.dataset.frames = String(Number(this.element.dataset.frames ?? 0) + 1);
  }

  showTiles() {
    const { series, tiles } = this;
    const { figures, metrics } = series.newest;
    tiles.tokens.showSpeed(series.line("written_per_sec"), metrics.tokens_generated_total);
    tiles.prompt.showSpeed(series.line("read_per_sec"), metrics.prefill_tokens_total);
    this.showPercentiles(tiles.first, figures.first_token_ms);
    this.showPercentiles(tiles.between, figures.between_tokens_ms);
    const share = 100 * (figures.cached_share ?? 0);
    tiles.cache.show(number(share), "%", "of their tokens were not read again", share >= 0.5);
    tiles.preempted.show(
      number(metrics.preemptions_total),
      "",
      `requests paused for others, ${number(series.growth("preemptions_total"))} in the last minute`,
      metrics.preemptions_total > 0,
    );
  }

  /** @param {Tile} tile @param {Percentiles | null} times */
  showPercentiles(tile, times) {
    if (times === null) return tile.show("–", "", "no token yet", false);
    const { count, last, p50, p95, p99 } = times;
    const all = this.info()?.models ? " of all models" : "";
    if (p50 === null) return tile.show(...split(about(last)), `the last of ${number(count)}`);
    const words = [`median of ${number(count)}${all}`, `95 % within ${about(p95 ?? 0)}`, `99 % within ${about(p99 ?? 0)}`];
    tile.show(...split(about(p50)), words.map((each) => each.replaceAll(" ", NO_BREAK)).join(" · "));
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
    const one = share < total ? `${number(share)} tokens for each request` : "shared by all requests";
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

/** What one of several models does. @param {LiveModel} model */
function lineOf({ name, figures, loading_percent: percent, waiting = 0 }) {
  const wait = waiting ? `, ${number(waiting)} ${waiting === 1 ? "waits" : "wait"} for it` : "";
  if (!figures) return h("li", {}, h("b", { dir: "auto" }, name), ` Loading, ${loaded(percent)}${wait}.`);
  const { written_per_sec: written, read_per_sec: read, first_token_ms: first } = figures;
  const words = [
    wordsOf(figures, 0),
    written >= 0.5 && `Writing ${number(written)} tokens/s.`,
    read >= 0.5 && `Reading ${number(read)} tokens/s.`,
    first && `First token after ${about(first.p50 ?? first.last)}.`,
  ];
  return h("li", {}, h("b", { dir: "auto" }, name), ` ${words.filter(Boolean).join(" ")}`);
}

/** What happens, and how long it takes until the last one begins. @param {Figures} figures @param {number} most Requests that can run at once. */
function wordsOf(figures, most) {
  const { running, slot_every_ms: every } = figures;
  const runs = running ? `${number(running)} ${running === 1 ? "request runs" : "requests run"}` : "Nothing runs";
  const lanes = /** @type {const} */ (["interactive", "normal", "background"]);
  const kinds = lanes.filter((lane) => figures[`waiting_${lane}`]);
  const waiting = kinds.reduce((sum, lane) => sum + figures[`waiting_${lane}`], 0);
  if (!waiting) return `${runs}.`;
  const told = kinds.map((lane) => `${number(figures[`waiting_${lane}`])} ${lane}`).join(", ");
  const time = every ? `: the last of them begins in about ${duration(Math.ceil(waiting * every))}` : "";
  const bound = most && running >= most ? ` At most ${number(most)} run at once (--max-sequences).` : "";
  return `${runs}, ${number(waiting)} ${waiting === 1 ? "waits" : "wait"} in the queue (${told})${time}.${bound}`;
}

/** A figure and its unit. @param {string} text @returns {[string, string]} */
function split(text) {
  const at = text.lastIndexOf(" ");
  return [text.slice(0, at), text.slice(at + 1)];
}
