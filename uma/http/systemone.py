"""TypeSafe's decisions: `POST /v1/systemone`. Questions are a map by name; the state is a text, an object or a list."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from uma import json_text
from uma.constraints import show
from uma.errors import BadRequest
from uma.http.decisions import Asked, Decides, DecisionFields, diagnostics, made, one_of
from uma.http.problem import Unimplemented, Unsupported
from uma.http.reader import Reader, checked_text
from uma.types import MAX_QUESTIONS, Decision, DecisionQuestion, Decisions, Message, Option


@attrs.frozen(kw_only=True)
class SystemOneBody(DecisionFields):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    state: Any
    questions: dict[str, Any]
    assets: Any = None


@attrs.frozen(kw_only=True)
class _NamedQuestion:
    type: str
    instructions: Any = None
    criteria: Any = None


@attrs.frozen(kw_only=True)
class _Criteria:
    true: Any = None
    false: Any = None


_KINDS = {"noul": "predicate", "choice": "choice", "score": "score"}


def _read(body: SystemOneBody, reader: Reader) -> Asked:
    if body.assets:
        raise Unsupported.at("assets", "pictures of decisions are not supported yet; describe them in the state")
    if not 1 <= len(body.questions) <= MAX_QUESTIONS:
        raise BadRequest.at("questions", f"expected 1 to {MAX_QUESTIONS}, not {len(body.questions)}")
    questions = [_question(name, given, f"questions.{name}", reader) for name, given in body.questions.items()]
    names = {f"questions[{at}].options": f"questions.{name}.criteria" for at, name in enumerate(body.questions)}
    state = Message("user", _text(body.state, "state"))
    return [state], questions, names | {"messages": "state"}, partial(_form, questions)


def _question(name: str, given: Any, path: str, reader: Reader) -> DecisionQuestion:
    if isinstance(given, dict) and given.get("type") == "box":
        why = "places in pictures are not supported by language models; ask noul, choice or score"
        raise Unimplemented.at(f"{path}.type", why)
    kind = one_of(given, _KINDS, path)
    asked = reader.part(given, _NamedQuestion, path)
    instructions = "" if asked.instructions is None else _text(asked.instructions, f"{path}.instructions")
    options = tuple(_options(kind, asked, f"{path}.criteria", reader))
    return made(DecisionQuestion, path, {"options": "criteria"}, kind, instructions, options, name)


def _options(kind: str, asked: _NamedQuestion, path: str, reader: Reader) -> Sequence[Option]:
    criteria = asked.criteria
    if kind == "predicate":
        if criteria is None:
            if asked.instructions is None:
                raise BadRequest.at(path, "is required where there are no instructions")
            return ()
        both = reader.part(criteria, _Criteria, path)
        sides = (("yes", both.true, "true"), ("no", both.false, "false"))
        return [_option(label, side, f"{path}.{field}") for label, side, field in sides]
    if kind == "choice":
        if not isinstance(criteria, dict):
            raise BadRequest.at(path, f"expected an object of labels and descriptions, not {show(criteria)}")
        return [_option(label, each, f"{path}.{label}") for label, each in criteria.items()]
    if not isinstance(criteria, list):
        raise BadRequest.at(path, f"expected a list of levels, not {show(criteria)}")
    return [_option(_text(level, f"{path}[{at}]"), None, f"{path}[{at}]") for at, level in enumerate(criteria)]


def _option(label: str, description: Any, path: str) -> Option:
    return made(
        Option, path, {"label": "", "description": ""}, label, None if description is None else _text(description, path)
    )


def _text(value: Any, path: str) -> str:
    """A text as it is; anything else as JSON."""
    return checked_text(value if isinstance(value, str) else json_text.dumps(value, separators=(",", ":")), path)


def _form(questions: Sequence[DecisionQuestion], found: Decisions) -> dict[str, Any]:
    return {
        "answers": {
            str(each.name): _answer(each, decision) for each, decision in zip(questions, found.answers, strict=True)
        },
        "usage": {"input_tokens": found.usage.prompt_tokens, "output_tokens": 0},
    }


def _answer(asked: DecisionQuestion, decision: Decision) -> dict[str, Any]:
    if decision.is_refused:
        return {"type": "refusal"} | diagnostics(decision)
    if asked.kind == "predicate":
        return {"type": "noul", "noul": decision.probability} | diagnostics(decision)
    names = [option.label for option in asked.options]
    if asked.kind == "choice":
        found: dict[str, Any] = {"type": "choice", "choice": names[decision.best]}
    else:
        places = list(map(str, range(len(names))))
        found = {"type": "score", "score": decision.score, "legend": dict(zip(places, names, strict=True))}
        names = places
    found["probabilities"] = dict(zip(names, decision.probabilities, strict=True))
    found["confidence"] = decision.confidence
    return found | diagnostics(decision)


systemone = Decides(SystemOneBody, _read)
