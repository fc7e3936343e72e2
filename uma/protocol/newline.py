"""Newline mode, for debugging by hand (`nc -U`): a line in is a prompt, bytes out are its text, a newline ends it."""

from __future__ import annotations

from uma.errors import BadRequest, InvalidJson, PromptTooLarge

METRICS_LINE = "/metrics"
"""Line that asks for one line of metrics, after which the server closes."""


class LineDecoder:
    """Bytes in, lines out. A line that is too long is an error as soon as it exceeds the maximum, not at its end."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        """Take bytes from the peer. Never raises."""
        self._buffer += data

    def next_line(self) -> str | None:
        """The next line without its end (`\\n` or `\\r\\n`), or None until more is fed.

        Raises `PromptTooLarge`, after which later data is useless; `InvalidJson` for bytes that are not UTF-8, and
        `BadRequest` for a NUL, after which the next line can be read.
        """
        end = self._buffer.find(b"\n", self._searched)
        length = len(self._buffer) if end < 0 else end
        if length > self._max_line_bytes:
            raise PromptTooLarge(f"prompt too large: a line of over {self._max_line_bytes:,} bytes (max_prompt_bytes)")
        if end < 0:
            self._searched = length
            return None
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        self._searched = 0
        return _prompt(line)

    @property
    def is_mid_line(self) -> bool:
        """Whether a line is incomplete."""
        return bool(self._buffer)


def _prompt(line: bytes) -> str:
    if b"\0" in line:
        raise BadRequest("the line holds a NUL character, which no tokenizer takes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the line is not UTF-8: {error.reason} at byte {error.start}") from None
