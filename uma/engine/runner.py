"""Batches: filled from sequences, computed by llama.cpp, and booked.

Decode rows and prefill are batches of their own. Together they would read the weights once instead of twice, but a few
rows more than a tile holds cost another tile, and with split KV llama.cpp takes them apart anyway. So decode rows have
their tokens before the prompts' turn, and each kind's cost is known exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from uma.engine.clock import now_ms
from uma.engine.kv import KvPool
from uma.engine.outbox import Outbox
from uma.engine.policy import CostModel
from uma.engine.sequence import Sequence
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context
from uma.metrics import EngineMetrics

Work = list[tuple[Sequence, int]]
"""What a batch computes: sequences, each with the number of its tokens."""


class ModelRunner:
    """Computes what it is given. Who runs, and what becomes of a batch that fails, others decide.

    Belongs to the decode thread. What it returns is llama.cpp's answer (`Context.decode`); after `DONE` the logits are
    there, and everything is counted.
    """

    def __init__(
        self,
        context: Context,
        pool: KvPool,
        cost: CostModel,
        metrics: EngineMetrics,
        outbox: Outbox,
        trace: Callable[[str], None] | None,
    ) -> None:
        self._context = context
        self._pool = pool
        self._cost = cost
        self._metrics = metrics
        self._outbox = outbox
        self._trace = trace
        self._batch = Batch(context.n_batch)
        self._decode_ms = math.inf
        """What the last batch of decode rows took: the next takes about as long."""
        self._compute_cpu_sec = 0.0
        self.began_ms = 0.0
        """When the last batch went to llama.cpp."""
        self.is_sampled = False
        """Whether CPU time is measured now: that takes time itself."""

    def cpu_sec(self) -> float:
        """CPU time this thread has spent on everything but computing; to be compared while `is_sampled`."""
        return time.thread_time() - self._compute_cpu_sec if self.is_sampled else 0.0

    def decode(self, sequences: list[Sequence], *, learns: bool) -> int:
        """A token for each: the batch of nearly every tick, so it goes the shortest way.

        Their logits are in the order in which it leaves them. With `learns` the cost model is told what it took.
        """
        if self._pool.in_id_order:
            sequences.sort(key=_seq_id)
        size = len(sequences)
        self._pool.make_room(size)
        self._batch.clear()
        self._batch.add_decode(
            [sequence.tokens[-1] for sequence in sequences],
            [sequence.computed for sequence in sequences],
            [_seq_id(sequence) for sequence in sequences],
        )
        # Last of all, for whoever is woken by it works while llama.cpp does. (What is due at once is gone by now.)
        self._outbox.flush_due(now_ms() + self._decode_ms)
        code, took_ms = self._compute()
        if code != DONE:
            return code
        self._decode_ms = took_ms
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
        return code

    def prefill(self, work: Work) -> tuple[int, dict[Sequence, int]]:
        """Pieces of prompts. Also returns those that are read to their ends, each with the index of its logits."""
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
