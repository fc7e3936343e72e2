"""`uma config`: every setting with the value in force and where that value came from."""

from __future__ import annotations

import argparse
from typing import Any

from uma.cli.harmless import json_text, toml_text
from uma.cli.options import load_settings
from uma.cli.table import print_table
from uma.config import Loaded, Setting, settings


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    loaded = load_settings(options)
    if options.json:
        print(as_json(loaded))
    elif options.toml:
        print(as_toml(loaded), end="")
    else:
        print_table(("setting", "value", "unit", "from"), [_row(each, loaded) for each in settings().values()])
    return 0


def as_json(loaded: Loaded) -> str:
    """An object of settings, each with `value`, `unit` and `from`."""
    table = {
        name: {"value": getattr(loaded.config, name), "unit": each.unit or None, "from": loaded.origins[name]}
        for name, each in settings().items()
    }
    return json_text(table, indent=2)


def as_toml(loaded: Loaded) -> str:
    """A file that `--config` takes and that gives the same configuration anywhere."""
    return "".join(
        f"{name} = {_toml_value(each, getattr(loaded.config, name))}  # {_remark(each, loaded)}\n"
        for name, each in settings().items()
    )


def _row(each: Setting, loaded: Loaded) -> tuple[str, str, str, str]:
    return each.name, each.show(getattr(loaded.config, each.name)) or '""', each.unit, loaded.origins[each.name]


def _toml_value(each: Setting, value: Any) -> str:
    # A JSON string is a TOML basic string; permissions are written as people know them.
    if not isinstance(value, str) and each.name != "socket_mode":
        return each.show(value)
    return toml_text(each.show(value))


def _remark(each: Setting, loaded: Loaded) -> str:
    # A comment can hold no control character, and an origin can be a file's name.
    origin = "".join(char if char.isprintable() else "?" for char in loaded.origins[each.name])
    return f"{each.unit}; {origin}" if each.unit else origin
