"""`uma models`: what can be loaded from here. Reads the files' headers alone, so that a folder of large models is
listed at once, and lists a broken file with what is wrong with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from uma.cli import words
from uma.cli.table import print_table
from uma.cli.terminal import harmless
from uma.llama import catalog
from uma.llama.catalog import ModelFile

COLUMNS = ("name", "parameters", "quantization", "context", "size", "architecture")


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    models = catalog.available(os.environ)
    if options.json:
        print(json.dumps([as_json(each) for each in models], indent=2, ensure_ascii=False))
        return 0
    print_table(COLUMNS, [_row(each) for each in models if each.problem is None])
    for each in models:
        if each.problem is not None:
            print(f"cannot be loaded: {_one_line(each.problem)}")
    print(_advice(os.environ), file=sys.stderr)
    return 0


def as_json(model: ModelFile) -> dict[str, Any]:
    """One model with every field of `ModelFile`; sizes in bytes and tokens, `problem` null for a sound file."""
    return {
        "name": model.name,
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "quantization": model.quantization,
        "context_length": model.context_length,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "problem": model.problem,
    }


def _row(model: ModelFile) -> tuple[str, ...]:
    cells = (
        model.name,
        words.count(model.parameters) if model.parameters else "",
        model.quantization,
        f"{model.context_length:,}" if model.context_length else "",
        words.size(model.size_bytes),
        model.architecture,
    )
    return tuple(_one_line(cell) for cell in cells)


def _one_line(text: str) -> str:
    """What a file says of itself, harmless for a table on a terminal."""
    return harmless(text).replace("\n", " ")


def _advice(environ: Mapping[str, str]) -> str:
    folder = catalog.models_folder(environ)
    if folder is None:
        return "Set UMA_MODELS to a folder of GGUF files to see them here; any file loads by path: --model FILE.gguf"
    if not folder.is_dir():
        return f"UMA_MODELS={folder} is no folder."
    return f"From {folder}; load one with --model NAME"
