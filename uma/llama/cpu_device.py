"""ggml's CPU device, and the functions that its backend has and that are not in llama.cpp's own interface: ggml gives
their addresses by name, wherever the library that holds them lies.
"""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as lib

CPU_DEVICE = 0
"""GGML_BACKEND_DEVICE_TYPE_CPU."""


def device() -> int:
    """ggml's handle of the CPU; 0 where its backend is not loaded."""
    find = lib._lib.ggml_backend_dev_by_type
    find.argtypes, find.restype = (ctypes.c_int,), ctypes.c_void_p
    return find(CPU_DEVICE) or 0


def function(name: bytes) -> int:
    """The address of this function; 0 where the backend has none of that name."""
    backend_of, find = lib._lib.ggml_backend_dev_backend_reg, lib._lib.ggml_backend_reg_get_proc_address
    backend_of.argtypes, backend_of.restype = (ctypes.c_void_p,), ctypes.c_void_p
    find.argtypes, find.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_void_p
    cpu = device()
    return find(backend_of(cpu), name) or 0 if cpu else 0
