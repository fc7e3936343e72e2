"""Thinking: from the dialects' words for whether and how much, to what a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import attrs

from uma.constraints import Range, show
from uma.errors import BadRequest
from uma.http.ignored import Ignored
from uma.http.tools import Effort
from uma.protocol.converter import field_name
from uma.types import EFFORT_NAMES, EFFORTS, THINKING_BUDGET, THINKING_SWITCHES, Capabilities, ReasoningMode

KWARGS = "chat_template_kwargs"
Budget = Annotated[int, Range(-1)]
"""Maximum tokens of thinking; -1: no bound."""


@attrs.frozen(kw_only=True)
class ReasoningBody:
    """`reasoning`, as OpenAI's responses and OpenRouter have it."""

    effort: Effort | None = None
    summary: str | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None

    @property
    def wanted(self) -> bool | None:
        """Whether there is to be thinking: a bound says so too."""
        return True if self.enabled is None and (self.max_tokens or 0) > 0 else self.enabled

    def note_ignored(self, ignored: Ignored) -> None:
        """Add to `ignored` what has no effect here."""
        ignored.add_all(f"reasoning.{name}" for name in ("summary", "exclude") if getattr(self, name))


@attrs.frozen(kw_only=True, slots=False)
class BudgetFields:
    """A bound of thinking under the names of Qwen's API, vLLM and llama-server, which has the last two."""

    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    reasoning_budget_tokens: Budget | None = None
    thinking_budget_tokens: Budget | None = None


@attrs.frozen(kw_only=True)
class Wish:
    """What a body says of thinking, each with the field that says it; None where it says nothing."""

    wanted: bool | None = None
    field: str = ""
    effort: Effort | None = None
    effort_field: str = ""
    budget: int | None = None
    budget_field: str = ""
    variables: Mapping[str, Any] | None = None
    """`chat_template_kwargs`, whose switches of thinking go before `wanted`."""

    @property
    def bound(self) -> int | None:
        """Maximum tokens of thinking: `budget`, else a number among `variables` that says so."""
        named = (self.variables or {}).get(THINKING_BUDGET)
        bound = named if self.budget is None and type(named) is int else self.budget
        return None if bound is None or bound < 0 or self.wanted is False else bound


def max_reasoning_tokens(wish: Wish, own: int | None, able: Capabilities) -> int | None:
    """The engine's bound of thinking: the field of that name, else the wish's, where the model thinks."""
    return wish.bound if own is None and _bounds(able) else own


def _bounds(able: Capabilities) -> bool:
    return able.reasoning and "max_reasoning_tokens" in able.sampling_params


def thinking(wish: Wish, able: Capabilities, ignored: Ignored) -> dict[str, Any]:
    """The fields of a `Request`: its `reasoning`, and variables of the template.

    A bound of thinking is for `max_reasoning_tokens`, and for a template that reads one too.
    Adds to `ignored` what the model's template does not read, and a wish for thinking where the model does not think:
    programs ask whatever the model is. Raises `BadRequest` for a switch that is neither true nor false.
    """
    wanted, field = wish.wanted, wish.field
    if wish.effort == "none" and wanted is None:
        wanted, field = False, wish.effort_field
    values = {}
    for name, value in (wish.variables or {}).items():
        if name in ("enable_thinking", "thinking"):
            if not isinstance(value, bool):
                raise BadRequest.at(f"{KWARGS}.{name}", f"expected true or false, not {show(value)}")
            wanted, field = value, f"{KWARGS}.{name}"
        elif name in able.template_variables:
            values[name] = value
        elif name != THINKING_BUDGET or wish.bound != value or not _bounds(able):
            ignored.add(f"{KWARGS}.{field_name(name)}")
    values |= _effort(wish, able, ignored)
    if wish.budget is not None:
        if THINKING_BUDGET in able.template_variables and wanted is not False:
            values[THINKING_BUDGET] = wish.budget
        elif wish.budget >= 0 and (wish.bound is None or not _bounds(able)):
            ignored.add(wish.budget_field)
    return {"reasoning": _mode(wanted, field, able, ignored), KWARGS: values or None}


def _effort(wish: Wish, able: Capabilities, ignored: Ignored) -> dict[str, Any]:
    """The nearest word that the template takes, under the names that it reads."""
    if wish.effort in (None, "none"):
        return {}
    names = [name for name in EFFORT_NAMES if name in able.template_variables]
    words = [word for word in able.reasoning_efforts if word in EFFORTS]
    if not names or not words:
        ignored.add(wish.effort_field)
        return {}
    at = EFFORTS.index(wish.effort)
    word = next((word for word in words if EFFORTS.index(word) >= at), words[-1])
    return dict.fromkeys(names, word)


def _mode(wanted: bool | None, field: str, able: Capabilities, ignored: Ignored) -> ReasoningMode | None:
    is_switched = able.reasoning_switch or bool(THINKING_SWITCHES.keys() & set(able.template_variables))
    if wanted is None or not is_switched:
        if wanted and not able.reasoning:
            ignored.add(field)
        return ("off" if wanted is False else "auto") if able.reasoning else None
    return "on" if wanted else "off"
