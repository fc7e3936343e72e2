"""Contract versions: supported ones, and their negotiation.

`major.minor`: a new minor adds fields that can be ignored; removing or renaming one needs a new major.
"""

from __future__ import annotations

from collections.abc import Sequence

from uma.errors import VersionMismatch
from uma.protocol.versions import parse_version

PROTOCOL_HEADER = "X-UMA-Protocol-Version"
SERVER_HEADER = "X-UMA-Server-Version"

CONTRACT_VERSIONS = ("1.0",)
"""Supported versions, the oldest first. The socket's protocol has its own (`uma.protocol.versions`)."""


def negotiate_version(client_version: str, server_versions: Sequence[str] = CONTRACT_VERSIONS) -> str:
    """The highest of `server_versions` with the client's major version, compared as numbers: 1.10 is over 1.9.

    Raises `VersionMismatch` naming both sides' versions.
    """
    asked = parse_version(client_version)
    known = {
        version: server_version
        for server_version in server_versions
        if (version := parse_version(server_version)) is not None
    }
    common = [version for version in known if asked is not None and version[0] == asked[0]]
    if not common:
        raise VersionMismatch(
            f"{PROTOCOL_HEADER}: {client_version[:64]!r} is not spoken here; "
            f"this server speaks {', '.join(server_versions)}"
        )
    return known[max(common)]
