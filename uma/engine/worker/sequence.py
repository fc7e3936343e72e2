"""One answer to a request on the decode thread: its status, its tokens, how many are computed and delivered."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from uma.engine.adapters import NO_ADAPTERS, AdapterSet
from uma.engine.delivery.detokenize import TextStream
from uma.engine.delivery.pacing import hold_ms
from uma.engine.kv.adapter_keys import keyed
from uma.engine.kv.pictures import PictureRun, position_of
from uma.engine.kv.pool import Holding
from uma.engine.kv.snapshots import Snapshot
from uma.engine.policy.state import FairShare
from uma.engine.worker.account import Account
from uma.engine.worker.choice import TokenChoice
from uma.engine.worker.status import TRANSITIONS, Change, IllegalTransitionError, Status
from uma.llama.context import Context
from uma.llama.projector import Picture
from uma.types import Logprobs, Prompt, Request, RequestMetrics, Speculation, Usage


@attrs.define(slots=True, eq=False)
class PromptReport:
    """What a request asks for of its own prompt: its text and tokens, and their log probabilities.

    For log probabilities the logits of every prompt token are computed and read, batch by batch, so these tokens are
    not taken from the cache. The last token's logits are not part of it: the first output token is sampled from them.
    """

    text: str
    count: int | None
    """Number of likeliest tokens reported with each token; None: no log probabilities."""
    is_reported: bool = False
    _known: list[Logprobs | None] = attrs.field(init=False, factory=lambda: [None])

    def pending(self, prompt_tokens: int) -> int:
        """Prompt tokens whose logits have yet to be read."""
        return 0 if self.count is None else prompt_tokens - len(self._known)

    @property
    def read(self) -> int:
        """Prompt tokens whose logits were read."""
        return len(self._known) - 1

    def add(self, positions: Iterable[Logprobs]) -> None:
        """Add the log probabilities of the next prompt tokens."""
        self._known += positions

    def event(self, id: str, token_ids: Iterable[int]) -> Prompt:
        """The report as an event."""
        return Prompt(id, self.text, tuple(token_ids), None if self.count is None else tuple(self._known))


@attrs.frozen(eq=False)
class PlacedPicture:
    """A picture, or a part of one, and its place in a prompt."""

    run: PictureRun
    picture: Picture
    start: int = 0
    """Index of the first of the picture's tokens that this part has."""
    before: int = 0
    """Number of pictures before it in the prompt."""


def _start_of(placed: PlacedPicture) -> int:
    return placed.run.start


@attrs.frozen
class PieceInBatch:
    """Tokens of a sequence that the running batch computes."""

    first: int
    count: int
    context: Context

    @property
    def computed(self) -> int:
        """Tokens before the piece, and as many of the piece as the finished layers are worth, but never all of it."""
        return self.first + min(int(self.count * self.context.progress), self.count - 1)


@attrs.define(slots=True, eq=False)
class AnswerBuffer:
    """Text of an answer that its reader was not given yet."""

    text: TextStream = attrs.field(factory=TextStream)
    spellings: Mapping[int, bytes] = attrs.field(factory=dict)
    """Control tokens that count as text, because the answer is parsed by them, and their spelling."""
    pieces: list[str] = attrs.field(factory=list)
    """Output text, collected where the request is not streamed."""
    logprobs: list[Logprobs] = attrs.field(factory=list)
    """Log probabilities, collected likewise."""


@attrs.define(slots=True, eq=False)
class BatchFigures:
    """Figures of the batches that computed a sequence, for its metrics."""

    count: int = 0
    largest: int = 0
    """Maximum number of sequences in one batch."""
    drafted: int = 0
    accepted: int = 0
    saved_ms: float = 0.0


@attrs.define(slots=True, eq=False)
class Sequence:
    """One answer to a request, from submission to its last event: a request for several has a sequence for each.

    Made on the Trio thread, then the decode thread's alone.

    It is a `policy.Row`: the scheduler plans with the sequence itself. Files other than `slots.py` change it by its
    methods and those of its parts.
    """

    key: int
    """Rises with arrival."""
    request: Request
    tokens: array[int]
    """Prompt, then what was generated."""
    prompt_tokens: int
    max_tokens: int
    arrived_ms: float
    target_tbt_ms: float
    credits: int
    """Events for which the reader has space; at 0 the sequence pauses."""
    account: Account
    """Where its time goes."""
    choice: TokenChoice = attrs.field(factory=TokenChoice)
    answer: AnswerBuffer = attrs.field(factory=AnswerBuffer)
    batches: BatchFigures = attrs.field(factory=BatchFigures)
    is_paced: bool = False
    """Whether its tokens are delivered at even intervals while prompts are read, not as they are computed."""
    index: int = 0
    """Index of the answer among those of its request."""
    client: Hashable = None
    """Client that sent the request, for fair shares (`net.client.CLIENT`)."""
    user: int | None = None
    """User whose process sent the request (`net.client.USER`)."""
    warnings: tuple[str, ...] = ()
    report: PromptReport | None = None
    """Report on its prompt that the request asks for, if any."""
    message_ends: tuple[int, ...] = ()
    """Lengths of prefixes of the prompt at which a message ends, where other prompts are likely to differ."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures of its prompt, in order."""
    adapter_set: AdapterSet = NO_ADAPTERS
    """LoRA adapters that its tokens from `adapted_from` on are computed with."""
    adapted_from: int = 0
    """Index of the first token that is computed with them: 0, except for an aLoRA."""
    stream: Any = None
    """Destination of its events on the Trio thread, opaque here."""
    status: Status = Status.WAITING
    holding: Holding | None = None
    """Slot of the sequence; None while it has none."""
    kept: Snapshot | None = None
    """Snapshot of what a preempted sequence had computed, pinned in the store."""
    due_ms: float = 0.0
    """When its first token is due (`policy.order.due_ms`), fixed on arrival."""
    last_token_ms: float = 0.0
    last_gap_ms: float = 0.0
    """Time between its last two tokens."""
    cells: int = 0
    """KV cells that preempting it would free; up to date only where the scheduler needs it."""
    branch: int = 0
    """Length of the prefix that followers wait for, the shortest of several; 0: there are none."""
    checkpoint_positions: list[int] = attrs.field(factory=list)
    """Positions for checkpoints (`Checkpoints.positions`), the next one last: pieces of its prompt end there."""
    paused_ms: float = 0.0
    """When its reader fell behind."""
    computed: int = 0
    """Tokens whose KV is in memory."""
    piece: PieceInBatch | None = None
    """Piece of its prompt in the running batch."""
    cached_tokens: int = 0
    generated: int = 0
    """Tokens that were given to its reader, or will be at their time."""
    started_ms: float = 0.0
    first_token_ms: float = 0.0
    fair_share: FairShare = attrs.field(init=False)
    """Service that its client has received. Belongs to the decode thread, from the submission on."""
    _mrope_delta: int = attrs.field(init=False)
    """Number of tokens of all its pictures, less their number of positions."""

    def __attrs_post_init__(self) -> None:
        limit = self.request.sampling.max_reasoning_tokens
        if limit is not None:
            self.choice.bound_thinking(limit)
        self._mrope_delta = sum(placed.run.mrope_delta for placed in self.pictures)
        self.account.served = self

    # By its request

    @property
    def lane(self) -> int:
        """-1 background, 0 normal, 1 interactive."""
        return self.request.priority

    @property
    def has_reader(self) -> bool:
        """Whether tokens are streamed, not delivered all at the end."""
        return self.request.stream

    @property
    def is_reproducible(self) -> bool:
        """Whether it is computed in the context of `worker.reproducer`; then it never has a slot."""
        return self.request.sampling.reproducible

    @property
    def target_ttft_ms(self) -> float | None:
        """The request's own target for its first token."""
        return self.request.slo.target_ttft_ms

    @property
    def has_own_target(self) -> bool:
        """Whether the request names `target_tbt_ms`; else it is the configuration's."""
        return self.request.slo.target_tbt_ms is not None

    @property
    def hold_ms(self) -> float:
        """Maximum buffering delay (ms) of its tokens."""
        return hold_ms(self.target_tbt_ms, is_streamed=self.has_reader)

    # Its life

    def change(self, change: Change) -> None:
        """Move to the state that `TRANSITIONS` names; without one, raises `IllegalTransitionError` and stays."""
        status = TRANSITIONS[self.status].get(change)
        if status is None:
            raise IllegalTransitionError(f"sequence {self.key}: {change.name} while {self.status.name}")
        self.status = status
        self.account.turns_to(status)

    def fall_behind(self, now_ms: float, waits_for: str = "reader") -> None:
        """Pause the sequence: its reader has no credit left, or its grammar is compiled again."""
        self.account.paused_for = waits_for
        self.change(Change.FALL_BEHIND)
        self.paused_ms = now_ms

    @property
    def adapters(self) -> AdapterSet:
        """LoRA adapters of its next tokens."""
        return NO_ADAPTERS if self.computed < self.adapted_from else self.adapter_set

    def cache_key(self, tokens: array[int]) -> array[int]:
        """First tokens of the sequence, as keys of the prefix cache."""
        return keyed(tokens, self.adapter_set.number, self.adapted_from) if self.adapter_set.number else tokens

    def until_checkpoint(self, computed: int) -> int:
        """Tokens behind the first `computed` up to the next checkpoint, to where its adapters begin, or to its end."""
        ends = (end for end in (*self.checkpoint_positions, self.branch, self.adapted_from) if end > computed)
        return min(ends, default=len(self.tokens)) - computed

    def is_at_checkpoint(self) -> bool:
        """Whether it has reached a checkpoint position; positions that it has passed are forgotten."""
        is_there = self.computed == self.branch > 0
        while self.checkpoint_positions and self.checkpoint_positions[-1] <= self.computed:
            is_there = self.checkpoint_positions.pop() == self.computed or is_there
        return is_there

    @property
    def computed_so_far(self) -> int:
        """Tokens that are computed, with the progress of the running piece. Any thread."""
        # The piece is read first: it is removed once its tokens count as computed.
        piece = self.piece
        begun = 0 if piece is None else piece.computed
        return max(begun, self.computed)

    @property
    def uncomputed(self) -> int:
        """Known tokens that are not computed. A decoding sequence usually has one: the last it sampled."""
        return len(self.tokens) - self.computed

    @property
    def slot(self) -> Holding:
        """Slot of the sequence, which must have one."""
        assert self.holding is not None
        return self.holding

    @property
    def is_loading(self) -> bool:
        """Whether it has a slot in which its cached tokens have yet to be loaded."""
        return self.holding is not None and self.holding.loading is not None

    @property
    def picture(self) -> PlacedPicture | None:
        """The picture, or part of one, that it computes next; None if text comes next."""
        at = self._next_picture
        is_next = at < len(self.pictures) and not self.to_picture and not self.is_loading
        return self.pictures[at] if is_next else None

    @property
    def awaits_encoding(self) -> bool:
        """Whether the next thing it computes is a picture that is not encoded."""
        placed = self.picture if self.pictures and self.status is Status.PREFILLING else None
        return placed is not None and placed.picture.embedding is None

    @property
    def to_picture(self) -> int:
        """Number of text tokens before the next picture; all that are left if there is none."""
        at = self._next_picture
        start = self.pictures[at].run.start if at < len(self.pictures) else len(self.tokens)
        return start - self.computed

    @property
    def _next_picture(self) -> int:
        """Index of the first picture that begins at the computed tokens' end, or behind it."""
        return bisect_left(self.pictures, self.computed, key=_start_of)

    @property
    def next_position(self) -> int:
        """Position of the token that it computes next: behind a picture it can be less than the token's index."""
        if not self.pictures or self.computed >= self.pictures[-1].run.end:
            return self.computed - self._mrope_delta
        return position_of([placed.run for placed in self.pictures], self.computed)

    @property
    def logprobs_pending(self) -> int:
        """Prompt tokens whose logits have yet to be read for its report."""
        return 0 if self.report is None else self.report.pending(self.prompt_tokens)

    @property
    def cacheable_tokens(self) -> array[int]:
        """Tokens that can come from the cache, and one more: all of them, unless logits have yet to be read, or the
        request wants no cache.
        """
        if not self.request.cache_prompt and not self.generated:
            return self.tokens[:1]
        report = self.report
        return self.tokens if report is None or not self.logprobs_pending else self.tokens[: report.read + 1]

    @property
    def prefill_left(self) -> int:
        """Tokens to prefill; 0 once it decodes."""
        return 0 if self.status is Status.DECODING or self.status is Status.PAUSED else self.uncomputed

    @property
    def position(self) -> int:
        """How many of its tokens are computed."""
        return self.computed

    @property
    def is_paused(self) -> bool:
        """Whether its reader is behind; it takes no part until the reader has caught up."""
        return self.status is Status.PAUSED

    @property
    def left_tokens(self) -> int:
        """Maximum number of tokens that it can still get."""
        return self.max_tokens - self.generated

    def suppresses_end(self, ahead: int = 0) -> bool:
        """Whether the end of text must not be sampled, `ahead` tokens from now."""
        sampling = self.request.sampling
        return sampling.ignore_eos or self.generated + ahead < sampling.min_tokens

    def end_thinking(self) -> None:
        """Close its thinking with the next token. Nothing if the model does not think, or the sequence has ended."""
        if self.status is Status.ENDED:
            return
        was_bound, bound = self.choice.thinking, self.choice.bound_thinking(None)
        if bound is not None:
            if was_bound is None:
                bound.read_all(self.tokens[self.prompt_tokens :])
            bound.close()

    def had_token(self, now_ms: float) -> None:
        """Count a token that its reader gets at `now_ms`, which can be in the future. If it is earlier than the
        delivery of the token before, both are delivered at that time.
        """
        self.generated += 1
        self.last_gap_ms = max(0.0, now_ms - self.last_token_ms) if self.last_token_ms else 0.0
        self.last_token_ms = now_ms
        if self.last_gap_ms > self.account.worst_gap_ms:
            self.account.worst_gap_ms, self.account.worst_gap_token = self.last_gap_ms, self.generated - 1
        if self.generated == 1:
            self.first_token_ms = now_ms

    def spend_credit(self) -> None:
        """Count an event for its reader."""
        self.credits -= 1

    def was_computed(self, tokens: int, sequences: int) -> None:
        """Count `tokens` computed tokens, in a batch of `sequences` sequences, itself included."""
        self.computed += tokens
        if self.status is Status.PREFILLING:
            self.fair_share.was_read(tokens)
        else:
            self.fair_share.was_given(tokens)
        self.batches.count += 1
        self.batches.largest = max(self.batches.largest, sequences)

    def cut_back(self, computed: int) -> None:
        """Set the computed tokens back to `computed`: those behind are computed again."""
        self.computed = computed

    def usage(self) -> Usage:
        """Token counts so far."""
        extra = self.account.left_out.summary_tokens
        return Usage(self.prompt_tokens, self.cached_tokens, self.generated, summary_tokens=extra)

    def metrics(self, now_ms: float) -> RequestMetrics:
        """Metrics of the request so far."""
        started, first, batches = self.started_ms or now_ms, self.first_token_ms, self.batches
        speculation = Speculation(batches.drafted, batches.accepted, round(batches.saved_ms, 3))
        decode_ms = self.last_token_ms - first if first else 0.0
        return RequestMetrics(
            queue_ms=round(started - self.arrived_ms, 3),
            prefill_ms=round((first or now_ms) - started, 3),
            decode_ms=round(decode_ms, 3),
            ttft_ms=round(first - self.arrived_ms, 3) if first else 0.0,
            batch_size=batches.largest,
            tokens_per_second=round((self.generated - 1) * 1000 / decode_ms, 2) if decode_ms > 0 else 0.0,
            decode_iterations=batches.count,
            speculation=speculation if batches.drafted else None,
        )


@contextmanager
def being_computed(work: Iterable[tuple[Sequence, int]], context: Context) -> Iterator[None]:
    """Show these pieces as being computed in `context`, until they are booked or have failed (`computed_so_far`)."""
    work = list(work)
    for sequence, count in work:
        sequence.piece = PieceInBatch(sequence.computed, count, context)
    try:
        yield
    finally:
        for sequence, _ in work:
            sequence.piece = None
