/** Questions about a text that the model decides rather than answers: how likely are yes, each option, each level. */

import { ApiError, ask } from "./api.js";
import { byId, duration, h, number } from "./dom.js";

/** Levels of a question, at most. */
const MAX_LEVELS = 255;
/** Below this the model would rather have said something else. */
const LEAST_MASS = 0.5;

/** The sheet, which keeps what was written in it. @param {() => string} model The name of the one that is asked. @param {() => boolean} isLoaded */
export function listenForDecisions(model, isLoaded) {
  const dialog = byId("decisions", HTMLDialogElement);
  const found = byId("decided", HTMLElement);
  const button = byId("decide-now", HTMLButtonElement);
  /** What ends the questions that are asked. @type {AbortController | undefined} */
  let asking;
  const show = (/** @type {(HTMLElement | false)[]} */ ...parts) => {
    found.replaceChildren(...parts.filter((each) => each !== false));
    found.scrollIntoView({ block: "nearest" }); // below a long text it would not be seen
  };
  byId("decide", HTMLElement).addEventListener("click", () => {
    byId("decides", HTMLElement).textContent = model() || "The model";
    dialog.showModal();
  });
  byId("decisions-form", HTMLFormElement).addEventListener("submit", async (event) => {
    event.preventDefault();
    if (asking) return asking.abort();
    const questions = byId("decided-questions", HTMLTextAreaElement).value;
    const lines = questions.split("\n").map((line) => line.trim()).filter(Boolean);
    const faults = lines.flatMap((line) => faultOf(questionOf(line), line) ?? []);
    if (faults.length) return show(h("p", { class: "fault" }, faults.join("\n")));
    asking = new AbortController();
    const { signal } = asking;
    button.textContent = "Stop";
    const began = Date.now();
    const clock = h("span", { "aria-hidden": "true" });
    const ticking = setInterval(() => (clock.textContent = ` ${duration(Date.now() - began)}`), 1_000);
    const first = isLoaded() ? "" : `${model()} is loaded first. `;
    const asked = lines.length === 1 ? "the question" : `${number(lines.length)} questions`;
    show(h("p", { class: "help" }, h("span", { class: "pulse" }), `${first}The model reads the text and ${asked} …`, clock));
    try {
      const input = byId("decided-text", HTMLTextAreaElement).value;
      const body = { model: model(), input, questions: lines.map(questionOf) };
      const { answers, usage, model: name } = await ask("v1/decisions", body, signal);
      const { input_tokens: read, input_tokens_details: details } = usage;
      const extent = `${name} read ${number(read)} tokens, ${number(details.cached_tokens)} of them from the cache.`;
      const shown = lines.map((line, at) => decision(nameOf(line), answers[at]));
      const amiss = lines.filter((_, at) => answers[at].diagnostics.label_mass < LEAST_MASS).map((line) => `“${nameOf(line)}”`);
      show(...shown, amiss.length > 0 && h("p", { class: "help" }, `${amiss.join(", ")}: most of the probability went to other words. The model may not have understood.`), h("p", { class: "help" }, extent));
    } catch (error) {
      if (!signal.aborted && !(error instanceof ApiError)) throw error;
      const named = (/** @type {string} */ _, /** @type {string} */ at) => `“${lines[Number(at)]}”`; // in place of its number
      const words = error instanceof ApiError ? error.message.replace(/questions\[(\d+)\][\w.[\]]*/g, named) : "Stopped.";
      show(h("p", { class: signal.aborted ? "help" : "fault" }, words));
    }
    clearInterval(ticking);
    asking = undefined;
    button.textContent = "Decide";
  });
}

/** What is wrong with a line, where the server would refuse the question in words of its own fields. @param {ReturnType<typeof questionOf>} question @param {string} line */
function faultOf({ levels, choices }, line) {
  const labels = levels?.map(({ label }) => label) ?? choices?.map(({ value }) => value);
  const twice = labels?.find((each, at) => labels.indexOf(each) < at);
  if (/=\s*\d+\.\.\d+$/.test(line) && !levels) return `“${line}”: levels go from low to high, at most 255 of them: “= 1..5”.`;
  if ((labels && labels.length < 2) || /=$/.test(line)) return `“${line}”: give two or more options, as “= billing, shipping”, or none for yes or no.`;
  return twice && `“${line}”: “${twice}” is there twice.`;
}

/** A question without its options. @param {string} line */
const nameOf = (line) => line.split(/\s+=\s+/)[0];

/** What a line asks, as the server takes it. @param {string} line */
function questionOf(line) {
  const [instructions, options = ""] = line.split(/\s+=\s+(.*)/);
  const [, first, last] = /^(\d+)\.\.(\d+)$/.exec(options) ?? [];
  const extent = Number(last) - Number(first) + 1; // NaN without a range
  const isRange = extent > 1 && extent <= MAX_LEVELS;
  const labels = isRange ? Array.from({ length: extent }, (_, at) => String(Number(first) + at)) : options.split(/\s*[<,]\s*/).filter(Boolean);
  if (!labels.length) return { type: "predicate", instructions };
  if (isRange || options.includes("<")) return { type: "score", instructions, levels: labels.map((label) => ({ label })) };
  return { type: "choice", instructions, choices: labels.map((value) => ({ value })) };
}

/** The probabilities of one question as bars. @param {string} name @param {any} answer */
function decision(name, { probability, probabilities }) {
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
  return h("section", { class: "decision" }, h("h3", { dir: "auto" }, name), h("ul", {}, ...rows));
}
