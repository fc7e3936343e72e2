"""What attention takes on this CPU: measured once, kept, and what an engine decides by."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Literal

import attrs
import pytest

from harness import run_to_end
from models import write_model
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.policy.layout import Attended, AttentionCost, Layout
from uma.llama import attention, library
from uma.llama.attention import HEAD_SIZES, AttentionTimes, attention_times
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model

RECIPE = Path(__file__).parent.parent / "examples" / "tiny_model" / "attention.py"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "uma"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models with which something was really measured, in order."""
    seen: list[Path] = []
    measure = attention.measure

    def noted(path: Path) -> AttentionTimes:
        seen.append(path)
        return measure(path)

    monkeypatch.setattr(attention, "measure", noted)
    return seen


def test_the_models_are_those_that_the_recipe_writes(tmp_path: Path) -> None:
    done = run_to_end(sys.executable, str(RECIPE), str(tmp_path))
    assert done.returncode == 0, done.stderr
    for head_size in HEAD_SIZES:
        file = attention.model_file(head_size)
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
        with Model.load(file, n_gpu_layers=0) as model:
            assert model.head_size == head_size


def test_it_is_measured_once_for_a_library_a_cpu_and_a_size_of_heads(
    measured: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = attention_times(64)
    assert first is not None and all(0 < each < math.inf for each in attrs.astuple(first))
    assert attention_times(64) == attention_times(48) == first
    assert measured == [attention.model_file(64)]
    assert attention_times(80) == attention_times(256) != first
    assert measured[1:] == [attention.model_file(128)]
    monkeypatch.setattr(library, "cpu_identity", lambda *_: ["another"])
    attention_times(64)
    assert measured[2:] == [attention.model_file(64)]


def test_what_is_measured_is_what_the_cells_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model of the time in place of the clock: each figure is the one that the model has for it."""
    model = AttentionTimes(20.0, 10.0, 2.0, 1.0, 5.0, 8.0, 0.5)
    timed = attention._Timed._ns

    def modelled(self: attention._Timed, sequences: range, tokens: int) -> int:
        timed(self, sequences, tokens)
        context = self._context
        own = sum(context.seq_pos_max(each) + 1 for each in sequences)
        filled = sum(context.seq_pos_max(each) + 1 for each in range(attention.ROWS))
        is_crowd = filled == attention.CELLS
        if context.params.flash_attn == "off":
            ns = own * tokens * (model.plain_row_ns if tokens == 1 else model.plain_read_ns)
        else:
            ns = own * tokens * (model.flash_row_ns if tokens == 1 else model.flash_read_ns)
            if context.params.kv_unified and is_crowd:
                ns += attention.ROWS * attention.CELLS * model.masked_row_ns
            elif context.params.kv_unified and filled and not own:
                passed = attention.PASSED_CELLS if filled == attention.PASSED_CELLS else attention.CELLS
                ns += len(sequences) * tokens * passed * (model.cached_row_ns if tokens == 1 else model.masked_read_ns)
        return round(1e6 + heads * ns)

    path = attention.model_file(64)
    with Model.load(path, n_gpu_layers=0) as loaded:
        heads = loaded.attention_heads
    monkeypatch.setattr(attention._Timed, "_ns", modelled)
    found = attention.measure(path)
    assert attrs.astuple(found) == pytest.approx(attrs.astuple(model), rel=1e-3)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: b"",
        lambda _: b"\xff{",
        lambda _: b"[1, 2]",
        lambda kept: json.dumps(kept | {"flash_row_ns": -1.0}).encode(),
        lambda kept: json.dumps(kept | {"flash_row_ns": math.inf}).encode(),
        lambda kept: json.dumps(kept | {"flash_row_ns": "fast"}).encode(),
        lambda kept: json.dumps({name: kept[name] for name in list(kept)[:-1]}).encode(),
        lambda kept: json.dumps(kept | {"more": 1.0}).encode(),
    ],
)
def test_a_broken_file_is_measured_again(spoil: object, cache: Path, measured: list[Path]) -> None:
    assert callable(spoil)
    attention_times(64)
    [file] = cache.iterdir()
    whole = json.loads(file.read_bytes())
    file.write_bytes(spoil(whole))
    found = attention_times(64)
    assert found is not None and len(measured) == 2
    assert attention_times(64) == found and len(measured) == 2, "the file is whole again"


def test_a_cache_that_cannot_be_written_costs_a_measurement_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: list[Path]
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert attention_times(64) is not None and attention_times(64) is not None
    assert len(measured) == 2


def test_what_cannot_be_measured_is_said_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "model_file", lambda _size: tmp_path / "nothing.gguf")
    with caplog.at_level(logging.WARNING):
        assert attention_times(64) is None
    assert "nothing.gguf" in caplog.text
    assert not cache.exists() or not list(cache.iterdir())


def test_an_engine_decides_by_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attended = Attended(rows_masked=1e9)
    with (
        Model.load(write_model(tmp_path / "model.gguf")) as model,
        Context(model, ContextParams(n_ctx=4_096, n_seq_max=65)) as context,
    ):
        spared_ms = []
        for masked_ns in (1.0, 4.0):
            times = AttentionTimes(1.0, 1.0, masked_ns, 1.0, 1.0, 1.0, 1.0)
            monkeypatch.setattr(sizing, "attention_times", lambda _size, times=times: times)
            spared_ms.append(sizing.layouts(context, RuntimeConfig())._spared_ms(attended, Layout(8, 512)))
        monkeypatch.setattr(sizing, "attention_times", lambda _size: None)
        assert sizing.attention_cost(model) == AttentionCost()
    assert spared_ms[1] == pytest.approx(4 * spared_ms[0])


@pytest.mark.parametrize(
    ("kv_unified", "flash_attn", "needs"), [(True, "off", False), (False, "auto", False), (True, "auto", True)]
)
def test_a_layout_that_is_decided_for_good_needs_no_measurement_but_for_moving_cells(
    tmp_path: Path, measured: list[Path], kv_unified: bool, flash_attn: Literal["auto", "off"], needs: bool
) -> None:
    params = ContextParams(n_ctx=4_096, n_seq_max=65, kv_unified=kv_unified, flash_attn=flash_attn)
    with Model.load(write_model(tmp_path / "model.gguf")) as model, Context(model, params) as context:
        sizing.layouts(context, RuntimeConfig(kv_unified="on" if kv_unified else "off", flash_attn=flash_attn))
    assert bool(measured) is needs
