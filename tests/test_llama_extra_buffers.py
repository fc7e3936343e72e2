"""llama.cpp's extra buffer types: which ones a model's weights are laid out for."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import run_to_end
from uma.config import Toggle
from uma.llama import builtin, extra_buffers, library
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model

TILES = """
#include <immintrin.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
struct config { unsigned char palette = 0, start = 0, reserved[14] = {0}; unsigned short bytes[16] = {0};
                unsigned char rows[16] = {0}; };
__attribute__((noinline)) void load() {
    alignas(64) config tiles = {};
    tiles.palette = 1;
    for (int at = 0; at < 8; at++) { tiles.rows[at] = at < 2 ? 8 : 16; tiles.bytes[at] = at == 2 ? 32 : 64; }
    _tile_loadconfig(&tiles);
}
int main() {
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 77;
    load();
    alignas(64) volatile unsigned char kept[64] = {};
    __asm__ volatile("sttilecfg %0" : "=m"(*(volatile unsigned char(*)[64])kept));
    printf("%d %d %d %d", kept[48], kept[50], kept[16], kept[20]);
}
"""


def logits(setting: Toggle) -> list[float]:
    with (
        Model.load(builtin.builtin_path(), n_gpu_layers=0, extra_buffers=setting) as model,
        Context(model, ContextParams(n_ctx=512, n_threads=1)) as context,
    ):
        batch = Batch(40)
        batch.add(range(10, 50), 0, 0, last_logits=True)
        context.decode(batch)
        return list(map(float, context.logits(1)[0]))


def test_a_model_computes_with_its_extra_buffer_types_as_it_does_without() -> None:
    assert logits("auto") == pytest.approx(logits("off"), abs=1.0)


def test_amx_is_left_out_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_buffers, "names", lambda: ("AMX", "CPU_REPACK"))
    assert extra_buffers.chosen("auto") == ("CPU_REPACK",)
    assert extra_buffers.chosen("on") == ("AMX", "CPU_REPACK")
    assert extra_buffers.chosen("off") == ()


def test_a_model_is_loaded_with_the_types_of_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[tuple[str, ...]] = []

    @contextmanager
    def only(wanted: Sequence[str]) -> Iterator[None]:
        offered.append(tuple(wanted))
        with real(wanted):
            yield

    real = extra_buffers.only
    monkeypatch.setattr("uma.llama.model.only", only)
    settings: tuple[Toggle, ...] = ("auto", "on", "off")
    for setting in settings:
        Model.load(builtin.builtin_path(), n_gpu_layers=0, extra_buffers=setting).close()
        assert offered.pop() == extra_buffers.chosen(setting)


def test_only_offers_what_it_says_and_all_again_after() -> None:
    everything = extra_buffers.names()
    array = extra_buffers._array()
    if array is None or len(everything) == 0:
        pytest.skip("this library offers no extra buffer types here")

    def offered() -> int:
        return next(count for count in range(len(everything) + 1) if not array[count])

    assert offered() == len(everything)
    with extra_buffers.only(everything[1:]):
        assert offered() == len(everything) - 1
        with extra_buffers.only([]):
            assert offered() == 0
    assert offered() == len(everything)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.skipif("amx_tile" not in library.cpu_field("flags"), reason="this CPU has no AMX")
def test_the_header_of_the_rebuild_gives_amx_its_whole_configuration(tmp_path: Path) -> None:
    source, program = tmp_path / "tiles.cpp", tmp_path / "tiles"
    source.write_text(TILES)
    flags = ["-O3", "-march=native", *shlex.split(library.AMX_REPAIR)]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True)
    done = run_to_end(str(program))
    if done.returncode == 77:
        pytest.skip("this system does not let programs use AMX")
    assert (done.returncode, done.stdout) == (0, "8 16 64 32")


def test_a_cpu_is_told_by_its_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A: B\nflags\t\t: avx2 amx_tile\n\nprocessor\t: 1\nmodel name\t: C\n")
    assert (library.cpu_name(info), library.cpu_field("flags", info)) == ("A: B", "avx2 amx_tile")
    assert library.cpu_field("flags", tmp_path / "none") == ""
