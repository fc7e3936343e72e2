"""`uma key`: makes API keys for HTTP, prints each once, and lists and removes them in the file of their hashes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from uma.cli import say
from uma.cli.table import print_table
from uma.errors import ConfigError, ModelError


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    path = Path(options.keys)
    if options.action != "new" and (options.models is not None or options.manage_models):
        raise ConfigError(f"key {options.action}: --models and --manage-models are for new keys; edit {path}")
    if options.action == "list":
        if options.name is not None:
            raise ConfigError(f"key list: takes no name, and got {options.name}")
        _check_there(path, "list")
        _list(path)
    elif options.name is None:
        raise ConfigError(f"key {options.action}: the key's name is missing: uma key {options.action} NAME")
    elif options.action == "new":
        asked = options.models
        models = None if asked is None else [part.strip() for part in asked.split(",") if part.strip()]
        _make(path, options.name, models, manages_models=options.manage_models)
    else:
        _check_there(path, "remove")
        _remove(path, options.name)
    return 0


def _check_there(path: Path, action: str) -> None:
    if not path.exists():
        raise ConfigError(
            f"key {action}: there is no {path.absolute()}: `uma key new NAME` makes it with the first key, and --keys "
            "FILE names another"
        )


def _make(path: Path, name: str, models: Sequence[str] | None, *, manages_models: bool) -> None:
    from uma.http.keys import add  # noqa: PLC0415  (slow to import)
    from uma.models import catalog  # noqa: PLC0415

    print(add(path, name, models, manages_models=manages_models))
    say.plain(
        f"This key is shown only now; {path} holds its hash. Limits of its own go below [{name}] there: "
        "max_concurrent, max_tokens_per_minute, max_priority, max_tokens, max_reasoning_tokens, models; for all its "
        "requests priority, target_ttft_ms, target_tbt_ms; and the right manage_models.\n"
        f"Serve with --http-keys {path}; a server that runs with it knows the key already."
    )
    for model in models or ():
        try:
            catalog.resolve(model, os.environ)
        except ModelError as error:
            say.warn(f"--models: {error.message}; the key can use it once a server has a model or alias of this name")


def _list(path: Path) -> None:
    import attrs  # noqa: PLC0415  (slow to import)

    from uma.http.keys import load  # noqa: PLC0415

    accounts = [key.account for key in load(path).values()]
    rights = {True: {"manage_models": "true"}, False: {}}
    bounds = [attrs.asdict(account.bounds) | rights[account.manages_models] for account in accounts]
    rows = [(account.name, _written(own)) for account, own in zip(accounts, bounds, strict=True)]
    print_table(("name", "limits"), rows, key="name")


def _written(bounds: Mapping[str, object]) -> str:
    given = {name: value for name, value in bounds.items() if value is not None}
    return ", ".join(
        f"{name}={'+'.join(value) or 'none' if isinstance(value, tuple) else value}" for name, value in given.items()
    )


def _remove(path: Path, name: str) -> None:
    from uma.http.keys import remove  # noqa: PLC0415  (slow to import)

    remove(path, name)
    say.plain(f"{path}: {name} is removed; a server that runs refuses its key from the next request on.")
