"""The servers a scenario compares, by name: which there are on this machine, and how one is opened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from benchmarks.load import warm_up
from benchmarks.scenario import Bench, rotated
from benchmarks.targets.base import Target
from benchmarks.targets.llama_cpp_python import llama_cpp_python
from benchmarks.targets.llama_server import LAYOUTS, llama_server
from benchmarks.targets.uma import uma_server

UMA = "UMA"
SLOW = "llama_cpp.server"
DEFAULTS = "defaults"
"""In the place of a layout: UMA as it starts without an option, whatever context a scenario gives the others."""
OURS = f"{UMA} {DEFAULTS}"
"""The target that claims are about."""


def contenders(bench: Bench, index: int, *, with_slow: bool = False) -> list[str]:
    """UMA with its defaults, llama-server in both KV layouts, and `llama_cpp.server` if wanted; another one first each
    round.
    """
    kinds = [OURS]
    if bench.has_llama_server:
        kinds += [f"llama-server {layout}" for layout in LAYOUTS]
    if with_slow and bench.has_llama_cpp_python:
        kinds.append(SLOW)
    return rotated(kinds, index)


@asynccontextmanager
async def open_contender(
    kind: str,
    bench: Bench,
    *,
    n_ctx: int,
    slots: int,
    n_ctx_slow: int = 2048,
    settings: Mapping[str, object] | None = None,
    sessions: int = 1,
) -> AsyncIterator[Target]:
    """Run a server for the block and warm it up. All have `n_ctx` cells, in the split layout a share for each slot;
    UMA with its defaults has what it chooses.

    `settings` and `sessions` are UMA's; its name tells the settings that its defaults are changed by. `n_ctx_slow` is
    for `llama_cpp.server`, which holds one request at a time.
    """
    name, _, layout = kind.partition(" ")
    if name == UMA:
        wanted = {**uma_layout(layout, n_ctx=n_ctx, slots=slots), **(settings or {})}
        changed = [f"--{key.replace('_', '-')} {value}" for key, value in wanted.items()] if layout == DEFAULTS else []
        threads = bench.default_threads if layout == DEFAULTS else bench.threads
        label = " ".join([layout, *changed])
        async with uma_server(bench.model, wanted, sessions=sessions, threads=threads, label=label) as uma:
            await warm_up(uma, bench.model)
            yield uma
    elif kind == SLOW:
        async with llama_cpp_python(bench.model, n_ctx=n_ctx_slow, threads=bench.threads) as slow:
            await warm_up(slow, bench.model)
            yield slow
    else:
        async with llama_server(bench.model, slots=slots, n_ctx=n_ctx, layout=layout, threads=bench.threads) as server:
            await warm_up(server, bench.model)
            yield server


def uma_layout(layout: str, *, n_ctx: int, slots: int) -> dict[str, object]:
    """UMA's settings for a KV layout, or none for its defaults. With a buffer each it keeps one more than slots, for
    health probes.
    """
    if layout == DEFAULTS:
        return {}
    if layout == "unified":
        return {"n_ctx": n_ctx, "kv_unified": "on"}
    return {"n_ctx": n_ctx // slots * (slots + 1), "kv_unified": "off", "max_sequences": slots}
