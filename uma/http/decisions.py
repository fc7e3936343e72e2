"""OpenAI's decisions: `POST /v1/decisions`, and what both dialects of decisions share (`systemone.py` is the other)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import attrs

from uma.constraints import Length, Range, Text, show
from uma.errors import BadRequest, WrongValues
from uma.http import abilities
from uma.http.content import text_of
from uma.http.exchange import Exchange
from uma.http.fields import lane_alone
from uma.http.gateway import Gateway
from uma.http.openai_input import INPUT, messages_of
from uma.http.reader import Reader
from uma.net.quota import Lane
from uma.types import MAX_QUESTIONS, Decision, DecisionQuestion, DecisionRequest, Decisions, Message, Option
from uma.types.decision import MAX_LEVELS, MAX_OPTIONS, LabelForm, Orders
from uma.wrong import below, renamed

Label = Annotated[str, Length(1, 4_096), Text()]
T = TypeVar("T")
Form = Callable[[Decisions], dict[str, Any]]
Asked = tuple[Sequence[Message], Sequence[DecisionQuestion], Mapping[str, str], Form]
"""State and questions of a body, its names for fields that the engine calls otherwise, and what makes its answer."""
_OWN = ("labels", "orders", "temperature", "min_label_mass", "reproducible")


@attrs.frozen(kw_only=True)
class DecisionFields:
    """UMA's own fields of both dialects: see `DecisionRequest`."""

    model: str | None = None
    labels: LabelForm | None = None
    orders: Orders | None = None
    temperature: Annotated[float, Range(gt=0, le=100)] | None = None
    min_label_mass: Annotated[float, Range(0, 1)] | None = None
    reproducible: bool | None = None
    priority: Lane | None = None


@attrs.frozen(eq=False)
class Decides:
    """An endpoint that decides."""

    body: type[DecisionFields]
    read: Callable[[Any, Reader], Asked]

    async def __call__(self, gateway: Gateway, http: Exchange) -> None:
        """Answer one body."""
        reader = gateway.reader(http)
        form, request = await http.built(partial(self.begin, gateway, http, reader))
        found = await gateway.compute(http, request, gateway.source.decide)
        await http.answer_json({"model": reader.model} | form(found))

    def begin(self, _: Gateway, http: Exchange, reader: Reader, fields: dict[str, Any]) -> tuple[Form, DecisionRequest]:
        """What makes the answer, and the request, as `Generates.begin`."""
        body = reader.body(fields, self.body)
        state, questions, names, form = self.read(body, reader)
        abilities.decisions(reader.able)
        http.names.update(names)
        own = {name: value for name in _OWN if (value := getattr(body, name)) is not None}
        lane, model = lane_alone(body.priority, http), reader.adapted_model
        return form, DecisionRequest(http.id, state, questions, priority=lane, model=model, **own)


def made(cls: Callable[..., T], path: str, names: Mapping[str, str], *args: Any) -> T:
    """A part of the request, of what the body has at `path`, its fields by these names. Raises `BadRequest`."""
    try:
        return cls(*args)
    except WrongValues as error:
        raise BadRequest(*below(path, renamed(error.lines, names))) from None


def one_of(question: Any, kinds: Mapping[str, T], path: str) -> T:
    """What `kinds` has for the type of the question that the body has at `path`. Raises `BadRequest`."""
    kind = question.get("type") if isinstance(question, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise BadRequest.at(f"{path}.type", f"expected one of {', '.join(kinds)}, not {show(kind)}")
    return kinds[kind]


def diagnostics(decision: Decision) -> dict[str, Any]:
    """vLLM's member about a decision, which clients that do not know it leave out."""
    return {"diagnostics": {"label_mass": decision.label_mass}}


@attrs.frozen(kw_only=True)
class DecisionsBody(DecisionFields):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    input: Annotated[Any, INPUT]
    questions: Annotated[tuple[dict[str, Any], ...], Length(1, MAX_QUESTIONS, "questions")]


@attrs.frozen(kw_only=True)
class _Question:
    type: str
    instructions: Any
    name: Annotated[str, Length(1, 256), Text()] | None = None


@attrs.frozen(kw_only=True)
class _ChoiceValue:
    value: Label | bool
    description: Annotated[str, Length(0, 16_384), Text()] | None = None


@attrs.frozen(kw_only=True)
class _Choice(_Question):
    choices: Annotated[tuple[_ChoiceValue, ...], Length(2, MAX_OPTIONS, "choices")]


@attrs.frozen(kw_only=True)
class _Score(_Question):
    levels: Annotated[tuple[Option, ...], Length(2, MAX_LEVELS, "levels")]


_KINDS: Mapping[str, type[_Question]] = {"predicate": _Question, "choice": _Choice, "score": _Score}


def _read(body: DecisionsBody, reader: Reader) -> Asked:
    _check_calls(body.input)
    state = messages_of(body.input, None, reader)
    asked = [_asked(each, f"questions[{at}]", reader) for at, each in enumerate(body.questions)]
    questions, names = list[DecisionQuestion](), {"messages": "input"}
    for at, each in enumerate(asked):
        path, own, options = f"questions[{at}]", "levels", tuple[Option, ...]()
        if isinstance(each, _Choice):
            own, options = "choices", tuple(Option(_text(one.value), one.description) for one in each.choices)
        elif isinstance(each, _Score):
            options = each.levels
        names[f"{path}.options"] = f"{path}.{own}"
        instructions = text_of(each.instructions, f"{path}.instructions", reader, is_question=True)
        questions.append(made(DecisionQuestion, path, {"options": own}, each.type, instructions, options, each.name))
    return state, questions, names, partial(_form, asked)


def _asked(fields: dict[str, Any], path: str, reader: Reader) -> _Question:
    kind = one_of(fields, _KINDS, path)
    if "name" in fields and fields["name"] is None:
        raise BadRequest.at(f"{path}.name", "expected a string, not null; leave it out")
    return reader.part(fields, kind, path)


def _check_calls(given: Any) -> None:
    """Raise `BadRequest` for the output of a call that the input does not have."""
    known = set[Any]()
    for at, item in enumerate(given if isinstance(given, list) else ()):
        kind = str(item.get("type")) if isinstance(item, dict) else ""
        if kind.endswith("_call"):
            known.add(str(item.get("call_id")))
        elif kind.endswith("_call_output") and str(item.get("call_id")) not in known:
            raise BadRequest.at(f"input[{at}].call_id", f"no call before it has the id {show(item.get('call_id'))}")


def _text(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _form(asked: Sequence[_Question], found: Decisions) -> dict[str, Any]:
    usage = found.usage
    return {
        "answers": [_answer(each, decision) for each, decision in zip(asked, found.answers, strict=True)],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens,
        },
    }


def _answer(asked: _Question, decision: Decision) -> dict[str, Any]:
    head = {"type": "refusal" if decision.is_refused else asked.type, "name": asked.name} | diagnostics(decision)
    if decision.is_refused:
        return head
    if isinstance(asked, _Choice):
        options: list[dict[str, Any]] = [{"value": each.value} for each in asked.choices]
        head["choice"] = asked.choices[decision.best].value
    elif isinstance(asked, _Score):
        options = [{"value": at, "label": level.label} for at, level in enumerate(asked.levels)]
        head["score"] = decision.score
    else:
        return head | {"probability": decision.probability}
    shares = zip(options, decision.probabilities, strict=True)
    head["probabilities"] = [option | {"probability": share} for option, share in shares]
    return head | {"confidence": decision.confidence}


decisions = Decides(DecisionsBody, _read)
