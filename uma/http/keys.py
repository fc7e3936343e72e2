"""API keys: a TOML file that names them and holds their hashes, and the comparison with what a request brings.

A key is 256 random bits, so a plain SHA-256 hides it: there is no dictionary to try. Keys are never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import attrs

from uma.config import read_toml
from uma.constraints import Length
from uma.errors import BadRequest, ConfigError
from uma.net.quota import Account, Bounds
from uma.protocol.converter import structure, unknown_fields

PREFIX = "uma-"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")


@attrs.frozen(kw_only=True)
class _Entry(Bounds):
    sha256: Annotated[str, Length(64, 64)]


@attrs.frozen
class Key:
    """A key's hash, and the account that its requests are counted on."""

    sha256: str
    account: Account


@attrs.frozen
class Keys:
    """All keys of a server; with none, everything is let in."""

    known: tuple[Key, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Keys:
        """The keys of a file: `[NAME]` tables with `sha256` and, optionally, `Bounds`.

        Raises `ConfigError` where the file cannot be read, holds none, or something else.
        """
        tables = read_toml(path, f"http_keys: {path}")
        if not tables:
            raise ConfigError(f"http_keys: {path}: holds no key; make one with `uma key new NAME --keys {path}`")
        return cls(tuple(_key(path, name, table) for name, table in tables.items()))

    def find(self, presented: str) -> Account | None:
        """The account of a key, or None. Takes the same time whichever key it is, or none."""
        digest = hash_of(presented)
        found: Account | None = None
        for key in self.known:
            if hmac.compare_digest(digest, key.sha256):
                found = key.account
        return found


def _key(path: Path, name: str, table: Any) -> Key:
    where = f"http_keys: {path}: [{name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table with the key's sha256")
    try:
        entry = structure(table, _Entry)
    except BadRequest as error:
        raise ConfigError(f"{where}: {error.message}") from None
    for unknown in unknown_fields(table, _Entry):
        raise ConfigError(f"{where}: {unknown}: no such bound; there are {', '.join(_BOUNDS)}")
    if not _HASH.fullmatch(entry.sha256):
        raise ConfigError(f"{where}: sha256: expected 64 hexadecimal digits")
    return Key(entry.sha256, Account(name, Bounds(**{bound: getattr(entry, bound) for bound in _BOUNDS})))


_BOUNDS = tuple(field.name for field in attrs.fields(Bounds))


def hash_of(key: str) -> str:
    """What a file of keys holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def presented_in(headers: Mapping[str, str]) -> str | None:
    """A request's key: `Authorization: Bearer KEY`, as OpenAI's clients send it, or `X-Api-Key`, as Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def add(path: Path, name: str) -> str:
    """Make a key, append its hash to the file, which is made where it is missing, and return the key.

    Raises `ConfigError` for a name that cannot be used or is there already.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name: {name!r}: expected 1 to 64 letters, digits, - or _")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before.strip() and name in _names(path):
        raise ConfigError(f"{path}: [{name}] is there already; choose another name, or remove that table")
    key = PREFIX + secrets.token_urlsafe(32)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    with os.fdopen(fd, "a", encoding="utf-8") as file:
        # An editor can have left the last line without its end.
        begin = "" if before.endswith("\n") or not before else "\n"
        file.write(f'{begin}[{name}]\nsha256 = "{hash_of(key)}"\n\n')
    return key


def _names(path: Path) -> set[str]:
    return {key.account.name for key in Keys.load(path).known}
