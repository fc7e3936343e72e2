"""Batches: filled from sequences, computed by llama.cpp, and booked.

Decode rows and prefill are batches of their own. Together they would read the weights once instead of twice, but a few
rows more than a tile holds cost another tile, and with split KV llama.cpp takes them apart anyway. So decode rows have
their tokens before the prompts' turn, and each kind's cost is known exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from uma.engine.clock import now_ms
from uma.engine.delivery.outbox import Outbox
from uma.engine.delivery.output import choose_tokens
from uma.engine.kv.pool import KvPool
from uma.engine.policy import CostModel
from uma.engine.worker.neighbours import Neighbours
from uma.engine.worker.sequence import Sequence
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context
from uma.metrics import EngineMetrics

Work = list[tuple[Sequence, int]]
"""What a batch computes: sequences, each with the number of its tokens."""


class Step(NamedTuple):
    """A batch of decode rows that was computed."""

    tokens: list[int]
    """The next token of each row."""
    at_ms: float
    """When they were known."""
    took_ms: float


class Stride(NamedTuple):
    """How far decode rows may go on before anything else is looked at."""

    steps: int
    """Tokens for each row, at most."""
    within_ms: float
    """Between the first token and the last."""


ONE_STEP = Stride(1, 0.0)


class ModelRunner:
    """Computes what it is given. Who runs, and what becomes of a batch that fails, others decide.

    Belongs to the decode thread. What it returns is llama.cpp's answer (`Context.decode`). `is_called` says whether
    somebody wants this thread's attention.
    """

    def __init__(
        self,
        context: Context,
        pool: KvPool,
        cost: CostModel,
        metrics: EngineMetrics,
        outbox: Outbox,
        is_called: Callable[[], bool],
        trace: Callable[[str], None] | None,
    ) -> None:
        self._context = context
        self._pool = pool
        self._cost = cost
        self._metrics = metrics
        self._outbox = outbox
        self._is_called = is_called
        self._trace = trace
        self._neighbours = Neighbours(context, metrics)
        self._batch = Batch(context.n_batch)
        self.decode_ms = math.inf
        """What the last batch of decode rows took: the next takes about as long."""
        self._compute_cpu_sec = 0.0
        self.began_ms = 0.0
        """When the last batch went to llama.cpp."""
        self.is_sampled = False
        """Whether CPU time is measured now: that takes time itself."""

    def cpu_sec(self) -> float:
        """CPU time this thread has spent on everything but computing; to be compared while `is_sampled`."""
        return time.thread_time() - self._compute_cpu_sec if self.is_sampled else 0.0

    def decode(self, sequences: list[Sequence], stride: Stride) -> tuple[int, list[Step]]:
        """Tokens for each, step after step: the batches of nearly every tick, so they go the shortest way.

        Ends with the stride, with the end of a row's text, when `is_called`, or before held events would be late.
        Returns llama.cpp's last answer, and the steps that were computed: step by step they are to be booked (`book`)
        and their tokens, in the order in which it leaves the sequences, accepted, before anything else is done. What is
        booked later costs less: between two batches, whose weights went through every cache, each line of code comes
        from memory again.
        """
        if self._pool.in_id_order:
            sequences.sort(key=_seq_id)
        size = len(sequences)
        self._pool.make_room(size * stride.steps)
        self._batch.clear()
        self._batch.add_decode(
            [sequence.tokens[-1] for sequence in sequences],
            [sequence.computed for sequence in sequences],
            [_seq_id(sequence) for sequence in sequences],
        )
        # Last of all, for whoever is woken by it works while llama.cpp does. (What is due at once is gone by now.)
        self._outbox.flush_due(now_ms() + min(stride.steps * self.decode_ms, stride.within_ms + self.decode_ms))
        ends = self._context.model.vocab.eog
        steps: list[Step] = []
        last_ms = self._outbox.due_ms
        while True:
            code, took_ms = self._compute()
            if code != DONE:
                return code, steps
            tokens, at_ms = choose_tokens(self._context, sequences, range(size)), now_ms()
            steps.append(Step(tokens, at_ms, took_ms))
            last_ms = min(last_ms, at_ms + stride.within_ms)
            is_over = len(steps) == stride.steps or at_ms + took_ms > last_ms
            if is_over or self._is_called() or not ends.isdisjoint(tokens):
                return code, steps
            self._batch.advance(tokens)

    def book(self, sequences: list[Sequence], step: Step, *, learns: bool) -> None:
        """Count a step of `decode`, before its tokens are accepted. With `learns` the cost model is told of it."""
        size, took_ms = len(sequences), step.took_ms
        self.decode_ms = took_ms
        for sequence in sequences:
            assert sequence.holding is not None
            self._pool.append(sequence.holding, sequence.tokens[-1])
            sequence.computed += 1
            sequence.was_in_batch(size)
        self._metrics.tick(size, took_ms)
        if learns:
            self._cost.observe_decode(size, self._pool.used_cells, took_ms)
        if self._trace:
            self._trace(f"batch decode={size} sequences={size} ms={took_ms:.2f} cells={self._pool.used_cells}")

    def prefill(self, work: Work) -> tuple[int, dict[Sequence, int]]:
        """Pieces of prompts, computed and booked. Also returns those read to their ends, with their logits' indices."""
        if self._pool.in_id_order:
            work.sort(key=lambda each: _seq_id(each[0]))
        tokens = sum(count for _, count in work)
        self._pool.make_room(tokens)
        self._batch.clear()
        ends: dict[Sequence, int] = {}
        behind = 0
        for sequence, count in work:
            first, last = sequence.computed, sequence.computed + count
            behind += count * first
            is_whole = last == len(sequence.tokens)
            index = self._batch.add(sequence.tokens[first:last], first, _seq_id(sequence), last_logits=is_whole)
            if is_whole:
                ends[sequence] = index
        self._outbox.flush()  # for this takes long
        code, took_ms = self._compute()
        if code != DONE:
            return code, {}
        for sequence, count in work:
            assert sequence.holding is not None
            self._pool.extend(sequence.holding, sequence.tokens[sequence.computed : sequence.computed + count])
            sequence.computed += count
            sequence.was_in_batch(len(work))
            sequence.row.remaining = sequence.missing
            if sequence.missing == 0 and not self._pool.shares:
                self._pool.save(sequence.holding, now_ms())
        self._metrics.tick(tokens, took_ms)
        self._metrics.prefill_tokens_total += tokens
        self._cost.observe_prefill(tokens, behind / tokens, took_ms)
        if self._trace:
            self._trace(f"batch prefill={tokens} sequences={len(work)} ms={took_ms:.2f} cells={self._pool.used_cells}")
        return code, ends

    def _compute(self) -> tuple[int, float]:
        """llama.cpp's answer to the batch, and the milliseconds it took."""
        self._cost.use(self._neighbours.before_batch())
        cpu_began = time.thread_time() if self.is_sampled else 0.0
        self.began_ms = now_ms()
        code = self._context.decode(self._batch)
        took_ms = now_ms() - self.began_ms
        if self.is_sampled:
            self._compute_cpu_sec += time.thread_time() - cpu_began
        if code == DONE:
            self._pool.batch_done()
        return code, took_ms


def _seq_id(sequence: Sequence) -> int:
    assert sequence.holding is not None
    return sequence.holding.seq_id
