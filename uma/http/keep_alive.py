"""Ollama's `keep_alive`: how long a model stays loaded behind a request."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from uma.constraints import show
from uma.errors import BadRequest

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Units of Go's durations, in seconds."""
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[+-]?(?:0|(?:{_PART})+)")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def keep_sec(fields: Mapping[str, Any]) -> float | None:
    """The seconds of a body's `keep_alive`: infinite where they are negative, None where it says nothing.

    Raises `BadRequest` for what is neither a number of seconds nor a duration as Go writes it (`1h30m`).
    """
    given = fields.get("keep_alive")
    if given is None:
        return None
    seconds = _seconds(given)
    if seconds is None or math.isnan(seconds):
        raise BadRequest.at("keep_alive", f"expected seconds, or a duration such as 5m or 1h30m, not {show(given)}")
    return math.inf if seconds < 0 else seconds


def _seconds(given: Any) -> float | None:
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    if not isinstance(given, str):
        return None
    if _NUMBER.fullmatch(given):
        return float(given)
    if not _DURATION.fullmatch(given):
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, given))
    return -seconds if given.startswith("-") else seconds
