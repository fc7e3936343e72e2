"""Whose request it is, where it comes from this machine without a key: the user of its process, as Linux tells it. And
who can change which models a server has, or which of them stay: who runs it, and keys that were given the right.

A page without a key belongs to the user whose browser it is in, and so do their requests on the Unix socket. Through a
proxy it is the proxy's user that is seen, so what says that it was forwarded has none. Forwarders of connections say
nothing (kubectl port-forward, tailscale serve --tcp), and run as root: root is no user here, unless the server runs as
root, for then there is no other whose the page could be.
"""

from __future__ import annotations

import sys

import trio

from uma import posix
from uma.http.exchange import Exchange
from uma.http.problem import Forbidden
from uma.net.client import THIS_MACHINE, machine_at
from uma.net.tcp_peer import Address, ends_at

ROOT = 0
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-proto")


def ends_of(http: Exchange) -> tuple[Address, Address] | None:
    """The addresses of the client and of this server, where both are on this machine."""
    client, server = http.scope.get("client"), http.scope.get("server")
    if not client or not server or machine_at(client[0]) != THIS_MACHINE:
        return None
    return (client[0], client[1]), (server[0], server[1])


async def user_of(http: Exchange) -> int | None:
    """The user id; None where it comes with a key, from elsewhere or through a proxy, from root to a server that does
    not run as root, or the system does not tell.
    """
    ends = ends_of(http)
    if http.account is not None or ends is None or any(http.header(name) is not None for name in _FORWARDED):
        return None
    (found,) = await trio.to_thread.run_sync(ends_at, [ends], abandon_on_cancel=True)
    if found is None or (found.uid == ROOT and posix.user_id() != ROOT):
        return None
    return found.uid


async def is_manager(http: Exchange) -> bool:
    """Whether the request's key, or without keys its user on this machine, can manage models."""
    if http.account is not None:
        return http.account.manages_models
    return await user_of(http) == posix.user_id()


async def check_manager(http: Exchange, what: str) -> None:
    """Raise `Forbidden` unless `is_manager`."""
    if await is_manager(http):
        return
    if http.account is not None:
        raise Forbidden(f"{http.account.name} must not {what}: its key has no manage_models = true")
    here = "from this machine and not through a proxy" if sys.platform == "linux" else "and Linux alone tells who asks"
    raise Forbidden(
        f"only the user that the server runs as can {what}, {here}; others need a key with manage_models = true "
        "(`uma key new NAME --manage-models`)"
    )
