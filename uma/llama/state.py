"""One sequence's state between two layouts of the same KV memory.

llama.cpp writes a sequence's cells behind the number of streams: one where all sequences share a buffer, else as many
as there are sequence ids, each with its number of cells, though only one of them has any. It takes a state with another
number for a foreign one. What lies behind these numbers is the same, and they are all that differs.

    magic, id, number of streams, 0 … 0, number of cells, the cells, 0 … 0          (numbers of 32 bits)
"""

from __future__ import annotations

import numpy as np

HEAD_BYTES = 12
WORD_BYTES = 4


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
    counts = np.frombuffer(view, np.uint32, written, HEAD_BYTES)
    filled = np.flatnonzero(counts)
    before = int(filled[0]) if len(filled) else written - 1
    first, last = HEAD_BYTES + WORD_BYTES * before, len(view) - WORD_BYTES * (written - 1 - before)
    head = bytes(view[:8]) + n_streams.to_bytes(WORD_BYTES, "little")
    return b"".join((head, view[first:last], bytes(WORD_BYTES * (n_streams - 1))))
