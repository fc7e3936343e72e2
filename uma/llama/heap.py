"""Memory of the C library's heap that is free again."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give the system what loading has freed: the C library keeps it for later, as much as 20 MiB. Takes a millisecond
    or two; nothing on a system whose C library has no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
