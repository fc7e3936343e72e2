/** A row for each request: who asks, what is done for it or why nothing is, how fast, and what was computed in each
 * quarter of a second of the last 30. The rows stand in the order in which their requests came, in every window. */

import { ApiError } from "./api.js";
import { byId, copyOf, duration, number, say, toast } from "./dom.js";

/** Time between two frames. */
const INTERVAL_MS = 250;
const COLUMNS = 30_000 / INTERVAL_MS;
/** What came so lately is seen from its beginning. */
const NEW_MS = 1_000;
/** Rows of so many requests that have ended stay, if no others are looked at. */
const MAX_ENDED = 5;
/** Rows of requests that have ended go after this time: what stands below them moves. */
const LINGER_MS = 20_000;
/** Of those without a slot so many are shown: the next to begin, and one's own. */
const MAX_WAITING = 5;
const GONE = 404;
/** As many tokens as make a tick of full height. */
const FULL = { prefill: 256, decode: 32 };
/** With several models a request’s number is its own in its model, times this, and the model’s; see `supervisor/model.py`. */
const MOST_MODELS = 65_536;
const PRIORITIES = new Map([
  [1, "interactive"],
  [-1, "background"],
]);
/** What has a slot, and waits: in two words, and in a sentence. @type {Map<string | undefined, [string, string]>} */
const HELD = new Map([
  ["prompt", ["its prompt waits", "Another prompt is read first."]],
  ["prefix", ["its prompt waits", "Another request reads a prompt that begins like this one: that is computed only once."]],
  ["grammar", ["prepares", "The grammar of its output is compiled again."]],
  ["reader", ["waits for client", "Its program is slow to read the answer."]],
]);
/** Why another one cannot begin. */
const QUEUED = new Map([
  ["cells", "The KV cache has no space for its prompt yet."],
  ["adapters", "Other LoRA adapters have their turn."],
]);

/** Who asks: its user, its key, or else its program, and not by which door. @param {string} origin As the server tells it: program, key, user, door, process. */
function whoOf(origin) {
  const parts = origin.split(" · ").filter((part) => !part.startsWith("pid "));
  const door = parts.pop() ?? "";
  parts.sort((one, other) => Number(/^(key|user) /.test(other)) - Number(/^(key|user) /.test(one))); // programs look alike
  return parts.join(" · ") || door;
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
    return whoOf(origin ?? "") || (id.length > 24 ? `${id.slice(0, 23)}…` : id);
  }

  /** Its number, which tells those of one program apart, and its model of several. @param {RunningRequest} request */
  numberOf({ number: given, model: own }) {
    const model = this.models.get(given);
    return model ? `#${Math.floor(given / MOST_MODELS)} · ${model}` : given ? `#${given}` : (own ?? "");
  }

  /** What is done for it, or why nothing is: in a few words, and what there is to add. @param {RunningRequest} request @returns {[string, string]} */
  stateOf(request) {
    const { waits_for: cause, prompt_tokens: prompt, computed_tokens: computed, generated_tokens: generated } = request;
    const held = HELD.get(cause);
    if (held) return held;
    if (cause === "loading") return ["its model loads", `${request.model}: ${request.behind || "not loaded"}`];
    if (request.is_preempted) return ["paused", "A request of higher priority has its place in the KV cache."];
    if (cause) {
      const ahead = this.queue.indexOf(request);
      return [ahead > 0 ? `${number(ahead)} ahead` : "next in line", QUEUED.get(cause) ?? "All slots are taken."];
    }
    if (computed >= prompt || generated) return [`writing, ${tokens(generated)}`, ""];
    return [`reading ${Math.floor((100 * computed) / Math.max(1, prompt))} %`, ""];
  }
}

class Lane {
  /** @param {RunningRequest} request */
  constructor(request) {
    /** Tokens of the prompt and of the answer, by column number since the server's clock began. @type {Map<number, {prefill: number, decode: number}>} */
    this.ticks = new Map();
    this.request = request;
    /** @type {Own | undefined} */
    this.does = undefined;
    this.endedAt = 0;
    const isNew = request.age_ms < NEW_MS;
    this.computed = isNew ? request.cached_tokens : request.computed_tokens;
    this.generated = isNew ? 0 : request.generated_tokens;
    const [element, part] = copyOf("lane");
    this.element = element;
    this.element.dataset.id = request.id;
    this.canvas = /** @type {HTMLCanvasElement} */ (part("lane-ticks"));
    this.details = /** @type {HTMLDetailsElement} */ (part("lane-details"));
    this.name = part("lane-name");
    this.of = part("lane-of");
    this.state = part("lane-state");
    this.speed = part("lane-speed");
    this.more = part("lane-more");
    this.button = part("icon-button");
    this.hurry = part("link-button");
    this.isStopped = false;
    this.button.onclick = () => (this.does?.title ? this.stop() : this.ask());
    this.hurry.onclick = () => {
      this.does?.hurry?.();
      this.hurry.remove();
    };
  }

  /** Whether a person looks at it just now. */
  get isHeld() {
    return this.details.open || this.element.contains(document.activeElement);
  }

  /** @param {RunningRequest} request @param {number} column @param {Scene} scene */
  take(request, column, scene) {
    const [prefill, decode] = [request.computed_tokens - this.computed, request.generated_tokens - this.generated];
    this.ticks.set(column, { prefill: Math.max(0, prefill), decode: Math.max(0, decode) });
    for (const at of this.ticks.keys()) if (at < column - COLUMNS) this.ticks.delete(at);
    [this.computed, this.generated, this.request] = [request.computed_tokens, request.generated_tokens, request];
    this.describe(scene);
  }

  /** @param {Scene} scene */
  describe(scene) {
    const { request } = this;
    const { id, age_ms: age, ttft_ms: first, cached_tokens: cached, generated_tokens: generated } = request;
    const own = scene.own(id);
    if (own?.title || !this.element.classList.contains("is-own")) say(this.name, scene.nameOf(request)); // what has ended keeps it
    if (own?.title) this.element.classList.add("is-own");
    say(this.of, scene.numberOf(request));
    const [state, why] = scene.stateOf(request);
    say(this.state, state);
    const speed = first && age > first && generated > 1 ? (1_000 * (generated - 1)) / (age - first) : 0;
    const isWriting = state.startsWith("writing");
    say(this.speed, isWriting ? (speed ? `${number(speed, speed < 10 ? 1 : 0)} tokens/s` : "") : `for ${duration(age)}`);
    const read = cached ? `, ${number(cached)} of them from the cache` : "";
    const written = generated ? `, answer: ${tokens(generated)}${first ? `, the first after ${duration(first)}` : ""}` : "";
    const came = [request.origin, `request ${id}`].filter(Boolean).join(" · ");
    const priority = PRIORITIES.get(request.priority) ?? "normal";
    say(this.more, `${why} Prompt: ${tokens(request.prompt_tokens)}${read}${written}. Came ${duration(age)} ago with ${priority} priority: ${came}.`.trim());
    this.offer(own, isWriting);
  }

  /** Buttons for what can be done with it. @param {Own | undefined} own @param {boolean} isWriting */
  offer(own, isWriting) {
    if (own && !this.does) {
      this.button.title = `End ${own.title ?? `${this.name.textContent} ${this.of.textContent}`}`;
      this.button.setAttribute("aria-label", this.button.title);
    }
    this.does = own;
    const hasFocus = !own && this.button === document.activeElement;
    this.button.hidden = !own;
    this.hurry.hidden = !own?.hurry || !isWriting;
    if (hasFocus) this.focus();
  }

  focus() {
    this.details.querySelector("summary")?.focus({ preventScroll: true });
  }

  async stop() {
    const { does } = this;
    this.isStopped = Boolean(does);
    try {
      if (!does) throw new ApiError(GONE, { code: "", message: "" });
      await does.stop();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.isStopped = false;
      if (this.endedAt) this.tellEnd();
      toast(error.status === GONE ? `${this.button.title.replace("End ", "")} had already ended.` : error.message);
    }
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
    this.element.classList.add("is-over");
    say(this.speed, (this.speed.textContent ?? "").replace(/^for\b/, "after"));
    this.tellEnd(this.does);
    this.offer(undefined, false);
  }

  tellEnd(/** @type {Own | undefined} */ does = undefined) {
    say(this.state, this.isStopped ? "ended by you" : "ended");
    if (!this.isStopped) void does?.howEnded?.().then((how) => say(this.state, how));
  }

  /** @param {number} column The newest. @param {Record<"prefill" | "decode", string>} colours */
  paint(column, colours) {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((each) => Math.round(each * devicePixelRatio));
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const context = canvas.getContext("2d");
    if (!context || !width) return;
    context.clearRect(0, 0, width, height);
    const step = width / COLUMNS;
    const bar = Math.max(1, Math.floor(step * 0.75)); // whole pixels, as its place: a part of one is a blur
    for (const [at, tick] of this.ticks)
      for (const kind of /** @type {const} */ (["prefill", "decode"])) {
        if (!tick[kind]) continue;
        const share = Math.min(1, Math.log2(1 + tick[kind]) / Math.log2(1 + FULL[kind]));
        context.fillStyle = colours[kind];
        context.fillRect(Math.round(width - (column - at + 1) * step), height, bar, -Math.max(2 * devicePixelRatio, Math.round(share * height)));
      }
  }
}

export class Lanes {
  /** @param {HTMLElement} list @param {(id: string) => Own | undefined} [own] What can be done with a request. */
  constructor(list, own = () => undefined) {
    this.list = list;
    this.own = own;
    /** As they stand. @type {Lane[]} */
    this.rows = [];
    this.column = 0;
    list.addEventListener("keydown", (event) => this.step(event));
  }

  /** @param {Frame} frame @returns How many there are, how many of them are shown, and how many prompts wait to be read. */
  take(frame) {
    this.column = Math.round(frame.at_ms / INTERVAL_MS);
    const scene = new Scene(frame, this.own);
    this.list.classList.toggle("is-several", frame.models.length > 0);
    for (const lane of this.rows) if (!lane.endedAt && !scene.all.has(lane.request.id)) lane.end(frame.at_ms);
    const shown = this.shownOf(scene);
    /** @type {Lane | undefined} */
    let before;
    for (const request of shown.sort((one, other) => other.age_ms - one.age_ms)) (before = this.laneOf(request, before)).take(request, this.column, scene);
    const ended = this.rows.filter(({ endedAt, isHeld }) => endedAt && !isHeld).sort((one, other) => one.endedAt - other.endedAt);
    const over = new Set(ended.filter(({ endedAt }, at) => frame.at_ms - endedAt > LINGER_MS || at < ended.length - MAX_ENDED));
    for (const { element } of over) element.remove();
    this.rows = this.rows.filter((lane) => !over.has(lane));
    this.paint();
    const { waiting_interactive = 0, waiting_normal = 0, waiting_background = 0, waiting = [] } = frame.activity;
    const untold = Math.max(0, waiting_interactive + waiting_normal + waiting_background - waiting.length);
    const unread = scene.running.filter(({ waits_for: cause }) => cause === "prompt" || cause === "prefix").length;
    return { shown: shown.length, all: scene.all.size + untold, unread };
  }

  /** All that have a slot, one's own, and the first few others; what is shown stays. @param {Scene} scene */
  shownOf(scene) {
    const has = new Set(this.rows.flatMap(({ endedAt, request }) => (endedAt ? [] : [request.id])));
    let left = MAX_WAITING - scene.queue.filter(({ id }) => has.has(id)).length;
    return [...scene.running, ...scene.queue.filter(({ id }) => has.has(id) || left-- > 0 || this.own(id)?.title)];
  }

  /** @param {RunningRequest} request @param {Lane | undefined} before That of the request that came before it. */
  laneOf(request, before) {
    const known = this.rows.find((lane) => lane.request.id === request.id && !lane.endedAt);
    if (known) return known;
    const lane = new Lane(request);
    const above = before ? this.rows.indexOf(before) : -1;
    const next = this.rows.find(({ endedAt }, at) => at > above && !endedAt);
    this.list.insertBefore(lane.element, next?.element ?? null);
    this.rows.splice(next ? this.rows.indexOf(next) : this.rows.length, 0, lane);
    return lane;
  }

  /** ↑ and ↓ move between the rows. @param {KeyboardEvent} event */
  step(event) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const at = this.rows.findIndex(({ element }) => element.contains(document.activeElement));
    if (!by || at < 0) return;
    event.preventDefault();
    this.rows[at + by]?.focus();
  }

  /** Forget all: another server's clock says nothing about them. */
  clear() {
    this.list.replaceChildren();
    this.rows = [];
  }

  paint() {
    const colours = { prefill: colourOf(this.list, "--prefill"), decode: colourOf(this.list, "--decode") };
    for (const lane of this.rows) lane.paint(this.column, colours);
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

/** A custom property as a colour that a canvas takes: `light-dark(…)` is resolved by a real property only. @param {HTMLElement} near @param {string} name */
function colourOf(near, name) {
  near.style.outlineColor = `var(${name})`;
  const colour = getComputedStyle(near).outlineColor;
  near.style.outlineColor = "";
  return colour;
}
