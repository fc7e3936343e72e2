"""Who can change which models a server has, or which of them stay: who runs it, and keys that were given the right."""

from __future__ import annotations

import sys

from uma import posix
from uma.http.exchange import Exchange
from uma.http.local_user import user_of
from uma.http.problem import Forbidden


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
