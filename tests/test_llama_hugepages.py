"""Memory in huge pages: that they are asked for in time, where they are, and when the file is mapped instead."""

from __future__ import annotations

import ctypes
import math
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
from engine_world import answer, ask, config_for

from harness import PATIENCE_SEC
from models import write_large_cells, write_model
from uma import RuntimeConfig, open_engine
from uma.engine import sizing
from uma.llama import hugepages
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


CONTEXT = """
import mmap, sys
from pathlib import Path
import attrs
from uma.llama import hugepages
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model

SIZE = 64 * 2**20

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

def watched(start, end, fill=hugepages._fill):
    before = resident_bytes()
    fill(start, end)
    print(end - start, resident_bytes() - before)

with Model.load(Path(sys.argv[1])) as model:
    hugepages._fill = watched
    params = ContextParams(n_ctx=SIZE // model.kv_bytes_per_token("f16", "f16"))
    with Context(model, params) as context:
        context.remake(attrs.evolve(params, n_seq_max=2))
"""
"""Prints, each time that memory is filled, how much that is, and how much of it had no pages before."""


def can_fill() -> bool:
    """Whether this kernel knows how to."""
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if sys.platform == "linux" else 0
        return hugepages._madvise(start, start + mmap.PAGESIZE, hugepages.MADV_POPULATE_WRITE)


has_huge_pages = pytest.mark.skipif(
    not (hugepages.available() and SMAPS.exists()), reason="this system has no huge pages to ask for"
)


@pytest.mark.skipif(not can_fill(), reason="this system cannot give memory its pages before it is written")
def test_kv_memory_is_filled_before_anything_is_in_it_and_each_time_it_is_made(tmp_path: Path) -> None:
    path = write_large_cells(tmp_path / "large-cells.gguf", layers=2, kv_heads=8, context_length=16_384)
    told = subprocess.run(
        [sys.executable, "-c", CONTEXT, path], check=True, capture_output=True, text=True, timeout=PATIENCE_SEC
    )
    filled = [tuple(map(int, line.split())) for line in told.stdout.splitlines() if int(line.split()[0]) >= 64 * MIB]
    assert len(filled) == 2
    assert all(new > 60 * MIB for _, new in filled)


@pytest.mark.parametrize(
    ("slow_from", "huge", "others"),
    [(99, 15, 1), (0, 5, 11), (5, 10, 6)],
)
def test_memory_has_huge_pages_as_long_as_they_are_had_sooner_than_others(
    monkeypatch: pytest.MonkeyPatch, slow_from: int, huge: int, others: int
) -> None:
    size, given = hugepages.HUGE_BYTES, {"MADV_HUGEPAGE": 0, "MADV_NOHUGEPAGE": 0}

    def timed_ns(start: int, end: int, advice: str) -> int:
        given[advice] += (end - start) // size
        if advice == "MADV_NOHUGEPAGE":
            return 100
        return 180 if given[advice] > slow_from else 20

    monkeypatch.setattr(hugepages, "_timed_ns", timed_ns)
    hugepages._fill(3 * size - 4_096, 19 * size + 4_096)
    assert given == {"MADV_HUGEPAGE": huge, "MADV_NOHUGEPAGE": others}


@pytest.mark.parametrize(("start", "end"), [(1, 2), (100, 2 * MIB + 50), (MIB, 5 * MIB), (2 * MIB, 4 * MIB)])
def test_memory_with_no_two_huge_pages_in_it_is_left_alone_and_so_is_what_lies_behind_it(
    monkeypatch: pytest.MonkeyPatch, start: int, end: int
) -> None:
    monkeypatch.setattr(hugepages, "_timed_ns", lambda *found: pytest.fail(f"{found} is filled"))
    hugepages._fill(start, end)


def test_only_new_memory_is_seen_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size, line = hugepages.LEAST_BYTES, "{:x}-{:x} rw-p 00000000 00:00 0 \n"
    maps = tmp_path / "maps"
    monkeypatch.setattr("uma.llama.mappings.MAPPINGS", maps)
    maps.write_text(line.format(10 * size, 20 * size))
    pages = hugepages.HugePages()
    maps.write_text(line.format(6 * size, 22 * size) + line.format(30 * size, 30 * size + 4_096))
    assert pages._new() == [(6 * size, 10 * size), (20 * size, 22 * size)]
    assert pages._new() == []


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
    assert hugepages.available(file) is found


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
    monkeypatch.setattr(hugepages, "available", lambda: has_pages)
    monkeypatch.setattr("uma.llama.trust.has_gpu", lambda: has_gpu)
    config = RuntimeConfig(use_mmap=use_mmap, n_gpu_layers=n_gpu_layers)  # type: ignore[arg-type]
    assert sizing.map_above_bytes(config) == limit


async def test_an_answer_does_not_depend_on_how_the_weights_got_there(tiny: Path) -> None:
    found = set()
    for use_mmap in ("on", "off", "auto"):
        async with open_engine(config_for(tiny, use_mmap=use_mmap)) as engine:
            found.add((await answer(engine, ask(max_tokens=40))).token_ids)
    assert len(found) == 1
