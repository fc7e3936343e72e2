/** The chat: which conversation is shown, what is asked in it, and the answers that are being written anywhere. */

import { announce, arrange, button, byId, DOUBLE_CLICK_MS, h, rebuild, toast } from "./dom.js";
import { AnswerView, edit, nameModelsOnce, question, spokenEnd } from "./message.js";
import { Run } from "./run.js";
import { mark } from "./search.js";
import { DEFAULTS } from "./settings.js";
import * as store from "./store.js";
import { add, asked, branch, branchOff, freshId, isOutgrown, newConversation, news, pathTo, show, versions } from "./tree.js";
import { Turns } from "./turns.js";

const SAVE_EVERY_MS = 1_000;
const NEAR_END_PX = 80;
/** For so long at a stretch finished answers are rendered. */
const RENDER_MS = 30;
/** An answer that is written rests for so many times as long as it took to draw it, however long its last block is. */
const REST = 4;
/** Code of a refusal for a key that is missing or wrong. */
const NO_KEY = "invalid_api_key";

export class Chat {
  /** @param {{onChange: () => void, focus: () => void, begin: () => void, defaults: () => Settings, model: () => string | undefined, ended: () => void, suggestions: () => string[], info: () => Info | undefined, count: (text: string) => Promise<number | undefined>, stopped: (home: Conversation) => void, over: (home: Conversation) => void}} does */
  constructor(does) {
    this.does = does;
    /** @type {Conversation[]} */
    this.conversations = [];
    this.current = newConversation(does.defaults(), does.model());
    /** Answers that are being written, by their message's id. @type {Map<string, {run: Run, home: Conversation}>} */
    this.runs = new Map();
    this.turns = new Turns();
    /** The answers that are shown, by their message's id. @type {Map<string, AnswerView>} */
    this.shown = new Map();
    /** What is shown of each message, and of which versions: a long conversation takes seconds to be built again. @type {Map<Message, {versions: string, element: HTMLElement, answer?: AnswerView}>} */
    this.views = new Map();
    /** Conversations that the browser has no room for. @type {Set<string>} */
    this.unkept = new Set();
    this.hasStore = true;
    this.branchedAt = -Infinity;
    /** The question whose answers are shown side by side. @type {string | null} */
    this.compared = null;
    this.thread = byId("thread", HTMLElement);
    this.scroller = byId("scroller", HTMLElement);
    this.empty = byId("empty", HTMLElement);
    this.toEnd = byId("to-end", HTMLButtonElement);
    this.isAtEnd = true;
    this.scroller.addEventListener("scroll", () => this.noteScroll());
    this.toEnd.addEventListener("click", () => this.goToEnd());
    new ResizeObserver(() => this.isAtEnd && this.goToEnd()).observe(this.scroller);
  }

  /** Load what the browser keeps, and go on with answers that were being written when the page was left. */
  async start() {
    try {
      const { conversations, unreadable } = await store.load();
      this.conversations = conversations;
      if (unreadable) toast("Some saved conversations are damaged, and are not listed.");
      store.watch({ saved: (stored) => this.take(stored), deleted: (id) => this.drop(id) });
    } catch {
      this.hasStore = false;
    }
    for (const conversation of this.conversations)
      for (const message of Object.values(conversation.messages))
        if (message.token)
          void this.follow(conversation, message, message.isUnsent ? bodyOf(conversation, message) : undefined);
  }

  /** What another window has saved. @param {Conversation} stored */
  take(stored) {
    const mine = this.conversations.find(({ id }) => id === stored.id);
    if (!mine) this.keep(stored);
    else this.join(mine, stored);
    this.does.over(mine ?? stored);
  }

  /** @param {Conversation} mine @param {Conversation} stored */
  join(mine, stored) {
    const found = news(mine, stored).filter(({ id }) => !this.runs.has(id));
    for (const message of found) mine.messages[message.id] = message;
    const { title, settings, model, updated, pinned } = stored;
    Object.assign(mine, { title, settings, model, updated, pinned });
    // What is being edited stays as it is: it becomes another version beside what has come meanwhile.
    if (!found.length || (mine === this.current && this.thread.querySelector(".is-edited"))) return;
    if (branch(stored).some(({ id }) => id === mine.leaf)) mine.leaf = stored.leaf;
    if (mine !== this.current) return;
    this.render();
    this.pickUp(mine);
  }

  /** Follow answers that another window has asked for: those with text, for an answer is saved before it is asked for. @param {Conversation} conversation */
  pickUp(conversation) {
    for (const message of Object.values(conversation.messages))
      if (message.token && (message.text || message.thinking) && !this.runs.has(message.id))
        void this.follow(conversation, message);
  }

  /** What another window has deleted. @param {string} id */
  drop(id) {
    const gone = this.conversations.find((each) => each.id === id);
    if (!gone) return;
    if (gone === this.current) toast(`“${gone.title || "New chat"}” was deleted in another window.`);
    this.leave(gone);
    this.does.onChange();
  }

  /** The runs of the answer that is shown last, or of all that are shown side by side there. */
  get running() {
    const isUndecided = this.isUndecided(this.current);
    const isShown = (/** @type {Message} */ each) => each.id === this.current.leaf || (isUndecided && this.actions.isCompared(each));
    // One that is over is still being saved.
    return [...this.runs.values()].flatMap(({ run }) => (!run.isOver && isShown(run.message) ? [run] : []));
  }

  get newestFirst() {
    return [...this.conversations].sort((a, b) => b.updated - a.updated);
  }

  /** Ids of the conversations in which an answer is being written. */
  get answering() {
    return new Set([...this.runs.values()].map(({ home }) => home.id));
  }

  /** @param {string} [id] Without one, or with one that is not known: a new conversation. */
  open(id) {
    this.current = this.conversations.find((each) => each.id === id) ?? newConversation(this.does.defaults(), this.does.model());
    this.isAtEnd = true;
    this.render();
    this.pickUp(this.current);
  }

  /** Change the conversation that is shown, from now on. @param {Partial<Pick<Conversation, "model" | "settings">>} changes */
  change(changes) {
    Object.assign(this.current, changes);
    void this.save(this.current);
    this.does.onChange();
  }

  /** @param {string} text @param {Attachment[]} files */
  send(text, files, home = this.current) {
    this.keep(home);
    const question = add(home, { parent: home.leaf, role: "user", text, ...(files.length ? { files } : {}) });
    if (home === this.current) [this.isAtEnd, this.compared] = [true, null];
    this.answer(home, question.id);
  }

  /** The last one that is shown and has text. */
  get lastAnswer() {
    return branch(this.current).findLast(({ role, text }) => role === "assistant" && text);
  }

  /** Whether the conversation ends with several answers of which none was chosen. @param {Conversation} conversation */
  isUndecided({ messages, leaf }) {
    return leaf !== null && this.actions.isCompared(messages[leaf]);
  }

  editLast() {
    const last = branch(this.current).findLast(({ role }) => role === "user");
    if (last) this.edit(last);
  }

  /** @param {Message} question */
  edit(question) {
    const view = this.views.get(question);
    if (view) edit(view.element, question, this.actions);
  }

  /** What waits behind these answers is not sent any more; what is entered from now on is. */
  stop(runs = this.running) {
    const found = [...this.runs.values()].find(({ run }) => runs.includes(run));
    if (found) this.does.stopped(found.home);
    for (const run of runs) void run.stop();
    this.does.onChange();
  }

  /** The answer of this page's that is this request, and what can be done with it. @param {string} request */
  own(request) {
    const found = [...this.runs.values()].find(({ run }) => run.request === request);
    if (!found) return undefined;
    const { run, home } = found;
    const hurry = run.canHurry ? () => void run.answerNow() : undefined;
    return { title: home.title || "New chat", stop: () => this.stop([run]), hurry };
  }

  /** The server takes the key now: what it refused for the lack of one is asked again, where it is shown. */
  askAgain() {
    const message = this.current.leaf ? this.current.messages[this.current.leaf] : undefined;
    if (message?.failure?.code !== NO_KEY || this.runs.has(message.id)) return;
    delete message.failure;
    Object.assign(message, { token: freshId(), isUnsent: true });
    this.views.delete(message);
    void this.follow(this.current, message, bodyOf(this.current, message));
  }

  /** @param {Conversation[]} conversations */
  addAll(conversations) {
    for (const each of conversations) {
      this.keep(each);
      void this.save(each, true);
    }
    this.open(conversations[0]?.id);
  }

  /** @param {Conversation} conversation */
  remove(conversation) {
    void store.forget(conversation.id).catch(() => {});
    this.leave(conversation);
  }

  /** @param {Conversation} conversation */
  leave(conversation) {
    for (const { run, home } of this.runs.values()) if (home === conversation) this.stop([run]);
    this.conversations = this.conversations.filter((each) => each !== conversation);
    if (conversation === this.current) this.open();
  }

  /** @param {Conversation} conversation @param {boolean} [isNew] As for `store.save`. */
  async save(conversation, isNew) {
    if (!this.hasStore || !this.conversations.includes(conversation)) return;
    const { id } = conversation;
    try {
      await store.save(conversation, isNew);
      if (this.unkept.delete(id)) this.does.onChange();
    } catch {
      if (this.unkept.has(id)) return; // an answer is saved every second: it was said
      this.unkept.add(id);
      const name = conversation.title || "New chat";
      if (conversation !== this.current) toast(`The browser’s storage is full: “${name}” is not saved.`);
      this.does.onChange();
    }
  }

  /** Why the conversation that is shown is lost with the page; empty where the browser keeps it. */
  get loss() {
    if (!this.conversations.includes(this.current)) return "";
    if (!this.hasStore) return "This browser saves no conversations: this one is lost when the page is closed.";
    if (!this.unkept.has(this.current.id)) return "";
    return "The browser’s storage is full: this conversation is lost when the page is closed.";
  }

  /** @param {Conversation} conversation */
  keep(conversation) {
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
  }

  /** Ask for an answer to the branch that ends with `parent`, or for several. @param {Conversation} conversation @param {string | null} parent @param {number} [count] */
  answer(conversation, parent, count = conversation.settings.answers ?? 1) {
    if (count > 1) this.compared = parent;
    for (let number = 0; number < count; number++) this.askFor(conversation, { parent, role: "assistant", text: "" });
  }

  /** @param {Conversation} conversation @param {Pick<Message, "parent" | "role" | "text"> & Partial<Message>} answer Its text is its beginning. */
  askFor(conversation, answer) {
    const info = this.does.info();
    const mostTokens = Number(conversation.settings.sampling.max_tokens) || info?.sampling.max_tokens?.default;
    if (info?.models) conversation.model ??= info.model.called;
    const fresh = { token: freshId(), isUnsent: true, mostTokens, model: conversation.model ?? info?.model.called };
    const message = add(conversation, { ...answer, ...fresh });
    void this.follow(conversation, message, bodyOf(conversation, message));
  }

  /** How much of the context the branch that is shown takes, in tokens; 0 where that is not known. */
  get used() {
    const last = branch(this.current).findLast(({ done }) => done);
    return last?.done ? last.done.usage.prompt_tokens + last.done.usage.completion_tokens : 0;
  }

  /** From now on the oldest turns make way where the context is full. @param {Settings["truncation"]} truncation */
  outgrow(truncation) {
    this.change({ settings: { ...this.current.settings, truncation } });
  }

  /** @param {Conversation} conversation @param {Message} message @param {Record<string, unknown>} [body] */
  async follow(conversation, message, body) {
    const run = new Run(message, this.turns, body);
    this.runs.set(message.id, { run, home: conversation });
    let saved = 0;
    run.onChange = () => {
      if (Date.now() - saved > SAVE_EVERY_MS) {
        saved = Date.now();
        void this.save(conversation);
      }
      this.showRun(run);
      if (run.isOver) this.does.over(conversation); // with its end, and not once it is saved: a key can be pressed in between
    };
    const saving = this.save(conversation);
    // At once: a second click finds the page as the first has left it, and asks for nothing.
    if (conversation === this.current) this.render();
    else this.does.onChange();
    await saving; // before it is asked for: a window that is reloaded in between, or another one, goes on with it
    const ticking = setInterval(() => run.waitsFor === "loading" && this.showRun(run), 1_000);
    await run.follow();
    clearInterval(ticking);
    this.runs.delete(message.id);
    void this.renderMissing();
    this.does.ended();
    await this.save(conversation);
    const end = spokenEnd(message);
    if (conversation === this.current && end) announce(end);
    this.does.onChange();
  }

  /** Show what is new of an answer: its end at once, all else as soon as the page has rested. @param {Run} run */
  showRun(run) {
    const view = this.shown.get(run.message.id);
    if (!view) return;
    if (run.isOver) this.draw(view, run);
    else view.drawing ??= setTimeout(() => this.draw(view, run), view.restMs);
  }

  /** @param {AnswerView} view @param {Run} run */
  draw(view, run) {
    clearTimeout(view.drawing);
    view.drawing = undefined;
    const began = performance.now();
    view.follow(run);
    if (run.isOver) nameModelsOnce(this.thread, this.current.model ?? this.does.info()?.model.called);
    if (this.isAtEnd) this.goToEnd();
    view.restMs = REST * (performance.now() - began);
  }

  render() {
    const path = branch(this.current);
    rebuild(this.scroller, () => this.build(path), this.does.focus);
    this.turns.show(this.running.at(-1));
    if (this.isAtEnd) this.goToEnd();
    this.does.onChange();
    void this.renderMissing();
  }

  /** @param {Message[]} path */
  build(path) {
    this.empty.hidden = path.length > 0;
    byId("chat-view", HTMLElement).classList.toggle("is-empty", !path.length);
    this.welcome();
    const [all, before] = [versions(this.current), this.views];
    this.views = new Map();
    this.shown.clear();
    const show = (/** @type {Message} */ message, /** @type {Message[]} */ siblings) => {
      const found = before.get(message);
      const view = found?.versions === this.versionsOf(message, siblings) ? found : this.view(message, siblings);
      this.views.set(message, view);
      if (view.answer) this.shown.set(message.id, view.answer);
      const run = this.runs.get(message.id)?.run;
      if (run) view.answer?.follow(run);
      return view.element;
    };
    const parts = path.map((message) => {
      const siblings = all.get(message.parent) ?? [message];
      if (!this.actions.isCompared(message)) return show(message, siblings);
      return h("div", { class: "compared" }, ...siblings.map((each) => show(each, siblings)));
    });
    arrange(this.thread, parts);
    nameModelsOnce(this.thread, this.current.model ?? this.does.info()?.model.called);
  }

  /** What a message's view is built for. @param {Message} message @param {Message[]} siblings */
  versionsOf(message, siblings) {
    return [this.actions.isCompared(message) && (this.actions.goesOn(message) ? "chosen" : "beside"), ...siblings.map(({ id }) => id)].join();
  }

  /** @param {Message} message @param {Message[]} siblings */
  view(message, siblings) {
    const versions = this.versionsOf(message, siblings);
    if (message.role === "user") return { versions, element: question(message, siblings, this.actions) };
    const answer = new AnswerView(message, siblings, this.actions);
    if (!this.runs.has(message.id)) answer.showPlain();
    return { versions, element: answer.element, answer };
  }

  /** Show a message of this conversation, and where it has these words. @param {string} id @param {string[]} words */
  async reveal(id, words) {
    this.isAtEnd = false;
    show(this.current, id);
    this.render();
    const view = this.views.get(this.current.messages[id]);
    if (!this.runs.has(id)) view?.answer?.blocks.show(this.current.messages[id].text, true);
    await view?.answer?.blocks.loading;
    view?.element.querySelector(".is-folded")?.classList.remove("is-folded");
    if (view) mark(view.element, words);
  }

  /** @type {Actions} */
  actions = {
    resend: (message, text, files) => {
      for (const run of this.running) void run.stop(); // it answers what is asked no more
      add(this.current, { parent: message.parent, role: "user", text, files });
      this.isAtEnd = true;
      this.answer(this.current, this.current.leaf);
    },
    again: (message) => this.answer(this.current, message.parent, 1),
    goOn: (message) => this.goOn(message, message.text),
    amend: (message, text, goesOn) => {
      if (goesOn) return this.goOn(message, text);
      const { parent, role, thinking, model } = message;
      add(this.current, { parent, role, text, thinking, model, isEdited: true });
      void this.save(this.current);
      this.render();
    },
    outgrow: (message, truncation) => {
      this.outgrow(truncation);
      this.answer(this.current, message.parent, 1);
    },
    edit: (message) => {
      if (message.parent) this.edit(this.current.messages[message.parent]);
    },
    mostTokens: () => this.does.info()?.limits.n_ctx || Infinity,
    info: () => this.does.info(),
    count: (text) => this.does.count(text),
    begin: () => this.does.begin(),
    isOutgrown: (message) => isOutgrown(this.current, message),
    branchOff: (message) => {
      // Where the button was, there is now that of the branch.
      if (performance.now() - this.branchedAt < DOUBLE_CLICK_MS) return;
      const copy = branchOff(this.current, message.id);
      this.addAll([copy]);
      this.branchedAt = performance.now();
      toast("A new chat with the messages up to here.");
    },
    isCompared: ({ role, parent }) => role === "assistant" && parent !== null && parent === this.compared,
    goesOn: (message) => branch(this.current).includes(message),
    compare: ({ parent }) => {
      this.compared = parent;
      this.render();
    },
    show: (id) => {
      if (this.actions.isCompared(this.current.messages[id]))
        for (const run of this.running) if (run.message.id !== id) void run.stop(); // nobody would see it
      this.compared = null;
      show(this.current, id);
      void this.save(this.current);
      this.render();
      this.does.over(this.current); // what is queued has waited for the choice
      const shown = this.thread.querySelector(`[data-id="${id}"] .versions button:not(:disabled)`);
      if (shown instanceof HTMLElement) shown.focus();
    },
  };

  /** Have the model go on after `text`, in another version of this answer. @param {Message} message @param {string} text */
  goOn({ parent, role, thinking }, text) {
    for (const run of this.running) void run.stop(); // of those beside it
    [this.isAtEnd, this.compared] = [true, null];
    this.askFor(this.current, { parent, role, text, thinking, continues: true });
  }

  /** What an empty conversation shows; the suggestions are those for the server's model. */
  welcome() {
    const list = byId("ideas", HTMLElement);
    list.hidden = this.empty.hidden;
    const isBase = this.does.info()?.capabilities.chat === false;
    byId("welcome", HTMLElement).textContent = isBase ? "How does the text begin?" : "What would you like to know?";
    byId("whose", HTMLElement).textContent = /^(localhost|127\.|\[::1\])/.test(location.hostname) ? "this" : "the server’s";
    const texts = this.does.suggestions();
    const shown = [...list.children].map((each) => each.textContent);
    if (texts.join() === shown.join()) return;
    list.replaceChildren(...texts.map((text) => button(text, () => this.send(text, []), "idea")));
  }

  /** Render finished answers that are still shown as plain text, the last one first; between them the page does what else there is. */
  async renderMissing() {
    let began = performance.now();
    const isMissing = (/** @type {AnswerView} */ { message, blocks }) =>
      this.shown.get(message.id)?.blocks === blocks && !blocks.isFinal && !this.runs.has(message.id);
    for (const view of [...this.shown.values()].reverse())
      while (isMissing(view)) {
        if (performance.now() - began > RENDER_MS) {
          await new Promise((resolve) => setTimeout(resolve));
          began = performance.now();
          continue;
        }
        view.blocks.show(view.message.text, true);
        await view.blocks.loading;
        if (this.isAtEnd) this.goToEnd();
      }
  }

  /** While another view is shown, the thread stays as it is, and comes back where it was. @param {boolean} isShown */
  setShown(isShown) {
    const view = byId("chat-view", HTMLElement);
    const wasShown = !view.hidden;
    if (wasShown) this.scrolledTo = this.scroller.scrollTop;
    view.hidden = !isShown;
    if (!isShown) return;
    if (!this.thread.hasChildNodes() && this.empty.hidden) this.render();
    else if (!wasShown && this.isAtEnd) this.goToEnd();
    else if (!wasShown) this.scroller.scrollTop = this.scrolledTo ?? 0;
  }

  noteScroll() {
    if (!this.scroller.clientHeight) return; // another view is shown
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    this.toEnd.hidden = this.isAtEnd;
  }

  goToEnd() {
    this.isAtEnd = true;
    this.toEnd.hidden = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

/** What the server is asked for an answer: of the settings those alone that the person has changed. @param {Conversation} conversation @param {Message} message The answer. */
function bodyOf(conversation, { parent, token, text, thinking }) {
  const { settings, model } = conversation;
  const { json_schema, ...plain } = settings.sampling;
  const sampling = json_schema ? { ...plain, grammar: { json_schema } } : plain;
  /** @type {(keyof Settings)[]} */
  const names = ["priority", "reasoning", "truncation"];
  const changed = Object.fromEntries(names.flatMap((name) => (settings[name] === DEFAULTS[name] ? [] : [[name, settings[name]]])));
  const messages = asked(conversation, pathTo(conversation, parent));
  if (text) messages.push({ role: "assistant", content: text, ...(thinking && { reasoning: thinking }) });
  return { model, messages, sampling, ...changed, token };
}
