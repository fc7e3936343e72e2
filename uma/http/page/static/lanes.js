/** A lane for each request: what was computed for it in each quarter of a second of the last 30, as coloured ticks. */

import { h, number } from "./dom.js";
import { INTERVAL_MS } from "./series.js";

/** @typedef {import("./types.js").Frame} Frame */
/** @typedef {import("./types.js").RunningRequest} RunningRequest */
/** @typedef {{prefill: number, decode: number, cached: number, waits: boolean}} Tick */

const SHOWN_MS = 30_000;
const COLUMNS = SHOWN_MS / INTERVAL_MS;
const LINGER_MS = 8_000;
/** As many requests as an engine can run at once. */
const MAX_LANES = 256;
/** Frames that come at most so many columns apart leave no request's beginning unseen. */
const MAX_GAP = 4;
/** As many tokens as make a tick of full height. */
const FULL_PREFILL = 512;
const FULL_DECODE = 64;
const LANE_NAMES = new Map([
  [1, "interactive"],
  [0, "normal"],
  [-1, "background"],
]);

class Lane {
  /**
   * @param {RunningRequest} request
   * @param {boolean} isLate It ran before the view was opened: when its tokens were computed is not known.
   */
  constructor(request, isLate) {
    /** By column number since the server's clock began. @type {Map<number, Tick>} */
    this.ticks = new Map();
    this.last = request;
    this.endedAt = 0;
    this.computed = isLate ? request.computed_tokens : request.cached_tokens;
    this.generated = isLate ? request.generated_tokens : 0;
    this.tellsCached = !isLate;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.state = h("span", { class: "lane-state" });
    this.figures = h("span", { class: "lane-figures" });
    const name = h(
      "span",
      { class: "lane-name", title: request.id },
      request.id.length > 14 ? `${request.id.slice(0, 13)}…` : request.id,
    );
    const lane = LANE_NAMES.get(request.priority) ?? "normal";
    this.element = h(
      "li",
      { class: "lane" },
      h("div", { class: "lane-label" }, name, h("span", { class: `badge is-${lane}` }, lane)),
      this.canvas,
      h("div", { class: "lane-side" }, this.state, this.figures),
    );
  }

  /** @param {RunningRequest} request @param {number} column */
  take(request, column) {
    const tick = {
      prefill: Math.max(0, request.computed_tokens - this.computed),
      decode: Math.max(0, request.generated_tokens - this.generated),
      cached: this.tellsCached ? request.cached_tokens : 0,
      waits: request.is_preempted,
    };
    this.ticks.set(column, tick);
    this.tellsCached = false;
    this.computed = request.computed_tokens;
    this.generated = request.generated_tokens;
    this.last = request;
    for (const at of this.ticks.keys()) if (at < column - COLUMNS) this.ticks.delete(at);
    this.describe();
  }

  end(/** @type {number} */ now) {
    this.endedAt = now;
    this.element.classList.add("is-over");
    this.state.textContent = "ended";
  }

  describe() {
    const { prompt_tokens, cached_tokens, computed_tokens, generated_tokens, is_preempted } = this.last;
    const isReading = computed_tokens < prompt_tokens && generated_tokens === 0;
    this.state.textContent = is_preempted
      ? "preempted"
      : isReading
        ? `reading ${Math.floor((100 * computed_tokens) / prompt_tokens)} %`
        : "writing";
    const cached = cached_tokens ? `, ${number(cached_tokens)} cached` : "";
    this.figures.textContent = `${number(prompt_tokens)} in${cached} · ${number(generated_tokens)} out`;
  }

  /** @param {number} column The newest. @param {Record<"prefill" | "decode" | "cached" | "line" | "wait", string>} colours */
  paint(column, colours) {
    const { canvas } = this;
    const scale = devicePixelRatio;
    const [width, height] = [Math.round(canvas.clientWidth * scale), Math.round(canvas.clientHeight * scale)];
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const context = canvas.getContext("2d");
    if (!context || !width) return;
    context.clearRect(0, 0, width, height);
    const step = width / COLUMNS;
    const bar = Math.max(1, step - Math.max(0.5, step * 0.25));
    const draw = (/** @type {string} */ colour, /** @type {number} */ x, /** @type {number} */ share) => {
      const tall = Math.max(2 * scale, Math.min(1, share) * height);
      context.fillStyle = colour;
      context.fillRect(x, height - tall, bar, tall);
    };
    for (const [at, tick] of this.ticks) {
      const x = width - (column - at + 1) * step;
      context.fillStyle = colours.line;
      context.fillRect(x, height - scale, step, scale);
      if (tick.cached) draw(colours.cached, x, 1);
      if (tick.prefill)
        draw(
          colours.prefill,
          tick.cached ? x + step : x,
          Math.log2(1 + tick.prefill) / Math.log2(1 + FULL_PREFILL),
        );
      if (tick.decode) draw(colours.decode, x, Math.log2(1 + tick.decode) / Math.log2(1 + FULL_DECODE));
      if (tick.waits) {
        context.fillStyle = colours.wait;
        context.fillRect(x, height / 2, bar / 2, 2 * scale);
      }
    }
  }
}

export class Lanes {
  /** @param {HTMLElement} list @param {HTMLElement} more Says how many are not shown. */
  constructor(list, more) {
    this.list = list;
    this.more = more;
    /** @type {Map<string, Lane>} */
    this.lanes = new Map();
    this.column = 0;
    this.isWatching = false;
  }

  /** @param {Frame} frame */
  take(frame) {
    const column = Math.round(frame.at_ms / INTERVAL_MS);
    this.isWatching = column - this.column <= MAX_GAP;
    this.column = column;
    const running = byRequest(frame.activity?.running ?? []);
    const ids = new Set(running.map((each) => each.id));
    for (const [id, lane] of this.lanes) {
      if (!ids.has(id) && !lane.endedAt) {
        this.place(lane);
        lane.end(frame.at_ms);
      }
      if (lane.endedAt && frame.at_ms - lane.endedAt > LINGER_MS) this.drop(id, lane);
    }
    for (const request of running) this.laneOf(request)?.take(request, this.column);
    const hidden = running.filter((each) => !this.lanes.has(each.id)).length;
    this.more.textContent = hidden ? `and ${number(hidden)} more` : "";
    this.paint();
  }

  /** @param {RunningRequest} request */
  laneOf(request) {
    let lane = this.lanes.get(request.id);
    if (lane && !lane.endedAt) return lane;
    if (lane) this.drop(request.id, lane); // an id that is used again
    if (this.lanes.size >= MAX_LANES && !this.makeRoom()) return null;
    lane = new Lane(request, !this.isWatching);
    this.lanes.set(request.id, lane);
    this.place(lane);
    return lane;
  }

  /** Below all that run, above all that have ended. @param {Lane} lane */
  place(lane) {
    this.list.insertBefore(lane.element, this.list.querySelector(".is-over"));
  }

  /** Forget all: another server's clock says nothing about them. */
  clear() {
    for (const [id, lane] of this.lanes) this.drop(id, lane);
    this.column = -Infinity;
  }

  /** Lanes that have ended make room for those that run. */
  makeRoom() {
    const over = [...this.lanes].find(([, lane]) => lane.endedAt);
    if (over) this.drop(...over);
    return Boolean(over);
  }

  /** @param {string} id @param {Lane} lane */
  drop(id, lane) {
    lane.element.remove();
    this.lanes.delete(id);
  }

  paint() {
    const style = getComputedStyle(this.list);
    const probe = (/** @type {string} */ name) => colourOf(this.list, style.getPropertyValue(name));
    const colours = {
      prefill: probe("--prefill"),
      decode: probe("--decode"),
      cached: probe("--cached"),
      line: probe("--line"),
      wait: probe("--line-strong"),
    };
    for (const lane of this.lanes.values()) lane.paint(this.column, colours);
  }
}

/** One entry for each request: several answers of one run under its id. @param {readonly RunningRequest[]} running */
function byRequest(running) {
  /** @type {Map<string, RunningRequest>} */
  const found = new Map();
  for (const each of running) {
    const other = found.get(each.id);
    found.set(each.id, other ? together(other, each) : each);
  }
  return [...found.values()];
}

/** @param {RunningRequest} one @param {RunningRequest} other @returns {RunningRequest} */
function together(one, other) {
  return {
    ...one,
    computed_tokens: Math.max(one.computed_tokens, other.computed_tokens),
    generated_tokens: one.generated_tokens + other.generated_tokens,
    is_preempted: one.is_preempted && other.is_preempted,
  };
}

/** A custom property as a colour that a canvas takes: `light-dark(…)` is resolved by a real property only. @param {HTMLElement} near @param {string} value */
function colourOf(near, value) {
  near.style.outlineColor = value;
  const colour = getComputedStyle(near).outlineColor;
  near.style.outlineColor = "";
  return colour;
}
