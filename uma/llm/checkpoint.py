"""Results of `LLM.generate` that are kept in a file as they come, so that the same call goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import cattrs
import xxhash

from uma.errors import InternalError, UmaError, from_code
from uma.jobs import EndedRow, JobChanged, Results, model_of
from uma.jobs.runner import SYNC_SEC
from uma.llm.batch import GONE, GivenPrompt, Raises, results_of
from uma.llm.results import RequestOutput
from uma.llm.thread import Deadline, SourceThread
from uma.types import Message

PASSING = (*GONE, InternalError)
"""Errors that are no prompt's own: neither they nor what follows is kept."""
ANEW = "remove it and its journal to start over"


def results_with(
    loop: SourceThread, rows: Sequence[GivenPrompt], deadline: Deadline, path: Path, raises: Raises
) -> Generator[RequestOutput, None, None]:
    """The result of each row, in order: from the file as far as it has them, and the others, which are appended.

    Raises `JobChanged` where the file has results of other rows, parameters or another model.
    """
    header = {"version": 1, "made by": "LLM.generate", "model": model_of(loop.source)}
    with closing(Results.open(path, header, anew=ANEW)) as results:
        if results.rows > len(rows):
            raise JobChanged(
                f"{path}: has results of {results.rows:,} prompts, and these are {len(rows):,}; ask with all of them, "
                f"name another file, or {ANEW}"
            )
        yield from [_kept(results, row) for row in rows[: results.rows]]  # all are checked before one is taken
        begun, synced_sec, keeps = results.rows, time.monotonic(), True
        rest = (attrs.evolve(row, index=row.index - begun) for row in rows[begun:])
        try:
            with closing(results_of(loop, rest, deadline, in_order=True, raises=raises)) as ended:
                for out in ended:
                    row, placed = rows[begun + out.index], attrs.evolve(out, index=begun + out.index)
                    keeps = keeps and not isinstance(out.error, PASSING)
                    if keeps:
                        line = json.dumps(placed.to_dict(), ensure_ascii=False).encode() + b"\n"
                        results.append([EndedRow(row.index, _digest(row), line, out.error is not None)])
                    if time.monotonic() - synced_sec > SYNC_SEC:
                        results.sync()
                        synced_sec = time.monotonic()
                    yield placed
        finally:
            results.sync()


def _kept(results: Results, row: GivenPrompt) -> RequestOutput:
    found = results.finished.find(row.index)
    if found is None or found.digest != _digest(row):
        raise JobChanged(
            f"{results.path}: prompt {row.index:,} or its parameters are others than when its result was written; name "
            f"another file, or {ANEW}"
        )
    return _converter().structure(json.loads(results.finished.line(found)), RequestOutput)


def _digest(row: GivenPrompt) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps([row.prompt, attrs.asdict(row.sampling)], default=str).encode())


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=False)
    converter.register_structure_hook(UmaError, _error)
    converter.register_structure_hook(str | tuple[int, ...] | tuple[Message, ...] | None, _prompt)
    return converter


def _prompt(given: Any, _kind: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _error(given: Any, _kind: Any) -> UmaError:
    return from_code(given["code"], given["message"])
