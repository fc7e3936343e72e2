"""Who can change which models a server has, or which of them stay: who runs it, and keys that were given the right."""

from __future__ import annotations

import os

from uma.http.exchange import Exchange
from uma.http.local_user import user_of
from uma.http.problem import Forbidden

ROOT = 0
"""The user id that can do so anyway."""


async def check_manager(http: Exchange, what: str) -> None:
    """Raise `Forbidden` unless the request's key, or without keys its user on this machine, can manage models."""
    if http.account is not None:
        if not http.account.manages_models:
            raise Forbidden(f"{http.account.name} must not {what}: its key has no manage_models = true")
    elif await user_of(http) not in (ROOT, os.geteuid()):
        raise Forbidden(
            f"only the user that the server runs as can {what}, from this machine and not through a proxy; others need "
            "a key with manage_models = true (`uma key new NAME --manage-models`)"
        )
