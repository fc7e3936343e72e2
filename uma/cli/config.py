"""`uma config`: every setting with the value in force and where that value came from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from uma.cli.default_model import default_model
from uma.cli.options import load_settings
from uma.cli.sanitize import json_text, toml_text
from uma.cli.table import print_table, print_wrapped, width_of
from uma.config import ALL_MODELS, Loaded, ModelSettings, Setting, settings
from uma.errors import ModelError

WIDE = 120
"""Columns of a terminal from which on settings are a table: paths and origins are long."""
OF_FILE = "the file"
"""Where settings of single models come from: nothing else has them."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    loaded = load_settings(options)
    if options.toml:
        print(as_toml(loaded), end="")
        return 0
    taken = _taken(loaded)
    if options.json:
        print(as_json(loaded, taken))
    else:
        rows = [_row(setting, loaded, taken) for setting in settings().values()]
        rows += [(name, model.show(value), model.unit, OF_FILE) for name, model, value in _of_models(loaded)]
        _show(rows)
    return 0


def _show(rows: Sequence[tuple[str, str, str, str]]) -> None:
    if (width_of(sys.stdout) or WIDE) >= WIDE:
        print_table(("setting", "value", "unit", "from"), rows)
        return
    for name, value, unit, origin in rows:
        print_wrapped(f"{name} = {' '.join(filter(None, (value, unit)))}  ({origin})")


def _taken(loaded: Loaded) -> str:
    """The name of the model that is used."""
    if loaded.origins["model"] == "default":
        with suppress(ModelError):  # of those that the file serves one is not here: they are told as they stand
            return default_model(loaded).name
    return loaded.config.model


def as_json(loaded: Loaded, taken: str) -> str:
    """An object of settings, each with `value`, `unit` and `from`; `taken` is the model that is used."""
    table = {
        name: {"value": getattr(loaded.config, name), "unit": setting.unit or None, "from": loaded.origins[name]}
        for name, setting in settings().items()
    }
    table["model"]["taken"] = taken
    for name, model, value in _of_models(loaded):
        table[name] = {"value": value, "unit": model.unit or None, "from": OF_FILE}
    return json_text(table, indent=2)


def as_toml(loaded: Loaded) -> str:
    """A file that `--config` takes and that gives the same configuration anywhere."""
    lines = [
        _toml_line(setting, loaded) for setting in settings().values() if setting.name != "models" or not loaded.models
    ]
    return "".join([*lines, *_toml_tables(loaded)])


def _toml_tables(loaded: Loaded) -> Iterator[str]:
    """A table for each model that is served: where one has settings, tables say which these are."""
    served = loaded.config.models.split(",")
    for name in dict.fromkeys([*served, *(loaded.models if ALL_MODELS in served else ())] if loaded.models else ()):
        model = loaded.models.get(name, ModelSettings())
        yield f"\n[models.{toml_text(name)}]\n"
        if model.alias:
            yield f"alias = [{', '.join(map(toml_text, model.alias))}]\n"
        if model.pin:
            yield "pin = true\n"
        for key, value in model.values.items():
            yield f"{key} = {_toml_value(settings()[key], value)}\n"


def _of_models(loaded: Loaded) -> Iterator[tuple[str, Setting, Any]]:
    """What single models have for themselves, by the place in the file."""
    known = settings()
    for model, own in loaded.models.items():
        for name, value in own.values.items():
            yield f"models.{toml_text(model)}.{name}", known[name], value


def _row(known: Setting, loaded: Loaded, taken: str) -> tuple[str, str, str, str]:
    value, origin = getattr(loaded.config, known.name), loaded.origins[known.name]
    if known.name == "model" and taken != value:
        return known.name, taken, known.unit, f"{origin}; the first that is here, generates and fits (uma models)"
    return known.name, "unset" if value is None else known.show(value) or '""', known.unit, origin


def _toml_line(known: Setting, loaded: Loaded) -> str:
    value, remark = getattr(loaded.config, known.name), _remark(known, loaded)
    if value is None or (known.name == "model" and loaded.origins["model"] == "default"):
        return f"# {known.name} is unset  # {remark}\n"
    return f"{known.name} = {_toml_value(known, value)}  # {remark}\n"


def _toml_value(known: Setting, value: Any) -> str:
    # A JSON string is a TOML basic string; permissions are written as people know them.
    if not isinstance(value, str) and known.name != "socket_mode":
        return known.show(value)
    return toml_text(known.show(value))


def _remark(known: Setting, loaded: Loaded) -> str:
    # A comment can hold no control character, and an origin can be a file's name.
    origin = "".join(char if char.isprintable() else "?" for char in loaded.origins[known.name])
    return f"{known.unit}; {origin}" if known.unit else origin
