"""`uma config`: every setting with the value in force and where that value came from."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from uma.cli.default_model import Taken, default_model
from uma.cli.options import load_settings
from uma.cli.sanitize import json_text, toml_text
from uma.cli.table import print_table, print_wrapped, width_of
from uma.config import ALL_MODELS, BUILTIN, Loaded, ModelSettings, Setting, settings
from uma.errors import ModelError
from uma.types import CHAT_SAMPLING, SAMPLER_FIELDS

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
    drawn, name = _drawn(loaded, taken.setting), taken.name
    if options.json:
        print(as_json(loaded, drawn, name))
    else:
        rows = [_row(setting, loaded, drawn, name) for setting in settings().values()]
        rows += [(name, model.show(value), model.unit, OF_FILE) for name, model, value in _of_models(loaded)]
        _show(rows)
    return 0


def _show(rows: Sequence[tuple[str, str, str, str]]) -> None:
    if (width_of(sys.stdout) or WIDE) >= WIDE:
        print_table(("setting", "value", "unit", "from"), rows)
        return
    for name, value, unit, origin in rows:
        print_wrapped(f"{name} = {' '.join(filter(None, (value, unit)))}  ({origin})")


def _taken(loaded: Loaded) -> Taken:
    """The model that is used."""
    if loaded.origins["model"] == "default":
        with suppress(ModelError):  # of those that the file serves one is not here: they are told as they stand
            return default_model(loaded)
    return Taken(loaded.config.model, loaded.config.model)


def _drawn(loaded: Loaded, model: str) -> dict[str, tuple[float, str]]:
    """The figures that `chat`, `generate` and `LLM` take with this model where the setting is unset, and whence."""
    own = {} if model == BUILTIN else _of_the_model(model)
    figures = {name: (value, "default") for name, value in CHAT_SAMPLING.items()}
    figures |= {name: (value, "the model's own") for name, value in own.items()}
    return {name: figures[name] for name in SAMPLER_FIELDS if name in figures and getattr(loaded.config, name) is None}


def _of_the_model(name: str) -> dict[str, float]:
    # Slow to import, and not needed for the built-in model.
    from uma.llama import header  # noqa: PLC0415
    from uma.llama.suggested import suggested_sampling  # noqa: PLC0415
    from uma.models import catalog  # noqa: PLC0415

    try:
        return suggested_sampling(header.read(catalog.resolve(name, os.environ).path))
    except ModelError:  # there is no such model yet: what its file says is not known
        return {}


def as_json(loaded: Loaded, drawn: Mapping[str, tuple[float, str]], taken: str) -> str:
    """An object of settings, each with `value`, `unit` and `from`; `in_chat` is the figure that `chat`, `generate` and
    `LLM` take where the setting is unset, `taken` the model that is used.
    """
    table = {
        name: {"value": getattr(loaded.config, name), "unit": setting.unit or None, "from": loaded.origins[name]}
        | ({"in_chat": drawn[name][0]} if name in drawn else {})
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


def _row(
    known: Setting, loaded: Loaded, drawn: Mapping[str, tuple[float, str]], taken: str
) -> tuple[str, str, str, str]:
    value, origin = getattr(loaded.config, known.name), loaded.origins[known.name]
    if known.name == "model" and taken != value:
        return known.name, taken, known.unit, f"{origin}; the first that is here, generates and fits (uma models)"
    if known.name in drawn:
        origin = f"{origin}; chat, generate and LLM: {drawn[known.name][0]:g} ({drawn[known.name][1]})"
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
