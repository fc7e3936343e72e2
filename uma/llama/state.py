"""One sequence's state between two layouts of the same KV memory.

llama.cpp writes a sequence's cells behind the number of streams: one where all sequences share a buffer, else as many
as there are sequence ids, each with its number of cells, though only one of them has any. It takes a state with another
number for a foreign one. Behind these numbers come the cells' positions, and then keys and values, layer by layer:

    magic, id, number of streams, 0 … 0, number of cells,                           (numbers of 32 bits)
    the cells' positions, 0 or 1, number of layers, keys of each layer, values of each layer, 0 … 0

The 1 says that values are transposed: value by value with all cells of each, as plain attention keeps them, where flash
attention keeps them cell by cell. The size of a row, or of a value and their number, stands before each layer's.
Of attention memory that is all; what is not built like this stays as it is, and llama.cpp refuses it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

HEAD_BYTES = 12
WORD_BYTES = 4
CELL_BYTES = (12, 24)
"""Of one cell's position and sequence; more where a model's positions have several parts."""
KEYS = struct.Struct("<iQ")
"""Before a layer's keys, and its values where they are not transposed: their type, and the bytes of a row."""
TRANSPOSED = struct.Struct("<iII")
"""Before a layer's transposed values: their type, the bytes of a value, and values of a cell."""
ROWS_AT_ONCE = 64
"""Rows that are transposed at once: of a long sequence five times as fast as all of them."""
VALUE_BYTES = {0: 4, 1: 2, 30: 2}
"""By ggml's types: f32, f16 and bf16. What is quantized cannot be transposed."""


def for_streams(data: bytes | bytearray | memoryview, n_streams: int) -> bytes | bytearray | memoryview:
    """`data` as a context with so many streams would have written it; copied only where it has another number.

    What is too short to be a state is returned as it is: llama.cpp refuses it.
    """
    if len(data) < HEAD_BYTES:
        return data
    view = memoryview(data)
    written = int.from_bytes(view[8:HEAD_BYTES], "little")
    if written in (n_streams, 0) or len(view) < HEAD_BYTES + WORD_BYTES * written:
        return data
    first, last = _filled_stream(view, written)
    head = bytes(view[:8]) + n_streams.to_bytes(WORD_BYTES, "little")
    return b"".join((head, view[first:last], bytes(WORD_BYTES * (n_streams - 1))))


def for_attention(data: bytes | bytearray | memoryview, *, is_transposed: bool) -> bytes | bytearray | memoryview:
    """`data` as a context that keeps values transposed, or one that does not, would have written it; copied only where
    it was made by the other. What cannot be turned is returned as it is.
    """
    view = memoryview(data)
    found = _find_values(view)
    if found is None or found.is_transposed is is_transposed:
        return data
    source = np.frombuffer(view, np.uint8)
    turned = np.empty_like(source)  # either head has as many bytes
    at = found.flag_at + WORD_BYTES
    turned[: found.flag_at] = source[: found.flag_at]
    turned[found.flag_at : at].view(np.uint32)[0] = is_transposed
    for values in found.layers:
        turned[at : values.head_at] = source[at : values.head_at]
        if is_transposed:
            head = TRANSPOSED.pack(values.type, values.value_bytes, values.per_cell)
            shape = found.cells, values.per_cell
        else:
            head = KEYS.pack(values.type, values.value_bytes * values.per_cell)
            shape = values.per_cell, found.cells
        turned[values.head_at : values.at] = np.frombuffer(head, np.uint8)
        at, kind = values.at + found.cells * values.per_cell * values.value_bytes, f"u{values.value_bytes}"
        rows = source[values.at : at].view(kind).reshape(shape)
        columns = turned[values.at : at].view(kind).reshape(shape[::-1])
        for first in range(0, shape[0], ROWS_AT_ONCE):
            columns[:, first : first + ROWS_AT_ONCE] = rows[first : first + ROWS_AT_ONCE].T
    turned[at:] = source[at:]
    return turned.data


class _Values(NamedTuple):
    """The values of a layer."""

    head_at: int
    at: int
    type: int
    value_bytes: int
    per_cell: int


class _Found(NamedTuple):
    cells: int
    flag_at: int
    is_transposed: bool
    layers: list[_Values]


def _find_values(view: memoryview) -> _Found | None:
    if len(view) < HEAD_BYTES:
        return None
    written = int.from_bytes(view[8:HEAD_BYTES], "little")
    if not written or len(view) < HEAD_BYTES + WORD_BYTES * written:
        return None
    first, last = _filled_stream(view, written)
    (cells,) = struct.unpack_from("<I", view, first)
    for cell_bytes in CELL_BYTES:
        flag_at = first + WORD_BYTES + cells * cell_bytes
        if not cells or flag_at + 2 * WORD_BYTES > last:
            continue
        flag, n_layers = struct.unpack_from("<II", view, flag_at)
        if flag in (0, 1):
            layers = list(_layers(view, flag_at + 2 * WORD_BYTES, last, cells, n_layers, is_transposed=bool(flag)))
            if not layers or layers[-1] is not None:  # (there are models without values of their own)
                return _Found(cells, flag_at, bool(flag), [each for each in layers if each is not None])
    return None


def _layers(
    view: memoryview, at: int, end: int, cells: int, n_layers: int, *, is_transposed: bool
) -> Iterator[_Values | None]:
    """The values of each layer that has any; None at the end of what is not built like this."""
    for _ in range(n_layers):
        if at + KEYS.size > end:
            yield None
            return
        _, row_bytes = KEYS.unpack_from(view, at)
        at += KEYS.size + cells * row_bytes
    while at < end:
        if at + KEYS.size > end:
            yield None
            return
        if is_transposed:
            kind, value_bytes, per_cell = TRANSPOSED.unpack_from(view, at)
        else:
            kind, row_bytes = KEYS.unpack_from(view, at)
            value_bytes = VALUE_BYTES.get(kind, 0)
            per_cell = row_bytes // value_bytes if value_bytes else 0
        if not per_cell or VALUE_BYTES.get(kind) != value_bytes:
            yield None
            return
        yield _Values(at, at + KEYS.size, kind, value_bytes, per_cell)
        at += KEYS.size + cells * per_cell * value_bytes
    if at != end:
        yield None


def _filled_stream(view: memoryview, written: int) -> tuple[int, int]:
    """Where the one stream of `written` that has cells begins, with their number, and ends; the last if none has."""
    counts = np.frombuffer(view, np.uint32, written, HEAD_BYTES)
    filled = np.flatnonzero(counts)
    before = int(filled[0]) if len(filled) else written - 1
    return HEAD_BYTES + WORD_BYTES * before, len(view) - WORD_BYTES * (written - 1 - before)
