"""Tiny projectors (mmproj files) with random weights, models that see and hear by them, pictures and sounds: made in
milliseconds.

    path = write_projector(folder / "mmproj.gguf")                     # LLaVA's: 16 tokens a picture, of any size
    path = write_projector(folder / "mmproj.gguf", kind="qwen2vl")     # Qwen2-VL's: more tokens for a larger picture
    path = write_seeing_model(folder / "model.gguf", kind="qwen2vl")   # a Qwen2-VL, with M-RoPE
    path = write_seeing_model(folder / "model.gguf", kind="qwen3vl")   # a Qwen3.5: the same with recurrent states
    path = write_projector(folder / "mmproj.gguf", hears="ultravox")   # a Whisper encoder: 15 tokens for 30 s
    path = write_projector(folder / "mmproj.gguf", None, hears="gemma4ua")  # no encoder, no eyes: 25 tokens a second
    data = png(40, 30, seed=1)                                         # a picture as a file, of no library's making
    data = wav(0.7, seed=1)                                            # a sound

What a model says of a picture is nonsense, but it depends on every pixel, and what of a sound on every sample.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gguf
import llama_cpp.mtmd_cpp as mtmd
import numpy as np
import numpy.typing as npt
from hybrids import write_hybrid

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

Seeing = Literal["llava", "qwen2vl", "hunyuanvl", "gemma3", "deepseek4v", "lfm2", "qwen3vl"]
"""Kinds of projectors; with `gemma3` a picture's tokens attend to later ones of it too."""
SEEING: tuple[Seeing, ...] = ("llava", "qwen2vl")
HYBRID_SEEING: tuple[Seeing, ...] = ("lfm2", "qwen3vl")
"""Of models with recurrent states: without M-RoPE, and with it."""

Hearing = Literal["ultravox", "gemma4ua"]
"""Kinds of projectors for sounds: with a Whisper encoder, and without any."""
HEARING: tuple[Hearing, ...] = ("ultravox", "gemma4ua")

SIZE, PATCH, VISION, VISION_HEADS, VISION_FF, VISION_LAYERS = 56, 14, 32, 2, 48, 2
LLAVA_TOKENS = (SIZE // PATCH) ** 2
MELS, WINDOW, STACK, FRAME = 80, 1_500, 100, 640
"""Of Whisper: figures of a spectrum, positions of 30 seconds, and how many of them are one token; of the other kind,
samples of a token."""


def write_seeing_model(
    path: Path, kind: Seeing, *, context_length: int = 2_048, chat_template: str | None = CHATML, seed: int = 0
) -> Path:
    """Write a text model that a projector of this kind fits, and return its path."""
    if kind in HYBRID_SEEING:
        return write_hybrid(path, "lfm2" if kind == "lfm2" else "qwen35", context_length=context_length)
    if kind in ("llava", "gemma3", "deepseek4v"):
        return write_model(path, context_length=context_length, chat_template=chat_template, seed=seed)
    arch, lengths = ("hunyuan_vl", [4, 4, 4, 4]) if kind == "hunyuanvl" else ("qwen2vl", [4, 6, 6, 0])
    writer = gguf.GGUFWriter(path, arch)
    sections: dict[str, Any] = {f"{arch}.rope.dimension_sections": lengths}
    if kind == "hunyuanvl":
        sections["hunyuan_vl.rope.freq_base"] = 2.0  # the fourth position counts pictures, and must tell
    write_metadata(writer, "attention", context_length, FF, sections)
    write_tokenizer(writer, "gpt2", "gpt-2", True, chat_template)
    tensors = random_tensors("attention", np.random.default_rng(seed))
    for index in range(LAYERS):
        for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            tensors[f"blk.{index}.attn_{name}.bias"] = np.zeros(rows, np.float32)
        for name in ("q", "k") if kind == "hunyuanvl" else ():
            tensors[f"blk.{index}.attn_{name}_norm.weight"] = np.ones(HEAD, np.float32)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def write_projector(
    path: Path,
    kind: Seeing | None = "llava",
    *,
    hears: Hearing | None = None,
    embed: int = EMBED,
    seed: int = 0,
    scale: float = 1,
    figures: Mapping[str, int] | None = None,
) -> Path:
    """Write a projector for models whose embedding has `embed` figures, and return its path. `scale` is a factor of all
    weights; `figures` are what its header says otherwise than it should.
    """
    writer, rng = gguf.GGUFWriter(path, "clip"), np.random.default_rng(seed)
    values: dict[str, Any] = {"general.type": "mmproj", "general.name": "Tiny projector", "general.file_type": 0}
    tensors: Tensors = {}
    if kind is not None:
        of_kind = {"llava": "mlp", "qwen2vl": "qwen2vl_merger", "qwen3vl": "qwen3vl_merger"}.get(kind, kind)
        values |= {"clip.vision.projector_type": of_kind}
        values["clip.vision.projector.scale_factor"] = 2 if kind in ("lfm2", "deepseek4v") else 1
        values |= {"clip.vision.image_size": SIZE, "clip.vision.patch_size": PATCH} | _encoder("vision", embed)
        if kind in ("hunyuanvl", "deepseek4v"):
            values |= {"clip.vision.image_min_pixels": 4 * PATCH**2, "clip.vision.image_max_pixels": 64 * PATCH**2}
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
        writer.add_array("clip.vision.image_std", [0.25, 0.25, 0.25])
        tensors |= _tensors(kind, embed, rng)
    if hears is not None:
        values |= {"clip.audio.projector_type": hears, "clip.audio.projector.stack_factor": STACK}
        values |= {"clip.audio.num_mel_bins": MELS if hears == "ultravox" else FRAME} | _encoder("audio", embed)
        if hears == "gemma4ua":
            values["clip.audio.block_count"] = 0
        writer.add_bool("clip.has_audio_encoder", True)
        tensors |= _sound_tensors(hears, embed, rng)
    for key, value in (values | dict(figures or {})).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor * np.float32(scale))
    finish(writer)
    return path


def _encoder(of: str, embed: int) -> dict[str, Any]:
    return {
        f"clip.{of}.embedding_length": VISION,
        f"clip.{of}.feed_forward_length": VISION_FF,
        f"clip.{of}.block_count": VISION_LAYERS,
        f"clip.{of}.projection_dim": embed,
        f"clip.{of}.attention.head_count": VISION_HEADS,
        f"clip.{of}.attention.layer_norm_epsilon": 1e-5,
    }


def _sound_tensors(kind: Hearing, embed: int, rng: np.random.Generator) -> Tensors:
    if kind == "gemma4ua":
        return {"mm.a.input_projection.weight": _random(rng, embed, FRAME)}
    stacked = VISION * STACK
    tensors: Tensors = {
        "a.conv1d.1.weight": _random(rng, VISION, MELS, 3),
        "a.conv1d.1.bias": np.zeros((VISION, 1), np.float32),
        "a.conv1d.2.weight": _random(rng, VISION, VISION, 3),
        "a.conv1d.2.bias": np.zeros((VISION, 1), np.float32),
        "a.position_embd.weight": _random(rng, WINDOW, VISION),
        "mm.a.norm_pre.weight": np.ones(stacked, np.float32),
        "mm.a.mlp.1.weight": _random(rng, 2 * VISION_FF, stacked),
        "mm.a.norm_mid.weight": np.ones(VISION_FF, np.float32),
        "mm.a.mlp.2.weight": _random(rng, embed, VISION_FF),
    }
    tensors |= _layers(rng, "a")
    for index in range(VISION_LAYERS):
        del tensors[f"a.blk.{index}.attn_k.bias"]
    return tensors | _norm("a.post_ln")


def _layers(rng: np.random.Generator, of: str) -> Tensors:
    tensors: Tensors = {}
    for index in range(VISION_LAYERS):
        layer = f"{of}.blk.{index}"
        tensors |= _norm(f"{layer}.ln1") | _norm(f"{layer}.ln2")
        for name in ("q", "k", "v", "out"):
            tensors |= _linear(rng, f"{layer}.attn_{name}", VISION, VISION)
        tensors |= _linear(rng, f"{layer}.ffn_up", VISION_FF, VISION) | _linear(
            rng, f"{layer}.ffn_down", VISION, VISION_FF
        )
    return tensors


def _tensors(kind: Seeing, embed: int, rng: np.random.Generator) -> Tensors:
    merged = VISION if kind == "llava" else 4 * VISION
    tensors: Tensors = {"v.patch_embd.weight": _random(rng, VISION, 3, PATCH, PATCH)}
    if kind == "llava":
        tensors |= {
            "v.class_embd": _random(rng, VISION),
            "v.position_embd.weight": _random(rng, LLAVA_TOKENS + 1, VISION),
        }
        tensors |= _norm("v.pre_ln")
    else:
        tensors |= _norm("v.post_ln")
    if kind == "hunyuanvl":
        return tensors | _hunyuan_tensors(embed, rng)
    if kind in ("qwen2vl", "qwen3vl"):
        tensors["v.patch_embd.weight.1"] = _random(rng, VISION, 3, PATCH, PATCH)
    if kind in ("gemma3", *HYBRID_SEEING):
        tensors["v.patch_embd.bias"] = np.zeros(VISION, np.float32)
        tensors["v.position_embd.weight"] = _random(rng, LLAVA_TOKENS, VISION)
    tensors |= _layers(rng, "v")
    if kind == "qwen3vl":
        for index in range(VISION_LAYERS):
            tensors |= _linear(rng, f"v.blk.{index}.attn_qkv", 3 * VISION, VISION)
    if kind == "deepseek4v":
        marks = ("image_newline", *(f"token_embd.img_{name}" for name in ("start", "end", "pad")))
        tensors |= {f"v.{name}": _random(rng, embed) for name in marks}
    if kind == "gemma3":
        tensors["mm.soft_emb_norm.weight"] = np.ones(VISION, np.float32)
        return tensors | {"mm.input_projection.weight": _random(rng, VISION, embed)}
    first = "mm.1" if kind in ("lfm2", "deepseek4v") else "mm.0"
    return tensors | _linear(rng, first, VISION, merged) | _linear(rng, "mm.2", embed, VISION)


def _hunyuan_tensors(embed: int, rng: np.random.Generator) -> Tensors:
    tensors = {
        "v.position_embd.weight": _random(rng, LLAVA_TOKENS, VISION),
        "v.image_newline": _random(rng, 4 * VISION),
        "mm.0.weight": _random(rng, 2 * VISION, VISION, 2, 2),
        "mm.0.bias": np.zeros(2 * VISION, np.float32),
        "mm.2.weight": _random(rng, 4 * VISION, 2 * VISION, 1, 1),
        "mm.2.bias": np.zeros(4 * VISION, np.float32),
        "mm.pre_norm.weight": np.ones(VISION, np.float32),
        "mm.post_norm.weight": np.ones(embed, np.float32),
        "mm.image_begin": _random(rng, embed),
        "mm.image_end": _random(rng, embed),
    }
    return tensors | _layers(rng, "v") | _linear(rng, "mm.model.fc", embed, 4 * VISION)


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


# Sounds


def wav(seconds: float, seed: int = 0, *, rate: int = 22_050, channels: int = 2) -> bytes:
    """A sound of some tones and noise as a WAV file."""
    rng = np.random.default_rng(seed)
    count = int(seconds * rate)
    time = np.arange(count)[:, None] / rate
    tones = sum(np.sin(2 * np.pi * float(each) * time) for each in rng.uniform(100, 3_000, 3))
    noise = rng.standard_normal((count, channels))
    samples = (4_000 * (tones + 0.2 * noise)).astype("<i2").tobytes()
    head = struct.pack("<HHIIHH", 1, channels, rate, 2 * channels * rate, 2 * channels, 16)
    parts = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WAVE" + parts


def float_wav(samples: npt.NDArray[np.float32], rate: int = 16_000) -> bytes:
    """These samples as a WAV file of floats."""
    data = samples.astype("<f4").tobytes()
    head = struct.pack("<HHIIHH", 3, 1, rate, 4 * rate, 4, 32)
    parts = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WAVE" + parts


def flac(samples: npt.NDArray[np.int16], rate: int = 16_000) -> bytes:
    """Samples of one channel as a FLAC file that compresses nothing."""
    block = 4_096
    fixed = struct.pack(">HH", block, block) + bytes(6) + (rate << 44 | 15 << 36 | len(samples)).to_bytes(8, "big")
    data = b"fLaC" + bytes([0x80, 0, 0, 34]) + fixed + bytes(16)
    for number, start in enumerate(range(0, len(samples), block)):
        part = samples[start : start + block]
        head = bytes([0xFF, 0xF8, 0x70, 0x08, number]) + struct.pack(">H", len(part) - 1)  # 128 frames at most
        frame = head + bytes([_crc(head, 8, 0x07)]) + bytes([0x02]) + part.astype(">i2").tobytes()
        data += frame + struct.pack(">H", _crc(frame, 16, 0x8005))
    return data


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    value, top, mask = 0, 1 << (bits - 1), (1 << bits) - 1
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = (value << 1 ^ polynomial if value & top else value << 1) & mask
    return value


# What llama.cpp itself makes of it


class Reference:
    """A model and its projector by llama.cpp's own helpers, one prompt at a time: what llama-server does with one."""

    def __init__(self, model: Path, projector: Path) -> None:
        self._model = Model.load(model, n_gpu_layers=0)
        params = ContextParams(n_ctx=2_048, n_threads=1, flash_attn="off", cache_type_k="f32", cache_type_v="f32")
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
