"""What commands show on terminals of four widths, compared with files: `TEST_SCREENS=write pytest` writes them."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from pty_screen import WIDTHS, check_screen

from uma.cli import batch_view, main, say
from uma.cli.checks import Check
from uma.cli.doctor import show_checks
from uma.cli.explain import show_explained
from uma.cli.models import Memory, show_models
from uma.cli.ps import Running, show_servers
from uma.cli.pull import show_offers
from uma.jobs import Progress, Tally
from uma.models.catalog import ModelFile
from uma.models.hub import Listing, Offer, Reference, RemoteFile
from uma.types import CAUSES, WHY_NOT_CACHED, Beside, CacheUse, Explained, ListedModel, RequestMetrics

MB, GB = 1_000_000, 1_000_000_000
PARTS = {"quantization": "Q4_K_M", "context_length": 32_768, "architecture": "qwen2"}


def model(name: str, size_bytes: int, **more: object) -> ModelFile:
    return ModelFile(name, Path(f"/models/{name}.gguf"), size_bytes, **{"place": "UMA_MODELS", **PARTS, **more})  # type: ignore[arg-type]


def models() -> None:
    show_models(
        [
            model("builtin", 3_760_000, place="builtin", kind="dense", quantization="Q8_0", parameters=3_480_000),
            model(
                "gemma-3-270m-q4_k_m", 253_000_000, kind="dense, sliding window", parameters=268_000_000, is_base=True
            ),
            model("qwen2.5-coder-0.5b-instruct-q4_k_m", 491_000_000, kind="dense", parameters=630_000_000),
            model("Qwen3-VL-30B-A3B-Instruct-UD-Q4_K_XL", 18 * GB, place="Hugging Face", kind="MoE", vision=True),
            model("cut", 12, problem="/models/cut.gguf: ends in the middle of its header (12 bytes); pull it again"),
        ],
        Memory(8 * GB),
    )


def servers() -> None:
    socket = "/run/user/1000/uma/uma.sock"
    too_large = "it takes about 22 GB, and all models together can have 8.59 GB (--memory)"
    several = (
        ListedModel(
            "qwen2.5-coder-0.5b-instruct-q4_k_m",
            "/a",
            1,
            memory_bytes=1300 * MB,
            state="loaded",
            taken_bytes=969 * MB,
            running=2,
        ),
        ListedModel(
            "gemma-3-270m-q4_k_m", "/b", 1, memory_bytes=400 * MB, state="loading", loading_percent=99, waiting=1
        ),
        ListedModel("SmolLM2-135M-Instruct.Q4_1", "/c", 1, failure="no memory: it needs 400 MB, and 300 MB are free"),
        ListedModel(
            "Qwen3-VL-30B-A3B-Instruct-UD-Q4_K_XL", "/d", 1, memory_bytes=22 * GB, fits=False, failure=too_large
        ),
    )
    found = [
        Running(
            31914,
            socket,
            "3 models",
            2,
            datetime(2026, 1, 31, 12, tzinfo=UTC),
            models=several,
            memory_budget_bytes=8192 * 2**20,
        ),
        Running(8, "/tmp/loading/uma.sock", loading_percent=99),
    ]
    show_servers(found, found)


def checks() -> None:
    library = f"/home/mara/{'venv/' * 9}lib/python3.13/site-packages/llama_cpp/lib/libllama.so"
    features = "SSE3, AVX, AVX2, F16C, FMA, BMI2, AVX512, AVX512_VBMI, AVX512_BF16, LLAMAFILE"
    show_checks(
        [
            Check("UMA", "0.2.0, Python 3.13.1, Linux 6.18.44"),
            Check("llama.cpp", f"0.5.0, {library}", is_detail=True),
            Check("CPU", "Xeon; UMA uses all of what it can"),
            Check("instructions", f"used: {features}", is_detail=True),
            Check("socket", "/run/uma.sock", "it is a folder of uid 7: choose another `uma run --socket PATH`"),
            Check("threads", "2, on 2 of 2 CPUs", faster="more threads want the CPUs than there are: end programs"),
        ]
    )


def explained() -> None:
    show_explained(
        Explained(
            id="ba12f7ee37011c90d7d62095",
            priority=0,
            origin="curl/7.88.1 · chat/completions",
            came_at=0.0,
            age_ms=2900.0,
            spent_ms={next(iter(CAUSES)): 3.8, "read": 2780.0, "write": 116.0},
            prompt_tokens=32,
            cached_tokens=0,
            generated_tokens=8,
            cache=CacheUse(why=next(iter(WHY_NOT_CACHED))),
            metrics=RequestMetrics(0.8, 2780.0, 116.0, 2784.6, 2, 62.4, 8),
            reason="length",
            beside=(Beside("c0ffee" * 4, 2048, 812.5), Beside("decade" * 4, 512, 96.0)),
            worst_gap_ms=150_700.0,
            worst_gap_token=17,
        )
    )


def offers() -> None:
    found = [
        Offer(f"Qwen2.5-Coder-7B-Instruct-{name}", (RemoteFile(f"{name}.gguf", at * GB, ""),) * 2)
        for at, name in enumerate(("Q2_K", "Q4_K_M", "Q8_0"), 2)
    ]
    show_offers(
        Listing(Reference("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF"), "c", tuple(found)), found[1], 7 * GB, sys.stdout
    )


def batch() -> None:
    tally = Tally(total_rows=2_000, rows=1_024, begun_rows=400, running=40, failed=3)
    began_sec = time.monotonic()
    with pytest.MonkeyPatch.context() as clock:
        clock.setattr(batch_view, "time", SimpleNamespace(monotonic=lambda: began_sec + 100))
        speed, view = batch_view.Speed(tally), batch_view.OneLine()
        tally.note({"a": Progress(prompt_tokens=9_000)})
        view.look(speed)
        tally.note({"a": Progress(prompt_tokens=9_000, completion_tokens=21_000)})
        view.look(speed)
        tally.kept, tally.blocking_row = 160, 1_025
        view.look(speed)
        tally.note({}, "gemma-3-270m-q4_k_m: loading, 40 %")
        view.look(speed)
        view.tell("the server on /run/uma.sock ended: 40 rows wait until a server is back")
        tally.rows, tally.running, tally.kept = 2_000, 0, 0
        view.end(speed, is_done=True)


def errors() -> None:
    say.complain(
        "/run/user/1000/uma/uma.sock: no server listens there; start one with `uma run --socket PATH --model NAME`, or "
        "load the model here with --local"
    )


class Terminal(io.StringIO):
    """A file that believes it is a terminal of this width."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        _, self._fd = pty.openpty()
        termios.tcsetwinsize(self._fd, (24, columns))

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize(
    "show", [models, servers, checks, explained, offers, errors, batch], ids=lambda show: show.__name__
)
def test_a_screen_is_the_one_in_its_file_and_folds_no_word(
    show: Callable[[], None], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    screen = Terminal(columns)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    show()
    monkeypatch.undo()
    os.close(screen.fileno())
    check_screen(show.__name__, columns, screen.getvalue().replace(say.ERASE_LINE, "\n"))


def test_settings_on_a_narrow_terminal_are_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Terminal(80))
    assert main(["config"]) == 0
    monkeypatch.undo()
    os.close(screen.fileno())
    shown = screen.getvalue().splitlines()
    assert "n_batch = 2048 tokens  (default)" in shown
    assert max(map(len, shown)) <= 80
