"""What the loaded llama.cpp library can compute with: CPU features that it was built for, and GPUs that it finds."""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import llama_cpp.llama_cpp as lib

from uma.llama import backend

GPU_TYPES = (1, 2)
"""GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU."""


@attrs.frozen
class Device:
    """A GPU, by ggml's name."""

    name: str
    description: str
    free_bytes: int


def cpu_features() -> tuple[str, ...]:
    """The instruction sets that the library's CPU code uses, such as `AVX2`, in ggml's order."""
    backend.start()
    said: bytes = lib.llama_print_system_info()
    # CPU : SSE3 = 1 | AVX2 = 1 | ... | OPENMP = 1 |, and the same for other backends ahead of it.
    own = said.decode("utf-8", "replace").rpartition("CPU : ")[2]
    pairs = (part.split(" = ") for part in own.split("|") if " = " in part)
    return tuple(name.strip() for name, value in pairs if value.strip() != "0")


def gpus() -> tuple[Device, ...]:
    """GPUs that llama.cpp can compute on."""
    if not backend.has_gpu():
        return ()
    devices = (_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)(at) for at in range(_device_count()))
    type_of = _function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    return tuple(_describe(device) for device in devices if type_of(device) in GPU_TYPES)


def _device_count() -> int:
    return int(_function("ggml_backend_dev_count", ctypes.c_size_t)())


def _describe(device: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    sizes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))
    _function("ggml_backend_dev_memory", None, *sizes)(device, ctypes.byref(free), ctypes.byref(total))
    name: bytes = _function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)(device)
    description: bytes = _function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)(device)
    return Device(name.decode(), description.decode("utf-8", "replace"), free.value)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml that the binding does not declare."""
    return ctypes.CFUNCTYPE(result, *arguments)((name, lib._lib))
