"""The embedding lane of the decode thread: texts of all requests in common batches, in a context of their own.

The policy says how many tokens a tick embeds; this module fills a batch with the texts whose turn it is. A causal model
reads a text that is longer than the batch in pieces: their cells are kept, and their pooled results combined. A model
that attends to the whole text at once reads it in one batch.
"""

from __future__ import annotations

import heapq
import logging
from array import array
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from uma.engine.clock import now_ms
from uma.engine.policy.scheduler import EmbedDemand, EmbedTurns
from uma.errors import DecodeFailed, InternalError, UmaError
from uma.llama.batch import Batch
from uma.llama.context import ABORTED, DONE, Context
from uma.metrics import EngineMetrics

_log = logging.getLogger("uma.engine")

WEIGHTS = {1: 16.0, 0: 4.0, -1: 1.0}
"""Tokens of a lane that count as one token of a background request."""


@attrs.define(eq=False, slots=True)
class EmbedJob:
    """One request's texts. Belongs to the decode thread from `DecodeWorker.embed` on, until `finish` is called."""

    key: int
    lane: int
    texts: list[array[int]]
    """Texts as tokens, each at least one."""
    finish: Callable[[], None]
    """Called once, on the decode thread, when all `vectors` are complete, or `error` is set."""
    dimensions: int | None = None
    normalize: bool = True
    vectors: list[array[float]] = attrs.field(factory=list)
    """Vectors by text; empty until it is embedded."""
    error: UmaError | None = None
    next_text: int = 0
    """Index of the first text that has not been begun."""
    unfinished: int = 0
    served: float = 0.0
    """Virtual time: tokens computed by its lane's weight, from `Embedder._level` at its arrival; the least is next."""

    def __attrs_post_init__(self) -> None:
        self.vectors = [array("f") for _ in self.texts]
        self.unfinished = len(self.texts)

    def refuse(self, error: UmaError) -> None:
        """End the request before it was added."""
        self.error = error
        self.finish()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compute."""
        return self.error is not None or not self.unfinished


@attrs.define(eq=False, slots=True)
class _Reading:
    """A text that is being computed, and the pooled result of its pieces so far."""

    job: EmbedJob
    index: int
    seq_id: int
    computed: int = 0
    pooled: npt.NDArray[np.float32] | None = None

    @property
    def tokens(self) -> array[int]:
        return self.job.texts[self.index]

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    def take_in(self, pooled: npt.NDArray[np.float32], count: int, pooling: str) -> None:
        """Combine the next piece's result with those before it."""
        before, self.computed = self.computed, self.computed + count
        if before and pooling == "mean":
            assert self.pooled is not None
            self.pooled = (self.pooled * before + pooled * count) / np.float32(self.computed)
        elif not before or pooling != "cls":
            self.pooled = pooled


TextPart = tuple[_Reading, int]
"""A text, and the number of its next tokens in the batch."""


class Embedder:
    """Requests that wait for embeddings, and their context. Belongs to the decode thread, but for `abort`."""

    def __init__(self, turns: EmbedTurns, threads: Callable[[], int], metrics: EngineMetrics) -> None:
        self._turns = turns
        self._threads = threads
        self._metrics = metrics
        self._context: Context | None = None
        self._jobs: dict[int, EmbedJob] = {}
        self._level = 0.0
        """Virtual time: `served` of the job that was served last. A new job begins with it, so it neither waits for the
        earlier service of others nor catches up on it (start-time fair queueing: Goyal, Vin, Cheng 1996)."""
        self._partial: _Reading | None = None
        """The text of which a part is computed; there is at most one."""

    def abort(self) -> None:
        """Abort the running batch, and every later one. Any thread, once the decode thread has been told to stop: it
        computes nothing in a context that is attached later.
        """
        if self._context is not None:
            self._context.request_abort()

    def attach(self, context: Context) -> None:
        """Use this context from now on."""
        self._context = context
        self._batch = Batch(context.n_batch)

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self._jobs)

    def add(self, job: EmbedJob) -> None:
        """Take a request on."""
        self._jobs[job.key] = job
        job.served = self._level

    def end(self, job: EmbedJob, error: UmaError | None = None) -> None:
        """End a request: complete, failed with `error`, or cancelled. One that has ended already is ignored."""
        if self._jobs.pop(job.key, None) is None:
            return
        if self._partial is not None and self._partial.job is job:
            self._leave(self._partial)
        job.error = error
        job.finish()

    def end_all(self, error: UmaError) -> None:
        """End every request."""
        for job in list(self._jobs.values()):
            self.end(job, error)

    def demand(self) -> EmbedDemand | None:
        """What there is to embed; None: nothing."""
        if not self._jobs or self._context is None:
            return None
        left, least = self._context.n_batch, 0
        for job in self._jobs.values():
            for index in range(job.next_text, len(job.texts)):
                size = len(job.texts[index])
                least = least or size
                left -= size
                if left <= 0:
                    break
            if left <= 0:
                break
        done, rest = (self._partial.computed, self._partial.remaining) if self._partial else (0, 0)
        return EmbedDemand(
            tokens=self._context.n_batch - max(0, left - rest),
            least_tokens=0 if self._context.model.is_causal else least,
            lane=max(job.lane for job in self._jobs.values()),
            position=done,
        )

    def run(self, tokens: int) -> None:
        """Compute a batch of about `tokens` tokens. An exception ends the requests in it."""
        pieces = self._fill(tokens)
        if not pieces:
            return
        try:
            code = self._compute(pieces)
            if code not in (DONE, ABORTED):
                self._run_alone(pieces)
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is these requests' alone)
            _log.error("embedding failed: a fault in the engine", exc_info=fault)
            error = InternalError(f"a fault ended this request ({type(fault).__name__}: {fault})")
            for reading, _ in pieces:
                self.end(reading.job, error)
        for reading, _ in pieces:
            if reading.remaining and reading.job.is_over:
                self._leave(reading)

    def _fill(self, tokens: int) -> list[TextPart]:
        """The next pieces of texts in fair order, as many as fit."""
        assert self._context is not None
        left = min(tokens, self._context.n_batch)
        pieces: list[TextPart] = []
        queue = [(job.served, job.key) for job in self._jobs.values()]
        heapq.heapify(queue)
        free = [
            seq_id
            for seq_id in range(self._context.n_seq_max)
            if self._partial is None or seq_id != self._partial.seq_id
        ]
        while left > 0 and free and queue:
            job = self._jobs[queue[0][1]]
            piece = self._piece(job, left, free, is_first=not pieces)
            if piece is None or any(piece[0] is reading for reading, _ in pieces):
                heapq.heappop(queue)
                continue
            pieces.append(piece)
            left -= piece[1]
            self._level = max(self._level, job.served)
            job.served += piece[1] / WEIGHTS[job.lane]
            heapq.heapreplace(queue, (job.served, job.key))
        return pieces

    def _piece(self, job: EmbedJob, left: int, free: list[int], *, is_first: bool) -> TextPart | None:
        """The request's next piece for a batch with space for `left` tokens; None where it has none that fits."""
        assert self._context is not None
        partial = self._partial
        if partial is not None and partial.job is job:
            return partial, min(partial.remaining, left)
        if job.next_text == len(job.texts):
            return None
        size = len(job.texts[job.next_text])
        is_causal = self._context.model.is_causal
        if size > left and (partial is not None if is_causal else not is_first):
            return None
        reading = _Reading(job, job.next_text, free.pop())
        job.next_text += 1
        if size > left and is_causal:
            self._partial = reading
        return reading, min(size, left) if is_causal else size

    def _run_alone(self, pieces: list[TextPart]) -> None:
        """After a failed batch: run each text alone. One that fails again ends its request."""
        assert self._context is not None
        for reading, count in pieces:
            if reading.job.is_over:
                continue
            self._context.seq_rm(reading.seq_id, reading.computed, -1)
            code = self._compute([(reading, count)])
            if code not in (DONE, ABORTED):
                self.end(reading.job, DecodeFailed(f"texts[{reading.index}]: llama_decode failed with {code}"))

    def _compute(self, pieces: list[TextPart]) -> int:
        """Compute a batch, take its results in, and finish complete texts. Returns llama.cpp's code."""
        context, batch = self._context, self._batch
        assert context is not None
        batch.clear()
        for reading, count in pieces:
            first = reading.computed
            batch.add(reading.tokens[first : first + count], first, reading.seq_id, last_logits=False)
        batch.output[: batch.n_tokens] = 1  # pooling takes every token
        threads = self._threads()
        context.set_threads(threads)
        self._turns.cost.use(threads)
        position = sum(reading.computed for reading, _ in pieces)
        began = now_ms()
        code = context.decode(batch)
        took_ms = now_ms() - began
        if code != DONE:
            return code
        self._turns.cost.observe_prefill(batch.n_tokens, position, took_ms)
        self._metrics.tick(batch.n_tokens, took_ms)
        self._metrics.embed_tokens_total += batch.n_tokens
        for reading, count in pieces:
            reading.take_in(context.embedding(reading.seq_id), count, context.params.pooling)
            if reading.remaining == 0:
                self._finish(reading)
        return code

    def _finish(self, reading: _Reading) -> None:
        assert reading.pooled is not None
        job = reading.job
        self._leave(reading)
        job.vectors[reading.index].frombytes(_shaped(reading.pooled, job.dimensions, normalize=job.normalize).tobytes())
        job.unfinished -= 1
        self._metrics.embed_texts_total += 1
        if not job.unfinished:
            self.end(job)

    def _leave(self, reading: _Reading) -> None:
        """Free the cells of a text."""
        assert self._context is not None
        self._context.seq_rm(reading.seq_id)
        if self._partial is reading:
            self._partial = None


def _shaped(pooled: npt.NDArray[np.float32], dimensions: int | None, *, normalize: bool) -> npt.NDArray[np.float32]:
    """The first `dimensions` figures, scaled to length 1 (unchanged if all are 0)."""
    kept = pooled[:dimensions]
    length = float(np.sqrt(np.square(kept, dtype=np.float64).sum())) if normalize else 0.0
    return kept if length == 0.0 else (kept / length).astype(np.float32)
