"""A backend's output, and the check that every output passes before it is sent.

A violation is a bug on this side. The client gets an error, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import attrs

from uma.constraints import Json, Range
from uma.contracts.request import Tokens
from uma.errors import ContractViolation

OutputFinishReason = Literal["stop", "length", "eos", "cancelled", "error", "content_filter"]


@attrs.frozen
class PromptTokensDetails:
    """The cached part of a prompt."""

    cached_tokens: Annotated[int, Range(0)] = 0


@attrs.frozen
class CompletionUsage:
    """Token counts."""

    prompt_tokens: Annotated[int, Range(0)]
    completion_tokens: Annotated[int, Range(0)]
    total_tokens: Annotated[int, Range(0)]
    prompt_tokens_details: PromptTokensDetails | None = None


@attrs.frozen
class TopLogprob:
    """One of the likeliest tokens at a position."""

    rank: Annotated[int, Range(0)]
    token_id: Annotated[int, Range(0)]
    token: str | None
    logprob: Annotated[float, Range(le=0, ge=-1e9)]


@attrs.frozen
class BackendOutput:
    """A part of one answer: some tokens with their text, or its end."""

    token_ids: Tokens
    text: str | None = None
    """Text of these tokens, and of earlier ones whose text was held back."""
    index: Annotated[int, Range(0)] = 0
    """Index of the answer, where a request asked for several."""
    tokens: tuple[str, ...] | None = None
    """Text of each token alone; present with `log_probs`."""
    log_probs: tuple[Annotated[float, Range(le=0, ge=-1e9)], ...] | None = None
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None
    finish_reason: OutputFinishReason | None = None
    completion_usage: CompletionUsage | None = None
    engine_data: Annotated[dict[str, Any], Json()] | None = None


def problems_of(output: BackendOutput) -> Iterator[str]:
    """Inconsistencies within one output, as lines."""
    for name in ("log_probs", "top_logprobs", "tokens"):
        aligned = getattr(output, name)
        if aligned is not None and len(aligned) != len(output.token_ids):
            yield f"{name}: {len(aligned)} entries for {len(output.token_ids)} token_ids"
    usage = output.completion_usage
    if usage is None:
        return
    if usage.prompt_tokens + usage.completion_tokens != usage.total_tokens:
        yield (
            f"completion_usage.total_tokens: {usage.total_tokens} is not "
            f"{usage.prompt_tokens} + {usage.completion_tokens}"
        )
    details = usage.prompt_tokens_details
    if details is not None and details.cached_tokens > usage.prompt_tokens:
        yield (
            f"completion_usage.prompt_tokens_details.cached_tokens: {details.cached_tokens} of "
            f"{usage.prompt_tokens} prompt tokens"
        )
    if output.finish_reason is None:
        yield "completion_usage: comes before the finish_reason"


@attrs.define
class OutputChecker:
    """Follows the outputs of one answer, and rejects the first that is inconsistent."""

    n_vocab: int
    prompt_tokens: int
    _generated: int = attrs.field(default=0, init=False)
    _is_finished: bool = attrs.field(default=False, init=False)

    def check(self, output: BackendOutput) -> BackendOutput:
        """`output`, if it is consistent with itself and all before it. Raises `ContractViolation` with all lines."""
        wrong = [*problems_of(output), *self._problems(output)]
        if wrong:
            raise ContractViolation("the backend's output breaks its contract: " + "; ".join(wrong))
        self._generated += len(output.token_ids)
        self._is_finished = output.finish_reason is not None
        return output

    def _problems(self, output: BackendOutput) -> Iterator[str]:
        if self._is_finished:
            yield "token_ids: an output after the finish_reason"
        for token in output.token_ids:
            if not 0 <= token < self.n_vocab:
                yield f"token_ids: {token} is not in the vocabulary of {self.n_vocab:,} tokens"
        if output.finish_reason is None:
            return
        generated, usage = self._generated + len(output.token_ids), output.completion_usage
        if output.finish_reason == "length" and generated == 0:
            yield "finish_reason: length, but no token was generated"
        if output.finish_reason == "error":
            return
        if usage is None:
            yield "completion_usage: is required with a finish_reason"
            return
        if usage.completion_tokens != generated:
            yield f"completion_usage.completion_tokens: {usage.completion_tokens}, but {generated} token_ids came"
        if usage.prompt_tokens != self.prompt_tokens:
            yield f"completion_usage.prompt_tokens: {usage.prompt_tokens}, but the prompt has {self.prompt_tokens}"
