"""Which client a task works for, so that what all clients share is given to them in turns."""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from ipaddress import IPv6Address, ip_address
from typing import Any

CLIENT: ContextVar[Hashable] = ContextVar("CLIENT", default=None)
"""Name of a connection, an address, or name of the account that several connections belong to; None: this very process.
Tasks inherit it. It is text, numbers or a tuple of them: what is counted by client would keep any other object in
memory."""

ORIGIN: ContextVar[str] = ContextVar("ORIGIN", default="")
"""Client in words for people: the program, the key, the endpoint or the socket. Empty: this very process."""
TRACEPARENT: ContextVar[str] = ContextVar("TRACEPARENT", default="")
"""The span that a request belongs to, in the form of W3C's Trace Context; empty: unknown."""
TRACEPARENT_MEMBER = "traceparent"
"""What has the same in a request's metadata."""
USER: ContextVar[int | None] = ContextVar("USER", default=None)
"""The user id of the process at the other end of a Unix socket; None: it has come otherwise, or is not told."""
QUEUED: ContextVar[tuple[int, int]] = ContextVar("QUEUED", default=(0, 1))
"""Lane of a task's request and the answers that are drawn for it, as the queue of a load counts them."""
MAX_PROGRAM_CHARS = 40
"""Maximum length of a program's or user's name: what a client says of itself is shown to others."""

OWNER: ContextVar[Hashable] = ContextVar("OWNER", default=None)
"""Whose the requests of a task are, and whose it can ask about; None: the server's own, which can ask about all."""

MAX_ORIGIN_CHARS = 256
"""Maximum length of what `origin` and `with_user` make: a model's process takes no more."""
IPV6_NETWORK_BITS = 64
"""One machine has all the addresses of its network of this size, and can use a new one for each connection."""


THIS_MACHINE = "this machine"
"""What `machine_at` calls it."""


def client_at(host: str, port: int) -> Hashable:
    """The client at the other end of a TCP connection without an account.

    Another machine is one client, however many connections it opens. On this machine each connection is one, as on a
    Unix socket: counted by address, all programs here would be one client, and each would wait for another's flood.
    """
    machine = machine_at(host)
    return (host, port) if machine == THIS_MACHINE else machine


def machine_at(host: str) -> Hashable:
    """The machine at the other end of a TCP connection, whatever its address is."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return THIS_MACHINE
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return THIS_MACHINE
    if isinstance(address, IPv6Address):
        return int(address) >> 128 - IPV6_NETWORK_BITS
    return str(address)


def is_loopback(host: str) -> bool:
    """Whether a host, an address or a name, is reached from this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def asker() -> str | None:
    """Who asked for what a task does: `key NAME`, `user UID`, else `socket` or `http`; None: this very process."""
    if isinstance(owner := OWNER.get(), tuple):
        return " ".join(map(str, owner))
    return "socket" if USER.get() is not None else "http" if ORIGIN.get() else None


def origin(endpoint: str, holder: str | None, program: str, pid: int | None = None) -> str:
    """Value for `ORIGIN`: what is known of a request's way here, the parts apart by a middle dot."""
    parts = (_shown(program), holder, endpoint, pid and f"pid {pid}")
    return " · ".join(part for part in parts if part)[:MAX_ORIGIN_CHARS]


def with_user(origin: str, user: str) -> str:
    """An origin with the end user that the request's body names, before the endpoint."""
    *before, endpoint = origin.split(" · ")
    return " · ".join((*before, f"user {_shown(user)}", endpoint))[:MAX_ORIGIN_CHARS]


def _shown(name: str) -> str:
    return "".join(character for character in name if character.isprintable())[:MAX_PROGRAM_CHARS]


def with_span(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """A request's metadata with the span that it belongs to, where it goes to another process."""
    span = TRACEPARENT.get()
    return {**(metadata or {}), TRACEPARENT_MEMBER: span} if span else metadata


def span_of(metadata: dict[str, Any] | None) -> str:
    """The span that a request with this metadata belongs to; empty: unknown."""
    named = (metadata or {}).get(TRACEPARENT_MEMBER)
    return TRACEPARENT.get() or (named if isinstance(named, str) else "")
