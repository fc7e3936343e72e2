"""What the engine makes of its surroundings: memory that is free, and a model that can or cannot share prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_world import config_for

from models import Kind, write_model
from uma import open_engine
from uma.engine.sizing import free_memory_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "free"),
    [
        (str(GIB), GIB // 2),
        ("max", 8 * GIB),
        (str(100 * GIB), 8 * GIB),
        (str(GIB // 8), 0),
        ("rubbish", 8 * GIB),
    ],
)
def test_free_memory_is_what_the_container_s_limit_leaves(tmp_path: Path, limit: str, free: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable:   {8 * 2**20} kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(f"{GIB * 3 // 4}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 4}\n")
    assert free_memory_bytes(meminfo, tmp_path) == free


def test_without_a_container_it_is_what_the_machine_has(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {3 * 2**20} kB\n")
    assert free_memory_bytes(meminfo, tmp_path) == 3 * GIB


def test_where_nobody_tells_there_is_still_some(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path / "none", tmp_path) > 0


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
