"""Log lines: one an event, `key=value`, with the session's and the request's id.

A log must never take the server down with it. Lines that cannot be written (a full disk, a terminal that is gone) are
counted, and the next line that can be written says how many were lost.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from uma.config import RuntimeConfig, is_debugging
from uma.errors import ConfigError
from uma.net.logfmt import log, logfmt, visible

__all__ = ["LineFormatter", "LineHandler", "log", "logfmt", "logging_to"]

STDERR = 2


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z info uma.server event=… …`: always exactly one line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        text = record.getMessage()
        if record.exc_info:
            text += " " + logfmt({"traceback": self.formatException(record.exc_info)})
        return f"{when}Z {record.levelname.lower()} {record.name} {visible(text)}"


class LineHandler(logging.Handler):
    """Writes whole lines to a file descriptor, unbuffered, and outlives every failure to do so."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())
        self._fd = fd
        self.lines_lost = 0
        """Lines that could not be written since the last one that could."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if self.lines_lost:
            line += f" lines_lost={self.lines_lost}"
        try:
            os.write(self._fd, line.encode("utf-8", "replace") + b"\n")
        except OSError:
            self.lines_lost += 1
        else:
            self.lines_lost = 0


@contextmanager
def logging_to(config: RuntimeConfig, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Send the log of every `uma` package to `config.log_file` or standard error, for the length of the block.

    `UMA_DEBUG=1` shows everything, whatever `log_level` says. Raises `ConfigError` where the file cannot be opened.
    """
    fd = _open(config.log_file) if config.log_file else STDERR
    handler, root = LineHandler(fd), logging.getLogger("uma")
    before = root.level, root.propagate
    root.setLevel(logging.DEBUG if is_debugging(environ) else config.log_level.upper())
    root.propagate = False
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        root.propagate = before[1]
        if fd != STDERR:
            os.close(fd)


def _open(name: str) -> int:
    path = Path(name)
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"log_file: {path}: cannot be written: {error.strerror}") from error
