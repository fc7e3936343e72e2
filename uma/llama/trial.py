"""Trial of a header in a child process: whether its figures make llama.cpp end the process.

llama.cpp asserts what it expects of them, differently in each architecture's graph and for each kind of projector. What
can be checked with a clear message is checked with the header (`llama.header`). Everything else is tried where a crash
does no harm: for a model, graphs are built without weights; a projector prepares a picture and a sound, and begins to
encode them.
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
"""Maximum CPU time of a trial, without reading weights. The largest vocabularies take a second; invalid figures can
keep a loop busy for hours."""
READ_BYTES_PER_SEC = 2**28
"""Assumed minimum speed of reading weights, on a slow machine."""
MEMORY_BYTES = 2**32
"""Maximum address space, without these weights and the child's own. The largest picture that a projector plans for
(4,096 patches, without flash attention) takes one GiB; invalid figures take all memory of a machine."""
PROGRAM = str(Path(__file__).with_name("trial_process.py"))
"""Program of the child. Not imported: it imports `model`, which imports this module."""
MAX_ANSWER_BYTES = 2**16
"""Maximum length of the child's answer."""
MAX_KNOWN = 256
"""Maximum headers whose result is cached."""


@attrs.frozen
class _Trial:
    """Question to the child. Equal headers have equal results."""

    headers: tuple[bytes, ...]
    predicts: bool
    paths: tuple[str, ...] = attrs.field(eq=False)
    weights_bytes: int = attrs.field(eq=False)


def check_model(path: Path, *, predicts: bool) -> None:
    """Raise `ModelError` where llama.cpp ends the process for this model, with `predicts` also for its prediction
    heads. Takes 0.3 s to a second, depending on its vocabulary; any thread.
    """
    _check(_Trial((_digest(path),), predicts, (str(path),), 0))


def check_projector(path: Path, model: Path) -> None:
    """Raise `ModelError` where libmtmd ends the process for this projector with this model. Takes as long, and the time
    to read the projector; any thread.
    """
    # The model's weights are read, too, where its architecture does not determine the form of positions.
    weights_bytes = path.stat().st_size + sum(part.size_bytes for part in header.read_parts(model))
    _check(_Trial((_digest(path), _digest(model)), False, (str(path), str(model)), weights_bytes))


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return blake2b(file.read(header.read(path).data_offset)).digest()


def _check(trial: _Trial) -> None:
    with suppress(ChildBusyError, OSError):  # a model that could not be tried is not refused
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
