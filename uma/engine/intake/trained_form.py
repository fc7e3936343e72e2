"""Prompts of decision models, by the template in their file, and the tokens that answer them.

llama.cpp's server reads the same files (`server-decision.cpp`): options have the same names, places and labels here, so
prompts are the same. Models that answer by a head of their own are not supported.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from uma import json_text
from uma.engine.policy import labels
from uma.engine.policy.labels import AskedPrompt
from uma.errors import BadRequest
from uma.llama.header import Header
from uma.llama.model import Model
from uma.types import Message
from uma.types.decision import DecisionQuestion, DecisionRequest

KINDS = ("openjev", "lev", "nimble", "pplx-decider", "lfm2-d1")
"""Kinds of decision models, as headers call them, whose labels are tokens."""
RATINGS = 9
"""Number of labels of a predicate for `lev`: from certainly no to certainly yes."""
_TYPES = {"predicate": "noul", "choice": "choice", "score": "score"}
_YES_NO = (("yes", "Yes", "YES"), ("no", "No", "NO"))
Label = tuple[str, tuple[int, ...]]
"""Label of an option in a prompt, and the tokens that are read for it."""


def unsupported_kind(first: Header) -> str:
    """The kind of a decision model whose form is not supported; empty for any other model."""
    is_asked = first.decision_type in KINDS and first.metadata.get("tokenizer.chat_template.systemone")
    return "" if is_asked else first.decision_type


class TrainedForm:
    """The form of one decision model. Safe to use from several threads."""

    def __init__(self, model: Model, cut: Callable[[str], str], ids: Callable[[str], array[int]]) -> None:
        """`cut` breaks spellings of special tokens in a text; `ids` tokenizes a prompt."""
        self._model = model
        self._kind = model.header.decision_type
        self._cut = cut
        self._ids = ids

    def prompts(self, request: DecisionRequest) -> Iterator[AskedPrompt]:
        """The prompts of a request. Raises `BadRequest` for options that the model has no labels for."""
        if request.labels == "names":
            raise BadRequest.at("labels", "this decision model has labels of its own; leave it out")
        template, state = self._model.decision_template, self._state(request.messages)
        assert template is not None
        asked = [self._asked(request, at) for at in range(len(request.questions))]
        every = [given for (_, _, given), *_ in asked]  # `nimble` lists them, and names the one that is asked
        for at, orders in enumerate(asked):
            for order, found, given in orders:
                names = given | {"state": state, "questions": every, "images": []}
                spellings = [[(token,) for token in tokens] for _, tokens in found]
                text = template.render((), switches=names, opens_answer=False)
                fitted = self._temperature(request.questions[at])
                yield AskedPrompt(at, order, self._ids(text), spellings, fitted)

    def _asked(self, request: DecisionRequest, at: int) -> list[tuple[tuple[int, ...], list[Label], dict[str, Any]]]:
        """A question in each of its orders: labels by place, and variables for the template."""
        question = request.questions[at]
        named = _named(question)
        # (The first option of a predicate is yes.)
        orders: list[tuple[int, ...]] = [(0, 1) if self._kind in ("openjev", "lfm2-d1") else (1, 0)]
        if question.kind != "predicate":
            how = request.orders if request.orders != "auto" else "two" if self._kind == "lev" else "one"
            orders = labels.orders(len(named), how if question.kind == "choice" else "one")
        found = []
        for order in orders:
            own = self._labels(question, [named[place][0] for place in order])
            if len(own) < len(order) or not labels.is_distinct([[tokens] for _, tokens in own]):
                why = f"{self._kind} has no labels that tell {len(order)} such options apart; ask for fewer, or others"
                raise BadRequest.at(f"questions[{at}].options", why)
            options = [
                {"key": self._cut(key), "description": text and self._value(text), "label": label}
                for (key, text), (label, _) in zip((named[place] for place in order), own, strict=False)
            ]
            head = {"id": question.name or f"question {at + 1}", "type": _TYPES[question.kind]}
            found.append((order, own, head | {"instructions": self._value(question.instructions), "options": options}))
        return found

    def _state(self, messages: Sequence[Message]) -> Any:
        if len(messages) == 1 and messages[0].role == "user":
            return self._value(messages[0].content)
        return [{"role": turn.role, "content": self._cut(turn.content)} for turn in messages]

    def _value(self, text: str) -> Any:
        """JSON objects and lists as values, which the template formats itself; any other text unchanged."""
        try:
            return self._guarded(json_text.loads(text)) if text[:1] in ("{", "[") else self._cut(text)
        except (ValueError, RecursionError):
            return self._cut(text)

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, dict):
            items = sorted(value.items()) if self._kind == "lev" else value.items()
            return {self._cut(key): self._guarded(item) for key, item in items}
        if isinstance(value, list):
            return [self._guarded(item) for item in value]
        return self._cut(value) if isinstance(value, str) else value

    def _labels(self, question: DecisionQuestion, names: list[str]) -> list[Label]:
        """Labels for options with these names."""
        if self._kind != "lfm2-d1":
            return self._alphabet[: RATINGS if (self._kind, question.kind) == ("lev", "predicate") else len(names)]
        if question.kind == "predicate":
            return [(spellings[0], self._tokens(*spellings)) for spellings in _YES_NO]
        if question.kind == "score":
            return [(name, self._tokens(name)) for name in names]
        if not all(len(name) == 1 and name.isascii() and name.isalpha() for name in names):
            many = len(names) > len(labels.LETTERS)
            names = [f"{at:02}" if many else labels.LETTERS[at] for at in range(len(names))]
        return [(name, self._tokens(name) and self._tokens(name, f" {name}")) for name in names]

    @cached_property
    def _alphabet(self) -> list[Label]:
        codes = labels.LETTERS.lower() if self._kind == "openjev" else labels.PAIRS
        return [(code, tokens) for code in (*labels.LETTERS, *codes) if (tokens := self._tokens(code))]

    def _tokens(self, *texts: str) -> tuple[int, ...]:
        """Tokens of the texts that are a single token."""
        ids = (self._model.vocab.tokenize(text, add_special=False, parse_special=False).tolist() for text in texts)
        return tuple({found[0]: None for found in ids if len(found) == 1})

    def _temperature(self, question: DecisionQuestion) -> float:
        """Temperature fitted to questions of this kind with as many options."""
        kind, count = _TYPES[question.kind], len(question.options) or 2
        of_lev, of_others = {8: "small", 26: "mid", 255: "large"}, {2: "2", 5: "3_5", 10: "6_10", 255: "11"}
        sizes = of_lev if self._kind == "lev" else of_others
        fitted, size = self._model.decision_temperatures, next(sizes[most] for most in sizes if count <= most)
        return fitted.get(f"{kind}.{size}", fitted.get(kind, 1.0))


def _named(question: DecisionQuestion) -> list[tuple[str, str | None]]:
    """Names and descriptions of its options, in the form of these models."""
    options = question.options
    if question.kind == "predicate":
        return list(zip(("true", "false"), [option.description for option in options] or (None, None), strict=True))
    if question.kind == "choice":
        return [(option.label, option.description) for option in options]
    levels = (f"{level.label}: {level.description}" if level.description else level.label for level in options)
    return [(str(at), level) for at, level in enumerate(levels)]
