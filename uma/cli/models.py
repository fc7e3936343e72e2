"""`uma models`: what can be loaded from here. Reads the files' headers alone, so that a folder of large models is
listed at once, and lists a broken file with what is wrong with it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import trio

from uma import figures
from uma.cli import say
from uma.cli.default_model import check_folder
from uma.cli.memory import fits, memory_bytes
from uma.cli.options import load_settings
from uma.cli.sanitize import json_text
from uma.cli.table import print_table, print_wrapped
from uma.client import connect
from uma.config import Loaded
from uma.errors import UmaError
from uma.models import catalog, places
from uma.models.catalog import ModelFile

COLUMNS = ("name", "parameters", "kind", "note", "quant", "context", "size", "fits", "from")
SPARE = {"parameters": 100, "kind": 120, "from": 140}
"""Columns that a terminal goes without which is narrower than this."""
ANSWER_SEC = 2.0
"""Maximum time in which a server tells of its models."""
USES = "`uma chat NAME` talks with one, `uma run` serves all; a file is named by its path"


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    folder = places.models_folder(os.environ)
    check_folder()
    models, memory = catalog.available(os.environ), trio.run(_memory, load_settings(options))
    if options.json:
        print(json_text([as_json(model, memory) for model in models], indent=2))
        return 0
    show_models(models, memory)
    say.plain(f"fits: into {figures.size(memory.n_bytes)}, {memory.whose}")
    say.plain(_advice(folder, is_empty=not any(model.place == places.UMA_MODELS for model in models)))
    return 0


@attrs.frozen
class Memory:
    """What a model can have."""

    n_bytes: int
    whose: str = "which are free"
    known: Mapping[str, bool] = attrs.field(factory=dict)
    """Whether files fit, as a server's own plan has it."""

    def holds(self, model: ModelFile) -> bool:
        """Whether a model fits."""
        return self.known.get(str(model.path), fits(model.size_bytes, self.n_bytes))


async def _memory(loaded: Loaded) -> Memory:
    """That of the server's models, where it has several, or of the settings; else what is free."""
    config = loaded.config
    is_asked_for = loaded.origins["socket"] == "--socket"  # a variable does not say that a server runs
    with suppress(*([] if is_asked_for else [UmaError])), trio.move_on_after(ANSWER_SEC):
        async with connect(config.socket, loads=False, waits=False) as client:
            if client.info.models and (budget := (await client.metrics()).get("memory_budget_bytes")):
                known = {model.path: model.fits for model in await client.models()}
                return Memory(budget, f"what the models of the server on {config.socket} can have (--memory)", known)
    free = memory_bytes()
    if 0 < config.memory * figures.MB < free:
        return Memory(config.memory * figures.MB, f"what models can have together ({loaded.origins['memory']})")
    return Memory(free)


def show_models(models: Sequence[ModelFile], memory: Memory) -> None:
    """Write them for people to standard output."""
    print_table(COLUMNS, [_row(model, memory) for model in models if model.problem is None], spare=SPARE, key="name")
    for model in models:
        if model.problem is not None:
            print_wrapped(f"cannot be loaded: {model.problem}")


def as_json(model: ModelFile, memory: Memory) -> dict[str, Any]:
    """One model with every field of `ModelFile`; sizes in bytes and tokens, `problem` null for a sound file."""
    fields = attrs.asdict(model, value_serializer=lambda _of, _field, value: _plain(value))
    return fields | {"fits": memory.holds(model)}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _row(model: ModelFile, memory: Memory) -> tuple[str, ...]:
    return (
        model.name,
        figures.count(model.parameters) if model.parameters else "",
        model.kind,
        "sees" if model.vision else "base" if model.is_base else "",
        model.quantization,
        f"{model.context_length:,}" if model.context_length else "",
        figures.size(model.size_bytes),
        "yes" if memory.holds(model) else "no",
        model.place,
    )


def _advice(folder: Path | None, *, is_empty: bool) -> str:
    if folder is None:
        return f"{USES}; set UMA_MODELS to a folder of GGUF files of your own"
    holds = ", which holds no GGUF file" if is_empty else ""
    return f"{USES}; UMA_MODELS is {folder}{holds}"
