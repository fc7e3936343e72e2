"""What of `SamplingParams` the engine honours, and what does not go together: checked before anything is computed."""

from __future__ import annotations

import attrs

from uma.errors import BadRequest
from uma.types import Request, SamplingParams

MAX_PROMPT_LOGPROBS = 131_072
"""Maximum log probabilities told of one prompt: they are one event, of about a hundred bytes for each."""


def sampling_params() -> tuple[str, ...]:
    """Names of all parameters that are honoured."""
    return tuple(field.name for field in attrs.fields(SamplingParams))


def check_features(request: Request, max_active: int) -> None:
    """Raise `BadRequest` with a line for each field that another one, or the engine's size, excludes."""
    lines = _conflicts(request)
    if (count := request.sampling.drawn_answers) > max_active:
        name = "n" if count == request.sampling.n else "best_of"
        lines.append(
            f"{name}: {count} answers need as many sequences, and {max_active} run here at once; ask for fewer, or run "
            "with a larger --max-sequences"
        )
    if lines:
        raise BadRequest("\n".join(lines))


def check_prompt(sampling: SamplingParams, prompt_tokens: int) -> None:
    """Raise `BadRequest` where a prompt is too long to be told so many log probabilities of."""
    asked = sampling.prompt_logprobs
    if asked is not None and (asked + 1) * prompt_tokens > MAX_PROMPT_LOGPROBS:
        raise BadRequest(
            f"prompt_logprobs: {asked} for each of {prompt_tokens:,} prompt tokens are more than "
            f"{MAX_PROMPT_LOGPROBS:,} in all; ask for fewer, or shorten the prompt"
        )


def _conflicts(request: Request) -> list[str]:
    sampling = request.sampling
    lines = []
    if any(message.pictures for message in request.messages or ()):
        lines += [
            f"{name}: beside pictures this cannot be told yet; leave it out"
            for name, value in (("echo", sampling.echo), ("prompt_logprobs", sampling.prompt_logprobs is not None))
            if value
        ]
        if sampling.reproducible:
            lines.append("reproducible: pictures cannot be read so yet; leave it out")
    if sampling.grammar is not None and sampling.echo:
        lines.append("echo: a grammar is about the output alone; leave one of the two out")
    if sampling.reproducible and (sampling.echo or sampling.prompt_logprobs is not None):
        name = "echo" if sampling.echo else "prompt_logprobs"
        lines.append(f"{name}: a reproducible request is told nothing of its prompt; leave one of the two out")
    if sampling.best_of is not None and sampling.best_of < sampling.n:
        lines.append(f"best_of: {sampling.best_of} answers cannot have the {sampling.n} best (n) among them")
    if sampling.best_of is not None and sampling.best_of > sampling.n and request.stream:
        lines.append("best_of: which answers are the best is known at their end; set stream to false")
    return lines
