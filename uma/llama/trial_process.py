"""Program of the child process in which a header is tried (`llama.trial`). It answers if llama.cpp has not ended it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib

from uma.child import bound_memory, serve
from uma.errors import ModelError
from uma.llama import header
from uma.llama.model import Model
from uma.llama.projector import Picture, Pixels, Projector, Samples

WITH_FIGURES = "hunyuan_vl"
"""Architecture that does not determine the form of positions by itself, so that its figures must be loaded."""
PICTURES = ((40, 30), (200, 100))
SAMPLES = 16_000
"""Input for a projector: a second of silence, and pictures of one colour that are not square."""


def _prepared(setup: Any) -> Callable[[Any], str]:
    bound_memory(_taken_bytes() + setup["memory_bytes"])
    os.environ["GGML_NO_BACKTRACE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU's driver reserves terabytes of address space
    lib.llama_backend_init()
    return _try


def _taken_bytes() -> int:
    """Address space of this process: on machines with many cores, libraries reserve gigabytes for their threads."""
    with suppress(OSError):  # systems without /proc do not limit address space
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    return 0


def _try(asked: dict[str, Any]) -> str:
    """Message of a `ModelError` while loading, with little memory; empty: none. (The parent's own load reports other
    errors.)
    """
    path, *model = asked["paths"]
    try:
        if model:
            _try_projector(Path(path), Path(model[0]))
        else:
            _try_model(path, predicts=asked["predicts"])
    except ModelError as error:
        return error.message.removeprefix(f"{path}: ")
    except Exception:  # noqa: BLE001  (an error of these inputs only)
        return ""
    return ""


def _try_model(path: str, *, predicts: bool) -> None:
    params = lib.llama_model_default_params()
    params.no_alloc, params.n_gpu_layers, params.load_mode = True, 0, lib.LLAMA_LOAD_MODE_NONE
    params.load_mtp = predicts
    if model := lib.llama_model_load_from_file(os.fsencode(path), params):
        context = lib.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = 64
        lib.llama_init_from_model(model, context)
        if predicts:
            context.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
            lib.llama_init_from_model(model, context)


def _try_projector(path: Path, model: Path) -> None:
    """Encode a picture and a sound up to the first nodes: by then the graph and all of its inputs are made."""
    is_known = header.read(model).architecture != WITH_FIGURES
    with (
        Model.load(model, vocab_only=is_known, n_gpu_layers=0, extra_buffers="off") as vocabulary,
        Projector(path, vocabulary, threads=1, uses_gpu=False, is_tried=True) as projector,
    ):
        files: list[Pixels | Samples] = []
        if projector.sees:
            files += (Pixels("", width, height, bytes(3 * width * height)) for width, height in PICTURES)
        if projector.hears:
            files.append(Samples("", SAMPLES, bytes(4 * SAMPLES)))
        for file in files:
            for piece in projector.prepare(file):
                if isinstance(piece, Picture):
                    projector.encode(piece, lambda: False)


if __name__ == "__main__":
    serve(_prepared)
