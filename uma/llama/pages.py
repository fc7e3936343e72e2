"""Pages of the memory that llama.cpp takes: huge ones for weights, and none for what holds nothing yet.

A batch of decode rows reads all weights once. In pages of 4 KiB the processor has to look up where each page lies, far
more of them than it can keep in mind, and that takes several percent of the batch's time (`python -m benchmarks -s
weights`). Linux gives huge pages (2 MiB on x86) to memory for which it is asked (`madvise`), if it is asked before
anything is written there. llama.cpp does not ask. But it reports the progress of loading, for the first time when it
has the memory and nothing is in it yet.

A new context's cells, states and outputs are filled with zeros. Pages that are given back to Linux read as zeros, and
are there again as soon as they are written to: so a context takes the memory that conversations have come to need. But
llama.cpp does not tell where its cells lie, and what another thread writes between the look at a page and its return
would be lost. So only a process that is UMA's alone does it (never the library), only in large mappings that came with
the context, before a request can be computed, and on Trio's thread, which reads what clients send and keeps the GIL.
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
"""Linux: `always`, `madvise` or `never`, the one in brackets."""
LEAST_BYTES = 2 * 2**20
"""Size of a huge page on x86: minimum size of memory that is seen to, and of zeros that are given back."""
SPARED_BYTES = 16 * 2**20
"""Minimum size of a mapping whose zeros are given back: no thread of a server that starts fills a buffer so large. Also
the part that is looked at in one go, some 10 ms: Trio's thread and the GIL are needed elsewhere."""
logger = logging.getLogger("uma.llama")


def gives_huge_pages(setting: Path = SETTING) -> bool:
    """Whether this system gives huge pages to a process that asks."""
    try:
        return "[never]" not in setting.read_text(encoding="ascii")
    except OSError:  # another system, or a kernel without them
        return False


class NewPages:
    """Sees to memory that is taken after its making, for one model while it is loaded.

    What other threads take meanwhile is seen to as well. That does not change what is in it.
    """

    def __init__(self) -> None:
        self._known = list(_private_mappings())

    def make_huge(self) -> None:
        """Ask for huge pages for what was taken."""
        for start, end in self._new():
            _advise(start, end, "MADV_HUGEPAGE")

    def spared(self) -> Iterator[tuple[int, int]]:
        """Parts, of `SPARED_BYTES` at most, of the large memory that was taken: see `give_back_zeros`."""
        for start, end in self._new():
            if end - start >= SPARED_BYTES:
                first = -(-start // LEAST_BYTES) * LEAST_BYTES
                for at in range(first, end - LEAST_BYTES + 1, SPARED_BYTES):
                    yield at, min(at + SPARED_BYTES, end)

    def _new(self) -> list[tuple[int, int]]:
        """What is large and new since the last call. Linux has new memory as one piece with old that lies beside it."""
        found = []
        for start, end in _private_mappings():
            at = start
            for known_start, known_end in sorted(self._known):
                if known_start < end and at < known_end:
                    found.append((at, known_start))
                    at = known_end
            found.append((at, end))
        found = [(start, end) for start, end in found if end - start >= LEAST_BYTES]
        self._known += found
        return found


def give_back_zeros(start: int, end: int) -> None:
    """Give back what holds nothing but zeros of memory that begins at a huge page.

    On Trio's thread of a process that is UMA's alone: no other thread may write there without the GIL meanwhile.
    """
    if sys.platform == "win32":
        return
    starts = range(start, end - LEAST_BYTES + 1, LEAST_BYTES)
    # No line of Python between a look at a page and its return: there another thread could take the GIL.
    differ = map(_LIBC_WITH_GIL.memcmp, starts, repeat(bytes(LEAST_BYTES)), repeat(LEAST_BYTES))
    sizes = map({0: LEAST_BYTES}.get, differ, repeat(0))
    deque(map(_LIBC_WITH_GIL.madvise, starts, sizes, repeat(mmap.MADV_DONTNEED)), maxlen=0)


def trim_heap() -> None:
    """Give the system what loading has freed: the C library keeps it for later, as much as 20 MiB. Takes a millisecond
    or two; nothing on a system whose C library has no such call.
    """
    trim = getattr(ctypes.CDLL(posix.LIBC), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _private_mappings() -> Iterator[tuple[int, int]]:
    """Large memory of this process alone, with no file behind it; none where the system does not tell."""
    try:
        lines = MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        # 7f316eb35000-7f3175409000 rw-p 00000000 00:00 0 [and, if it has one, a name or a file's path]
        where, may, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(word, 16) for word in where.split("-"))
        if may == "rw-p" and (not name or name[0].startswith("[anon")) and end - start >= LEAST_BYTES:
            yield start, end


def _advise(start: int, end: int, name: str) -> None:
    advice = getattr(mmap, name, None)  # not there on other systems
    if advice is not None and _LIBC.madvise(start, end - start, advice):
        logger.debug("%s for %d bytes: %s", name, end - start, os.strerror(ctypes.get_errno()))


_LIBC = ctypes.CDLL(posix.LIBC, use_errno=True)
_LIBC_WITH_GIL = ctypes.PyDLL(posix.LIBC)
"""The C library; a call of it keeps the GIL."""
_LIBC_WITH_GIL.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
if sys.platform != "win32":
    for _library in (_LIBC, _LIBC_WITH_GIL):
        _library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
