"""What attention takes on this CPU with this library: measured once, by a model of one layer that does little else.

llama.cpp has two attentions, and how they compare is a matter of the CPU: a decode row's cell took flash attention five
times as long as plain attention on an Intel Xeon, and not twice as long on an AMD EPYC. A policy that knows one of them
chooses wrongly on the other.

One thread computes, so that nothing waits for another, and the time counts in which it really ran: what is measured is
kept for good, and the first start can be on a machine whose cores all compute already. A batch with the cells and one
without them take turns, and of several the shortest count, so that a core whose speed changes does not matter either.
All of it is in the CPU's caches, as a large model's cells are not: what memory takes is taken by both attentions. But
for the mask of a long piece behind many cells, an element for each token and cell, which every head reads again: it is
as large as in a real model, and where it does not fit into the caches a masked cell takes several times as long.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path

import attrs

from uma.errors import ModelError
from uma.llama import cpu_cache
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

logger = logging.getLogger("uma.llama.attention")

VERSION = 4
"""Counts the changes of what is measured: figures of another version are not used."""
HEAD_SIZES = (64, 128)
"""Values of a head for which there is a model; a head of another size is taken for the next larger one, or the last."""
ROWS, CELLS, READ_TOKENS = 8, 1_024, 64
"""Decode rows of a batch, the cells that each attends to or passes by, and the tokens of a prompt."""
PASSED_CELLS = 4_096
"""Masked cells that a piece of `N_BATCH` tokens passes by."""
N_BATCH = 512
REPEATS, LONG_REPEATS = 5, 3
LEAST_NS = 0.01
"""Minimum of a figure: one that is not to be told from nothing."""


@attrs.frozen
class AttentionTimes:
    """Nanoseconds that a cell takes for each head of 64 values and each layer, on one thread.

    Of a decode row and of a prompt's token; with flash attention, with plain attention, and where the cell is masked.
    """

    flash_row_ns: float
    plain_row_ns: float
    masked_row_ns: float
    """Where the cells of several sequences lie among each other, which slows a row down on its own cells as well."""
    cached_row_ns: float
    """Where those that are masked lie in a row."""
    flash_read_ns: float
    plain_read_ns: float
    masked_read_ns: float


def attention_times(head_size: int) -> AttentionTimes | None:
    """The times for heads of so many values: from the cache, or measured now, which takes 0.5 to 1 s.

    Any thread, in a process that has loaded a model. None where they cannot be measured, with a warning that says why.
    """
    size = min((each for each in HEAD_SIZES if each >= head_size), default=HEAD_SIZES[-1])
    key = [*cpu_cache.key(VERSION), size]
    path = cpu_cache.cache_file("attention", key)
    found = _read(path, key)
    if found is None:
        try:
            found = measure(model_file(size))
        except ModelError as error:
            logger.warning("what attention takes on this CPU could not be measured and is guessed: %s", error)
            return None
        cpu_cache.write(path, key, attrs.asdict(found))
    return found


def model_file(head_size: int) -> Path:
    """The model for heads of so many values, as the package was installed."""
    return Path(str(files("uma") / "data" / f"attention-{head_size}.gguf"))


def measure(path: Path) -> AttentionTimes:
    """Measure with this model. Raises `ModelError` where it cannot be loaded, or gets no memory."""
    with Model.load(path, n_gpu_layers=0, extra_buffers="none") as model, ExitStack() as stack:

        def timed(*, is_unified: bool, is_plain: bool = False, cells: int = CELLS) -> _Timed:
            return stack.enter_context(_Timed(model, cells, is_unified=is_unified, is_plain=is_plain))

        flash = _Pair(timed(is_unified=True), timed(is_unified=True))
        plain = _Pair(timed(is_unified=False, is_plain=True), timed(is_unified=False, is_plain=True))
        for pair in (flash, plain):
            pair.more.fill()
        passing = _Pair(timed(is_unified=True, cells=PASSED_CELLS), timed(is_unified=True, cells=PASSED_CELLS))
        passing.more.fill_with_others(PASSED_CELLS)
        crowd = _Pair(timed(is_unified=False), timed(is_unified=True))
        for each in (crowd.less, crowd.more):
            each.fill_as_crowd()
        rows, reads = ROWS * CELLS, READ_TOKENS * CELLS
        times = AttentionTimes(
            flash_row_ns=flash.ns(lambda each: each.rows_ns(0)) / rows,
            plain_row_ns=plain.ns(lambda each: each.rows_ns(0)) / rows,
            # llama.cpp goes over multiples of 256 cells: in one buffer over `CELLS` more than in a buffer each.
            masked_row_ns=crowd.ns(lambda each: each.rows_ns(0)) / rows,
            cached_row_ns=flash.ns(lambda each: each.rows_ns(ROWS)) / rows,
            flash_read_ns=flash.ns(lambda each: each.reading_ns(0)) / reads,
            plain_read_ns=plain.ns(lambda each: each.reading_ns(0)) / reads,
            masked_read_ns=passing.ns(lambda each: each.reading_ns(ROWS, N_BATCH), LONG_REPEATS)
            / (N_BATCH * PASSED_CELLS),
        )
        heads = model.attention_heads * model.head_size / 64
    return AttentionTimes(*[max(LEAST_NS, each / heads) for each in attrs.astuple(times)])


@attrs.frozen
class _Pair:
    """Two contexts that differ in what attention has to go over."""

    less: _Timed
    more: _Timed

    def ns(self, measure: Callable[[_Timed], int], repeats: int = REPEATS) -> int:
        """How much longer the one takes."""
        for each in (self.less, self.more):
            measure(each)  # the first touches memory
        took_ns = [(measure(self.more), measure(self.less)) for _ in range(repeats)]
        return min(more_ns for more_ns, _ in took_ns) - min(less_ns for _, less_ns in took_ns)


class _Timed:
    """A context whose batches are timed: one buffer for twice `ROWS` sequences, or a buffer for each of `ROWS`."""

    def __init__(self, model: Model, cells: int, *, is_unified: bool, is_plain: bool) -> None:
        share = cells + N_BATCH
        self._batch = Batch(N_BATCH)
        self._context = Context(
            model,
            ContextParams(
                n_ctx=share if is_unified else share * ROWS,
                n_batch=N_BATCH,
                n_ubatch=N_BATCH,
                n_seq_max=2 * ROWS if is_unified else ROWS,
                n_threads=1,
                n_threads_batch=1,
                kv_unified=is_unified,
                flash_attn="off" if is_plain else "on",
                offload_kqv=False,
            ),
        )

    def __enter__(self) -> _Timed:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def fill(self) -> None:
        """Give each of the first `ROWS` sequences the same `CELLS` cells."""
        for position in range(0, CELLS, N_BATCH):
            self._batch.clear()
            self._add(N_BATCH, 0, position)
            self._decode()
        for row in range(1, ROWS):
            self._context.seq_cp(0, row)

    def fill_with_others(self, cells: int) -> None:
        """Give each of the first `ROWS` sequences a share of the cells, in a row, in batches that are soon computed."""
        for row in range(ROWS):
            for position in range(0, cells // ROWS, READ_TOKENS):
                self._batch.clear()
                self._add(READ_TOKENS, row, position)
                self._decode()

    def fill_as_crowd(self) -> None:
        """Give each a share of `CELLS`; in one buffer they lie among each other, as where rows decode together."""
        steps = N_BATCH // ROWS
        for begin in range(0, CELLS // ROWS, steps):
            self._batch.clear()
            for position in range(begin, begin + steps):
                for row in range(ROWS):
                    self._add(1, row, position)
            self._decode()

    def rows_ns(self, first: int) -> int:
        """A decode row of each of `ROWS` sequences, from this one on."""
        return self._ns(range(first, first + ROWS), 1)

    def reading_ns(self, sequence: int, tokens: int = READ_TOKENS) -> int:
        """A piece of a prompt."""
        return self._ns(range(sequence, sequence + 1), tokens)

    def _ns(self, sequences: range, tokens: int) -> int:
        """A batch of so many tokens of each; they are as long afterwards as before."""
        position = self._context.seq_pos_max(sequences[0]) + 1
        self._batch.clear()
        for each in sequences:
            self._add(tokens, each, position)
        began_ns = time.thread_time_ns()
        self._decode()
        took_ns = time.thread_time_ns() - began_ns
        for each in sequences:
            self._context.seq_rm(each, position)
        return took_ns

    def _add(self, tokens: int, sequence: int, position: int) -> None:
        vocab = self._context.model.vocab.n_tokens
        self._batch.add([(position + at) % vocab for at in range(tokens)], position, sequence, last_logits=True)

    def _decode(self) -> None:
        code = self._context.decode(self._batch)
        if code != DONE:
            raise ModelError(f"{self._context.model.path}: llama_decode: {code}")


def _read(path: Path, key: list[object]) -> AttentionTimes | None:
    kept = cpu_cache.read(path, key)
    names = attrs.fields_dict(AttentionTimes)
    if kept is None or kept.keys() != names.keys():
        return None
    if not all(isinstance(each, float) and LEAST_NS <= each < math.inf for each in kept.values()):
        return None
    return AttentionTimes(**kept)
