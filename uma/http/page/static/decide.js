/** Questions about a text that the model decides rather than answers: how likely are yes, each option, each level. */

import { ApiError, ask } from "./api.js";
import { byId, duration, h, number } from "./dom.js";

const MEANING =
  "These probabilities are not calibrated: of answers at 90 %, nine in ten need not be right. Try texts whose answers you know, and choose a threshold by them.";
/** Below this the model would rather have said something else. */
const LEAST_MASS = 0.5;

/** The sheet, which keeps what was written in it. @param {() => string} model The name of the one that is asked. @param {() => boolean} isLoaded */
export function listenForDecisions(model, isLoaded) {
  const dialog = byId("decisions", HTMLDialogElement);
  const found = byId("decided", HTMLElement);
  const button = byId("decide-now", HTMLButtonElement);
  /** What ends the questions that are asked. @type {AbortController | undefined} */
  let asking;
  byId("decide", HTMLElement).addEventListener("click", () => dialog.showModal());
  byId("decisions-form", HTMLFormElement).addEventListener("submit", async (event) => {
    event.preventDefault();
    if (asking) return asking.abort();
    asking = new AbortController();
    const { signal } = asking;
    const questions = byId("decided-questions", HTMLTextAreaElement).value;
    const lines = questions.split("\n").map((line) => line.trim()).filter(Boolean);
    button.textContent = "Stop";
    const began = Date.now();
    const clock = h("span", { "aria-hidden": "true" });
    const ticking = setInterval(() => (clock.textContent = ` ${duration(Date.now() - began)}`), 1_000);
    const first = isLoaded() ? "" : `${model()} is loaded first. `;
    const asked = lines.length === 1 ? "the question" : `${number(lines.length)} questions`;
    found.replaceChildren(h("p", { class: "help" }, h("span", { class: "pulse" }), `${first}The model reads the text and ${asked} …`, clock));
    try {
      const input = byId("decided-text", HTMLTextAreaElement).value;
      const body = { model: model(), input, questions: lines.map(questionOf) };
      const { answers, usage } = await ask("v1/decisions", body, signal);
      const { input_tokens: read, input_tokens_details: details } = usage;
      const extent = `${number(read)} tokens were read, ${number(details.cached_tokens)} of them from the cache.`;
      const shown = lines.map((line, at) => decision(line.split(" = ")[0], answers[at]));
      found.replaceChildren(...shown, h("p", { class: "help" }, `${extent} ${MEANING}`));
    } catch (error) {
      if (!signal.aborted && !(error instanceof ApiError)) throw error;
      const words = error instanceof ApiError ? faultOf(error.message, lines) : "Stopped.";
      found.replaceChildren(h("p", { class: signal.aborted ? "help" : "fault" }, words));
    }
    clearInterval(ticking);
    asking = undefined;
    button.textContent = "Decide";
  });
}

/** What the server has against a question, with its line in place of its number. @param {string} message @param {string[]} lines */
function faultOf(message, lines) {
  return message.replace(/questions\[(\d+)\][\w.[\]]*/g, (_, at) => `“${lines[at]}”`);
}

/** What a line asks, as the server takes it. @param {string} line */
function questionOf(line) {
  const [instructions, options = ""] = line.split(/\s+=\s+(.*)/);
  const [, first, last] = /^(\d+)\.\.(\d+)$/.exec(options) ?? [];
  const range = Array.from({ length: Math.max(0, Math.min(255, Number(last) - Number(first) + 1)) || 0 });
  const labels = range.length ? range.map((_, at) => String(Number(first) + at)) : options.split(/\s*[<,]\s*/).filter(Boolean);
  if (!labels.length) return { type: "predicate", instructions };
  if (range.length || options.includes("<")) return { type: "score", instructions, levels: labels.map((label) => ({ label })) };
  return { type: "choice", instructions, choices: labels.map((value) => ({ value })) };
}

/** The probabilities of one question as bars. @param {string} name @param {any} answer */
function decision(name, { probability, probabilities, diagnostics, confidence }) {
  /** @type {[string, number][]} */
  const parts = probabilities
    ? probabilities.map((/** @type {any} */ each) => [each.label ?? String(each.value), each.probability])
    : [["yes", probability], ["no", 1 - probability]];
  const most = Math.max(...parts.map(([, share]) => share));
  const rows = parts.map(([label, share]) => {
    const bar = h("span", { class: "bar-part is-used" });
    bar.style.width = `${100 * share}%`;
    return h(
      "li",
      { class: share === most ? "is-likeliest" : "" },
      h("span", { dir: "auto" }, label),
      h("span", { class: "bar", "aria-hidden": "true" }, bar),
      h("span", { class: "share" }, `${number(100 * share, 1)} %`),
    );
  });
  const notes = [
    confidence !== undefined && `Confidence ${number(confidence, 2)}.`,
    diagnostics.label_mass < LEAST_MASS && "The model would rather have answered something else: it may not have understood the question.",
  ].filter(Boolean);
  return h(
    "section",
    { class: "decision" },
    h("h3", { dir: "auto" }, name),
    h("ul", {}, ...rows),
    notes.length > 0 && h("p", { class: "help" }, notes.join(" ")),
  );
}
