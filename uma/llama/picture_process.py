"""The program of the child process that decodes picture files, which strangers have made, with llama.cpp's decoder.

A fault in it ends that process and one request. Its parent's side is `uma.media`. It imports next to nothing: the child
starts in a fraction of the time that all of the bindings would need.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from uma.child import serve_about

MAX_MEMORY_BYTES = 3 * 2**30
"""Address space of the child process, libraries included."""


def main() -> None:
    """Decode files until the parent closes its end."""
    serve_about(_decoder, MAX_MEMORY_BYTES)


def _decoder(_setup: Any) -> Callable[[Any, bytes], tuple[Any, bytes]]:
    # The package's modules without the package, which would import all of them.
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
    import llama_cpp.mtmd_cpp as lib  # noqa: PLC0415

    options = lib.mtmd_helper_init_opt_default()
    options.video_params.ffmpeg_bin_dir = os.fsencode(os.devnull)  # what is no picture is not given to ffmpeg

    def decode(_question: Any, data: bytes) -> tuple[Any, bytes]:
        source = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        found = lib.mtmd_helper_bitmap_init_from_buf_wrapper(None, source, len(data), False, options)
        if not found.bitmap or found.video_ctx:
            return {"problem": "cannot be decoded"}, b""
        width, height = lib.mtmd_bitmap_get_nx(found.bitmap), lib.mtmd_bitmap_get_ny(found.bitmap)
        pixels = ctypes.string_at(lib.mtmd_bitmap_get_data(found.bitmap), lib.mtmd_bitmap_get_n_bytes(found.bitmap))
        lib.mtmd_bitmap_free(found.bitmap)
        return {"width": width, "height": height}, pixels

    return decode


if __name__ == "__main__":
    main()
