"""Incremental reader of a tool call that is one JSON object: `{"name": …, "arguments": {…}}`.

The arguments are given out as they come, before the object is complete. An object that is not a call is recognised at
its first foreign key, so that ordinary JSON is not held back.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress

from uma import json_text

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = {*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type", "tool_call_id"}


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


class JsonCall:
    """Push characters, beginning with `{`, until `is_whole` or `problem` is set."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._raw: list[str] = []
        self._depth = 0
        self._string = JsonString()
        self._key: str | None = None
        """Key whose value is being read; None while a key is read."""
        self._word = ""
        """Text of the current key or value so far."""
        self._unsent = ""
        self.name: str | None = None
        """Name of the tool, once it is known."""
        self.arguments = ""
        self.is_whole = False
        self.problem = ""
        """Why the text is not a call of these tools; empty while it can become one."""
        self._sent = 0
        """Number of characters of the arguments that were given out."""

    def push(self, char: str) -> str:
        """Take the next character. Returns the part of the arguments that it completes."""
        self._raw.append(char)
        was_open = self._string.is_open
        self._string.push(char)
        if was_open or self._string.is_open:
            self._word += char
        elif self._depth == 1 and char in ":,}":
            self._structural(char)
        elif self._depth == 1 and char.isspace():
            return ""
        else:
            self._depth += (char in "{[") - (char in "}]")
            if self._depth < 1:
                self.problem = "it is not JSON"
            elif len(self._raw) > 1:
                self._word += char
        if self._is_streaming and self._word and not self.is_whole and not self.problem:
            return self._send()
        sent, self._unsent = self._unsent, ""
        return sent

    def _structural(self, char: str) -> None:
        if char == ":":
            self._begin_value()
            return
        if self._key is not None:
            self._end_value()
        elif self._word:
            self.problem = "a key has no value"
        self._key, self._word = None, ""
        if char == "}" and not self.problem:
            self._depth = 0
            self._end()

    def _begin_value(self) -> None:
        key = self._word[1:-1]  # without escapes, because grammars spell keys without them
        if self._key is not None or key not in _KEYS or self._word != f'"{key}"':
            self.problem = "it is not a call's object"
            return
        self._key, self._word = key, ""

    def _end_value(self) -> None:
        value = self._json(self._word)
        if self.problem:
            return
        if self._key in _NAME_KEYS:
            spelled = json.dumps(value, ensure_ascii=False)
            if not isinstance(value, str) or value not in self._names or self._word != spelled:
                self.problem = "no tool of that name was offered"
                return
            if self.name is not None:
                self.problem = "it has a name twice"
                return
            self.name = value
            if self.arguments:
                self._unsent = self.arguments[self._sent :]
                self._sent = len(self.arguments)
        elif self._key in _ARGUMENT_KEYS:
            self._end_arguments(value)

    def _end_arguments(self, value: object) -> None:
        text = self._word
        if isinstance(value, str):  # some models write the object once more as a string
            text, value = value, self._json(value)
        if not isinstance(value, dict):
            self.problem = self.problem or "its arguments are no JSON object"
            return
        if self.arguments:
            self.problem = "it has arguments twice"
            return
        self.arguments = text
        if self.name is not None:
            self._unsent = text[self._sent :]
            self._sent = len(text)

    def _end(self) -> None:
        if self.name is None:
            self.problem = "it has no name"
            return
        if not self.arguments:
            self.arguments = self._unsent = "{}"
        self._json("".join(self._raw))
        self.is_whole = not self.problem

    @property
    def _is_streaming(self) -> bool:
        is_first = not self.arguments and self._key in _ARGUMENT_KEYS
        return self.name is not None and is_first and self._word.startswith("{")

    def _send(self) -> str:
        text = self._word[self._sent :]
        self._sent = len(self._word)
        return text

    def _json(self, text: str) -> object:
        try:
            return json_text.loads(text)
        except (ValueError, RecursionError):
            self.problem = self.problem or "it is not JSON"
            return None


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
