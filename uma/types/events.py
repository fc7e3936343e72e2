"""What a generation gives back: its events, and the figures of how it was served."""

from __future__ import annotations

from typing import Literal

import attrs

from uma.types.fields import short_repr
from uma.types.request import ToolCall

FinishReason = Literal["stop", "length", "cancelled", "error"]


@attrs.frozen
class Usage:
    """Numbers of tokens. `cached_tokens` of the `prompt_tokens` came from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    """The part of `completion_tokens` that the model thought with, the marks around its thinking included; counted
    where `reasoning` asked for the thinking to be told apart, and with `best_of` only in the answers that are given."""
    summary_tokens: int = 0
    """Tokens read and written, besides, for a summary of turns that were left out (`Request.truncation`)."""


@attrs.frozen
class Speculation:
    """What drafts were worth for a request. They never change its tokens."""

    drafted: int = 0
    """Tokens that were guessed and verified."""
    accepted: int = 0
    """Drafted tokens that the model's own sampler agreed to."""
    saved_ms: float = 0.0
    """Expected time of the same tokens one by one, less the time that was taken; negative where it took longer."""


@attrs.frozen
class RequestMetrics:
    """Times of a request, and how it was batched."""

    queue_ms: float
    """Time from arrival to the first tick that computed something for it."""
    prefill_ms: float
    """Time from that tick to the first token."""
    decode_ms: float
    """Time from the first token to the last."""
    ttft_ms: float
    """Time from arrival to the first token; 0 where there was none."""
    batch_size: int
    """Maximum number of sequences in one of its batches, itself included."""
    tokens_per_second: float
    """Completion tokens after the first, over `decode_ms`."""
    decode_iterations: int
    """Batches that computed one of its tokens, prefill chunks included."""
    speculation: Speculation | None = None
    """Where tokens were drafted."""


@attrs.frozen
class TokenLogprob:
    """A token, and how likely the model found it at its place."""

    token_id: int
    text: str
    """The token alone, special ones by their spelling; a part of a character is U+FFFD."""
    bytes: tuple[int, ...]
    """The token's bytes, also where it holds only a part of a character."""
    logprob: float
    """Natural logarithm of its probability at temperature 1, before bias, grammar, penalty or cut; -9999 or more."""
    rank: int
    """1 for the likeliest token of the vocabulary."""


@attrs.frozen
class Logprobs:
    """One position of a text: the token that stands there, and the likeliest ones for it."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """Alternatives, as many as were asked for, the likeliest first."""


@attrs.frozen
class Prompt:
    """The prompt, before the first token, if the request has `echo` or `prompt_logprobs`."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...] | None = None
    """One for each token, where `prompt_logprobs` asked; None for the first, which nothing comes before."""


@attrs.frozen
class Token:
    """A generated token. `text` has whole characters and can be empty; all texts together are exactly the answer.

    Text that is held back until the answer ends (a part of a character, the beginning of a stop string) comes in one
    more event with the id of the last token, which the usage does not count.
    """

    id: str
    text: str
    token_id: int
    index: int = 0
    """Answer of the request's `n` whose next token it is."""
    logprobs: Logprobs | None = None
    """Where `logprobs` asked for it."""
    holds: bool = attrs.field(default=False, eq=False)
    """Some of the text up to this token is held back for a later event: half a character, or the beginning of a stop
    string. Known in process only: over a socket it is always False."""


@attrs.frozen
class ReasoningDelta:
    """The next piece of the model's thinking, if the request has `reasoning`. It is not in the texts of tokens."""

    id: str
    text: str
    index: int = 0
    """Answer of the request's `n` that it belongs to."""


@attrs.frozen
class ToolCallDelta:
    """The next piece of a tool call: its name in the first, more of its arguments' JSON in each.

    A call that the output ends inside of is `Finished.cut_call`. One that turns out to be none is in the text as the
    model wrote it, and not among `Finished.tool_calls`, and a warning says why.
    """

    id: str
    call: int
    """Which call of the answer, from 0."""
    call_id: str
    name: str
    arguments: str
    """To be put behind what came before."""
    index: int = 0
    """Answer of the request's `n` that it belongs to."""


@attrs.frozen
class CutCall:
    """A tool call that is incomplete, because `max_tokens`, the context, a stop string or a cancel ended the answer."""

    id: str
    name: str
    arguments: str
    """The arguments' JSON as far as it came."""
    text: str
    """What the model wrote of the call, in its own form."""


@attrs.frozen
class Answer:
    """One of several answers to a request, in its last event."""

    index: int
    reason: FinishReason
    seed: int
    completion_tokens: int
    text: str | None = None
    """Where `stream` was false; so are the two below."""
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    stop_string: str | None = None
    """String of the request's `stop` that ended it; None where something else did."""
    cut_call: CutCall | None = None
    """The call that the output ended inside of; the text does not have it."""
    call_offsets: tuple[int, ...] = ()
    """Where `text` is there: for each call, the cut one included, how many of its characters come before."""


@attrs.frozen(repr=False)
class Finished:
    """The last event of a request. If it has several answers, the fields are those of the first; `usage` counts all."""

    id: str
    reason: FinishReason
    usage: Usage
    metrics: RequestMetrics
    seed: int
    text: str | None = None
    """The whole output, where `stream` was false."""
    token_ids: tuple[int, ...] | None = None
    """All generated tokens, where `stream` was false."""
    warnings: tuple[str, ...] = ()
    logprobs: tuple[Logprobs, ...] | None = None
    """One for each of `token_ids`, where `stream` was false and `logprobs` asked for it."""
    answers: tuple[Answer, ...] = ()
    """All of them, by index, where `n` or `best_of` asked for more than one."""
    prompt: Prompt | None = None
    """Where `stream` was false, and `echo` or `prompt_logprobs` asked for it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The whole calls of the request's `tools`, in order. `reason` is `stop` with them as without."""
    reasoning: str | None = None
    """The model's thinking, where `stream` was false and `reasoning` asked for it."""
    stop_string: str | None = None
    """String of the request's `stop` that ended it; None where something else did."""
    cut_call: CutCall | None = None
    """The call that the output ended inside of: neither in `tool_calls` nor in the text. A warning tells of it."""
    call_offsets: tuple[int, ...] = ()
    """Where `text` is there: for each call, the cut one included, how many of its characters come before."""
    dropped_messages: int = 0
    """How many of the conversation's messages were left out of the prompt (`Request.truncation`)."""
    summary: str = ""
    """What stands for them in the prompt, where the model has summarised them."""

    __repr__ = short_repr

    @property
    def n_positions(self) -> int:
        """Tokens whose log probabilities it tells."""
        told = [answer.logprobs for answer in (*self.every_answer, self.prompt) if answer is not None]
        return sum(len(positions) for positions in told if positions is not None)

    @property
    def every_answer(self) -> tuple[Answer, ...]:
        """`answers`, or the only one, which the event has in itself."""
        return self.answers or (
            Answer(
                0,
                self.reason,
                self.seed,
                self.usage.completion_tokens,
                self.text,
                self.token_ids,
                self.logprobs,
                self.tool_calls,
                self.reasoning,
                self.stop_string,
                self.cut_call,
                self.call_offsets,
            ),
        )


Event = Prompt | Token | ReasoningDelta | ToolCallDelta | Finished


@attrs.frozen
class Tokenized:
    """Token ids of a text or conversation, as a request with it would use them."""

    token_ids: tuple[int, ...]
    text: str | None = None
    """What they stand for: a conversation as the chat template renders it, or the text of given ids; None for a prompt,
    which the caller has. Special tokens among given ids have no text."""
    added_tokens: int = 0
    """Number of ids at the front that come from the tokenizer and not from the prompt: the beginning of text."""
    pieces: tuple[bytes, ...] | None = None
    """Each token's bytes, perhaps half a character, special tokens by their spelling; None where they were not asked
    for. Where they were, special tokens have their spelling in `text` too."""
