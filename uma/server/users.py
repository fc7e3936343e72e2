"""Bounds of the socket's users: a TOML file, and the account of the user at the other end of a connection.

The kernel tells the user, so there is nothing to present and nothing to forge. A server reads the file again as soon as
it has changed.
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


@attrs.frozen
class _UsersFile:
    """What a file says."""

    named: Mapping[int, tuple[str, Bounds]] = attrs.field(factory=dict)
    """Name and bounds of each user in the table, by user id."""
    others: Bounds | None = None
    """None: users without a table have no bounds."""

    @classmethod
    def load(cls, path: Path) -> _UsersFile:
        """Raises `ConfigError` where the file cannot be read, or names a user or a bound that does not exist."""
        tables = {
            name: from_table(table, Bounds, "socket_users", f"{path}: [{name}]")
            for name, table in read_toml(path, "socket_users").items()
        }
        others = tables.pop(OTHERS, None)
        named = {_uid(f"{path}: [{name}]", name): (name, bounds) for name, bounds in tables.items()}
        if len(named) < len(tables):
            raise ConfigError.at("socket_users", f"{path}: a user has two tables, by name and by user id; keep one")
        return cls(named, others)

    def of(self, uid: int | None) -> tuple[str, Bounds]:
        """A user's name and bounds."""
        if uid is not None and uid in self.named:
            return self.named[uid]
        return "unknown" if uid is None else str(uid), self.others or Bounds()


@attrs.define(eq=False)
class Users:
    """The accounts of a server's users, by user id, with the bounds that the file has now. Belongs to one thread."""

    _watch: FileWatch | None = None
    _file: _UsersFile = attrs.field(factory=_UsersFile)
    _accounts: dict[int | None, ClientAccount] = attrs.field(factory=dict, init=False)

    @classmethod
    def load(cls, file: str) -> Users:
        """The users of a file: tables `[NAME]` or `[UID]`, and `[others]`, each with `Bounds`; an empty name: no file.

        Raises `ConfigError` as `_UsersFile.load`.
        """
        return cls(FileWatch(Path(file)), _UsersFile.load(Path(file))) if file else cls()

    def account(self, uid: int | None) -> ClientAccount | None:
        """The account of a user, also of one that nothing bounds yet: what the file says later reaches open sessions.
        None where there is no file.
        """
        if self._watch is None:
            return None
        self.look()
        name, bounds = self._file.of(uid)
        return self._accounts.setdefault(uid, ClientAccount(f"user {name}", bounds))

    def accounts(self) -> list[ClientAccount]:
        """The accounts of all users that had a session; none without a file."""
        return list(self._accounts.values())

    def look(self) -> None:
        """Read a file that has changed. One that cannot be read is warned of, and the bounds stay as they were."""
        if self._watch is None or not self._watch.has_changed():
            return
        try:
            self._file = _UsersFile.load(self._watch.path)
        except ConfigError as error:
            log(logger, logging.WARNING, "socket.users_not_reloaded", kept=len(self._file.named), error=error.message)
            return
        for uid, account in self._accounts.items():
            name, account.bounds = self._file.of(uid)
            account.name = f"user {name}"
        log(logger, logging.INFO, "socket.users_reloaded", read=len(self._file.named))


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
