"""Protocol versions: supported ones, and their negotiation.

Versions are `major.minor`. Within a major, fields are only ever added. A session uses the highest minor that both sides
support, so a client never gets fields that its version does not have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from uma.errors import VersionMismatch

SUPPORTED = ("1.0", "1.1", "1.2")
"""Supported versions, the oldest first."""

_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})", re.ASCII)


def parse_version(word: str) -> tuple[int, int] | None:
    """Major and minor of `major.minor`; None where `word` is not a version."""
    match = _VERSION.fullmatch(word)
    return (int(match[1]), int(match[2])) if match else None


def negotiate(client: Sequence[str]) -> str:
    """The highest of `SUPPORTED` that is at most the client's highest minor of that major.

    A client that only names a lower minor than all of them gets the lowest: it can ignore unknown fields. A word that
    is not a version is skipped: a later server can understand it. Raises `VersionMismatch` naming both sides' versions
    where no major is common.
    """
    minors: dict[int, int] = {}
    for major, minor in filter(None, map(parse_version, client)):
        minors[major] = max(minor, minors.get(major, 0))
    common = [version for version in filter(None, map(parse_version, SUPPORTED)) if version[0] in minors]
    if not common:
        raise VersionMismatch(
            f"versions: this server speaks {', '.join(SUPPORTED)}, the client {', '.join(client)[:200] or 'none'}"
        )
    known = [version for version in common if version[1] <= minors[version[0]]]
    return "{}.{}".format(*max(known, default=min(common)))
