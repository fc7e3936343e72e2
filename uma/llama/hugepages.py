"""Memory in huge pages: weights, and KV cells.

A batch of decode rows reads all weights once. In pages of 4 KiB the processor has to look up where each page lies, far
more of them than it can keep in mind, and that takes several percent of the batch's time (`python -m benchmarks -s
weights`). And memory is had a page at a time, when it is first written: KV memory for another layout takes a quarter of
the time in huge pages.

Linux gives huge pages (2 MiB on x86) to memory for which it is asked (`madvise`), if it is asked before anything is
written there. llama.cpp does not ask. But it reports the progress of loading, for the first time when it has the memory
and nothing is in it yet; and it logs how large KV memory is before it clears that (`KV_TAKEN`). What it computes in is
left as it is: a batch writes to a little of it in many places, so that the first one would wait for more huge pages
than it needs.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from uma.llama.mappings import mappings

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Linux: `always`, `madvise` or `never`, the one in brackets."""
LEAST_BYTES = 2 * 2**20
"""Minimum size of memory with a huge page in it."""

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
    """Asks for huge pages for large memory that is taken after its making.

    For one model or context while it is made, on the thread that makes it. Where there are none this changes nothing.
    What other threads take meanwhile, and what lies next to new memory so that Linux has both as one piece, is asked
    for too: written to already, it stays as it is.
    """

    def __init__(self) -> None:
        self._known = set(_private_mappings())

    def ask(self) -> None:
        """Ask for whatever was taken since the making, or since the last call."""
        for start, end in _private_mappings():
            if (start, end) not in self._known:
                self._known.add((start, end))
                _ask(start, end - start)

    def on_line(self, text: str) -> None:
        """Take in a line that llama.cpp logs while it makes a context."""
        if KV_TAKEN in text:
            self.ask()


def _private_mappings() -> Iterator[tuple[int, int]]:
    """Where this process has large memory of its own, with no file behind it."""
    for each in mappings():
        is_anonymous = not each.name or each.name.startswith("[anon")
        if each.may == "rw-p" and is_anonymous and each.size >= LEAST_BYTES:
            yield each.start, each.end


def _ask(start: int, size: int) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:  # another system
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(start, size, advice) != 0:
        logger.debug("no huge pages for %d bytes: %s", size, os.strerror(ctypes.get_errno()))
