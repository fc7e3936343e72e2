"""Forms as browsers and clients send files (RFC 7578), read piece by piece and sans-I/O."""

from __future__ import annotations

import re
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from typing import Any

from uma.errors import BadRequest

MAX_PARTS = 64
"""Maximum parts of a form. Whatever a form's length, these bounds are those of what it takes to read it."""
MAX_HEAD_BYTES = 2_048
"""Maximum length of a part's headers."""
MAX_FIELD_BYTES = 65_536
"""Maximum length of all values together that are no file."""
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary="?([^";,]{1,200})"?', re.IGNORECASE)


def form_fields(content_type: str | None, data: bytes) -> dict[str, Any]:
    """A whole form: its values by name, and the bytes of its file as `file`. Raises `BadRequest`."""
    form, file = FormReader(content_type), bytearray()
    form.write = file.extend
    form.feed(data)
    if not form.is_whole:
        raise BadRequest("the form is broken: its end is missing")
    return form.fields if form.file_name is None else {**form.fields, "file": bytes(file)}


class FormReader:
    """A form's parts, as they come: values by name, and one file, whose contents go on at once."""

    def __init__(self, content_type: str | None) -> None:
        """Raises `BadRequest` where the body is no form."""
        found = _BOUNDARY.match(content_type or "")
        if found is None:
            raise BadRequest("Content-Type: expected multipart/form-data with a boundary, as for `curl -F`")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        """None: no file has come."""
        self.is_whole = False
        self.write: Callable[[bytes], object] = lambda _: None
        """Is given the file's contents."""
        self._delimiter = b"\r\n--" + found[1].encode()
        self._unread = bytearray(b"\r\n")
        self._part: str | None = None
        """Name of the value that is read; None: the file, or what comes before all parts."""
        self._value = bytearray()
        self._parts = self._values_bytes = 0
        """What has come of both."""
        self._is_file = False
        self._step: Callable[[], bool] = self._body

    def feed(self, data: bytes) -> None:
        """Take the next piece of the body; what stands behind the form's end is left out. Raises `BadRequest`."""
        if self.is_whole:
            return
        self._unread += data
        while not self.is_whole and self._step():
            pass

    def _body(self) -> bool:
        at = self._unread.find(self._delimiter)
        end = max(0, len(self._unread) - len(self._delimiter) + 1) if at < 0 else at
        self._give(bytes(self._unread[:end]))
        if at < 0:
            del self._unread[:end]
            return False
        del self._unread[: end + len(self._delimiter)]
        if self._part is not None:
            self.fields[self._part] = self._value.decode("utf-8", "replace")
        self._step = self._edge
        return True

    def _edge(self) -> bool:
        if len(self._unread) < 2:
            return False
        edge = bytes(self._unread[:2])
        if edge not in (b"--", b"\r\n"):
            raise BadRequest("the form is broken: something follows a boundary on its line")
        self.is_whole = edge == b"--"
        self._step = self._head
        return True

    def _head(self) -> bool:
        at = self._unread.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if at < 0:
            if len(self._unread) >= MAX_HEAD_BYTES:
                raise BadRequest(f"the form is broken: a part's headers are over {MAX_HEAD_BYTES:,} bytes")
            return False
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadRequest(f"the form has more than {MAX_PARTS} parts; leave out what is not needed")
        head = Parser().parsestr(self._unread[2:at].decode("utf-8", "replace"), headersonly=True)
        del self._unread[: at + 4]
        name = head.get_param("name", header="content-disposition")
        file_name = _file_name(head)
        self._is_file = file_name is not None and self.file_name is None
        self._part, self._value = None, bytearray()
        if self._is_file:
            self.file_name = file_name
        elif isinstance(name, str):
            self._part = name
        self._step = self._body
        return True

    def _give(self, data: bytes) -> None:
        if self._is_file:
            self.write(data)
        elif self._part is not None:
            self._value += data
            self._values_bytes += len(data)
            if self._values_bytes > MAX_FIELD_BYTES:
                raise BadRequest.at(f"{self._part[:100]}", f"the form's values are over {MAX_FIELD_BYTES:,} bytes")


def _file_name(head: Message) -> str | None:
    """The file's name, as text that UTF-8 can hold. The client names its encoding (RFC 2231), which can be any of
    Python's: some of them make surrogates, or raise. Raises `BadRequest`.
    """
    try:
        name = head.get_filename()
    except (ValueError, LookupError):
        raise BadRequest.at("file", "the encoding of its name (filename*) is unsupported; write it in UTF-8") from None
    return None if name is None else name.encode("utf-8", "replace").decode()
