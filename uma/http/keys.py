"""API keys: a TOML file that names them and holds their hashes, and the comparison with what a request brings. A server
reads the file again at the next request after a change.

A key is 256 random bits, so a plain SHA-256 hides it: there is no dictionary to try. Keys are never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import attrs

from uma.config import read_toml
from uma.constraints import Length
from uma.errors import ConfigError
from uma.net.file_watch import FileWatch
from uma.net.logfmt import log
from uma.net.quota import Bounds, ClientAccount
from uma.protocol.converter import from_table

logger = logging.getLogger("uma.http")

PREFIX = "uma-"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_HEAD = re.compile(r"""\s*\[\s*["']?([A-Za-z0-9_-]+)["']?\s*\]""")
"""The line that a key's table begins with."""
_TEXT = re.compile(r"\s*[^\s#]")
"""A line that is neither empty nor a comment alone."""


@attrs.frozen(kw_only=True)
class _Entry(Bounds):
    sha256: Annotated[str, Length(64, 64)]
    manage_models: bool = False
    """Whether it can pull, delete and pin models."""


@attrs.frozen
class Key:
    """A key's hash, and the account that its requests are counted on."""

    sha256: str
    account: ClientAccount


@attrs.define(eq=False)
class KeyFile:
    """The keys of a file as it is now. Belongs to one thread."""

    _watch: FileWatch
    _known: dict[str, Key]

    @classmethod
    def open(cls, path: Path) -> KeyFile:
        """Raises `ConfigError` where the file cannot be read, holds no key, or something else."""
        watch, known = FileWatch(path), load(path)
        if not known:
            raise ConfigError.at("http_keys", f"{path}: holds no key; make one with `uma key new NAME --keys {path}`")
        return cls(watch, known)

    def find(self, presented: str) -> ClientAccount | None:
        """The account of a key, or None. Takes the same time whichever key it is, or none.

        A file that has changed is read first. One that cannot be read is warned of, and the keys stay as they were.
        """
        if self._watch.has_changed():
            self._read()
        digest = hash_of(presented)
        found: ClientAccount | None = None
        for key in self._known.values():
            if hmac.compare_digest(digest, key.sha256):
                found = key.account
        return found

    def accounts(self) -> list[ClientAccount]:
        """The accounts of all keys."""
        return [key.account for key in self._known.values()]

    def named(self, name: str) -> ClientAccount | None:
        """The account of a key by the key's name."""
        return self._known[name].account if name in self._known else None

    def _read(self) -> None:
        """Read the file; a name that was there keeps its account, with the bounds that it has now."""
        try:
            now = load(self._watch.path)
        except ConfigError as error:
            log(logger, logging.WARNING, "http.keys_not_reloaded", kept=len(self._known), error=error.message)
            return
        for name in now.keys() & self._known.keys():
            account, new = self._known[name].account, now[name].account
            account.bounds, account.manages_models = new.bounds, new.manages_models
            now[name] = attrs.evolve(now[name], account=account)
        self._known = now
        log(logger, logging.INFO, "http.keys_reloaded", read=len(now))


def load(path: Path) -> dict[str, Key]:
    """The keys of a file by name: `[NAME]` tables with `sha256` and, optionally, `Bounds`.

    Raises `ConfigError` where the file cannot be read, or holds something else.
    """
    return {name: _key(path, name, table) for name, table in read_toml(path, "http_keys").items()}


def _key(path: Path, name: str, table: Any) -> Key:
    where = f"{path}: [{name}]"
    entry = from_table(table, _Entry, "http_keys", where)
    if not _HASH.fullmatch(entry.sha256):
        raise ConfigError.at("http_keys", f"{where}: sha256: expected 64 hexadecimal digits")
    bounds = Bounds(**{bound.name: getattr(entry, bound.name) for bound in attrs.fields(Bounds)})
    return Key(entry.sha256, ClientAccount(name, bounds, entry.manage_models))


def hash_of(key: str) -> str:
    """What a file of keys holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def presented_in(headers: Mapping[str, str]) -> str | None:
    """A request's key: `Authorization: Bearer KEY`, as OpenAI's clients send it, or `X-Api-Key`, as Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def add(path: Path, name: str, models: Sequence[str] | None = None, *, manages_models: bool = False) -> str:
    """Make a key, append its hash to the file, which is made where it is missing, and return the key. With `models`
    it can use these alone.

    Raises `ConfigError` for a name that cannot be used or is there already.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name: {name!r}: expected 1 to 64 letters, digits, - or _")
    bounds = f"models = {json.dumps(models, ensure_ascii=False)}\n" if models is not None else ""
    bounds += "manage_models = true\n" if manages_models else ""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if before.strip() and name in load(path):
        raise ConfigError(f"{path}: [{name}] is there already; choose another name, or remove that table")
    key = PREFIX + secrets.token_urlsafe(32)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(fd, "a", encoding="utf-8") as file:
            # An editor can have left the last line without its end.
            begin = "" if before.endswith("\n") or not before else "\n"
            file.write(f'{begin}[{name}]\nsha256 = "{hash_of(key)}"\n{bounds}\n')
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return key


def remove(path: Path, name: str) -> None:
    """Take a key's table out of the file, in one step for every reader; all else stays as it is written.

    Raises `ConfigError` where there is no such key, or its table is written so that only an editor can remove it.
    """
    names = load(path)
    if name not in names:
        raise ConfigError(f"{path}: there is no key {name}; there are {', '.join(sorted(names)) or 'none'}")
    before = path.read_bytes().decode()  # with the ends of lines that it has
    after = _without(before, name)
    if tomllib.loads(after) != {key: table for key, table in tomllib.loads(before).items() if key != name}:
        raise ConfigError(f"{path}: {name} is not written as a table [{name}] of its own; remove it with an editor")
    target = path.resolve()  # a link stays one
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(fd, "w", encoding="utf-8", newline="") as file:
            file.write(after)
        Path(temporary).chmod(target.stat().st_mode & 0o777)
        Path(temporary).replace(target)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _without(text: str, name: str) -> str:
    """`text` without the table `name`; what stands before the next one is the next one's."""
    lines = list(StringIO(text))
    heads = [at for at, line in enumerate(lines) if line.lstrip().startswith("[")] + [len(lines)]
    for begin, end in pairwise(heads):
        head = _HEAD.match(lines[begin])
        if head is not None and head[1] == name:
            last = max(at for at in range(begin, end) if _TEXT.match(lines[at]))
            while last + 1 < end and not lines[last + 1].strip():
                last += 1
            return "".join(lines[:begin] + lines[last + 1 :])
    return text
