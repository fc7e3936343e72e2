"""Models of every kind of memory by name, for what must hold of all of them.

Each test names the few that it has by default, mostly one for each way in which memory works. With `TEST_KINDS=all` it
has every architecture that is written here: beside those of `models`, the hybrids, windows in five of six layers and in
every second one, and mixtures of experts.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import get_args

from engine_world import SMALL_WINDOWS
from hybrids import Hybrid, write_hybrid

from benchmarks.kinds import Kind as Shape
from benchmarks.kinds import write_kind
from models import Kind, write_model

MEMORIES: tuple[str, ...] = (*get_args(Kind), SMALL_WINDOWS)
"""One of each way in which memory works."""
OTHERS: tuple[Shape, ...] = ("gemma3", "gpt-oss", "qwen3moe")
ALL = (*MEMORIES, *get_args(Hybrid), *OTHERS)
PLAIN = ("attention", "qwen3moe")
"""Memory is that of plain attention."""
WINDOWED = ("sliding-window", "gemma3", "gpt-oss")
"""It has windows, and all cells of these layers."""


def is_all() -> bool:
    """Whether all are asked for."""
    return os.environ.get("TEST_KINDS") == "all"


def kinds(*few: str) -> tuple[str, ...]:
    """These by default, and all others too with `TEST_KINDS=all`."""
    return (*few, *(name for name in ALL if name not in few)) if is_all() else few


def write_named(folder: Path, name: str, context_length: int = 2_048, most_gain: float = math.inf) -> Path:
    """Write the model of this name into a folder. Its file has the name: `config_for` knows `SMALL_WINDOWS` by it.
    `most_gain` is for `OTHERS`, which are loud.
    """
    path = folder / f"{name}.gguf"
    for hybrid in get_args(Hybrid):
        if name == hybrid:
            return write_hybrid(path, hybrid, context_length=context_length)
    for shape in OTHERS:
        if name == shape:
            write_kind(path, shape, write_model(folder / "vocabulary.gguf"), most_gain=most_gain)
            return path
    for kind in get_args(Kind):
        if name in (kind, SMALL_WINDOWS if kind == "sliding-window" else kind):
            return write_model(path, kind=kind, context_length=context_length)
    raise ValueError(f"{name}: no kind of model is called so")
