"""What the engine makes of its surroundings: memory that is free, and a model that can or cannot share prefixes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_world import answer, ask, config_for
from hybrids import write_hybrid
from reference import real_model

from models import Kind, write_large_cells, write_model
from uma import RuntimeConfig, open_engine
from uma.engine import sizing
from uma.engine.ledger import Ledger
from uma.engine.sizing import RULES
from uma.errors import ConfigError
from uma.llama import backend
from uma.llama.builtin import builtin_path
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model

GIB, MIB = 2**30, 2**20
TOO_FEW = "less than 4 conversations of 4,096"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by name: their attention's shape is the real one's."""
    folder = tmp_path_factory.mktemp("shapes")
    return {
        "Llama 2 7B": write_large_cells(folder / "llama2.gguf", layers=32, kv_heads=32),
        "Mistral 7B": write_large_cells(folder / "mistral.gguf", layers=32, kv_heads=8, context_length=32_768),
        "Llama 3.2 1B": write_large_cells(folder / "llama3.gguf", layers=8, kv_heads=8, context_length=131_072),
        "12 KiB a cell": write_large_cells(folder / "small.gguf", layers=3, kv_heads=8, context_length=32_768),
        "built-in": builtin_path(),
    }


@pytest.mark.parametrize(
    ("name", "weights_gib", "tokens", "is_told"),
    [
        ("built-in", 0.004, 16_384, False),  # 8 conversations of the 2,048 tokens that it was trained for
        ("Mistral 7B", 4.1, 32_768, False),  # Q4: a quarter of the memory is plenty
        ("Llama 3.2 1B", 1.3, 131_072, False),  # one request can have all that it was trained for
        ("Llama 3.2 1B", 9.0, 110_592, False),  # or as much as a quarter of what is left holds
        ("Llama 2 7B", 3.8, 16_384, False),  # Q4: a quarter would be too little for four, and more is there
        ("Llama 2 7B", 12.6, 14_080, True),  # F16: seven tenths of what is left are not enough for four
    ],
)
def test_on_24_gib_the_context_holds_one_of_full_length_and_four_conversations_or_says_why_not(
    shapes: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    weights_gib: float,
    tokens: int,
    is_told: bool,
) -> None:
    free_bytes, config = int(22.5 * GIB), RuntimeConfig()
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: free_bytes)
    is_mapped = weights_gib * GIB > sizing.map_above_bytes(config)
    with Model.load(shapes[name], map_above_bytes=0 if is_mapped else math.inf) as model:
        monkeypatch.setattr(model, "shape", attrs.evolve(model.shape, size_bytes=int(weights_gib * GIB)))
        if not is_mapped:
            free_bytes -= model.shape.size_bytes
        assert Ledger(config, model.shape).context_params().n_ctx == tokens
    assert (f"the context has {tokens:,} tokens, {TOO_FEW}" in caplog.text) == (TOO_FEW in caplog.text) == is_told


@pytest.mark.parametrize(
    ("name", "max_sequences", "tokens"),
    [
        ("Mistral 7B", 1, 65_536),
        ("Mistral 7B", 64, 65_536),
        ("Mistral 7B", 200, 102_400),
        ("Mistral 7B", backend.MAX_SEQUENCES, 131_072),
        ("12 KiB a cell", 200, 102_400),
        ("12 KiB a cell", backend.MAX_SEQUENCES, 131_072),
    ],
)
def test_more_sequences_than_by_default_have_512_cells_each(
    shapes: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, max_sequences: int, tokens: int
) -> None:
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 100 * GIB)
    with Model.load(shapes[name]) as model:
        assert Ledger(RuntimeConfig(max_sequences=max_sequences), model.shape).context_params().n_ctx == tokens


@pytest.fixture
def fitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], RuntimeConfig]:
    """The settings that name a model and nothing else, in a container that has so many MiB beside its weights."""
    path = write_model(tmp_path / "model.gguf", context_length=8_192, feed_forward=6_000)  # 9 MB, and 256 bytes a token

    def config(spare_mib: float) -> RuntimeConfig:
        root = container(tmp_path, path.stat().st_size + int(spare_mib * MIB))
        monkeypatch.setattr(sizing, "free_memory_bytes", partial(sizing.free_memory_bytes, root))
        return RuntimeConfig(model=str(path))

    return config


@pytest.mark.parametrize(("spare_mib", "tokens", "is_told"), [(6.5, 16_384, False), (4.0, 11_264, True)])
async def test_a_model_that_just_fits_into_its_container_starts_and_says_why_it_holds_less_than_four_conversations(
    fitting: Callable[[float], RuntimeConfig],
    caplog: pytest.LogCaptureFixture,
    spare_mib: float,
    tokens: int,
    is_told: bool,
) -> None:
    async with open_engine(fitting(spare_mib)) as engine:
        assert engine.snapshot()["kv_cells_total"] == tokens
        assert len((await answer(engine, ask(max_tokens=4))).tokens) == 4
    assert (f"{TOO_FEW}: beside the weights 4.19 MB" in caplog.text) == (TOO_FEW in caplog.text) == is_told


async def test_a_model_beside_which_no_context_fits_is_refused_with_what_there_is(
    fitting: Callable[[float], RuntimeConfig],
) -> None:
    with pytest.raises(ConfigError, match="n_ctx: beside the weights there is memory for 286 tokens only"):
        async with open_engine(fitting(0.1)):
            pass


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n_ctx": 1_000_000_000}, "n_ctx: a context of 1,000,000,000 tokens takes"),
        ({"n_ctx": 100_000, "max_sequences": 2, "kv_unified": "off"}, "n_ctx: a context of 100,000 tokens takes"),
        ({"n_batch": 8_192, "n_ubatch": 8_192}, "n_ctx: a context of 16,384 tokens takes"),
        ({"use_mmap": "off"}, "use_mmap: the weights of --model take 9.46 MB, and 2.12 MB of memory are free"),
        ({"use_mlock": True}, "use_mlock: the weights of --model take"),
    ],
)
async def test_what_takes_more_memory_than_there_is_is_refused_in_one_sentence(
    fitting: Callable[[float], RuntimeConfig], settings: dict[str, Any], named: str
) -> None:
    # The weights are mapped from their file, but where the settings keep them.
    spare_mib = -7.0 if {"use_mmap", "use_mlock"} & settings.keys() else 8.0
    config = attrs.evolve(fitting(spare_mib), **settings)
    with pytest.raises(ConfigError) as refused:
        async with open_engine(config):
            pass
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_a_context_that_the_user_has_named_can_have_all_the_memory_that_is_free(
    fitting: Callable[[float], RuntimeConfig],
) -> None:
    async with open_engine(attrs.evolve(fitting(32.0), n_ctx=16_384)) as engine:
        assert engine.snapshot()["kv_cells_total"] == 16_384


@pytest.mark.parametrize(("states", "max_sequences", "is_told"), [(100, 64, False), (9, 9, True), (64, 64, False)])
async def test_as_many_sequences_run_as_there_is_memory_for_their_states(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    states: int,
    max_sequences: int,
    is_told: bool,
) -> None:
    path = write_hybrid(tmp_path / "model.gguf", "qwen35", state=64)
    with Model.load(path) as model:
        free_bytes = RULES.pool_share * states * model.shape.state_bytes
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: free_bytes)
    async with open_engine(RuntimeConfig(model=str(path), use_mmap="off")) as engine:
        assert engine.info.limits.max_sequences == max_sequences
        assert len((await answer(engine, ask(max_tokens=4))).tokens) == 4
    assert (f"--max-sequences is {max_sequences}, and not 64" in caplog.text) == is_told


@pytest.mark.parametrize(("max_sequences", "runs"), [(0, 8), (20, 20)])
async def test_states_take_no_more_than_half_of_the_weights_unless_more_sequences_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_sequences: int, runs: int
) -> None:
    path = write_hybrid(tmp_path / "model.gguf", "qwen35", state=64)
    monkeypatch.setattr(sizing, "RULES", attrs.evolve(RULES, states_bytes=0))
    async with open_engine(RuntimeConfig(model=str(path), max_sequences=max_sequences)) as engine:
        assert engine.info.limits.max_sequences == runs


async def test_a_model_whose_one_state_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_hybrid(tmp_path / "model.gguf", "granitehybrid", state=64)
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: path.stat().st_size)
    with pytest.raises(ConfigError, match="a sequence's state alone takes"):
        async with open_engine(RuntimeConfig(model=str(path), use_mmap="on")):
            pass


@pytest.mark.parametrize(
    ("name", "free_gib", "tokens"),
    [
        ("Llama 3.2 1B", 32, 131_072),  # of 32 KiB a token: one context is more than an eighth
        ("Llama 3.2 1B", 48, 196_608),
        ("Llama 3.2 1B", 64, 262_144),
        ("Llama 3.2 1B", 256, 262_144),
        ("Mistral 7B", 256, 65_536),
    ],
)
def test_several_requests_of_a_long_context_have_up_to_two_of_it_where_that_is_little_of_the_memory(
    shapes: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, free_gib: int, tokens: int
) -> None:
    with Model.load(shapes[name]) as model:
        monkeypatch.setattr(sizing, "free_memory_bytes", lambda: free_gib * GIB + model.info.size_bytes)
        assert Ledger(RuntimeConfig(), model.shape).context_params().n_ctx == tokens


def test_two_long_contexts_leave_windows_as_one_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 256 * GIB)
    path = write_model(tmp_path / "model.gguf", kind="sliding-window", context_length=131_072)
    config = RuntimeConfig()
    with Model.load(path) as model:
        window_bytes = model.shape.window_bytes_per_token(config.cache_type_k, config.cache_type_v)
        for spare, tokens in ((1.0, 131_072), (1.5, 196_608), (3.0, 262_144)):
            states_bytes = int(spare * 131_072 * window_bytes)
            monkeypatch.setattr(sizing, "RULES", attrs.evolve(RULES, states_bytes=states_bytes))
            params = Ledger(config, model.shape).context_params()
            assert (params.swa_full, params.n_ctx) == (True, tokens)


def container(root: Path, memory_bytes: int) -> Path:
    """A `/proc` and a `/sys` as they look in a container with so much memory that nothing uses yet."""
    files = {
        "proc/self/cgroup": "0::/",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "proc/meminfo": f"MemAvailable: {8 * 2**20} kB",
        "sys/fs/cgroup/memory.max": str(memory_bytes),
        "sys/fs/cgroup/memory.current": "0",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("kind", "layout", "how"),
    [
        ("attention", "on", "cells"),
        ("attention", "off", "copies"),
        ("sliding-window", "on", "cells"),
        ("sliding-window", "off", "copies and checkpoints"),
        ("recurrent", "on", "cells and checkpoints"),
        ("hybrid", "on", "cells and checkpoints"),
        ("hybrid", "off", "copies and checkpoints"),
    ],
)
async def test_what_cannot_share_cells_says_so(tmp_path: Path, kind: Kind, layout: str, how: str) -> None:
    model = write_model(tmp_path / "model.gguf", kind=kind)
    async with open_engine(config_for(model, kv_unified=layout, max_sequences=2, cache_ram_mb=16)) as engine:
        assert engine.info.capabilities.prefix_sharing.partition(":")[0].startswith(how)


@pytest.fixture(scope="module")
def gemma() -> Iterator[Model]:
    with Model.load(real_model("gemma3")) as model:
        yield model


@pytest.mark.parametrize(
    ("settings", "sequences", "is_full"),
    [
        ({}, 15, False),  # a quarter of full-size windows holds so many
        ({"max_sequences": 8}, 9, False),
        ({"max_sequences": 64}, 128, True),  # whose windows would take as much as full-size ones
        ({"n_ctx": 4_096}, 128, True),  # they take little
        ({"swa_full": "on"}, 128, True),
        ({"max_sequences": 64, "swa_full": "off"}, 65, False),
        ({"max_sequences": 8, "kv_unified": "off"}, 9, False),  # where no sequence has a guard
    ],
    ids=str,
)
def test_windows_are_small_where_full_ones_are_large_beside_the_weights(
    gemma: Model, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], sequences: int, *, is_full: bool
) -> None:
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 16 * GIB)
    params = Ledger(RuntimeConfig(**settings), gemma.shape).context_params()
    found = params.swa_full, params.guards_window, params.n_seq_max // (1 + is_full)
    assert found == (is_full, is_full, sequences)
    if not settings:
        assert params.n_ctx == 2 * gemma.n_ctx_train
        assert params.kv_bytes(gemma.shape) < attrs.evolve(params, swa_full=True).kv_bytes(gemma.shape) / 2


def test_where_memory_is_short_small_windows_leave_it_for_a_longer_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Model.load(write_model(tmp_path / "model.gguf", kind="sliding-window", context_length=65_536)) as model:
        free_bytes = RULES.pool_share * 32_768 * model.shape.bytes_per_token("f16", "f16")
        monkeypatch.setattr(sizing, "free_memory_bytes", lambda: free_bytes + model.info.size_bytes)
        full, chosen = (
            Ledger(RuntimeConfig(swa_full=each, use_mmap="on"), model.shape).context_params() for each in ("on", "auto")
        )
        assert full.n_ctx == 32_768
        assert chosen.n_ctx > 60_000
        assert chosen.kv_bytes(model.shape) <= full.kv_bytes(model.shape)


def test_one_buffer_has_ids_for_cache_beside_the_sequences_and_as_many_as_llama_has_where_they_are_asked_for(
    tmp_path: Path,
) -> None:
    with Model.load(write_model(tmp_path / "model.gguf")) as model:

        def ids(max_sequences: int) -> int:
            return (
                Ledger(RuntimeConfig(max_sequences=max_sequences, kv_unified="on"), model.shape)
                .context_params()
                .n_seq_max
            )

        assert ids(64) == RULES.pool_ids > 65
        assert ids(200) == 202
        assert ids(backend.MAX_SEQUENCES - 1) == backend.MAX_SEQUENCES


@pytest.mark.parametrize(("n_ctx", "unified"), [(0, True), (5 * 256 - 256, True), (5 * 256, False)])
def test_one_buffer_is_made_unless_the_context_is_as_long_as_all_sequences_need(
    tmp_path: Path, n_ctx: int, *, unified: bool
) -> None:
    config = RuntimeConfig(max_sequences=4, n_ctx=n_ctx)
    with Model.load(write_model(tmp_path / "model.gguf", context_length=256)) as model:
        assert Ledger(config, model.shape).context_params().kv_unified is unified


def test_with_a_sliding_window_a_batch_is_one_ubatch(tmp_path: Path) -> None:
    config = config_for(Path("model"), n_batch=48, n_ubatch=32, max_sequences=12)
    with Model.load(write_model(tmp_path / "model.gguf", kind="sliding-window")) as model:
        found = Ledger(config, model.shape).context_params()
        with Context(model, found) as target:
            draft = sizing.draft_params(model, target, config, 64 * MIB)
    assert [found.n_batch, found.n_ubatch, draft.n_batch, draft.n_ubatch] == [32] * 4


@pytest.mark.parametrize(("n_gpu_layers", "tokens"), [(-1, 256), (2, 64), (0, 64)])
def test_prompts_alone_are_read_a_batch_at_a_time_only_where_a_gpu_computes_everything(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, n_gpu_layers: int, tokens: int
) -> None:
    monkeypatch.setattr(backend, "has_gpu", lambda: True)
    params = ContextParams(n_ctx=512, n_batch=256, n_ubatch=64)
    with Model.load(tiny, n_gpu_layers=n_gpu_layers) as model, Context(model, params) as context:
        assert sizing.solo_tokens(context) == tokens


@pytest.mark.parametrize(
    ("cores", "threads", "at_once"),
    [(1, 1, 1), (2, 1, 1), (8, 0, 1), (8, 8, 1), (8, 3, 4), (8, 4, 3)],
)
def test_grammars_are_compiled_at_once_only_on_cores_that_nothing_else_needs(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, at_once: int
) -> None:
    monkeypatch.setattr(backend, "core_count", lambda: cores)
    params = ContextParams(n_ctx=256, n_threads=threads)
    assert sizing.grammars_at_once(params) == at_once


def test_the_first_memory_that_a_plan_takes_is_enough() -> None:
    asked: list[int] = []

    def plan(mib: int) -> None:
        asked.append(mib)
        if mib < 170:
            raise ConfigError("n_ctx: too little")

    assert sizing.enough_mb(100, plan) == 200
    assert asked == [100, 125, 150, 200]
    assert sizing.enough_mb(10, plan) == 0
