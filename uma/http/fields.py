"""Fields that all dialects share, and how a body becomes a class with a list of what it has beyond it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import attrs

from uma.constraints import Range
from uma.errors import BadRequest
from uma.http.exchange import Exchange
from uma.protocol.converter import structure, unknown_fields
from uma.types import SamplingParams, Slo

T = TypeVar("T")

MAX_NAMED = 20
"""Most ignored fields that an answer's header names."""


@attrs.frozen(kw_only=True)
class Common:
    """Fields of every dialect's requests that are UMA's own; other servers ignore them."""

    priority: Literal[-1, 0, 1] | None = None
    slo: Slo | None = None
    min_tokens: Annotated[int, Range(0)] | None = None
    ignore_eos: bool | None = None


def read(fields: Mapping[str, Any], cls: type[T], http: Exchange, more: Callable[[], Iterator[str]] | None = None) -> T:
    """`fields` as a `cls`; the answer's `X-UMA-Ignored` header names those that it does not have.

    Raises `BadRequest` with a line for each wrong field.
    """
    body = structure(fields, cls, more)
    ignored = [name for name, _ in zip(unknown_fields(fields, cls), range(MAX_NAMED), strict=False)]
    if ignored:
        http.extra_headers.append((b"x-uma-ignored", ", ".join(ignored).encode("ascii", "backslashreplace")))
    return body


def sampling(**given: Any) -> SamplingParams:
    """The parameters that are given; None stands for the default. Raises `BadRequest` where they do not go together."""
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise BadRequest(str(error)) from None


@attrs.frozen
class Urgency:
    """Scheduling of a request: its lane and its latency targets."""

    priority: Literal[-1, 0, 1]
    slo: Slo


def urgency(body: Common, http: Exchange) -> Urgency:
    """From the body, else from the headers, else the defaults; a key's own bound comes on top.

    Raises `BadRequest` where a header is no number in its range.
    """
    priority = body.priority if body.priority is not None else _header_priority(http)
    slo = body.slo or Slo(
        target_ttft_ms=_header_ms(http, "x-uma-target-ttft-ms"), target_tbt_ms=_header_ms(http, "x-uma-target-tbt-ms")
    )
    return Urgency(priority, slo)


def _header_priority(http: Exchange) -> Literal[-1, 0, 1]:
    text = http.header(b"x-uma-priority")
    lanes: dict[str | None, Literal[-1, 0, 1]] = {None: 0, "-1": -1, "0": 0, "1": 1}
    if text not in lanes:
        raise BadRequest(f"X-UMA-Priority: expected one of -1, 0, 1, not {text!r}")
    return lanes[text]


def _header_ms(http: Exchange, name: str) -> float | None:
    text = http.header(name.encode())
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise BadRequest(f"{name}: expected milliseconds over 0, not {text!r}")
    return value
