"""Prediction heads of a model (multi-token prediction, MTP): additional layers that draft the next tokens.

They have a context of their own over the same weights, with cells of these layers only. After each batch of the model,
the heads compute the same tokens, together with the hidden state that the model computed for the token before each.
What is copied and cut in the model's memory is also copied and cut in theirs, so they know all texts in the model's
cells. Pictures are the exception: behind these they draft worse. A snapshot of a sequence includes their cells.

An assistant (Gemma 4's) is a separate model with the same task. It reads the model's cells, so it has none of its own
to keep in step, and knows everything in them.

A single head drafts all tokens, one after the other. Of several heads each drafts one token (`shape.CHAINED`): a head's
own cells only contain text, and it computes the drafted tokens before its own again.
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
"""Hidden state of one token."""

KEPT_ROWS = 65
"""Hidden states of a sequence's last batch that are kept: of one token and the longest draft."""


class _LastRows(NamedTuple):
    """Hidden states of the last tokens of a sequence."""

    first: int
    """Position of the first token."""
    rows: Rows


class DraftInput(NamedTuple):
    """A token in the input of a head: the one that the draft follows, or one of the draft."""

    seq: int
    token: int
    position: int
    hidden: HiddenRow
    """Hidden state of the token before."""
    is_last: bool
    """Whether the token after this one is to be drafted."""


class PredictionHeads(Closing):
    """Owner of the heads' context, kept in step with the model's. Belongs to the same thread."""

    def __init__(self, target: Context, params: ContextParams, assistant: Model | None = None) -> None:
        """Make the context for `target`, which must not have computed anything yet. Raises as `Context` does."""
        self._target = target
        self.vocab = target.model.vocab
        self.count = target.model.shape.heads if assistant is None else 1
        """Number of heads: with several, each drafts one token."""
        self.reads_cells = assistant is not None
        """Whether it is an assistant. All its drafted tokens have the position behind the target's last cell."""
        if assistant is None:
            self.context = Context(target.model, params)
        else:
            self.context = Context(assistant, params, target)
        """Context that computes. Its sequences are the target's."""
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

    # Operations of the target (`context.Follower`)

    def computed(self, batch: Batch) -> None:
        """Compute the batch that the target has computed. If that fails, all sequences are forgotten."""
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
        """Compute a batch of the target, in which sequences begin at `starts`. Returns whether it was computed."""
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
                self._free_position(int(sequences[start]), int(positions[start]))
            if self._decode(head) != DONE:
                return False
        return True

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove positions that the target has removed."""
        if not self.reads_cells:
            self.context.seq_rm(seq, p0, p1)
        if p0 <= 0:
            self._last.pop(seq, None)
        elif (last := self._last.get(seq)) is not None:
            self._last[seq] = last._replace(rows=last.rows[: max(0, p0 - last.first)])

    def seq_cp(self, source: int, target: int, p0: int = -1, p1: int = -1) -> None:
        """Copy positions that the target has copied."""
        if not self.reads_cells:
            self.context.seq_cp(source, target, p0, p1)
        if (last := self._last.get(source)) is not None:
            self._last[target] = last if p1 < 0 else last._replace(rows=last.rows[: max(0, p1 - last.first)])

    def clear(self) -> None:
        """Remove all sequences."""
        if not self.reads_cells:  # the cells are the target's
            self.context.clear(overwrites=False)
        self._last.clear()

    # Drafting

    def hidden_before(self, seq: int, position: int) -> HiddenRow:
        """The target's hidden state of the token before this position; zeros where it is unknown."""
        last = self._last.get(seq)
        index = -1 if last is None else position - 1 - last.first
        if last is None or not 0 <= index < len(last.rows):
            return np.zeros(self._width, np.float32)
        row: HiddenRow = last.rows[index]
        return row

    def predict(self, head: int, rows: Sequence[DraftInput]) -> int:
        """Compute this head's draft. Returns the result of `Context.decode`; if that is not `DONE`, all sequences are
        forgotten.
        """
        self._batch.clear()
        for index, row in enumerate(rows):
            self._hidden[index] = row.hidden
            if not index or rows[index - 1].seq != row.seq:
                self._free_position(row.seq, row.position)
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
        """Hidden states of the last `count` tokens of the last `predict`. Valid until the next batch."""
        return _rows(self.context, count, self._width)

    def cut(self, seq: int, position: int) -> None:
        """Remove drafted tokens from this position on."""
        if not self.reads_cells:
            self.context.seq_rm(seq, position, -1)

    def _free_position(self, seq: int, position: int) -> None:
        """Remove what is in the way of this position: llama.cpp only accepts tokens right behind a sequence's end, or
        at any position of an empty sequence.
        """
        if self.reads_cells:
            return
        held = self.context.seq_pos_max(seq)
        if held >= position:
            self.context.seq_rm(seq, position, -1)
        elif 0 <= held < position - 1:
            self.context.seq_rm(seq)

    def close(self) -> None:
        """Free the memory. The target continues alone."""
        self._target.follow(None)
        self.context.close()


def _rows(context: Context, count: int, width: int) -> Rows:
    """The first hidden states of a context's last batch, in llama.cpp's memory."""
    rows: Rows = ctypeslib.as_array(ext.llama_get_embeddings_nextn(context.handle), (count, width))
    return rows
