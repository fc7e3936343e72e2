"""What `LLM` returns for each prompt, made from a request's last event."""

from __future__ import annotations

import array
import math
import warnings
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from uma.errors import UmaError
from uma.types import (
    Answer,
    CutCall,
    Decision,
    DecisionRequest,
    Decisions,
    Finished,
    FinishReason,
    Logprobs,
    Message,
    Prompt,
    RequestMetrics,
    TokenLogprob,
    ToolCall,
    Usage,
)
from uma.types.fields import short_repr


@attrs.frozen(repr=False)
class Completion:
    """One answer to a prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    index: int = 0
    """Number of the answer among those of the prompt, from 0."""
    logprobs: tuple[dict[int, TokenLogprob], ...] | None = None
    """A dict of each token, by token id, with itself and the likeliest tokens. None unless `logprobs` was set."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of its tokens. None unless `logprobs` was set."""
    stop_reason: str | None = None
    """The string of `stop` that ended the answer; None if it ended otherwise."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of the `tools` that were given to `LLM.chat`. They are not part of `text`."""
    reasoning: str | None = None
    """The model's thinking, without the answer. None unless `reasoning` was set."""
    cut_call: CutCall | None = None
    """A call that is incomplete, because the answer ended inside it. Neither `tool_calls` nor `text` has it."""

    __repr__ = short_repr


@attrs.frozen(repr=False)
class RequestOutput:
    """The result of one prompt. If `error` is set, the request failed, and `outputs` has one empty completion."""

    prompt: str | tuple[int, ...] | tuple[Message, ...] | None
    """The prompt as it was given: a text, token ids or messages."""
    outputs: tuple[Completion, ...]
    """The answers: `n` of them, by default one."""
    error: UmaError | None = None
    """Why the request failed; None if it succeeded."""
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    seed: int | None = None
    warnings: tuple[str, ...] = ()
    """Parts of the request that had no effect, such as a `max_tokens` over the limit."""
    prompt_text: str | None = None
    """The prompt as the model read it, after the chat template. It and `prompt_token_ids` are None unless `echo` or
    `prompt_logprobs` was set."""
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[int, TokenLogprob] | None, ...] | None = None
    """A dict of each token, by token id, with itself and the likeliest tokens; None for the first token. None unless
    `prompt_logprobs` was set."""
    index: int = 0
    """Number of the prompt among the prompts of the call, from 0."""

    __repr__ = short_repr

    @property
    def text(self) -> str:
        """Text of the first answer; empty if the request failed."""
        return self.outputs[0].text

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for `json.dumps`; an error is a dict of its `code` and `message`."""
        return attrs.asdict(self, value_serializer=_plain)


def _plain(_instance: Any, _field: Any, value: Any) -> Any:
    return {"code": value.code, "message": str(value)} if isinstance(value, UmaError) else value


def completions_of(finished: Finished) -> tuple[Completion, ...]:
    """The answers of a finished request, by index."""
    return tuple(map(_completion, finished.every_answer))


def _completion(answer: Answer) -> Completion:
    known = answer.logprobs
    return Completion(
        answer.text or "",
        answer.token_ids or (),
        answer.reason,
        answer.index,
        logprobs=None if known is None else tuple(map(_by_token, known)),
        cumulative_logprob=None if known is None else sum(logprob.chosen.logprob for logprob in known),
        stop_reason=answer.stop_string,
        tool_calls=answer.tool_calls,
        reasoning=answer.reasoning,
        cut_call=answer.cut_call,
    )


def prompt_fields(prompt: Prompt | None) -> dict[str, Any]:
    """`RequestOutput`'s fields about the prompt, where it was reported."""
    if prompt is None:
        return {}
    known = prompt.logprobs
    return {
        "prompt_text": prompt.text,
        "prompt_token_ids": prompt.token_ids,
        "prompt_logprobs": None if known is None else tuple(logprob and _by_token(logprob) for logprob in known),
    }


def _by_token(known: Logprobs) -> dict[int, TokenLogprob]:
    return {token.token_id: token for token in (known.chosen, *known.top)}


def array_of(rows: Sequence[array.array[float] | None]) -> npt.NDArray[np.float32]:
    """Embeddings as the rows of an array. One warning, of the caller of `LLM`'s method, tells of texts without one."""
    empty = [index for index, row in enumerate(rows) if row is None]
    if empty:
        what = f"{len(empty):,} of {len(rows):,} texts have no token, so their rows are NaN"
        warnings.warn(f"{what}; the first is texts[{empty[0]}]", stacklevel=3)
    width = next((len(row) for row in rows if row is not None), 0)
    blank = [math.nan] * width
    return np.array([blank if row is None else row for row in rows], np.float32).reshape(len(rows), width)


def labelled(request: DecisionRequest, found: Decisions) -> list[Decision]:
    """The decisions, each with its question's labels."""
    return [
        attrs.evolve(answer, labels=question.labels)
        for question, answer in zip(request.questions, found.answers, strict=True)
    ]


def failed(prompt: Any, error: UmaError) -> RequestOutput:
    """The result of a prompt that failed."""
    return RequestOutput(prompt, (Completion("", (), "error"),), error=error)
