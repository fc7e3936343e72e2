"""Decisions: questions about one state whose answers are probabilities of labels; nothing is generated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import attrs

from uma.constraints import Json, Length, Range, Text, check, show
from uma.errors import WrongValues
from uma.types.events import Usage
from uma.types.fields import tuple_or_none
from uma.types.request import Message, ModelName, Slo
from uma.wrong import Wrong, below

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
MAX_LEVELS = 10
"""Maximum levels of a score: each is a digit, which counts from 0."""
MAX_READS = 4_096
"""Maximum prompts of one decision: its questions, each in all of its orders."""
WORDING = 1
"""Version of the wording of prompts. Probabilities of two versions cannot be compared."""

QuestionKind = Literal["predicate", "choice", "score"]
LabelForm = Literal["auto", "names", "codes"]
Orders = Literal["auto", "one", "two", "all"]


@attrs.frozen
class Option:
    """One answer that a question can have."""

    label: Annotated[str, Length(1, 4_096), Text()]
    description: Annotated[str, Length(0, 16_384), Text()] | None = None

    def __attrs_post_init__(self) -> None:
        check(self)


@attrs.frozen
class DecisionQuestion:
    """One question: whether something holds (`predicate`), which of several options (`choice`), or how much (`score`).

    A predicate has no options, or two that describe its yes and its no; the levels of a score are in ascending order.
    """

    kind: QuestionKind
    instructions: Annotated[str, Length(0, 65_536), Text()] = ""
    options: Annotated[tuple[Option, ...], Length(0, MAX_OPTIONS, "options")] = attrs.field(
        default=(), converter=tuple_or_none
    )
    name: Annotated[str, Length(1, 256), Text()] | None = None

    @classmethod
    def predicate(cls, instructions: str, name: str | None = None) -> DecisionQuestion:
        """A question with the answers yes and no."""
        return cls("predicate", instructions, name=name)

    @classmethod
    def choice(
        cls, instructions: str, options: list[str] | dict[str, str | None], name: str | None = None
    ) -> DecisionQuestion:
        """A question with one of these options as its answer; a `dict` has their descriptions."""
        return cls("choice", instructions, _options(options), name)

    @classmethod
    def score(
        cls, instructions: str, levels: list[str] | dict[str, str | None], name: str | None = None
    ) -> DecisionQuestion:
        """A question with one of these levels as its answer, the least first."""
        return cls("score", instructions, _options(levels), name)

    @property
    def labels(self) -> tuple[str, ...]:
        """What its answers are called, in the order of their probabilities."""
        return tuple(option.label for option in self.options) or ("yes", "no")

    def __attrs_post_init__(self) -> None:
        check(self)
        count, most = len(self.options), MAX_LEVELS if self.kind == "score" else MAX_OPTIONS
        if self.kind == "predicate" and count not in (0, 2):
            raise WrongValues(Wrong("options", f"a predicate has none, or its yes and its no, not {count:,}"))
        if self.kind != "predicate" and not 2 <= count <= most:
            raise WrongValues(Wrong("options", f"expected 2 to {most}, not {count:,}"))
        for at, label in enumerate(labels := [option.label for option in self.options]):
            if label in labels[:at]:
                raise WrongValues(Wrong(f"options[{at}]", f"{show(label)} is there twice; reword one of the two"))


def _options(given: list[str] | dict[str, str | None]) -> tuple[Option, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise WrongValues(
            Wrong("options", f"expected a list of labels, or a dict that describes them, not {show(given)}")
        )
    found = []
    for at, label in enumerate(given):
        try:
            found.append(Option(label, given[label] if isinstance(given, dict) else None))
        except WrongValues as error:
            raise WrongValues(*below(f"options[{at}]", error.lines)) from None
    return tuple(found)


@attrs.frozen
class DecisionRequest:
    """A state, which is a conversation or one message of the user, and questions about it."""

    id: Annotated[str, Length(1, 128)]
    messages: Annotated[tuple[Message, ...], Length(1, None, "messages")] = attrs.field(converter=tuple_or_none)
    """The state. Questions follow the text of its last message, where that is the user's, else as a message more."""
    questions: Annotated[tuple[DecisionQuestion, ...], Length(1, MAX_QUESTIONS, "questions")] = attrs.field(
        converter=tuple_or_none
    )
    labels: LabelForm = "auto"
    """What the model answers with: whole `names` of options, or `codes` (letters, and digits of levels). `auto`: names
    where they are short and differ, else codes. A predicate is always answered with yes or no."""
    orders: Orders = "auto"
    """Orders in which the options of a choice are asked, whose probabilities are averaged: as they come (`one`),
    backwards too (`two`), or all rotations. `auto`: one of names, two of codes; a decision model as it was trained."""
    temperature: Annotated[float, Range(gt=0, le=100)] = 1.0
    """Divisor of the options' log probabilities: over 1 evens them out."""
    min_label_mass: Annotated[float, Range(0, 1)] = 0.0
    """Questions are refused whose options together are less likely than this as the model's answer."""
    reproducible: bool = False
    """See `SamplingParams.reproducible`: the same probabilities bit for bit, whatever else runs or ran."""
    priority: Literal[-1, 0, 1] = 0
    slo: Slo = Slo()
    metadata: Annotated[dict[str, Any], Json()] | None = None
    """Echoed in every event of the request on the wire."""
    model: ModelName | None = None
    """See `Request.model`."""

    def __attrs_post_init__(self) -> None:
        check(self)
        reads = sum(map(self.orders_of, self.questions))
        if reads > MAX_READS:
            raise WrongValues(
                Wrong("questions", f"{reads:,} prompts with all orders are over {MAX_READS:,}; ask for fewer orders")
            )

    @property
    def texts(self) -> list[str]:
        """All texts of the state and of the questions."""
        options = [option for question in self.questions for option in question.options]
        labels = [f"{option.label}{option.description or ''}" for option in options]
        return [turn.content for turn in self.messages] + [asked.instructions for asked in self.questions] + labels

    def orders_of(self, question: DecisionQuestion) -> int:
        """Maximum orders in which a question is asked."""
        if question.kind != "choice":
            return 1
        return {"one": 1, "two": 2, "auto": 2, "all": len(question.options)}[self.orders]


@attrs.frozen
class Decision:
    """The answer to one question."""

    kind: QuestionKind
    probabilities: tuple[float, ...]
    """Probability of each option, in the question's order; they add up to 1. A predicate has those of yes and no."""
    label_mass: float
    """Probability that the model would answer with one of the options at all."""
    is_refused: bool = False
    """Whether `label_mass` is below the request's `min_label_mass`."""
    name: str | None = None
    labels: tuple[str, ...] = ()
    """What the options are called, where `LLM.decide` gives it: it shows each with its probability."""

    def __repr__(self) -> str:
        labels = self.labels or range(len(self.probabilities))
        shares = {label: round(share, 3) for label, share in zip(labels, self.probabilities, strict=True)}
        return f"<Decision {self.name or self.kind}: {shares}, label_mass {self.label_mass:.3f}>"

    @property
    def best(self) -> int:
        """Index of the likeliest option, the first of equals."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def answer(self) -> str | int:
        """The text of the likeliest option; its index if the labels are not known."""
        return self.labels[self.best] if self.labels else self.best

    @property
    def probability(self) -> float:
        """Probability of the first option: a predicate's yes."""
        return self.probabilities[0]

    @property
    def score(self) -> float:
        """Expected index of the option: of a score, its level, counted from 0."""
        return math.fsum(index * share for index, share in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """Concentration from 0 to 1: how far the likeliest option is above an even distribution; of a score, how near
        to it the others are.
        """
        size, top = len(self.probabilities), max(self.probabilities)
        if self.kind != "score":
            return min(1.0, max(0.0, (top - 1 / size) / (1 - 1 / size)))
        spread = math.fsum(share * abs(index - self.best) for index, share in enumerate(self.probabilities))
        even = math.fsum(abs(index - (size - 1) / 2) for index in range(size)) / size
        return min(1.0, max(0.0, 1 - spread / even))


@attrs.frozen
class Decisions:
    """The answer to a `DecisionRequest`: a decision for each question, in their order."""

    id: str
    answers: tuple[Decision, ...]
    usage: Usage
    """Prompt tokens of all questions, each with the whole state; of them, those that were not read again."""

    @property
    def read_tokens(self) -> int:
        """Tokens that were read for it."""
        return self.usage.prompt_tokens - self.usage.cached_tokens
