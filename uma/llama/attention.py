"""What attention takes on this CPU with this library: measured once, by a model of one layer that does little else.

llama.cpp has two attentions, and how they compare is a matter of the CPU: a decode row's cell took flash attention five
times as long as plain attention on an Intel Xeon, and not twice as long on an AMD EPYC. A policy that knows one of them
chooses wrongly on the other.

One thread computes, so that nothing waits for another; of several measurements the shortest counts, which a neighbour
that takes the core now and then does not change. All of it is in the CPU's caches, as a large model's cells are not:
what memory takes is taken by both attentions.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import attrs

from uma.errors import ModelError
from uma.llama import cpu_cache
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

logger = logging.getLogger("uma.llama.attention")

VERSION = 2
"""Counts the changes of what is measured: figures of another version are not used."""
HEAD_SIZES = (64, 128)
"""Values of a head for which there is a model; a head of another size is taken for the next larger one, or the last."""
ROWS, CELLS, READ_TOKENS = 8, 1_024, 64
"""Decode rows of a batch, the cells that each attends to or passes by, and the tokens of a prompt."""
N_BATCH = 512
REPEATS = 5
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
    flash_read_ns: float
    plain_read_ns: float
    masked_read_ns: float


def attention_times(head_size: int) -> AttentionTimes | None:
    """The times for heads of so many values: from the cache, or measured now, which takes 0.1 to 0.2 s.

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
    with Model.load(path, n_gpu_layers=0, extra_buffers="none") as model:
        heads = model.attention_heads * model.head_size / 64
        with _Measured(model, is_plain=False) as flash, _Measured(model, is_plain=True) as plain:
            flash_row, flash_read = flash.row_ns(0), flash.read_ns(0)
            plain_row, plain_read = plain.row_ns(0), plain.read_ns(0)
            masked_row, masked_read = flash.row_ns(ROWS), flash.read_ns(ROWS)
    times = (flash_row, plain_row, masked_row, flash_read, plain_read, masked_read)
    return AttentionTimes(*[max(LEAST_NS, each / heads) for each in times])


class _Measured:
    """A context in which `ROWS` sequences have `CELLS` tokens. With flash attention it is one buffer for them and for
    as many empty sequences, which pass all of it by; with plain attention a buffer each, as both are used.
    """

    def __init__(self, model: Model, *, is_plain: bool) -> None:
        share = CELLS + 256
        self._batch = Batch(N_BATCH)
        self._context = Context(
            model,
            ContextParams(
                n_ctx=share * ROWS if is_plain else share,
                n_batch=N_BATCH,
                n_ubatch=N_BATCH,
                n_seq_max=ROWS if is_plain else 2 * ROWS,
                n_threads=1,
                n_threads_batch=1,
                kv_unified=not is_plain,
                flash_attn="off" if is_plain else "on",
                offload_kqv=False,
            ),
        )

    def __enter__(self) -> _Measured:
        try:
            self._rows_ns(0, 0)  # the first touches memory
            self._empty_row_ns, self._empty_read_ns = self._rows_ns(0, 0), self._reading_ns(0, 0)
            for position in range(0, CELLS, N_BATCH):
                self._batch.clear()
                self._add(N_BATCH, 0, position)
                self._decode()
            for row in range(1, ROWS):
                self._context.seq_cp(0, row)
        except BaseException:
            self._context.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def row_ns(self, first: int) -> float:
        """What a cell takes one of `ROWS` decode rows, of the sequences from this one on."""
        return (self._rows_ns(first, self._context.seq_pos_max(first) + 1) - self._empty_row_ns) / ROWS / CELLS

    def read_ns(self, sequence: int) -> float:
        """What a cell takes a prompt's token in this sequence."""
        took_ns = self._reading_ns(sequence, self._context.seq_pos_max(sequence) + 1)
        return (took_ns - self._empty_read_ns) / READ_TOKENS / CELLS

    def _rows_ns(self, first: int, position: int) -> float:
        def add() -> None:
            for row in range(first, first + ROWS):
                self._add(1, row, position)

        return self._best_ns(add, range(first, first + ROWS), position)

    def _reading_ns(self, sequence: int, position: int) -> float:
        return self._best_ns(
            lambda: self._add(READ_TOKENS, sequence, position), range(sequence, sequence + 1), position
        )

    def _best_ns(self, add: Callable[[], None], sequences: range, position: int) -> float:
        """The shortest time of several; the sequences are as long afterwards as before."""
        took_ns = []
        for _ in range(REPEATS):
            self._batch.clear()
            add()
            began_ns = time.perf_counter_ns()
            self._decode()
            took_ns.append(time.perf_counter_ns() - began_ns)
            for each in sequences:
                self._context.seq_rm(each, position)
        return min(took_ns)

    def _add(self, tokens: int, sequence: int, position: int) -> None:
        vocab = self._context.model.vocab.n_tokens
        self._batch.add([at % vocab for at in range(tokens)], position, sequence, last_logits=True)

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
