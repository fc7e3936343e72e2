"""Huge pages are asked for in time, for new memory alone."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from engine_world import answer, ask, config_for

from harness import PATIENCE_SEC
from models import write_model
from uma import RuntimeConfig, open_engine
from uma.engine import sizing
from uma.llama import pages
from uma.llama.model import Model

SMAPS = Path("/proc/self/smaps")
MIB = 2**20


LOAD = """
import math, sys
from pathlib import Path
from uma.llama.model import Model

def asked_for_bytes():
    total = size = 0
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        name, *values = line.split()
        if name == "Size:":
            size = int(values[0]) * 1024
        elif name == "VmFlags:" and "hg" in values:
            total += size
    return total

before = asked_for_bytes()
with Model.load(Path(sys.argv[1])):
    mapped = asked_for_bytes()
with Model.load(Path(sys.argv[1]), map_above_bytes=math.inf) as model:
    print(mapped - before, asked_for_bytes() - before, model.info.size_bytes)
"""
"""Prints for how much of its memory huge pages were asked: with weights mapped, and read; and the weights' size.
(In a process of its own: what other tests leave is freed and taken at any time.)"""


has_huge_pages = pytest.mark.skipif(
    not (pages.gives_huge_pages() and SMAPS.exists()), reason="this system has no huge pages to ask for"
)


def test_only_new_memory_is_seen_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size, line = pages.LEAST_BYTES, "{:x}-{:x} rw-p 00000000 00:00 0 \n"
    maps = tmp_path / "maps"
    monkeypatch.setattr("uma.llama.mappings.MAPPINGS", maps)
    maps.write_text(line.format(10 * size, 20 * size))
    new = pages.NewPages()
    maps.write_text(line.format(6 * size, 22 * size) + line.format(30 * size, 30 * size + 4_096))
    assert new._new() == [(6 * size, 10 * size), (20 * size, 22 * size)]
    assert new._new() == []


@has_huge_pages
def test_weights_that_are_read_are_in_memory_for_which_huge_pages_were_asked(tmp_path: Path) -> None:
    path = write_model(tmp_path / "not-so-tiny.gguf", feed_forward=24_000)
    told = subprocess.run(
        [sys.executable, "-c", LOAD, path], check=True, capture_output=True, text=True, timeout=PATIENCE_SEC
    )
    mapped, read, weights = map(int, told.stdout.split())
    assert weights > 32 * MIB
    assert mapped == 0, "a mapped file has no huge pages"
    assert read > weights - 4 * MIB


def test_where_there_are_no_mappings_to_read_nothing_is_asked_for(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.llama.mappings.MAPPINGS", tmp_path / "none")
    with Model.load(tiny, map_above_bytes=math.inf) as model:
        assert model.vocab.n_tokens == 266


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("always [madvise] never", True),
        ("[always] madvise never", True),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_they_are_there_unless_the_system_says_never(tmp_path: Path, setting: str | None, found: bool) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting + "\n")
    assert pages.gives_huge_pages(file) is found


@pytest.mark.parametrize(
    ("use_mmap", "has_pages", "has_gpu", "n_gpu_layers", "limit"),
    [
        ("on", True, False, 0, 0),
        ("off", False, True, -1, math.inf),
        ("auto", True, False, -1, 500),
        ("auto", False, False, -1, 0),
        ("auto", True, True, -1, 0),
        ("auto", True, True, 0, 500),
    ],
)
def test_weights_are_read_where_they_fit_easily_and_cpus_compute(
    use_mmap: str, has_pages: bool, has_gpu: bool, n_gpu_layers: int, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 1_000)
    monkeypatch.setattr(pages, "gives_huge_pages", lambda: has_pages)
    monkeypatch.setattr("uma.llama.backend.has_gpu", lambda: has_gpu)
    config = RuntimeConfig(use_mmap=use_mmap, n_gpu_layers=n_gpu_layers)  # type: ignore[arg-type]
    assert sizing.map_above_bytes(config) == limit


async def test_an_answer_does_not_depend_on_how_the_weights_got_there(tiny: Path) -> None:
    found = set()
    for use_mmap in ("on", "off", "auto"):
        async with open_engine(config_for(tiny, use_mmap=use_mmap)) as engine:
            found.add((await answer(engine, ask(max_tokens=40))).token_ids)
    assert len(found) == 1
