"""Bounds of the socket's users: a TOML file, and the account of the user at the other end of a connection.

The kernel tells the user, so there is nothing to present and nothing to forge. A server reads the file again at
the next session after a change.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import attrs

with suppress(ImportError):  # Windows
    import pwd

from uma.config import read_toml
from uma.errors import ConfigError
from uma.net.file_watch import FileWatch
from uma.net.logfmt import log
from uma.net.quota import Bounds, ClientAccount
from uma.protocol.converter import from_table

logger = logging.getLogger("uma.server")

OTHERS = "others"
"""The table whose bounds each user without a table of its own has, each for itself."""


@attrs.define(eq=False)
class Users:
    """The accounts of a server's users, by user id, with the bounds that the file has now. Belongs to one thread."""

    _watch: FileWatch | None = None
    """None: no file, and no user has bounds."""
    _known: _Known = attrs.field(factory=lambda: ({}, Bounds()))
    _accounts: dict[int | None, ClientAccount] = attrs.field(factory=dict, init=False)

    @classmethod
    def load(cls, file: str) -> Users:
        """The users of a file: tables `[NAME]` or `[UID]`, and `[others]`, each with `Bounds`; an empty name: no file.

        Raises `ConfigError` where the file cannot be read, or names a user or a bound that does not exist.
        """
        return cls(FileWatch(Path(file)), _load(Path(file))) if file else cls()

    def account(self, uid: int | None) -> ClientAccount:
        """The account of a user, also of one without bounds: what the file says later reaches open sessions."""
        self.look()
        return self._accounts.setdefault(uid, ClientAccount(*self._of(uid)))

    def accounts(self) -> list[ClientAccount]:
        """The accounts of all users that had a session."""
        return list(self._accounts.values())

    def _of(self, uid: int | None) -> tuple[str, Bounds]:
        named, others = self._known
        name, bounds = ("unknown", others) if uid is None else named.get(uid, (str(uid), others))
        return f"user {name}", bounds

    def look(self) -> None:
        """Read a file that has changed. One that cannot be read is warned of, and the bounds stay as they were."""
        if self._watch is None or not self._watch.has_changed():
            return
        try:
            self._known = _load(self._watch.path)
        except ConfigError as error:
            log(logger, logging.WARNING, "socket.users_not_reloaded", kept=len(self._known[0]), error=error.message)
            return
        for uid, account in self._accounts.items():
            account.name, account.bounds = self._of(uid)
        log(logger, logging.INFO, "socket.users_reloaded", read=len(self._known[0]))


_Known = tuple[Mapping[int, tuple[str, Bounds]], Bounds]
"""What a file says: name and bounds of users by user id, and the bounds of all others."""


def _load(path: Path) -> _Known:
    tables = {
        name: from_table(table, Bounds, "socket_users", f"{path}: [{name}]")
        for name, table in read_toml(path, "socket_users").items()
    }
    others = tables.pop(OTHERS, Bounds())
    named = {_uid(f"{path}: [{name}]", name): (name, bounds) for name, bounds in tables.items()}
    if len(named) < len(tables):
        raise ConfigError.at("socket_users", f"{path}: a user has two tables, by name and by user id; keep one")
    return named, others


def _uid(where: str, name: str) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    if sys.platform == "win32":
        raise ConfigError.at("socket_users", f"{where}: unsupported: this system has no Unix sockets")
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigError.at(
            "socket_users", f"{where}: this system has no user of that name; give the user id, or [{OTHERS}]"
        ) from None
