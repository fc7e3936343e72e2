"""Program of the child process that decodes untrusted files of pictures and sounds.

llama.cpp's own decoders are used; for WebP, which it leaves to ffmpeg, Pillow where it is installed. A crash in them
ends this process and one request. The parent's side is `uma.media`. This module imports next to nothing, so that the
child starts in a fraction of the time that all bindings would need.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any

from uma.child import confine, serve_about

MAX_MEMORY_BYTES = 3 * 2**30
"""Address space of the child process, libraries included."""
SAMPLE_RATE = 16_000
"""Sample rate of decoded sounds. All but one of llama.cpp's projectors for speech expect it."""
TOO_LARGE = "too large"
"""Problem of a file that takes too many bytes when decoded."""

_FRAME = 640
_TEXT, _UINT32, _FLOAT32, _BOOL = 8, 4, 6, 7
_ALIGNMENT = 32
"""Constants of GGUF: types of values, and the alignment of tensors."""


def main() -> None:
    """Decode files until the parent closes the connection."""
    serve_about(_decoder, MAX_MEMORY_BYTES)


def _decoder(setup: Any) -> Callable[[Any, bytes], tuple[Any, bytes]]:
    # Import modules without their package, whose `__init__` would import all of them.
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
    import llama_cpp.mtmd_cpp as lib  # noqa: PLC0415

    options = lib.mtmd_helper_init_opt_default()
    options.video_params.ffmpeg_bin_dir = os.fsencode(os.devnull)  # no ffmpeg for files that are not pictures
    audio_context = _audio_context(lib) if setup["hears"] else None
    with suppress(ImportError):  # without Pillow the parent sends no WebP
        from PIL import Image, WebPImagePlugin  # noqa: F401, PLC0415
    confine()

    def decode(question: Any, data: bytes) -> tuple[Any, bytes]:
        if question["form"] == "WebP":
            return _webp(data)
        source = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        found = lib.mtmd_helper_bitmap_init_from_buf_wrapper(audio_context, source, len(data), False, options)
        if not found.bitmap or found.video_ctx:
            return {"problem": "cannot be decoded; its file is broken"}, b""
        size = lib.mtmd_bitmap_get_n_bytes(found.bitmap)
        if size > question["max_bytes"]:
            lib.mtmd_bitmap_free(found.bitmap)
            return {"problem": TOO_LARGE}, b""
        shape = {"width": lib.mtmd_bitmap_get_nx(found.bitmap), "height": lib.mtmd_bitmap_get_ny(found.bitmap)}
        content = ctypes.string_at(lib.mtmd_bitmap_get_data(found.bitmap), size)
        lib.mtmd_bitmap_free(found.bitmap)
        return shape, content

    return decode


def _webp(data: bytes) -> tuple[Any, bytes]:
    """Decode the first frame of a file."""
    from PIL import Image, WebPImagePlugin  # noqa: PLC0415

    Image.MAX_IMAGE_PIXELS = None  # the parent has checked the size
    try:
        image = WebPImagePlugin.WebPImageFile(BytesIO(data)).convert("RGB")
    except (OSError, ValueError, EOFError, SyntaxError):
        return {"problem": "cannot be decoded; its file is broken"}, b""
    return {"width": image.width, "height": image.height}, image.tobytes()


def _audio_context(lib: Any) -> int:
    """A context of libmtmd with nothing but a sample rate, which its decoder of sounds takes from a context."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without this, a GPU is initialised, which takes time and memory
    params = lib.mtmd_context_params_default()
    params.use_gpu = params.warmup = params.print_timings = False
    params.n_threads = 1
    with tempfile.NamedTemporaryFile() as file:
        file.write(_least_projector())
        file.flush()
        handle = lib.mtmd_init_from_file(os.fsencode(file.name), None, params)
    if not handle:
        raise RuntimeError("llama.cpp does not load the least projector that there is")
    return int(handle)


def _least_projector() -> bytes:
    """A minimal GGUF file of a projector for sounds at `SAMPLE_RATE`: a row of zeros, of a kind without encoder."""
    values = [
        _text("general.architecture") + struct.pack("<I", _TEXT) + _text("clip"),
        _text("clip.projector_type") + struct.pack("<I", _TEXT) + _text("gemma4ua"),
        _text("clip.has_audio_encoder") + struct.pack("<IB", _BOOL, 1),
        _text("clip.audio.attention.layer_norm_epsilon") + struct.pack("<If", _FLOAT32, 1e-6),
        *(
            _text(f"clip.audio.{name}") + struct.pack("<II", _UINT32, value)
            for name, value in (
                ("embedding_length", 1),
                ("feed_forward_length", 1),
                ("block_count", 0),
                ("projection_dim", 1),
                ("attention.head_count", 1),
                ("num_mel_bins", _FRAME),
            )
        ),
    ]
    tensor = _text("mm.a.input_projection.weight") + struct.pack("<IQQIQ", 2, _FRAME, 1, 0, 0)
    head = struct.pack("<4sIQQ", b"GGUF", 3, 1, len(values)) + b"".join(values) + tensor
    return head + bytes(-len(head) % _ALIGNMENT) + bytes(4 * _FRAME)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


if __name__ == "__main__":
    main()
