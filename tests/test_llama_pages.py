"""Pages of memory: huge ones are asked for in time, zeros take none, and nothing that is written is lost."""

from __future__ import annotations

import math
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
from engine_world import answer, ask, config_for
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import real_model

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
    size, line = pages.HUGE_PAGE_BYTES, "{:x}-{:x} rw-p 00000000 00:00 0 \n"
    maps = tmp_path / "maps"
    monkeypatch.setattr("uma.llama.pages.MAPPINGS", maps)
    maps.write_text(line.format(10 * size, 20 * size))
    new = pages.NewPages()
    maps.write_text(line.format(6 * size, 22 * size) + line.format(30 * size, 30 * size + 4_096))
    assert new._new() == [(6 * size, 10 * size), (20 * size, 22 * size)]
    assert new._new() == []


SPARE = """
import sys
from array import array
from pathlib import Path
import numpy as np
import psutil
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model
from uma.llama.pages import NewPages, give_back_zeros

def logits(context):
    batch = Batch(32)
    for seq_id in range(4):
        batch.add(array("i", [5, 6, 7 + seq_id]), 0, seq_id, last_logits=True)
    context.decode(batch)
    return np.array(context.logits(4)).tobytes()

params = ContextParams(n_ctx=8_192, n_batch=32, n_ubatch=32, n_seq_max=256, n_threads=1)
with Model.load(Path(sys.argv[1])) as model:
    with Context(model, params) as whole:
        new = NewPages()
        with Context(model, params) as context:
            process = psutil.Process()
            before = process.memory_info().rss
            for start, end in new.large_parts():
                give_back_zeros(start, end)
            spared = before - process.memory_info().rss
            written = params.kv_bytes(model.shape) + params.n_seq_max * model.vocab.n_tokens * 4
            print(spared / written, logits(context) == logits(whole))
"""
"""Prints which part of a context's cells and outputs was given back, and whether it computes what one with all does."""


def test_a_context_takes_no_memory_for_what_is_not_computed_yet() -> None:
    told = subprocess.run(
        [sys.executable, "-c", SPARE, real_model("smollm2")],
        check=True, capture_output=True, text=True, timeout=PATIENCE_SEC,
    )  # fmt: skip
    spared, is_same = told.stdout.split()
    assert float(spared) > 0.9
    assert is_same == "True"


async def test_an_engine_s_answers_are_those_of_a_context_that_kept_its_zeros(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, given_back = [], list[int]()

    def give_back(start: int, end: int) -> None:
        given_back.append(end - start)
        pages.give_back_zeros(start, end)

    monkeypatch.setattr("uma.engine.open.give_back_zeros", give_back)
    for owns_process in (True, False):
        async with open_engine(config_for(tiny, n_ctx=65_536), owns_process=owns_process) as engine:
            found.append((await answer(engine, ask(max_tokens=40))).token_ids)
    assert found[0] == found[1]
    assert sum(given_back) > 16 * MIB


@settings(max_examples=30)
@given(written=st.dictionaries(st.integers(0, 32 * MIB - 1), st.integers(1, 255), max_size=6))
def test_what_is_written_stays(written: dict[int, int]) -> None:
    new = pages.NewPages()
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for at, value in written.items():
            memory[at] = value
        expected = memory[:]
        for start, end in new.large_parts():
            pages.give_back_zeros(start, end)
        assert memory[:] == expected


async def test_a_library_s_engine_gives_nothing_back(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the program that embeds it write at any time."""
    monkeypatch.setattr("uma.engine.open.give_back_zeros", lambda *_: pytest.fail("memory of others"))
    async with open_engine(config_for(tiny, n_ctx=65_536)):
        pass


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
    monkeypatch.setattr("uma.llama.pages.MAPPINGS", tmp_path / "none")
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
