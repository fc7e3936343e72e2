"""Trial of a model in a child process, without its weights: whether llama.cpp ends a process that makes its graph.

Each architecture's graph asserts what it expects of the header's figures. What can be said of that in words is checked
with the header; where keys and values have heads of two sizes, some architectures allow it and the others abort.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import llama_cpp.llama_cpp as lib

from uma.child import Child, ChildBusyError, ChildEndedError, serve
from uma.errors import ModelError

DEADLINE_SEC = 60.0
"""Maximum CPU time. The largest vocabularies take a second."""
MAX_MEMORY_BYTES = 2**36


def check(path: Path) -> None:
    """Raise `ModelError` where llama.cpp ends the process over this model. Takes some 0.3 s; any thread."""
    child = Child(__file__, None, deadline_sec=DEADLINE_SEC, max_answer_bytes=1_000)
    try:
        with suppress(ChildBusyError, TimeoutError, OSError):  # what could not be tried is not refused
            child.ask(str(path))
    except ChildEndedError:
        raise ModelError(
            f"{path}: its header is damaged or unsupported: llama.cpp aborts over keys and values with heads of two "
            "sizes (attention.key_length, attention.value_length); download or convert it again"
        ) from None
    finally:
        child.close()


def _try(path: str) -> bool:
    params = lib.llama_model_default_params()
    params.no_alloc, params.n_gpu_layers, params.load_mode = True, 0, lib.LLAMA_LOAD_MODE_NONE
    if model := lib.llama_model_load_from_file(os.fsencode(path), params):
        context = lib.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = 64
        lib.llama_init_from_model(model, context)
    return bool(model)


if __name__ == "__main__":
    os.environ["GGML_NO_BACKTRACE"] = "1"
    lib.llama_backend_init()
    serve(lambda _: _try, MAX_MEMORY_BYTES)
