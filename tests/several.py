"""What tests of several models in one server share: models that say different things, and what each says by itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from models import write_model
from uma.llm import LLM
from uma.types import SamplingParams

NAMES = ("alpha", "beta", "gamma-one")
PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def write_models(folder: Path) -> None:
    """One file for each of `NAMES`, of weights of its own, with contexts that take a while to be filled."""
    for seed, name in enumerate(NAMES):
        write_model(folder / f"{name}.gguf", seed=seed, context_length=16_384)


def texts_of(folder: Path) -> Mapping[str, str]:
    """What each says to `PROMPT` where it is alone."""
    found = {}
    for name in NAMES:
        with LLM(str(folder / f"{name}.gguf"), threads=1) as llm:
            found[name] = llm.generate(PROMPT, SamplingParams(**GREEDY))[0].outputs[0].text
    assert len(set(found.values())) == len(NAMES)
    return found


def children(pid: int) -> set[int]:
    """Process ids of the children of a process."""
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def taken_bytes(pid: int) -> int:
    """The memory that a process takes now, its part of what it shares included; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
