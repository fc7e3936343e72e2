"""A projector with random weights for the benchmarks' models, and pictures: the work of a small real one.

LLaVA's kind, with a ViT of 224 pixels and 256 tokens a picture, in a quarter of the width of CLIP's large one: some 11
million parameters.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from random import Random

from benchmarks.cache import cache_dir
from benchmarks.gguf_file import File
from benchmarks.models import BenchModel

SIDE, PATCH, WIDTH, HEADS, FEED_FORWARD, LAYERS = 224, 14, 384, 6, 1536, 6
TOKENS = (SIDE // PATCH) ** 2
VERSION = 1
"""Part of the cached file's name: raise it when what is written changes."""


def projector(model: BenchModel) -> Path:
    """The file for a model, from the cache or written now."""
    path = cache_dir() / f"mmproj-{model.shape.name}-v{VERSION}.gguf"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}.partial")
        _write(partial, model.shape.width)
        partial.rename(path)
    return path


def _write(path: Path, embed: int) -> None:
    file = File(path, "clip")
    file.text("general.type", "mmproj")
    file.text("clip.projector_type", "mlp")
    file.header(
        has_vision_encoder=True,
        vision__image_size=SIDE,
        vision__patch_size=PATCH,
        vision__embedding_length=WIDTH,
        vision__feed_forward_length=FEED_FORWARD,
        vision__block_count=LAYERS,
        vision__projection_dim=embed,
        vision__attention__head_count=HEADS,
        vision__attention__layer_norm_epsilon=1e-5,
        vision__image_mean=[0.5, 0.5, 0.5],
        vision__image_std=[0.25, 0.25, 0.25],
    )
    file.matrix("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    file.matrix("v.class_embd", WIDTH)
    file.matrix("v.position_embd.weight", TOKENS + 1, WIDTH)
    _norm(file, "v.pre_ln")
    for index in range(LAYERS):
        layer = f"v.blk.{index}"
        _norm(file, f"{layer}.ln1")
        _norm(file, f"{layer}.ln2")
        for name in ("q", "k", "v", "out"):
            _linear(file, f"{layer}.attn_{name}", WIDTH, WIDTH)
        _linear(file, f"{layer}.ffn_up", FEED_FORWARD, WIDTH)
        _linear(file, f"{layer}.ffn_down", WIDTH, FEED_FORWARD)
    _linear(file, "mm.0", WIDTH, WIDTH)
    _linear(file, "mm.2", embed, WIDTH)
    file.close()


def _norm(file: File, name: str) -> None:
    file.full(f"{name}.weight", WIDTH)
    file.full(f"{name}.bias", WIDTH, 0)


def _linear(file: File, name: str, rows: int, columns: int) -> None:
    file.matrix(f"{name}.weight", rows, columns)
    file.full(f"{name}.bias", rows, 0)


def picture(rng: Random) -> bytes:
    """A picture of random pixels as a BMP file."""
    rows = rng.randbytes(3 * SIDE * SIDE)
    head = struct.pack("<2sIHHI", b"BM", 54 + len(rows), 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, SIDE, SIDE, 1, 24, 0, len(rows), 0, 0, 0, 0) + rows
