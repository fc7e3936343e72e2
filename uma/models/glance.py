"""The beginning of a GGUF file: what it says of itself before its vocabulary.

The whole header of a model with 150,000 tokens takes a tenth of a second to read. Its figures stand before that, in
the first kilobytes, so that a folder of thousands of files is listed at once.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import attrs

from uma.llama.header import ARRAY, MAGIC, STRING, VERSIONS, VOCABULARY

BLOCK_BYTES = 65_536
"""Read of each file: more than the keys ahead of the vocabulary have, a licence's text among them."""
MAX_ITEMS = 4_096
"""Maximum strings of an array that are passed over one by one; a longer one is the vocabulary, or not worth it."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Formats of scalars by `gguf_type`."""


@attrs.frozen
class Glance:
    """The first keys of a header."""

    metadata: dict[str, Any]
    """See `Header.metadata`."""
    n_tensors: int
    n_tokens: int
    """Length of the vocabulary; 0 where it was not met."""


def glance(path: Path) -> Glance | None:
    """The beginning of a file's header; None where it is not that of a sound GGUF file, or cannot be read."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as file:
            block = file.read(BLOCK_BYTES)
        return _HeaderWalk(block).all()
    except (OSError, EOFError, ValueError, LookupError, struct.error):
        return None


class _HeaderWalk:
    """A walk over the keys of a block."""

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._at = 0

    def all(self) -> Glance | None:
        if self._take(4) != MAGIC or self._number("<I") not in VERSIONS:
            return None
        n_tensors, n_keys = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            try:
                key, kind = self._string(), self._number("<I")
                if key == VOCABULARY:
                    self._number("<I")
                    return Glance(metadata, n_tensors, self._number("<Q"))
                metadata[key.decode("utf-8", "replace")] = self._value(kind)
            except EOFError:
                # Ahead of the end of a longer file this is no fault: what is missing is not told.
                return Glance(metadata, n_tensors, 0) if len(self._block) == BLOCK_BYTES else None
        return Glance(metadata, n_tensors, 0)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string().decode("utf-8", "replace")
        if kind != ARRAY:
            return self._number(_SCALARS[kind])
        inner, length = self._number("<I"), self._number("<Q")
        if inner == STRING and length <= MAX_ITEMS:
            for _ in range(length):
                self._string()
        elif inner == STRING:
            raise EOFError
        else:
            self._take(length * struct.calcsize(_SCALARS[inner]))
        return length

    def _string(self) -> bytes:
        return self._take(self._number("<Q"))

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, n_bytes: int) -> bytes:
        start, self._at = self._at, self._at + n_bytes
        if self._at > len(self._block):
            raise EOFError
        return self._block[start : self._at]
