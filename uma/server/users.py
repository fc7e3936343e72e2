"""Bounds of the socket's users: a TOML file, and the account of the user at the other end of a connection.

The kernel tells the user, so there is nothing to present and nothing to forge.
"""

from __future__ import annotations

import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from uma.config import read_toml
from uma.errors import BadRequest, ConfigError
from uma.net.quota import Account, Bounds
from uma.protocol.converter import structure, unknown_fields

OTHERS = "others"
"""The table whose bounds each user without a table of its own has, each for itself."""


@attrs.define(eq=False)
class Users:
    """The accounts of a server's users, by user id. Belongs to one thread."""

    _named: Mapping[int | None, Account] = attrs.field(factory=dict)
    _others: Bounds | None = None
    """None: users without a table have no bounds."""
    _made: dict[int | None, Account] = attrs.field(factory=dict, init=False)

    @classmethod
    def load(cls, file: str) -> Users:
        """The users of a file: tables `[NAME]` or `[UID]`, and `[others]`, each with `Bounds`; an empty name: no file.

        Raises `ConfigError` where the file cannot be read, or names a user or a bound that does not exist.
        """
        if not file:
            return cls()
        where = f"socket_users: {file}"
        tables = {name: _bounds(f"{where}: [{name}]", table) for name, table in read_toml(Path(file), where).items()}
        others = tables.pop(OTHERS, None)
        named: dict[int | None, Account] = {
            _uid(f"{where}: [{name}]", name): Account(f"user {name}", bounds) for name, bounds in tables.items()
        }
        if len(named) < len(tables):
            raise ConfigError(f"{where}: a user has two tables, by name and by user id; keep one")
        return cls(named, others)

    def account(self, uid: int | None) -> Account | None:
        """The account of a user; None where nothing bounds it."""
        if uid in self._named:
            return self._named[uid]
        if self._others is None:
            return None
        if uid not in self._made:
            self._made[uid] = Account(f"user {'unknown' if uid is None else uid}", self._others)
        return self._made[uid]


def _bounds(where: str, table: Any) -> Bounds:
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table of bounds")
    try:
        bounds = structure(table, Bounds)
    except BadRequest as error:
        raise ConfigError(f"{where}: {error.message}") from None
    for unknown in unknown_fields(table, Bounds):
        known = ", ".join(field.name for field in attrs.fields(Bounds))
        raise ConfigError(f"{where}: {unknown}: no such bound; there are {known}")
    return bounds


def _uid(where: str, name: str) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigError(f"{where}: this system has no user of that name; give the user id, or [{OTHERS}]") from None
