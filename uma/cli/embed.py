"""`uma embed`: an embedding of each text, a line each on standard output, in the order of the texts."""

from __future__ import annotations

import argparse
import re
import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path

from uma.cli import say
from uma.cli.generate import quiet
from uma.cli.options import load_settings
from uma.cli.source import Opened, open_source
from uma.cli.terminal import TextOutput
from uma.cli.trio_run import Interrupts, run
from uma.config import Loaded
from uma.errors import BadRequest, ConfigError, PromptTooLarge
from uma.jobs import read_rows
from uma.types import Embeddings, EmbedRequest, Priority

BATCH_TEXTS = 256
"""Texts of one request: what is computed is written before the rest is. A client splits what no frame holds."""
_PLACE = re.compile(r"^texts\[(\d+)\]", re.MULTILINE)
"""How the engine names a text."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    loaded = quiet(load_settings(options))
    advice = 'give some as arguments, `uma embed "a fox" "a forest"`, or a line each'
    texts = read_texts(options.texts, options.file, advice, options.column)
    return run(partial(_embed_all, options, loaded, texts))


def read_texts(arguments: Sequence[str], file: Path | None, advice: str, column: str | None) -> list[str]:
    """The arguments, each a text, else the lines of the file or of standard input; of CSV, which a file's name tells or
    a `column` that is named, the cells of that one.

    Raises `ConfigError`, with the `advice` where there is no text; also where one is not UTF-8, or the file cannot be
    read.
    """
    if arguments and file is not None:
        raise ConfigError(f"--file {file}: texts came as arguments too; give either")
    for argument in filter(_is_file, arguments):
        say.note(f"{argument}: the name of the file is the text; --file {argument} reads what is in it")
    texts = list(arguments) or _lines(file, advice, column)
    if not texts:
        raise ConfigError(f"there is no text; {advice}")
    return texts


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # no name of a file: too long, or with a NUL
        return False


def _lines(file: Path | None, advice: str, column: str | None) -> list[str]:
    where = "standard input" if file is None else str(file)
    if file is None and sys.stdin.isatty():
        say.note("reading texts from the keyboard, a line each; Ctrl-D on a line of its own ends them")
    try:
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; {advice}") from None
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is not UTF-8 from byte {error.start + 1} on") from None
    if column is not None or where.lower().endswith(".csv"):
        return _cells(data, where, column)
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def _cells(data: bytes, where: str, column: str | None) -> list[str]:
    """The texts of one column, the only one where none is named."""
    texts = list[str]()
    for row in read_rows(BytesIO(data), is_csv=True):
        assert not isinstance(row.data, bytes)
        names = [*row.data]
        if row.fault:
            raise ConfigError(f"{where}: row {row.number + 1:,}: {row.fault}")
        if column is None and len(names) != 1:
            there = ", ".join(names) or "no names in its first line"
            raise ConfigError(f"{where}: which column has the texts? It has {there}; name one with --column")
        column = names[0] if column is None else column
        if column not in names:
            raise ConfigError(f"--column: {where} has no column {column!r}, but {', '.join(names)}")
        texts.append(row.data[column])
    return texts


async def _embed_all(options: argparse.Namespace, loaded: Loaded, texts: list[str], interrupts: Interrupts) -> int:
    async with open_source(loaded, interrupts, local=options.local, say=say.note) as opened:
        if opened.source.info.capabilities.generate:
            name = opened.source.info.model.name
            say.note(f"{name} is made to generate; a model made for embeddings tells texts apart better (uma models)")
        output = TextOutput.standard("utf-8")
        written = _in_base64 if options.base64 else _as_numbers
        empty: list[int] = []
        for first in range(0, len(texts), BATCH_TEXTS):
            found = await _embed(opened, options, texts[first : first + BATCH_TEXTS], first)
            await output.write(
                "".join(("null" if vector is None else written(vector)) + "\n" for vector in found.vectors)
            )
            empty += [first + index for index, vector in enumerate(found.vectors, 1) if vector is None]
    if empty:
        have = "has no token: its embedding is" if len(empty) == 1 else "and others have no token: their embeddings are"
        say.warn(
            f"text {empty[0]:,} {have} null ({len(empty):,} of {len(texts):,}); --fail-on-empty refuses such texts"
        )
    return 0


async def _embed(opened: Opened, options: argparse.Namespace, batch: list[str], first: int) -> Embeddings:
    """The embeddings of a batch, whose first text has this number.

    Raises what `Source.embed` does, with the text's number.
    """
    try:
        request = EmbedRequest(
            id=f"embed-{first}",
            texts=batch,
            dimensions=options.dimensions,
            normalize=options.normalize,
            fail_on_empty=options.fail_on_empty,
            priority=Priority[options.priority.upper()].value,
            model=opened.model,
        )
        return await opened.source.embed(request)
    except (BadRequest, PromptTooLarge) as error:
        raise type(error)(_numbered(error.message, first)) from None


def _numbered(message: str, first: int) -> str:
    """`message` with the place of a text as people count."""
    return _PLACE.sub(lambda found: f"text {first + int(found[1]) + 1}", message)


def _as_numbers(vector: array[float]) -> str:
    import numpy as np  # noqa: PLC0415  (slow to import)
    import orjson  # noqa: PLC0415

    return orjson.dumps(np.frombuffer(vector, np.float32), option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _in_base64(vector: array[float]) -> str:
    return b64encode(vector).decode("ascii")
