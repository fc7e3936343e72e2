"""Context variables that tell which client a task works for: for fair scheduling, access rights and display."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from ipaddress import IPv6Address, ip_address
from typing import Any

CLIENT: ContextVar[Hashable] = ContextVar("CLIENT", default=None)
"""Key by which requests are scheduled in turns: a connection, an address, or an account that several connections belong
to; None: this process itself. Tasks inherit it. It is text, a number or a tuple of them, because counters by client
would keep any other object in memory."""

ORIGIN: ContextVar[str] = ContextVar("ORIGIN", default="")
"""Description of the client for people: its program, key, endpoint or socket. Empty: this process itself."""
TRACEPARENT: ContextVar[str] = ContextVar("TRACEPARENT", default="")
"""W3C Trace Context (`traceparent`) of the span that the task's request belongs to; empty: unknown."""
TRACEPARENT_MEMBER = "traceparent"
"""Member of a request's metadata that carries `TRACEPARENT` to another process."""
USER: ContextVar[int | None] = ContextVar("USER", default=None)
"""User id of the peer's process on a Unix socket; None: another transport, or the system does not tell."""
QUEUED: ContextVar[tuple[int, Sequence[int]]] = ContextVar("QUEUED", default=(0, (1,)))
"""Lane of the task's request, and the number of answers for each of its prompts that are asked at once, as the queue
for a loading model counts them."""
MAX_PROGRAM_CHARS = 40
"""Maximum length of the name of a program or user: clients name themselves, and others are shown it."""

OWNER: ContextVar[Hashable] = ContextVar("OWNER", default=None)
"""Who owns the task's requests, and which requests it can ask about; None: the server's own user, who can ask about
all."""

MAX_ORIGIN_CHARS = 256
"""Maximum length of a value of `ORIGIN`: the bound of the protocol's field `origin`."""
IPV6_NETWORK_BITS = 64
"""Bits of an IPv6 address that identify a machine: it owns every address of its /64 network, and can use a new one for
each connection."""


THIS_MACHINE = "this machine"
"""Value of `machine_at` for every address of this machine."""


def client_at(host: str, port: int) -> Hashable:
    """Scheduling key (`CLIENT`) of the peer of a TCP connection without an account.

    Another machine is one client, however many connections it opens. On this machine each connection is a client of its
    own, as on a Unix socket: counted by address, all local programs would be one client, and a flood of one would delay
    all.
    """
    machine = machine_at(host)
    return (host, port) if machine == THIS_MACHINE else machine


def machine_at(host: str) -> Hashable:
    """Key of the machine at the other end of a TCP connection, equal for all addresses that it can use."""
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
    """Whether a host, given as an address or a name, can be reached from this machine only."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def asker() -> str | None:
    """Who asked for what this task does: `key NAME`, `user UID`, `socket` or `http`; None: this process itself."""
    if isinstance(owner := OWNER.get(), tuple):
        return " ".join(map(str, owner))
    return "socket" if USER.get() is not None else "http" if ORIGIN.get() else None


def origin(endpoint: str, holder: str | None, program: str, pid: int | None = None) -> str:
    """Value for `ORIGIN`: program, key, endpoint and process id as far as they are known, with middle dots between."""
    parts = (_shown(program), holder, endpoint, pid and f"pid {pid}")
    return " · ".join(part for part in parts if part)[:MAX_ORIGIN_CHARS]


def with_user(origin: str, user: str) -> str:
    """`origin` with the end user that a request's body names, put before the endpoint."""
    *before, endpoint = origin.split(" · ")
    return " · ".join((*before, f"user {_shown(user)}", endpoint))[:MAX_ORIGIN_CHARS]


def _shown(name: str) -> str:
    return "".join(character for character in name if character.isprintable())[:MAX_PROGRAM_CHARS]


def with_span(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Metadata of a request that is sent to another process, with the span that it belongs to."""
    span = TRACEPARENT.get()
    return {**(metadata or {}), TRACEPARENT_MEMBER: span} if span else metadata


def span_of(metadata: dict[str, Any] | None) -> str:
    """Span that a request with this metadata belongs to; empty: unknown."""
    named = (metadata or {}).get(TRACEPARENT_MEMBER)
    return TRACEPARENT.get() or (named if isinstance(named, str) else "")
