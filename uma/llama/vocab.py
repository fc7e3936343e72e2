"""A model's vocabulary: text to token ids and back to bytes, and the tokens that end a text.

llama.cpp's vocabulary is read-only once loaded, so everything here can be called from several threads at once.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt

from uma.errors import BadRequest
from uma.types import FillIn

BLOCK = 4000
"""Half of the maximum length (characters) of a word, for pre-tokenizers of llama.cpp that recurse; see `_cuts`."""

MIN_PIECE_CHARS = 16_384
"""Minimum length (characters) between two cuts of a text at its special tokens; see `Vocab._special_cuts`."""

SKIPPED_CHARS = 64
"""Characters skipped after a place that is not a cut: a check takes microseconds."""

MAX_UNUSED_TOKENS = 128
"""Maximum difference in size between vocabularies that count as equal: models of a family are padded differently."""

_WHITE_SPACE = " \t\n\r\v\f\u00a0\u3000"
_NO_BREAK = re.compile(r"\S*|\s*")

_READ_ON_DEMAND: int = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL: int = _READ_ON_DEMAND | lib.LLAMA_TOKEN_ATTR_USER_DEFINED

_ITERATIVE = frozenset(
    """
    llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5 gpt-2 phi-2
    gigachat mellum exaone4 mpt olmo jais trillion granite-docling starcoder refact command-r smollm codeshell exaone
    minerva-7b mellum2 qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2 qwen35 gemma4 kimi-k2
    """.split()  # noqa: SIM905  (a name a line would be a page)
)
"""Pre-tokenizers (`tokenizer.ggml.pre`) for which llama.cpp splits words iteratively, at any length."""


class Weights(Protocol):
    """The part of `Model` that its vocabulary needs."""

    @property
    def handle(self) -> int:
        """llama.cpp's pointer."""

    def retain(self) -> None:
        """Keep the weights loaded until `release`."""

    def release(self) -> None:
        """Undo `retain`."""


class Vocab:
    """The vocabulary of a `Model`, usable as long as that is open."""

    def __init__(self, model: Weights, pre_tokenizer: str) -> None:
        self._model = model
        self._handle: int = lib.llama_model_get_vocab(model.handle)
        self.n_tokens = int(lib.llama_vocab_n_tokens(self._handle))
        self.bos = int(lib.llama_vocab_bos(self._handle))
        """Token that begins a text; -1 where the model has none."""
        self.eos = int(lib.llama_vocab_eos(self._handle))
        """Token that ends a text; -1 where the model has none."""
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(self._handle))
        """Whether `add_special` puts `bos` in front."""
        self.sep = int(lib.llama_vocab_sep(self._handle))
        """Token that separates two texts; -1 where the model has none."""
        self.adds_eos = bool(lib.llama_vocab_get_add_eos(self._handle))
        """Whether `add_special` puts `eos` behind."""
        self.adds_sep = bool(lib.llama_vocab_get_add_sep(self._handle))
        """Whether a separator belongs between two texts."""
        self._recurses = (
            lib.llama_vocab_type(self._handle) == lib.LLAMA_VOCAB_TYPE_BPE and pre_tokenizer not in _ITERATIVE
        )
        self._pieces: dict[int, bytes] = {}
        self._shown: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._special_ids: tuple[int, ...] | None = None

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A block in which the handle stays valid, even if another thread closes the model."""
        self._model.retain()
        try:
            yield self._handle
        finally:
            self._model.release()

    @cached_property
    def eog_ids(self) -> npt.NDArray[np.int32]:
        """All tokens that end a generation (end of text, end of turn …), ascending."""
        is_eog = lib.llama_vocab_is_eog
        with self.opened() as handle:
            return np.array([token for token in range(self.n_tokens) if is_eog(handle, token)], np.int32)

    @cached_property
    def eog(self) -> frozenset[int]:
        """Ids that end a generation, as a set."""
        return frozenset(self.eog_ids.tolist())

    @property
    def bos_text(self) -> str:
        """Spelling of `bos`, as templates write it; empty where there is none."""
        return self.text_of(self.bos)

    @property
    def eos_text(self) -> str:
        """Spelling of `eos`; empty where there is none."""
        return self.text_of(self.eos)

    @cached_property
    def fill_in(self) -> FillIn | None:
        """Tokens for fill-in-the-middle; None where one of the three needed ones is missing."""
        with self.opened() as handle:
            prefix, suffix, middle, repository, file = (
                None if (token := int(read(handle))) < 0 else token
                for read in (
                    lib.llama_vocab_fim_pre,
                    lib.llama_vocab_fim_suf,
                    lib.llama_vocab_fim_mid,
                    lib.llama_vocab_fim_rep,
                    lib.llama_vocab_fim_sep,
                )
            )
        if prefix is None or suffix is None or middle is None:
            return None
        return FillIn(prefix, suffix, middle, repository, file)

    def text_of(self, token: int) -> str:
        """A token's spelling in the vocabulary, special tokens included; empty for -1."""
        if not 0 <= token < self.n_tokens:
            return ""
        with self.opened() as handle:
            spelling: bytes = lib.llama_vocab_get_text(handle, token)
        return spelling.decode("utf-8", "replace")

    def least_tokens(self, text: str) -> int:
        """A guaranteed lower bound on the number of tokens of a text; 0 where the vocabulary allows none.

        White space is not counted: some tokens absorb any amount of it beside them.
        """
        if not self._max_token_bytes:
            return 0
        return (len(text) - sum(map(text.count, _WHITE_SPACE))) // self._max_token_bytes

    @cached_property
    def _max_token_bytes(self) -> int:
        """Maximum bytes of text that one token can stand for; 0 where an unknown token can stand for any number.

        A token's spelling in the vocabulary has at least as many bytes as its text.
        """
        has_bytes = lib.llama_vocab_type(self._handle) in (lib.LLAMA_VOCAB_TYPE_BPE, lib.LLAMA_VOCAB_TYPE_SPM)
        if not has_bytes:
            return 0
        with self.opened() as handle:
            spellings = [lib.llama_vocab_get_text(handle, token) for token in range(self.n_tokens)]
        if lib.llama_vocab_type(self._handle) == lib.LLAMA_VOCAB_TYPE_BPE:
            # A byte that the vocabulary lacks is dropped from the text.
            single = {spelling for spelling in spellings if len(spelling.decode("utf-8", "replace")) == 1}
            if len(single) < 256:
                return 0
        return max(4, *map(len, spellings))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> npt.NDArray[np.int32]:
        """Token ids of the text.

        `add_special` adds the tokens around it that the model's metadata asks for. `parse_special` parses spellings of
        special tokens in the text as these tokens, which only trusted text such as a rendered template may have. Runs
        without the GIL, so long texts belong in a thread. Raises `BadRequest` for a lone surrogate.
        """
        cuts = set(_cuts(text) if self._recurses and len(text) > 2 * BLOCK else ())
        if len(text) > 2 * MIN_PIECE_CHARS:
            cuts.update(self._special_cuts(text, parse_special))
        if not cuts:
            return self._tokenize(text, add_special, parse_special)
        pieces = [text[start:stop] for start, stop in pairwise([0, *sorted(cuts), len(text)])]
        inner = [self._tokenize(piece, False, parse_special) for piece in pieces]
        around = self._tokenize("", add_special, False)
        n_before = int(self.adds_bos and len(around) > 0)
        return np.concatenate([around[:n_before], *inner, around[n_before:]])

    def _special_cuts(self, text: str, parse_special: bool) -> Iterator[int]:
        """Places of special tokens at which a text can be cut, at least `MIN_PIECE_CHARS` apart.

        llama.cpp takes time quadratic in the number of special tokens of a text: a megabyte of them took minutes of a
        thread that other requests wait for.
        """
        # Not at a token that absorbs the blanks before it.
        unread = lib.LLAMA_TOKEN_ATTR_LSTRIP | (0 if parse_special else _READ_ON_DEMAND)
        special = self._special
        lengths = sorted({len(spelling) for spelling in special})
        begins = {spelling for spelling, attributes in special.items() if not attributes & unread}
        if not begins:
            return
        heads, at = re.compile("|".join({re.escape(spelling[:2]) for spelling in begins})), MIN_PIECE_CHARS
        while (head := heads.search(text, at)) is not None:
            place = head.start()
            before = range(max(0, place - lengths[-1] + 1), place)
            is_cut = any(text[place : place + length] in begins for length in lengths) and not any(
                start + length > place and text[start : start + length] in special
                for start in before
                for length in lengths
            )
            if is_cut:
                yield place
            at = place + (MIN_PIECE_CHARS if is_cut else SKIPPED_CHARS)

    @cached_property
    def _special(self) -> dict[str, int]:
        """Attributes of the tokens that llama.cpp searches for in a text first, by their spelling."""
        read = lib.llama_vocab_get_attr
        with self.opened() as handle:
            attributes = {token: int(read(handle, token)) for token in range(self.n_tokens)}
        special = {token: its for token, its in attributes.items() if its & _SPECIAL}
        return {spelling: its for token, its in special.items() if (spelling := self.text_of(token))}

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> npt.NDArray[np.int32]:
        data = encode(text)
        # No token is shorter than a byte. 16 more are for `add_special` and a leading space.
        tokens = np.empty(len(data) + 16, np.int32)
        count = self._tokenize_into(data, tokens, add_special, parse_special)
        if count < 0:
            tokens = np.empty(-count, np.int32)
            count = self._tokenize_into(data, tokens, add_special, parse_special)
        return tokens[:count].copy()

    def _tokenize_into(self, data: bytes, tokens: npt.NDArray[np.int32], add_special: bool, parse_special: bool) -> int:
        pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        with self.opened() as handle:
            return int(lib.llama_tokenize(handle, data, len(data), pointer, len(tokens), add_special, parse_special))

    def piece(self, token: int) -> bytes:
        """A token's bytes, possibly a part of a character; empty for control and unknown tokens, and pictures (below
        0).
        """
        if token < 0:
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def pieces(self) -> list[bytes]:
        """Bytes of every token, as `piece` returns them: a sixth of a second for 128,000 tokens. Not cached: most
        tokens are never used, and 262,000 take 13 MiB.
        """
        size = 64
        buffer, read = ctypes.create_string_buffer(size), lib.llama_token_to_piece
        pieces: list[bytes] = []
        with self.opened() as handle:
            for token in range(self.n_tokens):
                length = read(handle, token, buffer, size, 0, False)
                pieces.append(buffer.raw[:length] if length >= 0 else self.piece(token))
        if self._special_ids is None:
            self._special_ids = tuple(token for token, piece in enumerate(pieces) if self._is_special(token, piece))
        return pieces

    def shown(self, token: int) -> tuple[str, tuple[int, ...]]:
        """A token alone, as text and as bytes: special ones by their spelling, parts of characters as U+FFFD."""
        shown = self._shown.get(token)
        if shown is None:
            data = self.spelled(token)
            shown = self._shown[token] = (data.decode("utf-8", "replace"), tuple(data))
        return shown

    def spelled(self, token: int) -> bytes:
        """A token's bytes as `piece` returns them, and special ones by their spelling."""
        return self.piece(token) or self.text_of(token).encode()

    def difference(self, other: Vocab) -> str | None:
        """First token that means something else in another vocabulary, as a message; None where all mean the same.

        Unused tokens at the end do not count, nor do control tokens: fine-tuned models add and rename some. Reads both
        vocabularies: a tenth of a second for 100,000 tokens.
        """
        if lib.llama_vocab_type(self._handle) != lib.llama_vocab_type(other._handle):
            return "they have tokenizers of different kinds"
        if abs(self.n_tokens - other.n_tokens) > MAX_UNUSED_TOKENS:
            return f"{other.n_tokens:,} tokens, not {self.n_tokens:,}"
        with self.opened() as mine, other.opened() as theirs:
            for token in range(min(self.n_tokens, other.n_tokens)):
                if lib.llama_vocab_get_text(mine, token) == lib.llama_vocab_get_text(theirs, token):
                    continue
                if not (lib.llama_vocab_is_control(mine, token) and lib.llama_vocab_is_control(theirs, token)):
                    return f"token {token} is {other.text_of(token)!r}, not {self.text_of(token)!r}"
        return None

    def is_user_defined(self, token: int) -> bool:
        """Whether a token was added to the vocabulary as it is spelled, such as `<tool_call>`."""
        with self.opened() as handle:
            return bool(lib.llama_vocab_get_attr(handle, token) & lib.LLAMA_TOKEN_ATTR_USER_DEFINED)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Tokens that are not part of a text: control tokens, and user-defined ones that look like them. The first call
        takes as long as `pieces`, unless that was called.
        """
        if self._special_ids is None:
            self.pieces()
        return self._special_ids or ()

    def _is_special(self, token: int, piece: bytes) -> bool:
        return not piece or (piece.startswith(b"<") and piece.endswith(b">") and self.is_user_defined(token))

    def _read_piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            with self.opened() as handle:
                length = int(lib.llama_token_to_piece(handle, token, buffer, size, 0, False))
            if length >= 0:
                return buffer.raw[:length]
            size = -length


def _cuts(text: str) -> list[int]:
    """Places to cut a text, so that no run of white space, or of other characters, is as long as two blocks.

    For most pre-tokenizers llama.cpp splits text into words by `std::regex`, which recurses for each character of a
    word: at some 25,000 it overflows a thread's stack and crashes the process. So such words are tokenized in pieces.
    Ordinary text has no cuts, and is tokenized exactly as llama.cpp does.
    """
    starts = range(0, len(text) - BLOCK + 1, BLOCK)
    solid = [start for start in starts if _NO_BREAK.fullmatch(text, start, start + BLOCK)]
    return sorted({cut for start in solid for cut in (start, start + BLOCK) if 0 < cut < len(text)})


def encode(text: str) -> bytes:
    """UTF-8 of a prompt. Raises `BadRequest` for a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest.at(
            "prompt", f"character {error.start} is half of a surrogate pair ({text[error.start]!r}), which is no text"
        ) from None
