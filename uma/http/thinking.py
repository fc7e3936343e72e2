"""Thinking: from the dialects' words for whether and how much, to what a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from uma.constraints import show
from uma.errors import BadRequest
from uma.http.tools import Effort
from uma.types import EFFORT_NAMES, EFFORTS, THINKING_BUDGET, THINKING_SWITCHES, Capabilities, ReasoningMode

KWARGS = "chat_template_kwargs"


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


def thinking(wish: Wish, able: Capabilities, ignored: list[str]) -> dict[str, Any]:
    """The fields of a `Request`: its `reasoning`, and variables of the template.

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
                raise BadRequest(f"{KWARGS}.{name}: expected true or false, not {show(value)}")
            wanted, field = value, f"{KWARGS}.{name}"
        elif name in able.template_variables:
            values[name] = value
        else:
            ignored.append(f"{KWARGS}.{name}")
    values |= _effort(wish, able, ignored)
    if wish.budget is not None:
        if THINKING_BUDGET in able.template_variables and wanted is not False:
            values[THINKING_BUDGET] = wish.budget
        else:
            ignored.append(wish.budget_field)
    return {"reasoning": _mode(wanted, field, able, ignored), KWARGS: values or None}


def _effort(wish: Wish, able: Capabilities, ignored: list[str]) -> dict[str, Any]:
    """The nearest word that the template takes, under the names that it reads."""
    if wish.effort in (None, "none"):
        return {}
    names = [name for name in EFFORT_NAMES if name in able.template_variables]
    words = [word for word in able.reasoning_efforts if word in EFFORTS]
    if not names or not words:
        ignored.append(wish.effort_field)
        return {}
    at = EFFORTS.index(wish.effort)
    word = next((word for word in words if EFFORTS.index(word) >= at), words[-1])
    return dict.fromkeys(names, word)


def _mode(wanted: bool | None, field: str, able: Capabilities, ignored: list[str]) -> ReasoningMode | None:
    is_switched = able.reasoning_switch or bool(THINKING_SWITCHES.keys() & set(able.template_variables))
    if wanted is None or not is_switched:
        if wanted and not able.reasoning:
            ignored.append(field)
        return ("off" if wanted is False else "auto") if able.reasoning else None
    return "on" if wanted else "off"
