"""A projector (mmproj file), which turns pictures and sounds into embeddings that a model reads instead of tokens.

It wraps llama.cpp's libmtmd. A `Projector` owns a context of it; a prompt consists of `TextPiece` and `Picture`. The
calls are those of llama-server, so the tokens are the same. In this module sounds are pictures, too: they differ only
in decoding, and libmtmd divides a long sound into several.
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
"""Length of the random part of a marker, so that users cannot write the text that stands for a picture."""
BREAK_NODES = 4
"""Nodes of a projector's graph that are computed without a break: on few cores a large matrix product takes a fraction
of a second, and all other nodes nearly nothing."""
MROPE_POSITIONS = 4
"""Numbers in a token's position, with M-RoPE."""
ALIGNED_KIND, BLOCK = "deepseek4v", 4
"""Kind of projector whose pictures are aligned to blocks of tokens, with padding before them."""
COUNTING_KIND = "hunyuanvl"
"""Kind of projector with a fourth number in positions: how many of the prompt's pictures come before."""
IDENTITY_BYTES = 2**20
"""Bytes at the beginning and the end of a projector's file that identify it."""


@attrs.frozen
class Pixels:
    """A decoded picture: three bytes for each pixel, row by row."""

    id: str
    """Hash of its file."""
    width: int
    height: int
    data: bytes


@attrs.frozen
class Samples:
    """A decoded sound: 32-bit floats, `SAMPLE_RATE` a second."""

    id: str
    """Hash of its file."""
    count: int
    data: bytes


@attrs.frozen
class TextPiece:
    """A piece of a prompt that consists of tokens."""

    tokens: npt.NDArray[np.int32]


class Picture:
    """A piece of a prompt that is a picture or a sound, or a part of one. Any thread can use it, one at a time."""

    def __init__(self, handle: int) -> None:
        """Own a copy of a chunk that belongs to libmtmd."""
        self._own(lib.mtmd_input_chunk_copy(handle))
        self.is_sound = lib.mtmd_input_chunk_get_type(handle) == lib.MTMD_INPUT_CHUNK_TYPE_AUDIO
        self.n_tokens = int(lib.mtmd_input_chunk_get_n_tokens(handle))
        self.n_positions = int(lib.mtmd_input_chunk_get_n_pos(handle))
        """Number of positions that it takes: with M-RoPE fewer than tokens."""
        self.embedding: Embedding | None = None
        """Result of `Projector.encode`."""

    def _own(self, handle: int | None) -> None:
        if not handle:
            raise MemoryError("no memory for a picture")
        self.handle = handle
        self._finalizer = weakref.finalize(self, lib.mtmd_input_chunk_free, handle)

    def forget_pixels(self) -> None:
        """Free its pixels once it is encoded, and keep only its shape."""
        old, placeholder = self._finalizer, lib.mtmd_input_chunk_get_placeholder(self.handle)
        self._own(placeholder)
        old()


class Projector(Closing):
    """Owner of a context of libmtmd. Any thread can `prepare`; `encode` and `decode` belong to one thread at a time.

    Close it before the model.
    """

    def __init__(
        self, path: Path, model: Model, *, threads: int = 0, uses_gpu: bool = True, is_tried: bool = False
    ) -> None:
        """Load the projector for `model`. Unless it `is_tried`, it is first loaded in a child process, which it can
        crash. Raises `ModelError`.
        """
        self.path = path
        self.model = model
        self._handle: int | None = None
        backend.start()
        lib.mtmd_helper_log_set(CALLBACK, None)
        mark = LOG.mark
        self.marker = f"__media_{secrets.token_hex(MARKER_BYTES)}__"
        """Text that stands for a picture in a prompt. Templates that write JSON do not escape it."""
        params = lib.mtmd_context_params_default()
        params.use_gpu = uses_gpu
        params.print_timings = False
        params.n_threads = threads or backend.core_count()
        params.media_marker = self.marker.encode()
        self.is_cut = not (uses_gpu and backend.has_gpu())
        """Whether `encode` has breaks. A GPU encodes without: a break would cost more than the nodes between two of
        them."""
        self._between: Callable[[], bool] = _go_on
        self._nodes, self._is_whole = 0, True
        self._callback = ggml_backend_sched_eval_callback(self._on_node)
        if self.is_cut:
            params.cb_eval = self._callback
        params.warmup = True  # allocates compute buffers before a context takes the free memory; computes nothing
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
        """Whether positions consist of several numbers (M-RoPE), so that many tokens of a picture share the first."""
        figures = header.read(path).metadata
        kinds = {figures.get(f"clip.{of}projector_type") for of in ("vision.", "")}
        self._counts_pictures = COUNTING_KIND in kinds
        self.block = BLOCK if ALIGNED_KIND in kinds else 1
        """Size of the blocks that pictures are aligned to."""

    @property
    def handle(self) -> int:
        """libmtmd's pointer. Raises `ValueError` after `close`."""
        if self._handle is None:
            raise ValueError(f"{self.path}: the projector is closed")
        return self._handle

    def prepare(self, file: Pixels | Samples, lead: int = 0) -> list[TextPiece | Picture]:
        """Pictures of a file, and the tokens that the model has around them. `lead` is the number of tokens before it
        in its `block`. Raises `BadRequest`.

        A prompt consists of text and the pieces of each file in order, because llama.cpp also tokenizes each text
        between two files by itself.
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
        """Compute a picture's embedding, and free its pixels. Takes a whole pass of the projector, without the GIL.
        Raises `BadRequest`, also where the embedding is not finite, because that would spoil the answers of all
        sequences that share the KV.

        If it `is_cut`, `between` is called after every `BREAK_NODES` nodes, in this thread, and can compute something
        else. It must not raise. Once it returns False, the rest is skipped. Returns whether the picture is encoded.
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

    def _on_node(self, _node: int, is_asked: bool, _data: int) -> bool:
        """Callback of llama.cpp, which asks for each node whether to make a break behind it, and in a break whether to
        go on.
        """
        if is_asked:
            self._nodes += 1
            return self._nodes % BREAK_NODES == 0
        self._is_whole = self._is_whole and self._between()
        return self._is_whole

    def attends_both_ways(self, picture: Picture) -> bool:
        """Whether its tokens also attend to later ones, so that one ubatch must hold all of them."""
        return bool(lib.mtmd_decode_use_non_causal(self.handle, picture.handle))

    def shares_positions(self, picture: Picture) -> bool:
        """Whether llama.cpp counts all its tokens at the position where it begins."""
        return self.uses_mrope and not picture.is_sound

    def decode(
        self, context: Context, picture: Picture, part: range, position: int, seq_id: int, before: int = 0
    ) -> int:
        """Compute a `part` of an encoded picture's tokens at the end of a sequence, in one batch. If the picture
        `attends_both_ways`, the part must be all tokens, and they must fit a ubatch. `before` is the number of pictures
        before it in the prompt. Returns what `Context.decode` does. What a failed call leaves in memory is at
        `position` and behind.
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
        """Position of each token; with M-RoPE four numbers for each, the first of which is the picture's place in the
        text.
        """
        if not self.shares_positions(picture):
            along = np.arange(position, position + len(part), dtype=np.int32)
            return np.tile(along, MROPE_POSITIONS if self.uses_mrope else 1)
        places = (lib.mtmd_decoder_pos * picture.n_tokens)()
        image = lib.mtmd_input_chunk_get_tokens_image(picture.handle)
        lib.mtmd_helper_image_get_decoder_pos(image, position, places)
        numbers = np.frombuffer(places, np.int32).reshape(-1, MROPE_POSITIONS)
        if self._counts_pictures:
            numbers[1:-1, 3] = before  # libmtmd says 0, because each file is prepared alone
        return np.ascontiguousarray(numbers[part.start : part.stop, [0, 2, 1, 3]].T).reshape(-1)  # time, y, x

    def close(self) -> None:
        """Free the context. Harmless when repeated."""
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
