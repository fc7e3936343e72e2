"""JSON text that is incomplete so far."""

from __future__ import annotations

from contextlib import suppress

from uma import json_text


class JsonString:
    """Tracks whether JSON text, pushed a character at a time, is inside a string."""

    def __init__(self) -> None:
        self.is_open = False
        self._is_escaped = False

    def push(self, char: str) -> None:
        """Take the next character. The quotes at both ends belong to the string."""
        if not self.is_open:
            self.is_open = char == '"'
        elif self._is_escaped:
            self._is_escaped = False
        else:
            self.is_open = char != '"'
            self._is_escaped = char == "\\"


def whole_members(beginning: str) -> str:
    """JSON object of the complete members of an object that is cut off anywhere, as they are written."""
    depth = comma = 0
    string = JsonString()
    for at, char in enumerate(beginning):
        string.push(char)
        if not string.is_open:
            depth += (char in "{[") - (char in "}]")
            comma = at if char == "," and depth == 1 else comma
    to_comma = beginning[:comma] + "}"
    # A number's last digit can be missing.
    for whole in [to_comma] if beginning[-1:].isdigit() else [beginning, beginning + "}", to_comma]:
        with suppress(ValueError, RecursionError):
            if isinstance(json_text.loads(whole), dict):
                return whole
    return "{}"
