"""What of `SamplingParams` the engine honours, and what does not go together: checked before anything is computed.

A field that the engine has no way to honour is refused by name, never ignored.
"""

from __future__ import annotations

import attrs

from uma.errors import BadRequest
from uma.types import Request, SamplingParams

UNAVAILABLE = frozenset(
    """
    grammar logprobs prompt_logprobs logit_bias n best_of echo penalty_window typical_p top_n_sigma xtc_probability
    xtc_threshold dynatemp_range dynatemp_exponent mirostat mirostat_tau mirostat_eta dry_multiplier dry_base
    dry_allowed_length dry_window dry_sequence_breakers
    """.split()  # noqa: SIM905  (a name a line would be a page)
)
"""Fields of `SamplingParams` that this engine does not have."""


def sampling_params() -> tuple[str, ...]:
    """Names of all parameters that are honoured."""
    return tuple(field.name for field in attrs.fields(SamplingParams) if field.name not in UNAVAILABLE)


def check_features(request: Request) -> None:
    """Raise `BadRequest` with a line for each field that is not honoured, and each that another one excludes."""
    lines = [*_unavailable(request.sampling), *_conflicts(request)]
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
