"""Standard input, output and error as this process found them, made fit for use.

A closed standard output stays closed: writing to it fails, as it does in any other program. Standard error that cannot
be written to, closed or on a full disk, loses what is said and nothing else.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from uma.errors import UmaError

OUTPUT = "standard output"
"""The name of descriptor 1 in errors."""


def mend() -> None:
    """Open what is closed, and let no character and no failure of standard error get in the way.

    Opening takes the lowest free descriptor, so in this order each gets its own again, and no socket or file of ours
    ever becomes the standard output of this process.
    """
    if sys.stdin is None:
        sys.stdin = _open(0, os.O_RDONLY, "r")
    if sys.stdout is None:
        # Not open for writing: every write says `Bad file descriptor`, as on a closed one.
        _open(1, os.O_RDONLY, "w")
        sys.stdout = _standard_output("utf-8")
    elif sys.stdout is (own := sys.__stdout__) and own is not None:
        sys.stdout = _standard_output(own.encoding)
    if sys.stderr is None:
        sys.stderr = _open(2, os.O_WRONLY, "w")
    elif sys.stderr is (given := sys.__stderr__) and given is not None:
        sys.stderr = io.TextIOWrapper(
            _Lossy(given.fileno()), encoding=given.encoding, errors="replace", line_buffering=True
        )


def _open(expected: int, flags: int, mode: str) -> IO[Any]:
    descriptor = os.open(os.devnull, flags)
    if descriptor != expected:
        os.dup2(descriptor, expected)
        os.close(descriptor)
    return open(expected, mode, encoding="utf-8", errors="replace", closefd=False)


def _standard_output(encoding: str) -> io.TextIOWrapper:
    writer = io.BufferedWriter(_StandardOutput(1, "w", closefd=False))
    return io.TextIOWrapper(writer, encoding=encoding, errors="replace", line_buffering=os.isatty(1))


def abandon_output() -> None:
    """Standard output is beyond use: what is still buffered for it must not fail once more as the process ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def naming(file: str) -> Iterator[None]:
    """A block that writes to `file`: an error of the system's that names none, as that of a full disk, names it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, UmaError) or error.filename:
            raise
        raise OSError(error.errno, error.strerror, file) from None


class _StandardOutput(io.FileIO):
    """Descriptor 1, whose errors say that it was standard output that could not be written."""

    def write(self, data: Any) -> int:
        """See `io.FileIO.write`."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, OUTPUT) from None


class _Lossy(io.BufferedIOBase):
    """A descriptor that takes everything, and loses what cannot be written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """All of `data` counts as written, whatever became of it."""
        unsent = memoryview(data).cast("B")
        size = len(unsent)
        with suppress(OSError):
            while unsent:
                unsent = unsent[os.write(self._descriptor, unsent) :]
        return size
