/** A lane for each request, grouped by what is done for it: what was computed for it in each quarter of a second of the
 * last 30, as coloured ticks, or why nothing is computed for it. */

import { arrange, byId, copyOf, duration, h, number } from "./dom.js";

/** @typedef {{prefill: number, decode: number, cached: number, waits: boolean}} Tick */
/** @typedef {"writing" | "reading" | "waiting" | "ended"} Phase */

/** Time between two frames. */
const INTERVAL_MS = 250;
const SHOWN_MS = 30_000;
const COLUMNS = SHOWN_MS / INTERVAL_MS;
const LINGER_MS = 8_000;
/** So many of those that have ended are shown. */
const MAX_ENDED = 5;
/** Of those of which nothing is computed yet so many are shown one by one: the next to begin, and one's own. */
const MAX_WAITING = 5;
/** Frames that come at most so many columns apart leave no request's beginning unseen. */
const MAX_GAP = 4;
/** As many tokens as make a tick of full height. */
const FULL_PREFILL = 512;
const FULL_DECODE = 64;
/** With several models a request’s number is its own in its model, times this, and the model’s; see `supervisor/model.py`. */
const MOST_MODELS = 65_536;
const PRIORITIES = new Map([
  [1, "interactive"],
  [0, "normal"],
  [-1, "background"],
]);
/** What a request without a slot waits for. */
const SLOTLESS = ["slot", "cells", "adapters", "prefix"];
/** @type {Phase[]} */
const PHASES = ["writing", "reading", "waiting", "ended"];

/** Whether nothing is computed for it now; an older server tells of preempted ones alone. @param {RunningRequest} request */
function isWaiting(request) {
  return Boolean(request.waits_for) || request.is_preempted;
}

/** What waits has no slot, as in the words above the lanes. @param {RunningRequest} request @returns {Phase} */
function phaseOf(request) {
  if (request.is_preempted || SLOTLESS.includes(request.waits_for ?? "")) return "waiting";
  return request.computed_tokens < request.prompt_tokens && !request.generated_tokens ? "reading" : "writing";
}

/** Whether something of it was computed, though it may wait now. @param {RunningRequest} request */
function isBegun(request) {
  return !isWaiting(request) || request.computed_tokens > request.cached_tokens || request.generated_tokens > 0;
}

/** What is known of a request's way here: the program, its key and user, its process, and the door that it came by. @param {string} origin As the server tells it: program, key, user, door, process. */
function wayOf(origin) {
  const parts = origin.split(" · ");
  const pid = parts.at(-1)?.startsWith("pid ") ? parts.pop() : "";
  const door = parts.pop() ?? "";
  parts.sort((one, other) => Number(/^(key|user) /.test(other)) - Number(/^(key|user) /.test(one))); // programs look alike
  return { who: parts.join(" · ") || door, pid };
}

/** @param {number} count */
function tokens(count) {
  return `${number(count)} ${count === 1 ? "token" : "tokens"}`;
}

/** What is known of all requests of one frame, for the words of each. */
class Scene {
  /** @param {Frame} frame @param {(id: string) => Own | undefined} own */
  constructor({ activity, models }, own) {
    this.own = own;
    /** Names of several models, by their requests' numbers. */
    this.models = new Map(models.flatMap(({ name, requests }) => requests.map((each) => [each, name])));
    this.running = byRequest(activity.running);
    this.queue = byRequest(activity.waiting ?? []);
    this.all = new Map([...this.running, ...this.queue].map((each) => [each.id, each]));
  }

  /** @param {RunningRequest} request */
  nameOf({ id, origin }) {
    const title = this.own(id)?.title;
    if (title) return `this page: ${title}`;
    return wayOf(origin ?? "").who || (id.length > 24 ? `${id.slice(0, 23)}…` : id);
  }

  /** Why nothing of it is computed. @param {RunningRequest} request */
  reasonOf(request) {
    const first = request.behind ? this.all.get(request.behind) : undefined;
    if (request.waits_for === "prompt" && first)
      return `after the prompt of ${this.nameOf(first)}, ${tokens(first.prompt_tokens - first.computed_tokens)} to go`;
    if (request.waits_for === "prefix") return "until another request has read the same prompt prefix";
    if (request.waits_for === "grammar") return "its grammar is being recompiled";
    if (request.waits_for === "reader") return "its program is slow to read the answer";
    if (request.is_preempted) return "paused for a request of higher priority";
    const ahead = this.queue.slice(0, this.queue.indexOf(request));
    const higher = ahead.filter(({ priority }) => priority > request.priority).length;
    const sets = request.waits_for === "adapters" ? ", until a set of LoRA adapters is free" : "";
    const why = request.waits_for === "cells" ? ", until the KV cache has space for its prompt" : sets;
    if (!ahead.length) return `next in the queue${why}`;
    const words = `${number(ahead.length)} ahead${why}`;
    return higher ? `${words}, ${number(higher)} of higher priority` : words;
  }
}

class Lane {
  /** @param {RunningRequest} request @param {boolean} isLate It ran before the view was opened: when its tokens were computed is not known. */
  constructor(request, isLate) {
    /** By column number since the server's clock began. @type {Map<number, Tick>} */
    this.ticks = new Map();
    this.request = request;
    /** @type {Phase} */
    this.phase = "waiting";
    /** @type {Own | undefined} */
    this.does = undefined;
    this.endedAt = 0;
    this.isOwn = false;
    this.isHurried = false;
    this.computed = isLate ? request.computed_tokens : request.cached_tokens;
    this.generated = isLate ? request.generated_tokens : 0;
    this.isLate = isLate;
    this.tellsCached = !isLate;
    const [element, part] = copyOf("lane");
    this.element = element;
    this.element.dataset.id = request.id;
    this.canvas = /** @type {HTMLCanvasElement} */ (part("lane-ticks"));
    this.state = part("lane-state");
    this.figures = part("lane-figures");
    this.name = part("lane-name");
    this.of = part("lane-of");
    this.pid = part("lane-pid");
    this.button = part("icon-button");
    this.hurry = part("link-button");
    this.isStopped = false;
    this.button.onclick = () => (this.does?.title ? this.stop() : this.ask());
    this.hurry.onclick = () => {
      this.isHurried = this.hurry.hidden = true;
      this.does?.hurry?.();
    };
    const priority = PRIORITIES.get(request.priority) ?? "normal";
    part("badge").textContent = priority;
    part("badge").classList.add(`is-${priority}`);
  }

  /** @param {RunningRequest} request @param {number} column @param {Scene} scene */
  take(request, column, scene) {
    if (!scene.queue.includes(request)) {
      this.ticks.set(column, {
        prefill: Math.max(0, request.computed_tokens - this.computed),
        decode: Math.max(0, request.generated_tokens - this.generated),
        cached: this.tellsCached ? request.cached_tokens : 0,
        waits: isWaiting(request),
      });
      this.tellsCached = false;
      this.computed = request.computed_tokens;
      this.generated = request.generated_tokens;
    }
    this.request = request;
    for (const at of this.ticks.keys()) if (at < column - COLUMNS) this.ticks.delete(at);
    this.describe(scene);
  }

  /** Whether it was seen to be computed. */
  get hasComputed() {
    return [...this.ticks.values()].some(({ prefill, decode }) => prefill + decode > 0);
  }

  stop() {
    this.isStopped = true;
    this.does?.stop();
  }

  /** Of another program's request one is asked first. */
  ask() {
    const dialog = byId("end-dialog", HTMLDialogElement);
    byId("end-title", HTMLElement).textContent = `${this.button.title}, which has run for ${duration(this.request.age_ms)}?`;
    dialog.returnValue = "";
    dialog.onclose = () => dialog.returnValue === "end" && this.stop();
    dialog.showModal();
  }

  end(/** @type {number} */ now) {
    this.endedAt = now;
    this.phase = "ended";
    this.element.classList.add("is-over");
    this.element.classList.remove("is-queued");
    this.state.textContent = this.isStopped ? "ended by you" : "ended";
    if (!this.isStopped) void this.does?.howEnded?.().then((how) => (this.state.textContent = how));
    this.offer(undefined);
  }

  /** @param {Scene} scene */
  describe(scene) {
    const { request } = this;
    const { prompt_tokens: prompt, cached_tokens, computed_tokens: computed, generated_tokens } = request;
    this.phase = phaseOf(request);
    this.element.classList.toggle("is-queued", this.phase === "waiting" && !this.hasComputed);
    const share = Math.floor((100 * computed) / Math.max(1, prompt));
    this.state.textContent =
      isWaiting(request) ? scene.reasonOf(request) : this.phase === "reading" ? `reading ${share} %` : "writing";
    const cached = cached_tokens ? ` (${number(cached_tokens)} cached)` : "";
    const isWriting = this.phase === "writing" && !isWaiting(request);
    const written = isWriting || generated_tokens ? ` · answer ${number(generated_tokens)}` : "";
    this.figures.textContent = `prompt ${number(prompt)}${cached}${written}`;
    const own = scene.own(request.id);
    this.isOwn ||= Boolean(own?.title); // it keeps its name when it has ended
    if (own?.title || !this.isOwn) this.name.textContent = scene.nameOf(request);
    this.name.title = [request.origin, `request ${request.id}`].filter(Boolean).join(" · ");
    const { pid } = wayOf(request.origin ?? "");
    const more = scene.models.get(request.number) ?? pid; // there is no place for both; the title has all
    this.of.textContent = more ? `· ${more}` : "";
    const counted = scene.models.has(request.number) ? Math.floor(request.number / MOST_MODELS) : request.number;
    const which = `· #${counted} · ${number(Math.floor(request.age_ms / 1_000))} s`; // tells those of one program apart
    this.pid.textContent = this.isOwn ? "" : which;
    this.element.classList.toggle("is-own", this.isOwn);
    this.offer(own);
  }

  /** Buttons for what can be done with it. @param {Own | undefined} own */
  offer(own) {
    if (own && !this.does) {
      this.button.title = `End ${own.title ?? this.name.textContent}`;
      this.button.setAttribute("aria-label", this.button.title);
    }
    this.does = own;
    this.button.hidden = !own;
    this.hurry.hidden = !own?.hurry || this.phase !== "writing" || this.isHurried;
  }

  /** @param {number} column The newest. @param {Record<"prefill" | "decode" | "cached" | "line" | "wait" | "words", string>} colours */
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
    const bar = Math.max(1, Math.floor(step * 0.75)); // whole pixels, as its place: a part of one is a blur
    const draw = (/** @type {string} */ colour, /** @type {number} */ x, /** @type {number} */ share) => {
      const tall = Math.round(Math.max(2 * scale, Math.min(1, share) * height));
      context.fillStyle = colour;
      context.fillRect(x, height - tall, bar, tall);
    };
    const [began, seen] = [column - this.request.age_ms / INTERVAL_MS, Math.min(...this.ticks.keys())];
    const left = Math.max(0, Math.round(width - (column - began + 1) * step));
    const before = Math.round(width - (column - seen + 1) * step) - left;
    if (this.isLate && before > bar) {
      context.fillStyle = colours.line;
      for (let x = left; x < left + before - scale; x += 6 * scale) context.fillRect(x, 0, scale, height);
      context.font = `${12 * scale}px sans-serif`;
      const words = "not recorded";
      const room = context.measureText(words).width + 12 * scale;
      if (room < before) {
        context.clearRect(left + (before - room) / 2, 0, room, height);
        context.fillStyle = colours.words;
        context.fillText(words, left + (before - room) / 2 + 6 * scale, height / 2 + 4 * scale);
      }
    }
    for (const [at, tick] of this.ticks) {
      const x = Math.round(width - (column - at + 1) * step);
      context.fillStyle = colours.line;
      context.fillRect(x, height - scale, step, scale);
      if (tick.cached) draw(colours.cached, x, 1);
      if (tick.prefill)
        draw(colours.prefill, tick.cached ? x + Math.round(step) : x, Math.log2(1 + tick.prefill) / Math.log2(1 + FULL_PREFILL));
      if (tick.decode) draw(colours.decode, x, Math.log2(1 + tick.decode) / Math.log2(1 + FULL_DECODE));
      if (tick.waits) {
        context.fillStyle = colours.wait;
        context.fillRect(x, Math.round(height / 2), Math.ceil(bar / 2), 2 * scale);
      }
    }
  }
}

export class Lanes {
  /** @param {HTMLElement} list @param {(id: string) => Own | undefined} [own] What can be done with a request. */
  constructor(list, own = () => undefined) {
    this.list = list;
    /** Says how many are not shown. */
    this.more = h("li", { class: "panel-note" });
    this.own = own;
    /** @type {Map<string, Lane>} */
    this.lanes = new Map();
    this.heads = new Map(
      PHASES.map((phase) => {
        const count = h("span", { class: "panel-note" });
        const title = h("h3", {}, `${phase[0].toUpperCase()}${phase.slice(1)}`);
        return [phase, { count, element: h("li", { class: "lane-group" }, title, count) }];
      }),
    );
    this.column = 0;
    this.isWatching = false;
  }

  /** @param {Frame} frame */
  take(frame) {
    const column = Math.round(frame.at_ms / INTERVAL_MS);
    const focused = this.list.contains(document.activeElement) && document.activeElement;
    const at = this.buttons.findIndex((each) => each.closest(".lane") === (focused && focused.closest(".lane")));
    this.isWatching = column - this.column <= MAX_GAP;
    this.column = column;
    const scene = new Scene(frame, this.own);
    const shown = this.shownOf(scene);
    const ids = new Set(shown.map(({ id }) => id));
    for (const [id, lane] of this.lanes) {
      if (!ids.has(id) && !lane.endedAt) {
        if (lane.ticks.size && !scene.all.has(id)) lane.end(frame.at_ms);
        else this.drop(id, lane); // it was never seen to begin, or others come before it now
      }
      if (lane.endedAt && frame.at_ms - lane.endedAt > LINGER_MS) this.drop(id, lane);
    }
    const ended = [...this.lanes].filter(([, { endedAt }]) => endedAt).sort(([, one], [, other]) => other.endedAt - one.endedAt);
    for (const each of ended.slice(MAX_ENDED)) this.drop(...each);
    for (const request of shown) this.laneOf(request).take(request, this.column, scene);
    const { waiting_interactive = 0, waiting_normal = 0, waiting_background = 0 } = frame.activity;
    const queued = waiting_interactive + waiting_normal + waiting_background;
    const untold = Math.max(0, queued - (frame.activity.waiting?.length ?? 0));
    const told = scene.running.length + scene.queue.length;
    const hidden = untold + told - shown.length;
    this.more.textContent = `and ${number(hidden)} more`;
    this.arrange(shown, hidden);
    // Of a request that has ended the button is gone: the focus goes on to that of the next line, or to the view.
    const next = this.buttons[Math.min(Math.max(at, 0), this.buttons.length - 1)] ?? this.list.closest("[tabindex]");
    if (focused && !focused.checkVisibility()) /** @type {HTMLElement | null} */ (next)?.focus({ preventScroll: true });
    this.paint();
  }

  /** Those that end a request, as the lines stand. */
  get buttons() {
    return [...this.list.querySelectorAll(".lane .icon-button:not([hidden])")];
  }

  /** All that were begun, one's own, and the first few others. @param {Scene} scene */
  shownOf(scene) {
    let left = MAX_WAITING;
    return [...scene.running, ...scene.queue].filter(
      (each) => isBegun(each) || this.lanes.get(each.id)?.hasComputed || left-- > 0 || this.own(each.id)?.title,
    );
  }

  /** Those that compute come first, then those that wait in their order, then those that have ended. @param {RunningRequest[]} shown @param {number} hidden How many more wait. */
  arrange(shown, hidden) {
    const places = new Map(shown.map(({ id }, index) => [id, index]));
    const lanes = [...this.lanes.values()];
    const placeOf = (/** @type {Lane} */ lane) => places.get(lane.request.id) ?? -lane.endedAt;
    /** @type {Element[]} */
    const rows = [];
    for (const phase of PHASES) {
      const members = lanes.filter((lane) => lane.phase === phase).sort((a, b) => placeOf(a) - placeOf(b));
      const head = this.heads.get(phase);
      const more = phase === "waiting" ? hidden : 0;
      if (!head || !(members.length + more)) continue;
      head.count.textContent = number(members.length + more);
      rows.push(head.element, ...members.map(({ element }) => element), ...(more ? [this.more] : []));
    }
    arrange(this.list, rows);
  }

  /** @param {RunningRequest} request */
  laneOf(request) {
    let lane = this.lanes.get(request.id);
    if (lane && !lane.endedAt) return lane;
    if (lane) this.drop(request.id, lane); // an id that is used again
    lane = new Lane(request, !this.isWatching);
    this.lanes.set(request.id, lane);
    return lane;
  }

  /** Forget all: another server's clock says nothing about them. */
  clear() {
    for (const [id, lane] of this.lanes) this.drop(id, lane);
    this.column = -Infinity;
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
      words: probe("--muted"),
    };
    for (const lane of this.lanes.values()) if (lane.ticks.size) lane.paint(this.column, colours);
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
    waits_for: one.waits_for && other.waits_for,
  };
}

/** A custom property as a colour that a canvas takes: `light-dark(…)` is resolved by a real property only. @param {HTMLElement} near @param {string} value */
function colourOf(near, value) {
  near.style.outlineColor = value;
  const colour = getComputedStyle(near).outlineColor;
  near.style.outlineColor = "";
  return colour;
}
