"""Input of one `llama_decode` call, in memory that is allocated once and filled by slices.

Every tick fills the same arrays, so adding rows costs one assignment for each array, not one for each token.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt

Tokens = Sequence[int] | npt.NDArray[np.int32]


class EmbeddingBatch:
    """Embeddings in the place of tokens, for one sequence and without logits."""

    def __init__(self, embeddings: npt.NDArray[np.float32], positions: npt.NDArray[np.int32], seq_id: int) -> None:
        """`embeddings` has the shape `[tokens, figures]`. `positions` has `[tokens]`, or with M-RoPE a flat `[4,
        tokens]`. Both are read in place.
        """
        self.n_tokens = len(embeddings)
        self._embeddings = embeddings
        self._pos = positions
        self._n_seq_id = np.ones(self.n_tokens, np.int32)
        self._seq_id = np.full(self.n_tokens, seq_id, np.int32)
        self._seq_lists = self._seq_id.ctypes.data + self._seq_id.itemsize * np.arange(self.n_tokens, dtype=np.uintp)
        self._output = np.zeros(self.n_tokens, np.int8)
        self.struct = _struct(self._pos, self._n_seq_id, self._seq_lists, self._output)
        self.struct.embd = self._embeddings.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


class Batch:
    """Up to `capacity` tokens, each with its sequence, its position, and a flag for computing its logits.

    Row `i` of `Context.logits` belongs to the `i`-th flagged token, in the order of adding. Belongs to one thread at a
    time. Adding too many tokens raises `ValueError` and adds none.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: {capacity} must be 1 or more")
        self.capacity = capacity
        self.n_tokens = 0
        self.n_outputs = 0
        self.token = np.zeros(capacity, np.int32)
        self.pos = np.zeros(capacity, np.int32)
        self.seq_id = np.zeros(capacity, np.int32)
        self.output = np.zeros(capacity, np.int8)
        # For a few rows, memoryviews take less time than numpy.
        self._token_cells, self._pos_cells = self.token.data, self.pos.data
        self._seq_id_cells, self._output_cells = self.seq_id.data, self.output.data
        self._n_seq_id = np.ones(capacity, np.int32)
        # llama.cpp wants a list of sequences for each token. Each has one item here: a cell of `seq_id`.
        self._seq_lists = self.seq_id.ctypes.data + self.seq_id.itemsize * np.arange(capacity, dtype=np.uintp)
        self.struct = _struct(self.pos, self._n_seq_id, self._seq_lists, self.output)
        self.struct.token = self.token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))

    def clear(self) -> None:
        """Empty the batch for the next tick."""
        self.n_tokens = 0
        self.n_outputs = 0

    def add(self, tokens: Tokens, first_pos: int, seq_id: int, *, last_logits: bool, all_logits: bool = False) -> int:
        """Add consecutive tokens of one sequence, the first at `first_pos`. Returns the index of the last one in the
        batch.

        `last_logits` computes the logits of the last token, which are row `n_outputs - 1` at that moment; `all_logits`
        those of every token.
        """
        start, stop = self._room_for(len(tokens))
        self.token[start:stop] = tokens
        self.pos[start:stop] = range(first_pos, first_pos + stop - start)
        self.seq_id[start:stop] = seq_id
        self.output[start:stop] = all_logits
        if all_logits:
            self.n_outputs += stop - start
        elif last_logits:
            self.output[stop - 1] = 1
            self.n_outputs += 1
        self.n_tokens = stop
        return stop - 1

    def add_decode(self, tokens: Tokens, positions: Tokens, seq_ids: Tokens) -> int:
        """Add one token for each of several sequences, all with logits. Returns the index of the first one in the
        batch.
        """
        start, stop = self._room_for(len(tokens))
        self._token_cells[start:stop] = array("i", tokens)
        self._pos_cells[start:stop] = array("i", positions)
        self._seq_id_cells[start:stop] = array("i", seq_ids)
        self._output_cells[start:stop] = array("b", b"\1") * (stop - start)
        self.n_outputs += stop - start
        self.n_tokens = stop
        return start

    def advance(self, tokens: Sequence[int]) -> None:
        """After `add_decode`, replace each row's token by its next one, at the next position."""
        token, pos = self._token_cells, self._pos_cells
        for row in range(self.n_tokens):
            token[row] = tokens[row]
            pos[row] += 1

    def _room_for(self, count: int) -> tuple[int, int]:
        start = self.n_tokens
        if count < 1 or start + count > self.capacity:
            raise ValueError(f"tokens: {count} do not fit; {self.capacity - start} of {self.capacity} places are free")
        return start, start + count


def _struct(
    positions: npt.NDArray[np.int32],
    n_seq_id: npt.NDArray[np.int32],
    seq_lists: npt.NDArray[np.uintp],
    output: npt.NDArray[np.int8],
) -> lib.llama_batch:
    """llama.cpp's struct of a batch, without its tokens or embeddings."""
    struct = lib.llama_batch()
    struct.pos = positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    struct.n_seq_id = n_seq_id.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    struct.seq_id = seq_lists.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
    struct.logits = output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
    return struct
