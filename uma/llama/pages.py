"""Memory pages that llama.cpp allocates: huge pages for weights, and no pages for memory that is still all zeros.

A batch of decode rows reads all weights once. With pages of 4 KiB the processor misses its TLB so often that it takes
several percent of the batch's time (`python -m benchmarks -s weights`). Linux uses huge pages (2 MiB on x86) for memory
for which it is asked (`madvise`) before anything is written there. llama.cpp does not ask. But it reports the progress
of loading, for the first time when its memory is allocated and still empty.

A new context's cells, states and outputs are filled with zeros. Pages that are returned to Linux read as zeros, and are
allocated again on the first write; so a context only takes the memory that conversations have come to need. But
llama.cpp does not tell where its cells are, and a write of another thread between the check of a page and its return
would be lost. So this is only done in a process that is UMA's alone (never in the library), only in large mappings that
came with the context, before a request can be computed, and on Trio's thread, which reads what clients send, and holds
the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

from uma import posix

MAPPINGS = Path("/proc/self/maps")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Linux's setting: `always`, `madvise` or `never`, the current one in brackets."""
HUGE_PAGE_BYTES = 2 * 2**20
"""Size of a huge page on x86: minimum size of memory that is treated, and unit of zeros that are returned."""
LARGE_BYTES = 16 * 2**20
"""Minimum size of a mapping whose zeros are returned: no other thread of a starting server fills so large a buffer.
Also the size of a part that is checked at a time, in some 10 ms, so that Trio's thread and the GIL stay available."""
logger = logging.getLogger("uma.llama")


def gives_huge_pages(setting: Path = SETTING) -> bool:
    """Whether this system gives huge pages to a process that asks."""
    try:
        return "[never]" not in setting.read_text(encoding="ascii")
    except OSError:  # not Linux, or a kernel without them
        return False


class NewPages:
    """Finds memory that is allocated after this object was made, for one model while it is loaded.

    Memory that other threads allocate meanwhile is included, which does not change its content.
    """

    def __init__(self) -> None:
        self._known = list(_private_mappings())

    def make_huge(self) -> None:
        """Ask for huge pages for the new memory."""
        for start, end in self._new():
            _advise(start, end, "MADV_HUGEPAGE")

    def large_parts(self) -> Iterator[tuple[int, int]]:
        """Parts, of at most `LARGE_BYTES`, of large new memory: see `give_back_zeros`."""
        for start, end in self._new():
            if end - start >= LARGE_BYTES:
                first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
                for at in range(first, end - HUGE_PAGE_BYTES + 1, LARGE_BYTES):
                    yield at, min(at + LARGE_BYTES, end)

    def _new(self) -> list[tuple[int, int]]:
        """Large memory that is new since the last call. Linux merges new memory with old memory beside it."""
        found = []
        for start, end in _private_mappings():
            at = start
            for known_start, known_end in sorted(self._known):
                if known_start < end and at < known_end:
                    found.append((at, known_start))
                    at = known_end
            found.append((at, end))
        found = [(start, end) for start, end in found if end - start >= HUGE_PAGE_BYTES]
        self._known += found
        return found


def give_back_zeros(start: int, end: int) -> None:
    """Return pages of a range that hold nothing but zeros. `start` must be aligned to a huge page.

    On Trio's thread of a process that is UMA's alone: no other thread may write there without the GIL meanwhile.
    """
    if sys.platform == "win32":
        return
    starts = range(start, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)
    # No Python code between the check of a page and its return: another thread could take the GIL there.
    differ = map(_LIBC_WITH_GIL.memcmp, starts, repeat(bytes(HUGE_PAGE_BYTES)), repeat(HUGE_PAGE_BYTES))
    sizes = map({0: HUGE_PAGE_BYTES}.get, differ, repeat(0))
    deque(map(_LIBC_WITH_GIL.madvise, starts, sizes, repeat(mmap.MADV_DONTNEED)), maxlen=0)


def trim_heap() -> None:
    """Return memory to the system that loading has freed: the C library keeps up to 20 MiB of it. Takes a millisecond
    or two; does nothing where the C library has no such call.
    """
    trim = getattr(ctypes.CDLL(posix.LIBC), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _private_mappings() -> Iterator[tuple[int, int]]:
    """Large private mappings of this process without a file; none where the system does not tell."""
    try:
        lines = MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        # 7f316eb35000-7f3175409000 rw-p 00000000 00:00 0 [and, if it has one, a name or a file's path]
        where, may, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(word, 16) for word in where.split("-"))
        if may == "rw-p" and (not name or name[0].startswith("[anon")) and end - start >= HUGE_PAGE_BYTES:
            yield start, end


def _advise(start: int, end: int, name: str) -> None:
    advice = getattr(mmap, name, None)  # None on other systems
    if advice is not None and _LIBC.madvise(start, end - start, advice):
        logger.debug("%s for %d bytes: %s", name, end - start, os.strerror(ctypes.get_errno()))


_LIBC = ctypes.CDLL(posix.LIBC, use_errno=True)
_LIBC_WITH_GIL = ctypes.PyDLL(posix.LIBC)
"""C library whose calls hold the GIL."""
_LIBC_WITH_GIL.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
if sys.platform != "win32":
    for _library in (_LIBC, _LIBC_WITH_GIL):
        _library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
