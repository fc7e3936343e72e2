"""What of `SamplingParams` the engine honours, and what does not go together: checked before anything is computed.

A field that the engine has no way to honour is refused by name, never ignored.
"""

from __future__ import annotations

import attrs

from uma.errors import BadRequest
from uma.types import Request, SamplingParams

UNAVAILABLE = frozenset(("prompt_logprobs", "echo"))
"""Fields of `SamplingParams` that this engine does not have."""


def sampling_params() -> tuple[str, ...]:
    """Names of all parameters that are honoured."""
    return tuple(field.name for field in attrs.fields(SamplingParams) if field.name not in UNAVAILABLE)


def answers(sampling: SamplingParams) -> int:
    """Answers that are drawn for a request."""
    return max(sampling.n, sampling.best_of or 1)


def check_features(request: Request, max_active: int) -> None:
    """Raise `BadRequest` with a line for each field that is not honoured, and each that another one excludes."""
    lines = [*_unavailable(request.sampling), *_conflicts(request)]
    if (count := answers(request.sampling)) > max_active:
        name = "n" if count == request.sampling.n else "best_of"
        lines.append(
            f"{name}: {count} answers need as many sequences, and {max_active} run here at once; ask for fewer, or run "
            "with a larger --max-sequences"
        )
    if lines:
        raise BadRequest("\n".join(lines))


def _unavailable(sampling: SamplingParams) -> list[str]:
    asked = [
        field.name
        for field in attrs.fields(SamplingParams)
        if field.name in UNAVAILABLE and getattr(sampling, field.name) != field.default
    ]
    return [f"{name}: not available; capabilities.sampling_params lists what is" for name in asked]


def _conflicts(request: Request) -> list[str]:
    sampling = request.sampling
    lines = []
    if sampling.grammar is not None and sampling.echo:
        lines.append("echo: a grammar is about the output alone; leave one of the two out")
    if sampling.best_of is not None and sampling.best_of < sampling.n:
        lines.append(f"best_of: {sampling.best_of} answers cannot have the {sampling.n} best (n) among them")
    if sampling.best_of is not None and sampling.best_of > sampling.n and request.stream:
        lines.append("best_of: which answers are the best is known at their end; set stream to false")
    return lines
