"""Memory in huge pages: weights, and KV cells.

A batch of decode rows reads all weights once. In pages of 4 KiB the processor has to look up where each page lies, far
more of them than it can keep in mind, and that takes several percent of the batch's time (`python -m benchmarks -s
weights`). And memory is had a page at a time, when it is first written: KV memory for another layout takes a quarter of
the time in huge pages.

Linux gives huge pages (2 MiB on x86) to memory for which it is asked (`madvise`), if it is asked before anything is
written there. llama.cpp does not ask. But it reports the progress of loading, for the first time when it has the memory
and nothing is in it yet; and it logs how large KV memory is before it clears that (`KV_TAKEN`).

In some virtual machines huge pages take several times as long as others: what was free for a while has gone back to the
host, in pieces of this size. So KV memory is filled piece by piece, and where huge pages turn out to be slow the rest
has others (`_fill`). What llama.cpp computes in is left as it is: a batch writes to a little of it in many places, so
that the first one would wait for more huge pages than it needs.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from uma.llama.mappings import mappings

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Linux: `always`, `madvise` or `never`, the one in brackets."""
HUGE_BYTES = LEAST_BYTES = 2 * 2**20
"""Size of a huge page on x86, and minimum size of memory with one in it."""
SURE_PIECES = 8
"""Pieces that are to take no longer than as many with other pages: a few huge ones can be at hand, and more not."""
MADV_POPULATE_WRITE = 23
"""`madvise`: give memory its pages now, without writing to it. Linux 5.14 and newer."""

KV_TAKEN = "KV buffer size"
"""In a line that llama.cpp logs when it has KV memory and nothing is in it yet. Without such a line KV memory has pages
as the system gives them.
"""

logger = logging.getLogger("uma.llama")


def available(setting: Path = SETTING) -> bool:
    """Whether this system gives huge pages to a process that asks."""
    try:
        return "[never]" not in setting.read_text(encoding="ascii")
    except OSError:  # another system, or a kernel without them
        return False


class HugePages:
    """Sees to memory that is taken after its making.

    For one model or context while it is made, on the thread that makes it. What other threads take meanwhile is seen to
    as well, which does not change what is in it.
    """

    def __init__(self) -> None:
        self._known = list(_private_mappings())

    def ask(self) -> None:
        """Ask for huge pages for what was taken."""
        for start, end in self._new():
            _advise(start, end, "MADV_HUGEPAGE")

    def on_line(self, text: str) -> None:
        """Take in a line that llama.cpp logs while it makes a context: KV memory is filled with pages."""
        if KV_TAKEN in text:
            for start, end in self._new():
                _fill(start, end)

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


def _private_mappings() -> Iterator[tuple[int, int]]:
    """Where this process has large memory of its own, with no file behind it."""
    for each in mappings():
        is_anonymous = not each.name or each.name.startswith("[anon")
        if each.may == "rw-p" and is_anonymous and each.size >= LEAST_BYTES:
            yield each.start, each.end


def _fill(start: int, end: int) -> None:
    """Give memory that is about to be written its pages: huge ones, as long as those are had sooner than others."""
    start, end = -(-start // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
    if end - start <= HUGE_BYTES:
        return
    usual_ns = _timed_ns(start, start + HUGE_BYTES, "MADV_NOHUGEPAGE")
    if usual_ns is None:
        return
    latest = deque[int](maxlen=SURE_PIECES)
    for piece in range(start + HUGE_BYTES, end, HUGE_BYTES):
        took_ns = _timed_ns(piece, piece + HUGE_BYTES, "MADV_HUGEPAGE")
        latest.append(took_ns or 0)
        if sum(latest) > SURE_PIECES * usual_ns:
            logger.debug("huge pages take %.1f times as long as others", sum(latest) / len(latest) / usual_ns)
            _timed_ns(piece + HUGE_BYTES, end, "MADV_NOHUGEPAGE")
            return


def _timed_ns(start: int, end: int, advice: str) -> int | None:
    """How long it took until this memory had pages of the kind; None where the system cannot do that."""
    _advise(start, end, advice)
    began_ns = time.perf_counter_ns()
    has_pages = _madvise(start, end, MADV_POPULATE_WRITE)
    return time.perf_counter_ns() - began_ns if has_pages else None


def _advise(start: int, end: int, name: str) -> None:
    advice = getattr(mmap, name, None)  # not there on other systems
    if advice is not None and end > start and not _madvise(start, end, advice):
        logger.debug("%s for %d bytes: %s", name, end - start, os.strerror(ctypes.get_errno()))


def _madvise(start: int, end: int, advice: int) -> bool:
    if sys.platform != "linux":
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return end <= start or madvise(start, end - start, advice) == 0
