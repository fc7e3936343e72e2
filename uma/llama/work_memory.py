"""llama.cpp's work memory on page boundaries: where the CPU's attention keeps its tiles while it reads prompts.

ggml takes that memory, a megabyte, by C++'s `operator new[]`. glibc mostly has it begin 16 bytes behind a page, so that
each vector of 64 bytes, and every second of 32, lies across two cache lines: on an AMD EPYC of family 25 prompts are
read in 0.69 to 0.88 of the time from a page on (`python -m benchmarks -s work_memory`). ggml has no setting for it. But
the library of its CPU backend calls `operator new[]` and `operator delete[]` through slots of its own (`linker`), and
where that library is not all of llama.cpp, for this memory alone. `align` has them lead to the C library's `valloc`,
which allocates the same size from a page on, and to `free`.

Only for Linux on x86 and Arm with 64 bits; macOS gives memory of this size whole pages. In a library of another make
nothing is changed, and it computes as it did, only slower.
"""

from __future__ import annotations

import logging
import platform
import sys
import threading

from uma.llama import cpu_device, linker

logger = logging.getLogger("uma.llama")

NEW_ARRAY, DELETE_ARRAY = b"_Znam", b"_ZdaPv"
"""`operator new[](unsigned long)` and `operator delete[](void*)`, as C++ names them for the linker."""
ALLOCATE, FREE = "valloc", "free"
ITS_FUNCTION = b"ggml_backend_set_n_threads"
"""One that the CPU backend has."""

_lock = threading.Lock()


def align() -> None:
    """Have the CPU backend's work memory begin at page boundaries from now on; memory it has already stays where it is.

    Any thread, any number of times; once ggml's backends are loaded. Where it cannot be done memory is taken as before,
    and the log says why.
    """
    with _lock:
        why = _align()
    if why:
        logger.debug("llama.cpp's work memory lies as malloc gives it: %s", why)


def is_aligned() -> bool:
    """Whether the CPU backend in this process takes its work memory at page boundaries. As for `align`."""
    wanted = _wanted(_functions())
    return bool(wanted) and all(linker.content(slot) == function for slot, function in wanted)


def _align() -> str:
    """What `align` does; why it was not done, or nothing."""
    functions = _functions()
    if not functions:
        return "this is not Linux on x86 or Arm with 64 bits, or its valloc and free are not of one make"
    wanted = _wanted(functions)
    if not wanted:
        return "ggml's CPU backend has no slots for operator new[] and operator delete[]"
    for slot, function in wanted:
        if linker.content(slot) != function and (why := linker.fill(slot, function)):
            return why
    return ""


def _functions() -> dict[bytes, int]:
    """What is called instead of what: two functions of one library, whichever allocator this process has."""
    if sys.platform != "linux" or sys.maxsize <= 2**32 or platform.machine() not in linker.POINTERS:
        return {}
    allocate, free = linker.definition(ALLOCATE), linker.definition(FREE)
    if not allocate or not free or linker.file_of(allocate) != linker.file_of(free):
        return {}
    # In this order: what was taken before the second is changed goes back by `free` as well.
    return {DELETE_ARRAY: free, NEW_ARRAY: allocate}


def _wanted(functions: dict[bytes, int]) -> list[tuple[int, int]]:
    """Each slot, and the function that it is to lead to; none where there are not slots for both."""
    found = linker.slots(_backend_file(), functions) if functions else []
    if {name for name, _ in found} != set(functions):
        return []
    return [(slot, function) for each, function in functions.items() for name, slot in found if name == each]


def _backend_file() -> bytes:
    """The library that holds ggml's CPU backend: it can be all of llama.cpp, or lie elsewhere."""
    function = cpu_device.function(ITS_FUNCTION)
    return linker.file_of(function) if function else b""
