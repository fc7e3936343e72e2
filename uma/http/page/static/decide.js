/** Questions about a text that the model decides rather than answers: how likely are yes, each option, each level. */

import { ApiError, ask } from "./api.js";
import { byId, h, iconButton, number } from "./dom.js";

const HELP =
  "One a line. “Is it spam?” is yes or no, “Which team? = billing, shipping” has options, “How urgent? = low < high” and “How urgent? = 1..5” have levels.";
const MEANING =
  "These are not calibrated: 90 % is not right nine times of ten. Ask about texts that you know, and choose a threshold by them.";
/** Below this the model would rather have said something else. */
const LEAST_MASS = 0.5;

/** Show the sheet; what was written in it stays. @param {() => string} model The name of the one that is asked. */
export function openDecisions(model) {
  const dialog = byId("decisions", HTMLDialogElement);
  if (!dialog.hasChildNodes()) build(dialog, model);
  dialog.showModal();
}

/** @param {HTMLDialogElement} dialog @param {() => string} model */
function build(dialog, model) {
  const text = h("textarea", { id: "decided-text", rows: 6, dir: "auto", required: true });
  const questions = h("textarea", { id: "decided-questions", rows: 4, dir: "auto", required: true, "aria-describedby": "decided-help" });
  const found = h("div", { class: "decided", role: "status" });
  const button = h("button", { class: "button primary" }, "Decide");
  const decide = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const lines = questions.value.split("\n").map((line) => line.trim()).filter(Boolean);
    button.disabled = true;
    found.replaceChildren(h("span", { class: "pulse" }));
    try {
      const body = { model: model(), input: text.value, questions: lines.map(questionOf) };
      const { answers, usage } = await ask("v1/decisions", body);
      const { input_tokens: read, input_tokens_details: details } = usage;
      const extent = `${number(read)} tokens, ${number(details.cached_tokens)} of them from the cache.`;
      const shown = lines.map((line, at) => decision(line.split(" = ")[0], answers[at]));
      found.replaceChildren(...shown, h("p", { class: "help" }, `${extent} ${MEANING}`));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      found.replaceChildren(h("p", { class: "fault" }, error.message));
    }
    button.disabled = false;
  };
  dialog.replaceChildren(
    h(
      "header",
      { class: "sheet-head" },
      h("h2", { id: "decisions-title" }, "Decide about a text"),
      iconButton("x", "Close", () => dialog.close()),
    ),
    h(
      "form",
      { class: "sheet-body", onsubmit: decide },
      h("div", { class: "field" }, h("label", { for: text.id }, "Text"), text),
      h(
        "div",
        { class: "field" },
        h("label", { for: questions.id }, "Questions"),
        questions,
        h("p", { class: "help", id: "decided-help" }, HELP),
      ),
      h("div", {}, button),
      found,
    ),
  );
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
    diagnostics.label_mass < LEAST_MASS && "The model would rather have answered otherwise: it did not understand the question.",
  ].filter(Boolean);
  return h(
    "section",
    { class: "decision" },
    h("h3", { dir: "auto" }, name),
    h("ul", {}, ...rows),
    notes.length > 0 && h("p", { class: "help" }, notes.join(" ")),
  );
}
