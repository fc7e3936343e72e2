"""A projector (mmproj file): it turns pictures and sounds into embeddings that a model reads in the place of tokens.

llama.cpp's libmtmd does it. A `Projector` owns its context, a `Picture` one piece of a prompt, others are `TextPiece`.
What llama-server does with a picture is done by the same calls here, so its text is the same. A sound is a picture
here: it is told from one only where it is decoded, and libmtmd cuts a long one into several.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import llama_cpp.mtmd_cpp as lib
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_cpp import ggml_backend_sched_eval_callback, llama_model_n_embd_inp
from numpy import ctypeslib

from uma.closing import Closing
from uma.errors import BadRequest, ModelError
from uma.llama import backend, header, trial
from uma.llama.batch import EmbeddingBatch
from uma.llama.context import Context
from uma.llama.header import quoted
from uma.llama.log import CALLBACK, LOG
from uma.llama.media_process import SAMPLE_RATE
from uma.llama.model import Model

_log = logging.getLogger("uma.llama")

Embedding = npt.NDArray[np.float32]
"""`[tokens, figures]`."""

MARKER_BYTES = 16
"""Length of the secret in a marker: what stands for a picture in a prompt's text is nothing that a user can write."""
CUT_NODES = 4
"""Nodes of a projector's graph that are computed without a break: a large matrix product of it takes a fraction of a
second on few cores, and all the others nearly nothing."""
MROPE_POSITIONS = 4
"""Numbers that say where a token is, with M-RoPE."""
ALIGNED, BLOCK = "deepseek4v", 4
"""Kind of projector whose pictures are laid on blocks of so many tokens, with padding before them."""
COUNTED = "hunyuanvl"
"""Kind of projector for whose pictures a fourth number says how many of the prompt come before."""
IDENTITY_BYTES = 2**20
"""Bytes of a projector's file that are read at its beginning and its end to tell it from others."""


@attrs.frozen
class Pixels:
    """A decoded picture: three bytes a pixel, row by row."""

    id: str
    """The hash of its file."""
    width: int
    height: int
    data: bytes


@attrs.frozen
class Samples:
    """A decoded sound: numbers of 32 bits, `SAMPLE_RATE` a second."""

    id: str
    """The hash of its file."""
    count: int
    data: bytes


@attrs.frozen
class TextPiece:
    """A piece of a prompt that is tokens."""

    tokens: npt.NDArray[np.int32]


class Picture:
    """A piece of a prompt that is a picture or a sound, or a part of one. It can be used from any thread, one at a
    time.
    """

    def __init__(self, handle: int) -> None:
        """Own a copy of a chunk that belongs to libmtmd."""
        self._own(lib.mtmd_input_chunk_copy(handle))
        self.is_sound = lib.mtmd_input_chunk_get_type(handle) == lib.MTMD_INPUT_CHUNK_TYPE_AUDIO
        self.n_tokens = int(lib.mtmd_input_chunk_get_n_tokens(handle))
        self.n_positions = int(lib.mtmd_input_chunk_get_n_pos(handle))
        """Number of positions that it takes: with M-RoPE fewer than it has tokens."""
        self.embedding: Embedding | None = None
        """What `Projector.encode` has made of it."""

    def _own(self, handle: int | None) -> None:
        if not handle:
            raise MemoryError("no memory for a picture")
        self.handle = handle
        self._finalizer = weakref.finalize(self, lib.mtmd_input_chunk_free, handle)

    def forget_pixels(self) -> None:
        """Once it is encoded: keep what its shape says alone."""
        old, placeholder = self._finalizer, lib.mtmd_input_chunk_get_placeholder(self.handle)
        self._own(placeholder)
        old()


class Projector(Closing):
    """Owner of a context of libmtmd. `prepare` is safe in any thread; `encode` and `decode` belong to one at a time.

    Close it before the model.
    """

    def __init__(
        self, path: Path, model: Model, *, threads: int = 0, uses_gpu: bool = True, is_tried: bool = False
    ) -> None:
        """Load it beside the model that it is for, in a process that it can end first, unless it `is_tried`. Raises
        `ModelError`.
        """
        self.path = path
        self.model = model
        self._handle: int | None = None
        backend.start()
        lib.mtmd_helper_log_set(CALLBACK, None)
        mark = LOG.mark
        self.marker = f"__media_{secrets.token_hex(MARKER_BYTES)}__"
        """What stands for a picture in a prompt's text. A template that writes JSON leaves it as it is."""
        params = lib.mtmd_context_params_default()
        params.use_gpu = uses_gpu
        params.print_timings = False
        params.n_threads = threads or backend.core_count()
        params.media_marker = self.marker.encode()
        self.is_cut = not (uses_gpu and backend.has_gpu())
        """Whether `encode` has breaks. A GPU encodes without: there each would cost more than the nodes between two."""
        self._between: Callable[[], bool] = _go_on
        self._nodes, self._is_whole = 0, True
        self._callback = ggml_backend_sched_eval_callback(self._has_come_to)
        if self.is_cut:
            params.cb_eval = self._callback
        params.warmup = (
            True  # memory for computing is laid out, before a context takes what is free; nothing is computed
        )
        try:
            self.identity = _identity(path)
        except OSError as error:
            raise ModelError(f"{path}: the projector cannot be read: {error.strerror or error}") from None
        if not is_tried:
            trial.check_projector(path, model.path)
        model.retain()
        self._handle = lib.mtmd_init_from_file(os.fsencode(path), model.handle, params)
        if not self._handle:
            model.release()
            raise ModelError(f"{path}: cannot be loaded as a projector for {model.path.name}{quoted(mark)}")
        self.sees = bool(lib.mtmd_support_vision(self._handle))
        self.hears = bool(lib.mtmd_support_audio(self._handle))
        if self.hears and (rate := lib.mtmd_get_audio_sample_rate(self._handle)) != SAMPLE_RATE:
            _log.warning("%s: takes no sounds: at %d samples a second they are not decoded here", path, rate)
            self.hears = False
        self.uses_mrope = bool(lib.mtmd_decode_use_mrope(self._handle))
        """Whether a token's position is three numbers, so that of a picture's tokens many have the same."""
        figures = header.read(path).metadata
        kinds = {figures.get(f"clip.{of}projector_type") for of in ("vision.", "")}
        self._counts_pictures = COUNTED in kinds
        self.block = BLOCK if ALIGNED in kinds else 1
        """Tokens of which a picture's place in a prompt is told from a multiple."""

    @property
    def handle(self) -> int:
        """libmtmd's pointer. Raises `ValueError` after `close`."""
        if self._handle is None:
            raise ValueError(f"{self.path}: the projector is closed")
        return self._handle

    def prepare(self, file: Pixels | Samples, lead: int = 0) -> list[TextPiece | Picture]:
        """What a file is in a prompt: pictures, and the tokens that the model has around them, where so many stand
        before it in its `block`. Raises `BadRequest`.

        llama.cpp's prompt is text and these one behind another: it reads each text between two files by itself.
        """
        vocab = self.model.vocab
        before = vocab.text_of(vocab.special_ids[0]) if lead else ""
        text = (before * lead + self.marker).encode()
        given = lib.mtmd_input_text(text, len(text), False, True)
        with _bitmap(file) as bitmap, _chunks() as chunks:
            array = (ctypes.c_void_p * 1)(bitmap)
            if lib.mtmd_tokenize(self.handle, chunks, ctypes.byref(given), array, 1):
                raise BadRequest("a picture or a sound of this request cannot be prepared for this model")
            pieces = [_piece(lib.mtmd_input_chunks_get(chunks, at)) for at in range(lib.mtmd_input_chunks_size(chunks))]
        if lead and isinstance(first := pieces[0], TextPiece):
            pieces[0] = TextPiece(first.tokens[lead:])
        return pieces

    def encode(self, picture: Picture, between: Callable[[], bool] | None = None) -> bool:
        """Make a picture's embedding; its pixels go. Takes a projector's whole pass, without the GIL. Raises
        `BadRequest`, also where it is no numbers: these would spoil the answers of all who share the KV.

        Where it `is_cut`, `between` is called every `CUT_NODES` nodes, in this thread, which can compute something else
        there. It must not raise. Once it is False, the rest is left out; returns whether the picture is encoded.
        """
        self._between, self._nodes, self._is_whole = between or _go_on, 0, True
        try:
            failed = lib.mtmd_encode_chunk(self.handle, picture.handle)
        finally:
            self._between = _go_on
        if not self._is_whole:
            return False
        if failed:
            raise BadRequest("a picture or a sound of this request cannot be encoded by this projector")
        width = int(llama_model_n_embd_inp(self.model.handle))
        shape = (picture.n_tokens, width)
        embedding = ctypeslib.as_array(lib.mtmd_get_output_embd(self.handle), shape).copy()
        if not np.isfinite(embedding).all():
            raise BadRequest("what this projector makes of a picture or a sound of this request is no numbers")
        picture.embedding = embedding
        picture.forget_pixels()
        return True

    def _has_come_to(self, _node: int, is_asked: bool, _data: int) -> bool:
        """Callback of llama.cpp, which asks of a node whether there is to be a break behind it, and in a break whether
        to go on.
        """
        if is_asked:
            self._nodes += 1
            return self._nodes % CUT_NODES == 0
        self._is_whole = self._is_whole and self._between()
        return self._is_whole

    def attends_both_ways(self, picture: Picture) -> bool:
        """Whether its tokens attend to later ones too: then one ubatch must hold all of them."""
        return bool(lib.mtmd_decode_use_non_causal(self.handle, picture.handle))

    def shares_positions(self, picture: Picture) -> bool:
        """Whether all its tokens stand where it begins, for what llama.cpp keeps of a sequence."""
        return self.uses_mrope and not picture.is_sound

    def decode(
        self, context: Context, picture: Picture, part: range, position: int, seq_id: int, before: int = 0
    ) -> int:
        """Compute a `part` of the tokens of a picture that is encoded at the end of a sequence, in one batch: all of
        them where it `attends_both_ways`, and then they fit a ubatch. So many come `before` it in its prompt. Returns
        what `Context.decode` does; what a failed one leaves in memory lies at `position` and behind.
        """
        if picture.embedding is None:
            raise ValueError("picture: is not encoded")
        if not self.attends_both_ways(picture):
            positions = self._positions(picture, part, position, before)
            embeddings = picture.embedding[part.start : part.stop]
            return context.decode_embeddings(EmbeddingBatch(embeddings, positions, seq_id))
        if part != range(picture.n_tokens):
            raise ValueError(f"part: {part} of a picture that cannot be cut")
        after = ctypes.c_int32(0)
        pointer = picture.embedding.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        nothing = lib.mtmd_helper_post_decode_callback()
        arguments = position, seq_id, context.n_batch, ctypes.byref(after), nothing, None
        return context.computing(
            len(part),
            lambda: lib.mtmd_helper_decode_image_chunk(
                self.handle, context.handle, picture.handle, pointer, *arguments
            ),
        )

    def _positions(self, picture: Picture, part: range, position: int, before: int) -> npt.NDArray[np.int32]:
        """Position of each token, or with M-RoPE four, of which the picture's place in the text is the first."""
        if not self.shares_positions(picture):
            along = np.arange(position, position + len(part), dtype=np.int32)
            return np.tile(along, MROPE_POSITIONS if self.uses_mrope else 1)
        places = (lib.mtmd_decoder_pos * picture.n_tokens)()
        image = lib.mtmd_input_chunk_get_tokens_image(picture.handle)
        lib.mtmd_helper_image_get_decoder_pos(image, position, places)
        numbers = np.frombuffer(places, np.int32).reshape(-1, MROPE_POSITIONS)
        if self._counts_pictures:
            numbers[1:-1, 3] = before  # of what is prepared alone libmtmd says none
        return np.ascontiguousarray(numbers[part.start : part.stop, [0, 2, 1, 3]].T).reshape(-1)  # time, y, x

    def close(self) -> None:
        """Free it. Harmless when repeated."""
        handle, self._handle = self._handle, None
        if handle:
            lib.mtmd_free(handle)
            self.model.release()


def _go_on() -> bool:
    return True


@contextmanager
def _bitmap(file: Pixels | Samples) -> Iterator[int]:
    size = 3 * file.width * file.height if isinstance(file, Pixels) else 4 * file.count
    if len(file.data) != size:
        raise ValueError(f"data: {len(file.data):,} bytes are not {size:,}")
    source = ctypes.c_char_p(file.data)
    if isinstance(file, Pixels):
        pixels = ctypes.cast(source, ctypes.POINTER(ctypes.c_uint8))
        handle = lib.mtmd_bitmap_init(file.width, file.height, pixels)
    else:
        handle = lib.mtmd_bitmap_init_from_audio(file.count, ctypes.cast(source, ctypes.POINTER(ctypes.c_float)))
    if not handle:
        raise MemoryError("no memory for a picture or a sound")
    try:
        yield int(handle)
    finally:
        lib.mtmd_bitmap_free(handle)


@contextmanager
def _chunks() -> Iterator[int]:
    handle = lib.mtmd_input_chunks_init()
    if not handle:
        raise MemoryError("no memory for a prompt's pieces")
    try:
        yield handle
    finally:
        lib.mtmd_input_chunks_free(handle)


def _piece(chunk: int) -> TextPiece | Picture:
    if lib.mtmd_input_chunk_get_type(chunk) != lib.MTMD_INPUT_CHUNK_TYPE_TEXT:
        return Picture(chunk)
    count = ctypes.c_size_t(0)
    tokens = lib.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
    return TextPiece(ctypeslib.as_array(tokens, (count.value,)).copy() if count.value else np.zeros(0, np.int32))


def _identity(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        for offset in (0, max(0, size - IDENTITY_BYTES)):
            file.seek(offset)
            digest.update(file.read(IDENTITY_BYTES))
    return digest.hexdigest()
