"""What the engine makes of its surroundings: memory that is free, and a model that can or cannot share prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_world import config_for

from models import Kind, write_model
from uma import RuntimeConfig, open_engine
from uma.engine import sizing
from uma.llama.model import Model


@pytest.mark.parametrize(
    ("free_mib", "tokens", "is_told"),
    [
        (100_000, 32_768, False),  # a quarter of the memory is plenty
        (40, 16_384, False),  # a quarter would be too little for four conversations, and more is there
        (10, None, True),  # not enough for four
    ],
)
def test_the_context_holds_four_conversations_or_says_why_not(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free_mib: int,
    tokens: int | None,
    is_told: bool,
) -> None:
    with Model.load(tiny) as model:
        # One cell of this model as large as of one with some hundred million parameters.
        monkeypatch.setattr(model, "kv_bytes_per_token", lambda *_: 1_500)
        taken = model.info.size_bytes if model.is_mapped else 0
        monkeypatch.setattr(sizing, "free_memory_bytes", lambda: free_mib * 2**20 + taken)
        found = sizing.context_params(model, RuntimeConfig(model=str(tiny))).n_ctx
    assert found == tokens if tokens is not None else 512 < found < 16_384
    assert ("less than 4 conversations" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("kind", "layout", "how"),
    [
        ("attention", "on", "cells"),
        ("attention", "off", "copies"),
        ("sliding-window", "on", "snapshots"),
        ("recurrent", "on", "snapshots"),
        ("hybrid", "on", "snapshots"),
    ],
)
async def test_what_cannot_share_cells_says_so(tmp_path: Path, kind: Kind, layout: str, how: str) -> None:
    model = write_model(tmp_path / "model.gguf", kind=kind)
    async with open_engine(config_for(model, kv_unified=layout, max_sequences=2, cache_ram_mb=16)) as engine:
        assert engine.info.capabilities.prefix_sharing.split()[0].rstrip(":") == how


def test_with_a_sliding_window_a_batch_is_one_ubatch(tmp_path: Path) -> None:
    with Model.load(write_model(tmp_path / "model.gguf", kind="sliding-window")) as model:
        found = sizing.context_params(model, config_for(Path("model"), n_batch=48, n_ubatch=32, max_sequences=12))
    assert found.n_batch == found.n_ubatch == 32
