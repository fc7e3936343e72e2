"""Fields of a body that have no effect, and how headers write text that a client or a file has chosen."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs

from uma.protocol.converter import field_name

MAX_NAMED = 20
"""Maximum ignored fields that an answer's header names."""
MAX_VALUE_BYTES = 1024
"""Maximum length of a header's value: clients refuse a line of 64 KiB."""
_INVISIBLE = re.compile(rb"[^ -~]")


def header_value(text: str) -> bytes:
    """`text` as visible ASCII, with escapes for all other characters; a long one is cut, and ends with `...`."""
    ascii = text[: MAX_VALUE_BYTES + 1].encode("ascii", "backslashreplace")
    value = _INVISIBLE.sub(lambda found: b"\\x%02x" % found[0][0], ascii).strip()
    return value if len(value) <= MAX_VALUE_BYTES else value[: MAX_VALUE_BYTES - 3] + b"..."


@attrs.define
class Ignored:
    """Collects the first `MAX_NAMED` ignored fields of a request, each once."""

    _places: dict[str, None] = attrs.field(factory=dict, init=False)

    def add(self, *places: str) -> None:
        """Add fields by their paths."""
        self.add_all(places)

    def add_all(self, places: Iterable[str]) -> None:
        """Add fields by their paths, and look at no more of them than are kept."""
        for place in places:
            if len(self._places) == MAX_NAMED:
                return
            self._places[place[:MAX_VALUE_BYTES]] = None

    def add_unknown(self, value: Mapping[str, Any], known: Collection[str], path: str) -> None:
        """Add the members of the object at `path` that are not `known`."""
        self.add_all(f"{path}.{field_name(name)}" for name in value if name not in known)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)
