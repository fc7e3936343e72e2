"""Which versions of the protocol are spoken here, and how two sides agree on one.

Versions are `major.minor`. Within a major, fields are only ever added and may be ignored, so the highest minor of a
common major that the server knows is safe for both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from uma.errors import VersionMismatch

SUPPORTED = ("1.0",)
"""Spoken here, the oldest first."""

_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})", re.ASCII)


def negotiate(client: Sequence[str]) -> str:
    """The highest of `SUPPORTED` whose major the client names. Raises `VersionMismatch` naming both sides' versions.

    A minor that only the client knows is no obstacle: it sees the chosen one in the answer and keeps to it.
    A word that is no version is skipped: it may mean something to a later server.
    """
    majors = {match[1].lstrip("0") for word in client if (match := _VERSION.fullmatch(word))}
    common = [version for version in SUPPORTED if version.partition(".")[0] in majors]
    if not common:
        raise VersionMismatch(
            f"versions: this server speaks {', '.join(SUPPORTED)}, the client {', '.join(client)[:200] or 'none'}"
        )
    return max(common, key=lambda version: tuple(map(int, version.split("."))))
