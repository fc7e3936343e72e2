"""The program that can die: computes a few batches with a llama.cpp library that is not trusted on this CPU yet.

`uma.llama.trust` runs it in a process of its own and judges what comes back. Each way to compute (with one of
llama.cpp's extra buffer types alone, or plain, without any) is announced before it begins, so that its death names it.
The program imports next to nothing, so that the whole question takes a fraction of a second.

What it writes on standard output: for each way a JSON line when it begins; a JSON line with the number of bytes that
follow; and the logits, float32, of all rows of all batches. 0 bytes: the model has no tensor that this type takes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, BinaryIO

ROWS = (1, 2, 8, 40, 512)
"""Batches: one stream, few, one over a tile of 32, and a whole micro-batch, as each takes other kernels."""
PLAIN = "plain"
"""The way without extra buffer types."""
ALONE = "alone"
"""Among the ways that are known: no extra buffer type is asked about."""
LOADING = "loading"
"""What comes before any way: the library itself."""


def main(arguments: Sequence[str]) -> None:
    """`arguments`: the model's file, compute threads, seconds until the process ends itself, and the ways that are
    known already, with commas between.
    """
    model, threads, limit_s, known = arguments
    _die_quietly(int(limit_s))
    answer = _private_stdout()
    _say(answer, {"begins": LOADING})
    lib = _import_binding()
    from uma.llama import extra_buffers  # noqa: PLC0415  (imports the library, which can end the process)

    lib.llama_backend_init()
    types = () if ALONE in known.split(",") else extra_buffers.names()
    # Plain last: where the types are at fault, each death costs least before it.
    for way in (*types, PLAIN):
        if way in known.split(","):
            continue
        _say(answer, {"begins": way})
        with extra_buffers.only([way]):
            logits = compute(lib, model, int(threads), way)
        _say(answer, {"bytes": len(logits)})
        answer.write(logits)
        answer.flush()


def compute(lib: Any, model: str, threads: int, way: str) -> bytes:
    """Load the model on the CPU and return the logits of every row of every batch; nothing where it does not use the
    extra buffer type `way`.
    """
    no_devices = (ctypes.c_void_p * 1)()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.devices = ctypes.addressof(no_devices)
    params.use_extra_bufts = way != PLAIN
    with _log_lines(lib) as lines:
        handle = lib.llama_model_load_from_file(os.fsencode(model), params)
    if not handle:
        raise RuntimeError(f"{model}: cannot be loaded: {''.join(lines[-2:])}")
    buffers = [line for line in lines if "model buffer size" in line]
    if way != PLAIN and buffers and not any(f" {way} model" in line for line in buffers):
        return b""
    context_params = lib.llama_context_default_params()
    context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = max(ROWS)
    context_params.n_outputs_max = max(ROWS)
    context_params.n_threads = context_params.n_threads_batch = threads
    context = lib.llama_init_from_model(handle, context_params)
    if not context:
        raise RuntimeError(f"{model}: no context could be made")
    vocab = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(handle)))
    batch = lib.llama_batch_init(max(ROWS), 0, 1)
    # Nothing is freed: the process ends soon, and would only take longer.
    return b"".join(_decode(lib, context, batch, rows, vocab) for rows in ROWS)


@contextmanager
def _log_lines(lib: Any) -> Iterator[list[str]]:
    """llama.cpp's log while the block runs; after it the log is silent."""
    lines: list[str] = []
    keep = lib.llama_log_callback(lambda _level, text, _data: lines.append(text.decode(errors="replace")))
    lib.llama_log_set(keep, None)
    try:
        yield lines
    finally:
        # `abs` of the C library stands in for "do nothing", and stays where `keep` does not.
        lib.llama_log_set(ctypes.cast(ctypes.CDLL(None).abs, lib.llama_log_callback), None)


def _decode(lib: Any, context: Any, batch: Any, rows: int, vocab: int) -> bytes:
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    batch.n_tokens = rows
    for row in range(rows):
        batch.token[row] = (row * 37 + 11) % vocab
        batch.pos[row] = row
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = 0
        batch.logits[row] = 1
    if code := lib.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode: {code}")
    return ctypes.string_at(lib.llama_get_logits(context), rows * vocab * ctypes.sizeof(ctypes.c_float))


def _die_quietly(limit_s: int) -> None:
    """Leave no core file, and no process that hangs after whatever started it has gone."""
    import resource  # noqa: PLC0415  (Unix)

    signal.alarm(limit_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # A core pattern that is a pipe ignores the limit. PR_SET_DUMPABLE, 0.
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


def _private_stdout() -> BinaryIO:
    """Standard output for the answer alone: what a library prints goes to standard error."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answer


def _import_binding() -> Any:
    """llama_cpp's binding without the rest of its package, whose import takes several times as long as the answer."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is not None and spec.submodule_search_locations is not None:
        package = ModuleType("llama_cpp")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["llama_cpp"] = package
    binding: Any = importlib.import_module("llama_cpp.llama_cpp")
    return binding


def _say(answer: BinaryIO, line: dict[str, object]) -> None:
    answer.write(json.dumps(line).encode() + b"\n")
    answer.flush()
