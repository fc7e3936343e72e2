"""Which client a task works for, so that what all clients share is given to them in turns."""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from ipaddress import IPv6Address, ip_address

CLIENT: ContextVar[Hashable] = ContextVar("CLIENT", default=None)
"""A connection, an address, or the account that several connections belong to; None: this very process. Tasks inherit
it."""

IPV6_NETWORK_BITS = 64
"""One machine has all the addresses of its network of this size, and can use a new one for each connection."""


def client_at(host: str, port: int) -> Hashable:
    """The client at the other end of a TCP connection without an account.

    Another machine is one client, however many connections it opens. On this machine each connection is one, as on a
    Unix socket: counted by address, all programs here would be one client, and each would wait for another's flood.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host, port
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return str(address), port
    if isinstance(address, IPv6Address):
        return int(address) >> 128 - IPV6_NETWORK_BITS
    return str(address)
