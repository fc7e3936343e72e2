"""Headers of GGUF files: keys with values, and what stands of each tensor.

ggml's own reader is not used: it reads whole vocabularies, also where a folder of thousands of files is listed by the
figures that stand before them, in the first kilobytes.
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
"""`gguf_type`."""

VOCABULARY = "tokenizer.ggml.tokens"
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of scalars by `gguf_type`, as `struct` has them."""
BLOCK_BYTES = 65_536
"""Beginning of a file that is read to list it: more than the keys ahead of the vocabulary have, with a licence."""
MAX_DIMENSIONS = 4
"""Maximum dimensions of a tensor."""


@attrs.frozen
class Glance:
    """What the first kilobytes of a GGUF file tell of it, enough to list it."""

    metadata: dict[str, Any]
    """See `HeaderReader.metadata`."""
    n_tensors: int
    n_tokens: int
    """Length of the vocabulary; 0 where it was not met."""


def glance(path: Path) -> Glance | None:
    """The beginning of a file's header; None where it is not that of a sound GGUF file, or cannot be read."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as file:
            reader = HeaderReader(file.read(BLOCK_BYTES))
        try:
            reader.read_keys(until_vocabulary=True)
        except EOFError:
            # Ahead of the end of a longer file this is no fault: what is missing is not told.
            if len(reader.block) < BLOCK_BYTES:
                return None
        n_tokens = reader.metadata.pop(VOCABULARY, 0)
        return Glance(reader.metadata, reader.n_tensors, n_tokens) if type(n_tokens) is int else None
    except (OSError, ValueError):
        return None


class Tensor(NamedTuple):
    """A tensor as the header has it, without its weights."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """Type by ggml's number."""
    offset: int
    """Where it begins, behind the beginning of the weights."""


class HeaderReader:
    """Reader of a GGUF file's header, from the file's first bytes.

    Its methods raise `EOFError` where these are too few, and `ValueError` where no header is like them.
    """

    def __init__(self, block: bytes) -> None:
        self.block = block
        self._at = 0
        self.n_tensors = 0
        self.metadata: dict[str, Any] = {}
        """Strings, numbers and booleans by key. Of an array only its length is kept, under its key."""
        self.numbers: dict[str, tuple[float, ...]] = {}
        """Arrays of numbers by key."""
        self.kinds: dict[str, int] = {}
        """`gguf_type` of each key."""
        self.tensors: list[Tensor] = []
        self.n_bytes = 0
        """Size of the header, without what aligns the weights behind it."""
        self._vocabulary_at = 0
        """Where the tokens begin; 0: there are none."""

    def read_keys(self, *, until_vocabulary: bool = False) -> None:
        """Read all keys, or those ahead of the vocabulary and its length."""
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
                if length > len(self.block):  # else `struct` would be asked for more memory than there is
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
        """Read what stands of the tensors, behind the keys."""
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
