"""Reads headers of GGUF files: keys with values, and descriptions of tensors.

Not by ggml's own reader: that reads whole vocabularies, even to list a folder of thousands of files, for which the keys
before the vocabulary, in the first kilobytes, are enough.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from uma.constraints import show

MAGIC = b"GGUF"
VERSIONS = range(2, 4)

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
"""Values of `gguf_type`."""

VOCABULARY = "tokenizer.ggml.tokens"
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format of a scalar for `struct`, by `gguf_type`."""
BLOCK_BYTES = 65_536
"""Bytes of a file that are read to list it: more than the keys before the vocabulary need, even with a licence."""
MAX_DIMENSIONS = 4
"""Maximum dimensions of a tensor."""


@attrs.frozen
class Glance:
    """What the first kilobytes of a GGUF file tell, which is enough to list it."""

    metadata: dict[str, Any]
    """See `HeaderReader.metadata`."""
    n_tensors: int
    n_tokens: int
    """Length of the vocabulary; 0 where it was not reached."""


def glance(path: Path) -> Glance | None:
    """Read the beginning of a file's header; None where it is not that of a valid GGUF file, or cannot be read."""
    try:
        if not path.is_file():  # reading a pipe would block
            return None
        with path.open("rb") as file:
            reader = HeaderReader(file.read(BLOCK_BYTES))
        try:
            reader.read_keys(until_vocabulary=True)
        except EOFError:
            # No error in a longer file: the keys behind the first block are left out.
            if len(reader.block) < BLOCK_BYTES:
                return None
        n_tokens = reader.metadata.pop(VOCABULARY, 0)
        return Glance(reader.metadata, reader.n_tensors, n_tokens) if type(n_tokens) is int else None
    except (OSError, ValueError):
        return None


class Tensor(NamedTuple):
    """Description of a tensor in the header, without its weights."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """ggml's number of its type."""
    offset: int
    """Offset from the beginning of the weights."""


class HeaderReader:
    """Reads a GGUF header from a file's first bytes.

    Its methods raise `EOFError` where these bytes are too few, and `ValueError` where they are not a header.
    """

    def __init__(self, block: bytes) -> None:
        self.block = block
        self._at = 0
        self.n_tensors = 0
        self.metadata: dict[str, Any] = {}
        """Strings, numbers and booleans by key; for arrays only their length."""
        self.numbers: dict[str, tuple[float, ...]] = {}
        """Arrays of numbers by key."""
        self.kinds: dict[str, int] = {}
        """`gguf_type` of each key."""
        self.tensors: list[Tensor] = []
        self.n_bytes = 0
        """Size of the header, without the alignment of the weights behind it."""
        self._vocabulary_at = 0
        """Offset of the vocabulary; 0: there is none."""

    def read_keys(self, *, until_vocabulary: bool = False) -> None:
        """Read all keys, or those up to the vocabulary, with its length."""
        if self._take(len(MAGIC)) != MAGIC or self._scalar("I") not in VERSIONS:
            raise ValueError("no GGUF file of a known version")
        self.n_tensors, n_keys = self._scalar("Q"), self._scalar("Q")
        for _ in range(n_keys):
            key, kind = self._text(), self._scalar("I")
            self.kinds[key] = kind
            if kind != ARRAY:
                self.metadata[key] = self._text() if kind == STRING else self._scalar(_format(key, kind))
                continue
            kind, length = self._scalar("I"), self._scalar("Q")
            self.metadata[key] = length
            if key == VOCABULARY and until_vocabulary:
                return
            if kind != STRING:
                form = f"<{length}{_format(key, kind)}"
                if length > len(self.block):  # otherwise `struct` would ask for more memory than there is
                    raise EOFError
                self.numbers[key] = struct.unpack(form, self._take(struct.calcsize(form)))
                continue
            if key == VOCABULARY:
                self._vocabulary_at = self._at
            self._skip_strings(length)

    def _skip_strings(self, count: int) -> None:
        at, block, most, read = self._at, self.block, len(self.block) - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > most:
                raise EOFError
            at += 8 + read(block, at)[0]
        self._at = at

    def read_tensors(self) -> None:
        """Read the descriptions of tensors, which follow the keys."""
        for _ in range(self.n_tensors):
            name, n_dimensions = self._text(), self._scalar("I")
            if n_dimensions > MAX_DIMENSIONS:
                raise ValueError(f"tensor {show(name)} has {n_dimensions:,} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(n_dimensions))
            self.tensors.append(Tensor(name, shape, self._scalar("I"), self._scalar("Q")))
        self.n_bytes = self._at

    def vocabulary(self) -> Iterator[bytes]:
        """Tokens as they are spelled."""
        self._at = self._vocabulary_at
        for _ in range(self.metadata[VOCABULARY] if self._at else 0):
            yield self._take(self._scalar("Q"))

    def _text(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "replace")

    def _scalar(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _take(self, n_bytes: int) -> bytes:
        start, self._at = self._at, self._at + n_bytes
        if self._at > len(self.block):
            raise EOFError
        return self.block[start : self._at]


def _format(key: str, kind: int) -> str:
    if kind not in FORMATS:
        raise ValueError(f"key {show(key)} has invalid GGUF type {kind}")
    return FORMATS[kind]
