"""llama.cpp's extra buffer types: layouts of weights for particular CPUs (AMX, CPU_REPACK, KLEIDIAI).

llama.cpp itself can only use all of them or none. ggml has them in a list, which it returns to callers and reads at
each load. Changing that list leaves out AMX, whose code GCC 12 compiles wrongly (half of the tile configuration is not
written, and its first use is a SIGSEGV), and keeps the speed of the others.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import llama_cpp.llama_cpp as lib

CPU_DEVICE = 0
"""GGML_BACKEND_DEVICE_TYPE_CPU."""
LEFT_OUT = frozenset({"AMX"})
"""Types that `auto` leaves out. AMX gave no more tokens per second, and is only correct if compiled by a compiler newer
than GCC 12, which a library does not tell."""

_loading = threading.RLock()
"""Held while a model is loaded: the list belongs to the process."""


def names() -> tuple[str, ...]:
    """Types that this library has on this CPU, in ggml's order of preference. Starts ggml's backends."""
    return tuple(name for _, name in _all_types())


def chosen(setting: Literal["auto", "on", "off"]) -> tuple[str, ...]:
    """Types for a load with this setting: `on` all, `auto` all but `LEFT_OUT`, `off` none."""
    if setting == "off":
        return ()
    return tuple(name for name in names() if setting == "on" or name not in LEFT_OUT)


@contextmanager
def only(allowed: Collection[str]) -> Iterator[None]:
    """A block in which loads can use just these types. One block at a time; others wait."""
    with _loading:
        types = _all_types()
        try:
            _offer([address for address, name in types if name in allowed])
            yield
        finally:
            _offer([address for address, _ in types])


def _offer(addresses: list[int]) -> None:
    array = _array()
    if array is None:
        return
    for index, address in enumerate(addresses):
        array[index] = address
    array[len(addresses)] = None


@cache
def _all_types() -> list[tuple[int, str]]:
    array = _array()
    name_of = lib._lib.ggml_backend_buft_name
    name_of.argtypes, name_of.restype = (ctypes.c_void_p,), ctypes.c_char_p
    found: list[tuple[int, str]] = []
    while array is not None and (address := array[len(found)]):
        found.append((address, name_of(address).decode()))
    return found


@cache
def _array() -> ctypes._Pointer[ctypes.c_void_p] | None:
    """ggml's own null-terminated list; None for a library without extra types."""
    # ggml returns a backend's own functions by name, whichever library they are in.
    ggml = lib._lib
    ggml.ggml_backend_dev_by_type.argtypes, ggml.ggml_backend_dev_by_type.restype = (ctypes.c_int,), ctypes.c_void_p
    backend_of, find = ggml.ggml_backend_dev_backend_reg, ggml.ggml_backend_reg_get_proc_address
    backend_of.argtypes, backend_of.restype = (ctypes.c_void_p,), ctypes.c_void_p
    find.argtypes, find.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_void_p
    cpu = ggml.ggml_backend_dev_by_type(CPU_DEVICE)
    address = find(backend_of(cpu), b"ggml_backend_dev_get_extra_bufts") if cpu else None
    if not address:
        return None
    list_of = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    return list_of(cpu) or None
