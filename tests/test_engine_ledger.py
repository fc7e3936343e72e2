"""What an engine plans of the free memory, all together, never exceeds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
from engine_world import answer, ask
from hypothesis import given
from hypothesis import strategies as st

from models import write_large_cells, write_model
from uma import RuntimeConfig, SamplingParams, open_engine
from uma.engine import sizing
from uma.engine.kv.snapshots import SnapshotStore
from uma.engine.ledger import Ledger
from uma.errors import BadRequest, ConfigError, UmaError
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model
from uma.types import EmbedRequest

MIB = 2**20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """Mapped models, of a few KiB up to half a MiB a token, and one with states."""
    folder = tmp_path_factory.mktemp("models")
    paths = [
        write_model(folder / "tiny.gguf", feed_forward=24_000),
        write_model(folder / "hybrid.gguf", kind="hybrid"),
        write_model(folder / "windows.gguf", kind="sliding-window"),
        write_large_cells(folder / "small.gguf", layers=3, kv_heads=8, context_length=32_768),
        write_large_cells(folder / "large.gguf", layers=32, kv_heads=32),
    ]
    loaded = [Model.load(path, map_above_bytes=0) for path in paths]
    yield loaded
    for model in loaded:
        model.close()


@given(
    which=st.integers(0, 4),
    free_mib=st.integers(1, 40_000),
    falls=st.lists(st.integers(0, 4_000), min_size=4, max_size=4),
    memory=st.integers(0, 3_000),
    order=st.permutations(["embed", "reproducible", "draft"]),
    fails=st.booleans(),
)
def test_sizes_that_are_planned_one_after_the_other_never_exceed_what_was_free(
    models: list[Model],
    monkeypatch: pytest.MonkeyPatch,
    which: int,
    free_mib: int,
    falls: list[int],
    memory: int,
    order: list[str],
    fails: bool,
) -> None:
    model, config = models[which], RuntimeConfig(n_gpu_layers=0, memory=memory)
    promised = 0

    def plan(params: ContextParams) -> None:
        nonlocal promised
        with ledger.promised(model.shape, params):
            promised += sizing.context_bytes(model.shape, params)

    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: free_mib * MIB)
    most_bytes = sizing.host_bytes(config, model.shape)
    assert most_bytes <= max(0, free_mib * MIB - model.info.size_bytes)
    ledger = Ledger(config, model.shape)
    with suppress(ConfigError):
        plan(ledger.context_params())
    ledger.promise_cache()
    promised += ledger.cache_bytes
    for name, fallen in zip(order, falls, strict=False):
        # What others take meanwhile, or this engine of what it was promised.
        monkeypatch.setattr(sizing, "free_memory_bytes", lambda fallen=fallen: max(0, free_mib - fallen) * MIB)
        with suppress(ConfigError):
            if name == "embed":
                plan(sizing.embed_params(model.shape, config, ledger.kv_bytes))
            elif name == "reproducible":
                plan(sizing.reproducible_params(model.shape, config, 8_192, ledger.kv_bytes))
            else:
                target = cast("Context", SimpleNamespace(model=model, n_ctx=32_768, n_sequences=8))
                plan(sizing.draft_params(model, target, config, ledger.kv_bytes))
        if fails:
            left = ledger.kv_bytes
            with suppress(MemoryError), ledger.promised(model.shape, ContextParams(n_ctx=100_000)):
                raise MemoryError
            assert ledger.kv_bytes == left, "what could not be made takes nothing"
    assert promised <= most_bytes
    assert ledger.host_bytes <= most_bytes - promised


@pytest.mark.parametrize("free_mib", [60, 150])
async def test_all_contexts_of_an_engine_and_its_snapshots_fit_into_the_memory_that_was_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int
) -> None:
    path = write_large_cells(tmp_path / "model.gguf", layers=3, kv_heads=8, context_length=32_768)  # 12 KiB a token
    made, capacities = list[int](), list[int]()
    init = Context.__init__

    def noted(self: Context, model: Model, params: ContextParams) -> None:
        made.append(sizing.context_bytes(model.shape, params))
        init(self, model, params)

    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: free_mib * MIB)

    def store(capacity_bytes: int, **how: Any) -> SnapshotStore:
        capacities.append(capacity_bytes)
        return SnapshotStore(capacity_bytes, **how)

    monkeypatch.setattr(Context, "__init__", noted)
    monkeypatch.setattr("uma.engine.engine.SnapshotStore", store)
    config = RuntimeConfig(model=str(path), draft=str(path), use_mmap="on", speculate="auto", threads=1)
    async with open_engine(config) as engine:
        with suppress(BadRequest):
            await answer(engine, attrs.evolve(ask(), sampling=SamplingParams(max_tokens=2, reproducible=True)))
        with suppress(UmaError):
            await engine.embed(EmbedRequest(id="e", texts=("a text",)))
        assert len(made) >= 2
        assert sum(made) + sum(capacities) <= free_mib * MIB - path.stat().st_size


def test_a_model_without_memory_is_told_the_memory_setting_that_is_enough_or_that_what_is_free_bounds_it(
    models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = models[3].shape
    config = RuntimeConfig(n_gpu_layers=0, memory=10)
    with pytest.raises(ConfigError, match=r"tokens only .*; --memory \d+ is enough$") as bounded:
        Ledger(config, shape).context_params()
    enough = int(bounded.value.message.split()[-3])
    Ledger(attrs.evolve(config, memory=enough), shape).context_params()
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 5 * MIB)
    with pytest.raises(ConfigError, match=r"; 5\.24 MB of memory are free .*; use a smaller") as short:
        Ledger(attrs.evolve(config, memory=30_000), shape).context_params()
    assert "--memory" not in short.value.message
