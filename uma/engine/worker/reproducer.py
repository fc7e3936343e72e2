"""Requests whose answer depends on nothing but themselves (`SamplingParams.reproducible`), in a context of their own.

The last bits of llama.cpp's sums differ with the number of rows in a batch, with the number of compute threads, and
with the cells; at a near tie of two tokens the text changes. So here one request is computed at a time, in an empty
context of one sequence, in batches that begin at the same tokens each time, without cache or drafts. The number of
threads follows the load of other programs only where no sum depends on it: without flash attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from uma.engine.clock import now_ms
from uma.engine.policy.isolated import IsolatedTurns
from uma.engine.policy.order import in_order
from uma.engine.worker.account import Instruments
from uma.engine.worker.canceller import BatchCanceller
from uma.engine.worker.choice import SharedStart
from uma.engine.worker.runner import book
from uma.engine.worker.sampling import RowResult, RowSampler
from uma.engine.worker.sequence import Sequence, being_computed
from uma.engine.worker.slots import Slots
from uma.engine.worker.status import Status
from uma.errors import DecodeFailed
from uma.llama.batch import Batch
from uma.llama.context import ABORTED, DONE, Context

MAX_ASIDE_BYTES = 256 * 2**20
"""Maximum memory of requests that were put aside: without a bound, readers that do not read could fill all of it."""


class Reproduced(NamedTuple):
    """Token that a batch of a reproducible request gave, and when."""

    sequence: Sequence
    given: RowResult
    at_ms: float


class Reproducer:
    """Computes reproducible requests, one at a time, in their context. Belongs to the decode thread, but for `abort`
    and `cancel`.
    """

    def __init__(self, slots: Slots, threads: Callable[[], int], instruments: Instruments) -> None:
        """`threads` gives the number of compute threads beside other programs, now."""
        self._slots = slots
        self._threads = threads
        self.turns = IsolatedTurns()
        self._instruments = instruments
        self._context: Context | None = None
        self._canceller: BatchCanceller | None = None
        self._waiting: dict[Sequence, bytes | None] = {}
        """Waiting sequences in order of arrival, each with its memory if a part of it is computed."""
        self._current: Sequence | None = None
        """The sequence whose tokens the context holds."""
        self._kept_start: SharedStart | None = None
        """The one shared start whose memory is kept."""
        self._piece_ms = 0.0
        """Time of the last piece of a prompt."""

    @property
    def running(self) -> int:
        """Requests that are computed now: one or none."""
        return int(self._current is not None and self._current.status is not Status.ENDED)

    @property
    def pause_ms(self) -> float:
        """Expected time of the next batch if it is a piece of a prompt, for which other streams wait; 0 before the
        first one, and for a decode step.
        """
        is_reading = self._current.status is Status.PREFILLING if self._current is not None else bool(self._waiting)
        return self._piece_ms if is_reading else 0.0

    def attach(self, context: Context) -> None:
        """Compute in this context from now on."""
        self._context = context
        self._sampling = RowSampler(context)
        self._batch = Batch(context.n_batch)
        self._canceller = BatchCanceller(context)

    def abort(self) -> None:
        """See `Embedder.abort`."""
        if self._context is not None:
            self._context.request_abort()

    def cancel(self, sequence: Sequence) -> None:
        """Note that a request is cancelled, and abort a batch of it; its command follows. Any thread."""
        if self._canceller is not None:
            self._canceller.cancel(sequence)

    def cancel_taken(self, sequence: Sequence) -> None:
        """Note that the cancel's command was taken: no batch of the request needs an abort any more."""
        if self._canceller is not None:
            self._canceller.cancel_taken(sequence)

    def close(self) -> None:
        """End the threads that help to sample."""
        if self._context is not None:
            self._sampling.close()

    def add(self, sequence: Sequence) -> None:
        """Add a request; its context is attached already."""
        self._waiting[sequence] = None

    def step(self, *, is_alone: bool) -> Reproduced | bool:
        """Compute one batch if a request has its turn, which it always has if it `is_alone`. Returns the token of the
        batch, True if it gave none, and False if nothing was computed.
        """
        sequence, context = self._take_turn(), self._context
        if sequence is None or context is None:
            return False
        if not is_alone and not self.turns.has_turn(sequence.lane, self._slots.active.values()):
            return False
        left = sequence.prompt_tokens - sequence.computed
        # Behind the prompt one token a batch, as they were sampled: also where they are computed again.
        count = min(left, context.n_batch - sequence.computed % context.n_batch) if left > 0 else 1
        if sequence.computed < sequence.adapted_from:
            count = min(count, sequence.adapted_from - sequence.computed)
        try:
            with being_computed([(sequence, count)], context):
                return self._compute(sequence, count)
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this request's alone)
            self._slots.fail(sequence, fault)
            return True

    def _take_turn(self) -> Sequence | None:
        """The request to compute next: the current one until it ends or its reader is behind, then the first in prefill
        order (`order.in_order`).
        """
        if self._context is None:
            return None
        if self._current is not None and self._current.status is Status.ENDED:
            self._current = None
        for gone in [sequence for sequence in self._waiting if sequence.status is Status.ENDED]:
            del self._waiting[gone]
        if self._current is not None and not self._current.is_paused:
            return self._current
        ready = [sequence for sequence in self._waiting if not sequence.is_paused]
        if not ready:
            return None
        if self._current is not None:
            self._put_aside(self._current)
        self._begin(in_order(ready, now_ms())[0])
        return self._current

    def _put_aside(self, sequence: Sequence) -> None:
        """Leave the context to another request. Memory that cannot be kept is computed again, in the same batches."""
        assert self._context is not None
        kept = self._context.state_get(0) if self._can_put_aside(sequence) else None
        if kept is None:
            sequence.cut_back(0)
        self._waiting[sequence] = kept

    def _can_put_aside(self, sequence: Sequence) -> bool:
        """Whether its memory can be restored exactly, and kept. Beyond a window's size it cannot: llama.cpp writes only
        the window, and restores it into other cells.
        """
        assert self._context is not None
        if 0 < self._context.model.shape.window_tokens < sequence.computed:
            return False
        aside = sum(len(kept) for kept in self._waiting.values() if kept is not None)
        return aside + self._context.state_size(0) <= MAX_ASIDE_BYTES

    def _begin(self, sequence: Sequence) -> None:
        assert self._context is not None
        self._context.clear(overwrites=False)
        kept = self._waiting.pop(sequence)
        self._current = sequence
        start = _start_of(sequence)
        is_fresh = not sequence.computed and not sequence.adapted_from
        if kept is None and start is not None and start.memory is not None and is_fresh:
            kept, sequence.computed = start.memory, start.computed
        if kept is not None:
            self._context.state_set(0, kept)

    def _keep_start(self, sequence: Sequence) -> None:
        """Keep the memory of the last whole batch in the decision's shared start, for its other prompts."""
        start, context = _start_of(sequence), self._context
        if start is None or start.memory is not None or context is None or sequence.adapted_from:
            return
        if sequence.computed == start.tokens // context.n_batch * context.n_batch and self._can_put_aside(sequence):
            if self._kept_start is not None:
                self._kept_start.memory = None
            self._kept_start = start
            start.memory, start.computed = context.state_get(0), sequence.computed

    def _compute(self, sequence: Sequence, count: int) -> Reproduced | bool:
        context, batch, canceller = self._context, self._batch, self._canceller
        assert context is not None
        assert canceller is not None
        if sequence.status is Status.WAITING:
            self._slots.start_isolated(sequence, now_ms())
        first = sequence.computed
        is_whole = first + count == len(sequence.tokens)
        if context.params.flash_attn == "off":
            context.set_threads(self._threads())
        if context.model.adapters:
            context.use_adapters(sequence.adapters.scaled)
        batch.clear()
        has_logits = first + count >= sequence.prompt_tokens  # also when it is computed again: the same batches
        index = batch.add(sequence.tokens[first : first + count], first, 0, last_logits=has_logits)
        self._sampling.prepare([sequence] if is_whole else [])
        began_ms = now_ms()
        code = context.decode(batch) if canceller.begin([sequence]) else ABORTED
        if canceller.end():
            context.resume()
            return True
        if code != DONE:
            if code != ABORTED:
                self._slots.end(sequence, DecodeFailed(f"llama_decode failed with {code} for this request"))
            return code != ABORTED
        took_ms = now_ms() - began_ms
        self.turns.computed(took_ms)
        if sequence.status is Status.PREFILLING:
            self._piece_ms = took_ms
        book(self._instruments, [(sequence, count)], took_ms, is_isolated=True)
        if not is_whole:
            self._keep_start(sequence)
            return True
        (given,) = self._sampling.sample([sequence], [index])
        return Reproduced(sequence, given, now_ms())


def _start_of(sequence: Sequence) -> SharedStart | None:
    return None if sequence.choice.labels is None else sequence.choice.labels.start
