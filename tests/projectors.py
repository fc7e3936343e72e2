"""Tiny projectors (mmproj files) with random weights, the models that see by them, and pictures: made in milliseconds.

    path = write_projector(folder / "mmproj.gguf")                     # LLaVA's: 16 tokens a picture, of any size
    path = write_projector(folder / "mmproj.gguf", kind="qwen2vl")     # Qwen2-VL's: more tokens for a larger picture
    path = write_seeing_model(folder / "model.gguf", kind="qwen2vl")   # a Qwen2-VL, with M-RoPE
    data = png(40, 30, seed=1)                                         # a picture as a file, of no library's making

What a model says of a picture is nonsense, but it depends on every pixel.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import gguf
import llama_cpp.mtmd_cpp as mtmd
import numpy as np
import numpy.typing as npt

from models import (
    CHATML,
    EMBED,
    FF,
    HEAD,
    HEADS,
    KV_HEADS,
    LAYERS,
    Tensors,
    finish,
    random_tensors,
    write_metadata,
    write_model,
    write_tokenizer,
)
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

Seeing = Literal["llava", "qwen2vl", "gemma3"]
"""Kinds of projectors; with the last a picture's tokens attend to later ones of it too."""
SEEING: tuple[Seeing, ...] = ("llava", "qwen2vl")

SIZE, PATCH, VISION, VISION_HEADS, VISION_FF, VISION_LAYERS = 56, 14, 32, 2, 48, 2
LLAVA_TOKENS = (SIZE // PATCH) ** 2


def write_seeing_model(
    path: Path, kind: Seeing, *, context_length: int = 2_048, chat_template: str | None = CHATML, seed: int = 0
) -> Path:
    """Write a text model that a projector of this kind fits, and return its path."""
    if kind == "llava":
        return write_model(path, context_length=context_length, chat_template=chat_template, seed=seed)
    writer = gguf.GGUFWriter(path, "qwen2vl")
    sections = {"qwen2vl.rope.dimension_sections": [4, 6, 6, 0]}
    write_metadata(writer, "attention", context_length, FF, sections)
    write_tokenizer(writer, "gpt2", "gpt-2", True, chat_template)
    tensors = random_tensors("attention", np.random.default_rng(seed))
    for index in range(LAYERS):
        for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            tensors[f"blk.{index}.attn_{name}.bias"] = np.zeros(rows, np.float32)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def write_projector(path: Path, kind: Seeing = "llava", *, embed: int = EMBED, seed: int = 0) -> Path:
    """Write a projector for models whose embedding has `embed` figures, and return its path."""
    writer, rng = gguf.GGUFWriter(path, "clip"), np.random.default_rng(seed)
    values: dict[str, Any] = {
        "general.type": "mmproj",
        "general.name": "Tiny projector",
        "general.file_type": 0,
        "clip.projector_type": {"llava": "mlp", "qwen2vl": "qwen2vl_merger", "gemma3": "gemma3"}[kind],
        "clip.vision.projector.scale_factor": 1,
        "clip.vision.image_size": SIZE,
        "clip.vision.patch_size": PATCH,
        "clip.vision.embedding_length": VISION,
        "clip.vision.feed_forward_length": VISION_FF,
        "clip.vision.block_count": VISION_LAYERS,
        "clip.vision.projection_dim": embed,
        "clip.vision.attention.head_count": VISION_HEADS,
    }
    for key, value in values.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.25, 0.25, 0.25])
    for name, tensor in _tensors(kind, embed, rng).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def _tensors(kind: Seeing, embed: int, rng: np.random.Generator) -> Tensors:
    merged = VISION if kind == "llava" else 4 * VISION
    tensors: Tensors = {"v.patch_embd.weight": _random(rng, VISION, 3, PATCH, PATCH)}
    if kind == "llava":
        tensors |= {
            "v.class_embd": _random(rng, VISION),
            "v.position_embd.weight": _random(rng, LLAVA_TOKENS + 1, VISION),
        }
        tensors |= _norm("v.pre_ln")
    elif kind == "gemma3":
        tensors |= {"v.patch_embd.bias": np.zeros(VISION, np.float32)} | _norm("v.post_ln")
        tensors["v.position_embd.weight"] = _random(rng, LLAVA_TOKENS, VISION)
    else:
        tensors["v.patch_embd.weight.1"] = _random(rng, VISION, 3, PATCH, PATCH)
        tensors |= _norm("v.post_ln")
    for index in range(VISION_LAYERS):
        layer = f"v.blk.{index}"
        tensors |= _norm(f"{layer}.ln1") | _norm(f"{layer}.ln2")
        for name in ("q", "k", "v", "out"):
            tensors |= _linear(rng, f"{layer}.attn_{name}", VISION, VISION)
        tensors |= _linear(rng, f"{layer}.ffn_up", VISION_FF, VISION) | _linear(
            rng, f"{layer}.ffn_down", VISION, VISION_FF
        )
    if kind == "gemma3":
        tensors["mm.soft_emb_norm.weight"] = np.ones(VISION, np.float32)
        return tensors | {"mm.input_projection.weight": _random(rng, VISION, embed)}
    return tensors | _linear(rng, "mm.0", VISION, merged) | _linear(rng, "mm.2", embed, VISION)


def _norm(name: str) -> Tensors:
    return {f"{name}.weight": np.ones(VISION, np.float32), f"{name}.bias": np.zeros(VISION, np.float32)}


def _linear(rng: np.random.Generator, name: str, rows: int, columns: int) -> Tensors:
    return {f"{name}.weight": _random(rng, rows, columns), f"{name}.bias": np.zeros(rows, np.float32)}


def _random(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    columns = int(np.prod(shape[1:])) or 1
    values: npt.NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32)
    return values * np.float32(2.0 / columns**0.5)


# Pictures


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A picture of random stripes as a PNG file."""
    rng = np.random.default_rng(seed)
    pixels = np.repeat(rng.integers(0, 256, (height, -(-width // 4), 3), np.uint8), 4, axis=1)[:, :width]
    return png_of(pixels)


def png_of(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels, `[height, width, 3]`, as a PNG file."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [_png_part(b"IHDR", header), _png_part(b"IDAT", zlib.compress(rows)), _png_part(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_header(width: int, height: int) -> bytes:
    """A PNG file that says it is so large, and has no pixel."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _png_part(b"IHDR", header) + _png_part(b"IDAT", zlib.compress(b""))


def _png_part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bmp(width: int, height: int, seed: int = 0) -> bytes:
    """A picture of random pixels as a BMP file."""
    stride = (3 * width + 3) // 4 * 4
    rows = np.random.default_rng(seed).integers(0, 256, (height, stride), np.uint8).tobytes()
    head = struct.pack("<2sIHHI", b"BM", 54 + len(rows), 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(rows), 0, 0, 0, 0) + rows


# What llama.cpp itself makes of it


class Reference:
    """A model and its projector by llama.cpp's own helpers, one prompt at a time: what llama-server does with one."""

    def __init__(self, model: Path, projector: Path) -> None:
        self._model = Model.load(model, n_gpu_layers=0)
        params = ContextParams(
            n_ctx=2_048, n_threads=1, n_threads_batch=1, flash_attn="off", cache_type_k="f32", cache_type_v="f32"
        )
        self._context = Context(self._model, params)
        settings = mtmd.mtmd_context_params_default()
        settings.n_threads, settings.warmup, settings.print_timings, settings.use_gpu = 1, False, False, False
        self._handle = mtmd.mtmd_init_from_file(str(projector).encode(), self._model.handle, settings)
        assert self._handle

    def continues(self, text: str, files: Sequence[bytes], count: int) -> tuple[int, ...]:
        """The likeliest next tokens, none of which ends the text. `MARKER` stands in it for each of the pictures."""
        self._context.clear()
        data = text.encode()
        given = mtmd.mtmd_input_text(data, len(data), True, True)
        chunks, position = mtmd.mtmd_input_chunks_init(), ctypes.c_int32(0)
        bitmaps = [self._bitmap(file) for file in files]
        array = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
        assert mtmd.mtmd_tokenize(self._handle, chunks, ctypes.byref(given), array, len(bitmaps)) == 0
        context = self._context.handle
        size = self._context.n_batch
        done = mtmd.mtmd_helper_eval_chunks(self._handle, context, chunks, 0, 0, size, True, ctypes.byref(position))
        assert done == 0
        for bitmap in bitmaps:
            mtmd.mtmd_bitmap_free(bitmap)
        mtmd.mtmd_input_chunks_free(chunks)
        found: list[int] = []
        batch = Batch(1)
        for step in range(count):
            row = self._context.logits(1)[0].copy()
            row[list(self._model.vocab.eog)] = -np.inf
            found.append(int(row.argmax()))
            batch.clear()
            batch.add_decode((found[-1],), (position.value + step,), (0,))
            assert self._context.decode(batch) == DONE
        return tuple(found)

    def text(self, text: str, files: Sequence[bytes], count: int) -> str:
        """The same as text."""
        found = b"".join(map(self._model.vocab.piece, self.continues(text, files, count)))
        return found.decode("utf-8", "replace")

    def _bitmap(self, file: bytes) -> int:
        source = ctypes.cast(ctypes.c_char_p(file), ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self._handle, source, len(file), False)
        assert bitmap
        return int(bitmap)

    def close(self) -> None:
        mtmd.mtmd_free(self._handle)
        self._context.close()
        self._model.close()


MARKER = mtmd.mtmd_default_marker().decode()
