"""A model's own prediction heads (multi-token prediction, MTP): further layers that guess the tokens to come.

They have a context of their own over the same weights, with the cells of these layers alone. After each batch of the
model each computes the same tokens, together with the hidden row that the model gave to the token before each. What is
copied and cut in the model's memory is copied and cut in theirs too, so they know every text that the model's cells
hold, but for pictures: of these they know nothing, and guess worse. A snapshot of a sequence has their cells, too.

An assistant (Gemma 4's) is a model of its own that does the same, and reads the model's cells: it has none to be kept
in step, and knows all that they hold.

One head guesses all of a draft, token by token. Of several each guesses one token (`shape.CHAINED`): a head has cells
of its own of the text alone, and reads what is drafted before its token anew.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp_ext as ext
from numpy import ctypeslib

from uma.closing import Closing
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

Rows = npt.NDArray[np.float32]
HiddenRow = npt.NDArray[np.float32]
"""What a layer hands on of one token."""

KEPT_ROWS = 65
"""Hidden rows of a sequence's last batch that are kept: a token's and those of the longest draft."""


class _LastRows(NamedTuple):
    """The hidden rows of the last tokens of a sequence."""

    first: int
    """Position of the first."""
    rows: Rows


class Guessed(NamedTuple):
    """A token that the next one is guessed behind, or that stands before it in a draft."""

    seq: int
    token: int
    position: int
    hidden: HiddenRow
    """The hidden row of the token before."""
    is_last: bool
    """What comes next is guessed."""


class PredictionHeads(Closing):
    """Owner of the heads' context, kept in step with the model's. Belongs to the same thread as that one."""

    def __init__(self, target: Context, params: ContextParams, assistant: Model | None = None) -> None:
        """Make it for `target`, which must have computed nothing. Raises as `Context` does."""
        self._target = target
        self.vocab = target.model.vocab
        self.count = target.model.shape.heads if assistant is None else 1
        """How many there are: of several each guesses one token."""
        self.reads_cells = assistant is not None
        """Whether it is an assistant. All that it guesses has the position behind the target's last cell."""
        if assistant is None:
            self.context = Context(target.model, params)
        else:
            self.context = Context(assistant, params, target)
        """What computes. Its sequences are the target's."""
        self.kept = None if self.reads_cells else self.context
        self.has_windows = target.model.shape.memory == "sliding-window"
        self._width = target.model.n_embedding
        self._batch = Batch(self.context.n_batch)
        self._hidden: Rows = np.zeros((self.context.n_batch, self._width), np.float32)
        self._batch.struct.embd = self._hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._last: dict[int, _LastRows] = {}
        ext.llama_set_embeddings_nextn(target.handle, True, False)
        ext.llama_set_embeddings_nextn(self.context.handle, True, True)
        target.follow(self)

    # What the target tells (`context.Follower`)

    def computed(self, batch: Batch) -> None:
        """The target has computed this batch: compute it too. What fails is forgotten."""
        count = batch.n_tokens
        rows = _rows(self._target, count, self._width)
        sequences, positions = batch.seq_id[:count], batch.pos[:count]
        goes_on = (np.diff(sequences) == 0) & (np.diff(positions) == 1)
        starts = [0, *(np.flatnonzero(~goes_on) + 1).tolist()]
        if self.reads_cells or self._follow(batch, rows, starts):
            for start, end in zip(starts, [*starts[1:], count], strict=True):
                kept = max(start, end - KEPT_ROWS)
                self._last[int(sequences[start])] = _LastRows(int(positions[kept]), rows[kept:end].copy())

    def _follow(self, batch: Batch, rows: Rows, starts: Sequence[int]) -> bool:
        """Compute a batch of the target's, of which texts begin at `starts`. Returns whether it was computed."""
        count = batch.n_tokens
        sequences, positions = batch.seq_id[:count], batch.pos[:count]
        self._hidden[1:count] = rows[: count - 1]
        for start in starts:
            seq, position = int(sequences[start]), int(positions[start])
            self._hidden[start] = self.hidden_before(seq, position)
        if self._target.threads:
            self.context.set_threads(self._target.threads)
        own = self._batch
        own.token[:count], own.pos[:count], own.seq_id[:count] = batch.token[:count], positions, sequences
        own.output[:count] = 0
        own.n_tokens, own.n_outputs = count, 0
        for head in range(self.count):
            for start in starts:
                self._make_way(int(sequences[start]), int(positions[start]))
            if self._decode(head) != DONE:
                return False
        return True

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """The target has forgotten these positions."""
        if not self.reads_cells:
            self.context.seq_rm(seq, p0, p1)
        if p0 <= 0:
            self._last.pop(seq, None)
        elif (last := self._last.get(seq)) is not None:
            self._last[seq] = last._replace(rows=last.rows[: max(0, p0 - last.first)])

    def seq_cp(self, source: int, target: int, p0: int = -1, p1: int = -1) -> None:
        """The target has copied these positions."""
        if not self.reads_cells:
            self.context.seq_cp(source, target, p0, p1)
        if (last := self._last.get(source)) is not None:
            self._last[target] = last if p1 < 0 else last._replace(rows=last.rows[: max(0, p1 - last.first)])

    def clear(self) -> None:
        """Forget all sequences."""
        if not self.reads_cells:  # they are the target's
            self.context.clear(overwrites=False)
        self._last.clear()

    # Guesses

    def hidden_before(self, seq: int, position: int) -> HiddenRow:
        """The target's hidden row of the token before this position; zeros where it is not known."""
        last = self._last.get(seq)
        index = -1 if last is None else position - 1 - last.first
        if last is None or not 0 <= index < len(last.rows):
            return np.zeros(self._width, np.float32)
        row: HiddenRow = last.rows[index]
        return row

    def predict(self, head: int, rows: Sequence[Guessed]) -> int:
        """Compute what this head guesses. The answer is that of `Context.decode`; with any but `DONE` all texts are
        forgotten.
        """
        self._batch.clear()
        for index, row in enumerate(rows):
            self._hidden[index] = row.hidden
            if not index or rows[index - 1].seq != row.seq:
                self._make_way(row.seq, row.position)
            self._batch.add((row.token,), row.position, row.seq, last_logits=row.is_last)
        return self._decode(head)

    def _decode(self, head: int) -> int:
        if self.count > 1:
            ext.llama_set_nextn_layer_offset(self.context.handle, head)
        code = self.context.decode(self._batch)
        if code != DONE:
            self.clear()
        return code

    def hidden(self, count: int) -> Rows:
        """The hidden rows of the `count` last tokens of the last `predict`. Valid until the next batch."""
        return _rows(self.context, count, self._width)

    def cut(self, seq: int, position: int) -> None:
        """Forget what was guessed from this position on."""
        if not self.reads_cells:
            self.context.seq_rm(seq, position, -1)

    def _make_way(self, seq: int, position: int) -> None:
        """llama.cpp takes tokens that go on where a sequence ends, or begin one anywhere."""
        if self.reads_cells:
            return
        held = self.context.seq_pos_max(seq)
        if held >= position:
            self.context.seq_rm(seq, position, -1)
        elif 0 <= held < position - 1:
            self.context.seq_rm(seq)

    def close(self) -> None:
        """Free the memory; the target computes on alone."""
        self._target.follow(None)
        self.context.close()


def _rows(context: Context, count: int, width: int) -> Rows:
    """The first hidden rows of a context's last batch, in llama.cpp's memory."""
    rows: Rows = ctypeslib.as_array(ext.llama_get_embeddings_nextn(context.handle), (count, width))
    return rows
