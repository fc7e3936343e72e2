"""Trial of a header in a child process: whether llama.cpp ends a process over its figures.

llama.cpp asserts what it expects of them, in each architecture's graph and for each kind of projector something else.
What can be said in words is checked with the header (`llama.header`). All else is tried where nothing is lost: of a
model the graphs are made, without its weights; a projector prepares a picture and a sound, and begins to encode them.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import attrs

from uma.child import Child, ChildBusyError, ChildEndedError
from uma.errors import ModelError
from uma.llama import header

DEADLINE_SEC = 10.0
"""Maximum CPU time of a trial, beside what reading weights takes: the largest vocabularies take a second, and figures
that no file has can keep a loop busy for hours."""
READ_BYTES_PER_SEC = 2**28
"""Minimum speed at which these are read, on a slow machine."""
MEMORY_BYTES = 2**32
"""Maximum address space beside these weights and the child's own. The largest picture that a projector plans for (4,096
patches, without flash attention) takes one GiB: figures that no file has take a machine's."""
PROGRAM = str(Path(__file__).with_name("trial_process.py"))
"""What the child runs. It loads models, whose module asks this one first."""
MAX_ANSWER_BYTES = 2**16
"""Maximum length of what the child says."""
MAX_KNOWN = 256
"""Maximum headers whose outcome is kept."""


@attrs.frozen
class _Trial:
    """What the child is asked. The same headers have the same outcome."""

    headers: tuple[bytes, ...]
    predicts: bool
    paths: tuple[str, ...] = attrs.field(eq=False)
    weights_bytes: int = attrs.field(eq=False)


def check_model(path: Path, *, predicts: bool) -> None:
    """Raise `ModelError` where llama.cpp ends the process over this model, with `predicts` over its prediction heads
    too. Takes from 0.3 s to a second, by its vocabulary; any thread.
    """
    _check(_Trial((_digest(path),), predicts, (str(path),), 0))


def check_projector(path: Path, model: Path) -> None:
    """Raise `ModelError` where libmtmd ends the process over this projector beside a model. Takes as long, and what
    reading the projector takes; any thread.
    """
    # The model's own weights are read where its kind alone does not say how positions are told.
    weights_bytes = path.stat().st_size + sum(part.size_bytes for part in header.read_parts(model))
    _check(_Trial((_digest(path), _digest(model)), False, (str(path), str(model)), weights_bytes))


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return blake2b(file.read(header.read(path).data_offset)).digest()


def _check(trial: _Trial) -> None:
    with suppress(ChildBusyError, OSError):  # what could not be tried is not refused
        if problem := _problem(trial):
            raise ModelError(f"{trial.paths[0]}: {problem}")


@lru_cache(MAX_KNOWN)
def _problem(trial: _Trial) -> str:
    deadline_sec = DEADLINE_SEC + trial.weights_bytes / READ_BYTES_PER_SEC
    setup = {"memory_bytes": MEMORY_BYTES + 2 * trial.weights_bytes}
    child = Child(PROGRAM, setup, deadline_sec=deadline_sec, max_answer_bytes=MAX_ANSWER_BYTES)
    try:
        problem: str = child.ask({"paths": trial.paths, "predicts": trial.predicts})
    except (ChildEndedError, TimeoutError):
        problem = (
            "its header is damaged or unsupported: llama.cpp would end the process over its figures; download or "
            "convert it again"
        )
    finally:
        child.close()
    return problem
