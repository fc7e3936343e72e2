"""Pictures of a chat: read from a person's files, told by name and size, and sent with a question."""

from __future__ import annotations

import base64
import shlex
from pathlib import Path
from typing import Any

import attrs

from uma import figures
from uma.errors import BadRequest
from uma.media.files import MAX_FILE_BYTES, PICTURES, check_file, form_of, size_of
from uma.types import Media

_HEAD_BYTES = 16
"""Bytes of a file that tell whether it is a picture."""


@attrs.frozen
class ChatPicture:
    """A picture's file and its name."""

    name: str
    data: bytes = attrs.field(repr=False)

    @classmethod
    def read(cls, path: Path) -> ChatPicture:
        """The one of this file. Raises `BadRequest`, naming the file, where it cannot be read or is no picture."""
        try:
            if path.exists() and not path.is_file():
                raise BadRequest.at(str(path), "is no file")  # to read from a pipe, say, has no end
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise BadRequest.at(str(path), f"cannot be read: {error.strerror}") from None
        if len(data) > MAX_FILE_BYTES:
            raise BadRequest.at(str(path), f"is over the limit of {MAX_FILE_BYTES:,} bytes for a picture's file")
        check_file(data, str(path), sees=True, hears=False)
        return cls(path.name, data)

    def label(self) -> str:
        """`cat.png (640 x 480, 120 kB)`."""
        width, height = size_of(self.data) or (0, 0)
        return f"{self.name} ({width:,} x {height:,}, {figures.size(len(self.data))})"

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode()

    def as_sent(self) -> Media:
        """The picture as it is sent: before the question's text."""
        return Media(self.base64)

    def as_json(self) -> dict[str, str]:
        """The picture as a saved chat has it."""
        return {"name": self.name, "data": self.base64}

    @classmethod
    def of_json(cls, table: Any) -> ChatPicture:
        """What `as_json` made. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
        if not isinstance(table["name"], str):
            raise TypeError("a name is expected")
        return cls(table["name"], base64.b64decode(table["data"], validate=True))


def path_of(text: str) -> Path:
    """The path that a person has typed, or a terminal has put there for a file that was dropped on it: as it is, in
    quotation marks, or with backslashes.
    """
    plain = Path(text).expanduser()
    try:
        (word,) = shlex.split(text)
        return plain if plain.exists() else Path(word).expanduser()
    except (ValueError, OSError, RuntimeError):  # more than one word, a mark without its other, a name too long
        return plain


def dropped(line: str) -> Path | None:
    """The picture's file whose path is all of a line; None for any other line."""
    try:
        path = path_of(line.strip())
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return path if form_of(file.read(_HEAD_BYTES)) in (*PICTURES, "WebP") else None
    except (OSError, ValueError, RuntimeError):
        return None
