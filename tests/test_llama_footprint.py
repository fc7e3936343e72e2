"""What a model is said to keep of a token and of a sequence is what llama.cpp's own buffers take, whatever its kind."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import attrs
import pytest
from hybrids import Hybrid, write_hybrid
from reference import real_model

from benchmarks.kinds import Kind as BenchmarkKind
from benchmarks.kinds import write_kind
from benchmarks.reference import RealModel
from models import Kind, write_large_cells, write_model
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.ledger import Ledger, planned
from uma.engine.sizing import memory_plan
from uma.llama.context import Context, ContextParams
from uma.llama.header import read_parts
from uma.llama.model import Model

MIB = 2**20
CELLS, SEQUENCES = 65_536, 64
"""llama.cpp logs its buffers in hundredths of a MiB: so many that these are a small part."""

OTHERS: tuple[BenchmarkKind, ...] = ("gemma3", "gpt-oss", "qwen3moe")
"""Windows in most layers or in every second one, and mixtures of experts."""


def _write_other(path: Path, kind: BenchmarkKind) -> Path:
    write_kind(path, kind, write_model(path.with_name("vocabulary.gguf")))
    return path


KINDS: dict[str, Callable[[Path], Path]] = {
    **{kind: partial(write_hybrid, kind=kind, state=64) for kind in get_args(Hybrid)},
    **{kind: partial(write_model, kind=kind) for kind in get_args(Kind)},
    **{kind: partial(_write_other, kind=kind) for kind in OTHERS},
    "grouped heads": partial(write_large_cells, layers=3, kv_heads=8),
}
WINDOWED = ("sliding-window", "gemma3", "gpt-oss")
"""Whose headers do not say which layers have a window: one of two, of six and of two attends to everything."""


@pytest.fixture
def buffers(caplog: pytest.LogCaptureFixture) -> Callable[[Model, ContextParams], dict[str, float]]:
    """Bytes of llama.cpp's buffers for cells and for states, as it logs them when a context is made."""

    def measure(model: Model, params: ContextParams) -> dict[str, float]:
        found = {"KV": 0.0, "RS": 0.0}
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "uma.llama"), Context(model, params):
            for match in re.finditer(r"(KV|RS) buffer size = *([\d.]+) MiB", caplog.text):
                found[match[1]] += float(match[2]) * MIB
        return found

    return measure


@pytest.mark.parametrize("kind", KINDS)
def test_planned_bytes_of_cells_and_states_are_those_of_llamas_buffers(
    tmp_path: Path, buffers: Callable[[Model, ContextParams], dict[str, float]], kind: str
) -> None:
    params = ContextParams(n_ctx=CELLS, n_ubatch=32, n_batch=64, n_seq_max=SEQUENCES)
    with Model.load(KINDS[kind](tmp_path / "model.gguf")) as model:
        actual = buffers(model, params)
        assert CELLS * model.shape.bytes_per_token("f16", "f16") == pytest.approx(actual["KV"], rel=0.02)
        assert SEQUENCES * model.shape.state_bytes == pytest.approx(actual["RS"], rel=0.02, abs=MIB / 100)
        assert (model.shape.state_bytes > 0) == (model.shape.memory in ("recurrent", "hybrid"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planned_by_a_header_alone_is_what_the_loaded_model_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 512 * MIB)
    path, asked = KINDS[kind](tmp_path / "model.gguf"), RuntimeConfig(n_gpu_layers=0)
    others = ({"speculate": "auto", "kv_unified": "off"}, {"swa_full": "off"}, {"max_sequences": 3})
    with Model.load(path, n_gpu_layers=0) as model:
        for config in (asked, *(attrs.evolve(asked, **settings) for settings in others)):
            assert planned(read_parts(path), config) == memory_plan(
                model.shape, Ledger(config, model.shape).context_params()
            )


@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "split"])
@pytest.mark.parametrize("kind", WINDOWED)
def test_planned_bytes_of_small_windows_are_those_of_llamas_buffers(
    tmp_path: Path, buffers: Callable[[Model, ContextParams], dict[str, float]], kind: str, *, kv_unified: bool
) -> None:
    with Model.load(KINDS[kind](tmp_path / "model.gguf")) as model:
        for n_ctx, swa_full in [(CELLS, False), (CELLS, True), (3_000, False)]:
            params = ContextParams(
                n_ctx=n_ctx, n_ubatch=32, n_batch=64, n_seq_max=5, kv_unified=kv_unified, swa_full=swa_full
            )
            assert params.kv_bytes(model.shape) == pytest.approx(buffers(model, params)["KV"], rel=0.02)


@pytest.mark.parametrize("name", get_args(RealModel))
def test_planned_bytes_of_real_models_are_those_of_llamas_buffers(
    buffers: Callable[[Model, ContextParams], dict[str, float]], name: RealModel
) -> None:
    params = ContextParams(n_ctx=2_048, n_ubatch=32, n_batch=64, cache_type_k="q8_0", cache_type_v="q4_0")
    with Model.load(real_model(name)) as model:
        planned = 2_048 * model.shape.bytes_per_token("q8_0", "q4_0")
        assert planned == pytest.approx(buffers(model, params)["KV"], rel=0.02)
