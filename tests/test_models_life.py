"""How long each of several models stays, what has it leave, and what a fault of one means: the supervisor by itself,
with the processes of real models and a clock that stands still.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from projectors import write_projector
from several import GREEDY, NAMES, PROMPT, children, taken_bytes

from harness import PATIENCE_SEC, short_directory
from models import CHATML, write_large_cells, write_model
from uma.config import ModelSettings, RuntimeConfig
from uma.contracts.explaining import sentences
from uma.engine.intake.overload import full_queue_retry_ms
from uma.errors import BadRequest, ConfigError, InternalError, ModelUnusable, Overloaded, UnknownModel
from uma.figures import MB
from uma.http import openai
from uma.http.problem import Problem
from uma.models.catalog import MAX_BROKEN
from uma.models.shelf import Shelf
from uma.net.client import CLIENT, OWNER, QUEUED
from uma.net.quota import Bounds, ClientAccount
from uma.supervisor import LoadedModels, child, open_models
from uma.supervisor.model import AGAIN_SEC, CROWDED_MS, MIN_TOKENS
from uma.supervisor.models import IDLE_UNLOAD, MEASURE_SEC, RESCAN_SEC
from uma.types import ListedModel, LoadProgress, Request, SamplingParams, Source, Token


@asynccontextmanager
async def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[LoadedModels]:
    monkeypatch.setenv("UMA_MODELS", str(folder))
    plain: dict[str, Any] = {"models": ",".join(NAMES), "threads": 1, "n_ctx": 512}
    async with open_models(RuntimeConfig(**plain | settings), LoadProgress()) as models:
        yield models


@asynccontextmanager
async def opened_large(
    folder: Path, monkeypatch: pytest.MonkeyPatch, context_length: int, n_ctx: int = 0
) -> AsyncIterator[LoadedModels]:
    """Two models, which have no memory for both whole contexts."""
    for name in ("alpha", "beta"):
        write_large_cells(folder / f"{name}.gguf", layers=8, kv_heads=8, context_length=context_length)
    async with opened(folder, monkeypatch, models="alpha,beta", n_ctx=n_ctx, memory=1_000, cache_ram_mb=0) as models:
        yield models


async def text(source: Source, model: str | None = None) -> str:
    request = Request(f"of {model}", prompt=PROMPT, sampling=SamplingParams(**GREEDY), model=model)
    async with source.generate(request) as stream:
        return "".join([event.text async for event in stream if isinstance(event, Token)])


async def until(is_so: Callable[[], Any]) -> None:
    """Let all else run until it is so. The clock of these tests stands still: what comes from a process does come."""
    give_up = time.monotonic() + PATIENCE_SEC
    while not is_so():
        assert time.monotonic() < give_up
        await trio.testing.wait_all_tasks_blocked(0.01)


async def test_a_model_that_does_not_fit_does_so_with_the_context_or_the_memory_that_its_refusal_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = write_large_cells(tmp_path / "wide.gguf", layers=32, kv_heads=8)
    settings = {"models": str(wide), "memory": 450, "n_ctx": 4096}
    with pytest.raises(ConfigError, match=r"of it for a context of 4,096 tokens, and all models together") as refused:
        async with opened(tmp_path, monkeypatch, **settings):
            pass
    advice = re.search(r"; --n-ctx (\d+) or --memory (\d+) is enough;", refused.value.message)
    assert advice is not None
    for name, enough in zip(("n_ctx", "memory"), map(int, advice.groups()), strict=True):
        async with opened(tmp_path, monkeypatch, **settings | {name: enough}) as models:
            assert models.find("wide").fits
            budget_bytes = (await models.metrics())["memory_budget_bytes"]
            assert budget_bytes == (enough if name == "memory" else 450) * MB


async def test_the_memory_that_a_refusal_beside_pinned_models_names_is_enough_when_it_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"wide{width}" for width in (32, 24, 16)]
    for name in names:
        write_large_cells(tmp_path / f"{name}.gguf", layers=int(name[4:]), kv_heads=8, context_length=16_384)
    settings: dict[str, Any] = {"models": ",".join(names), "n_ctx": 0, "memory": 1_000}
    refusals = 0
    while refusals < len(names):
        async with opened(tmp_path, monkeypatch, **settings) as models:
            try:
                for name in names:
                    await models.pin(name)
                break
            except ModelUnusable as refused:
                told = re.search(r"--memory (\d+) is enough$", refused.message)
                assert told is not None
                assert int(told[1]) > settings["memory"]
                settings["memory"], refusals = int(told[1]), refusals + 1
    assert 1 <= refusals < len(names)  # one for each model that has to have its place beside those before it


async def test_a_budget_beyond_the_machine_s_memory_is_what_the_machine_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder, monkeypatch, memory=99_999_999) as models:
        assert models.find("alpha").fits
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert (await models.metrics())["memory_budget_bytes"] == machine_bytes


async def test_a_frame_can_hold_pictures_where_a_model_of_them_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("text", "seeing"):
        write_model(tmp_path / f"{name}.gguf")
    text_alone = {"seeing": ModelSettings(values={"mmproj": "off"})}
    monkeypatch.setenv("UMA_MODELS", str(tmp_path))
    config = RuntimeConfig(models="all", threads=1, n_ctx=512)
    async with open_models(config, LoadProgress()) as models, open_models(config, LoadProgress(), text_alone) as blind:
        assert models.info.limits.max_frame_bytes == 2**20
        write_projector(tmp_path / "mmproj-seeing.gguf")  # comes while they are served
        for each in (models, blind):
            await each.look_again(is_changed=True)
        assert (await models.card("text", loads=False)).limits.max_frame_bytes == 8 * 2**20
        assert blind.info.limits.max_frame_bytes == 2**20


async def test_a_request_says_how_long_its_model_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch) as models:
        async with models.using("alpha", keep_sec=10):
            assert models.find("alpha").leaves_in_sec is None
        assert models.find("alpha").leaves_in_sec == 10
        mock_clock.jump(9)
        await text(models, "alpha")  # says nothing of it, so it is as it was said last
        assert models.find("alpha").leaves_in_sec == 10
        mock_clock.jump(10)
        await until(lambda: models.find("alpha").state == "unloaded")
        assert (await models.load("alpha")).leaves_in_sec == 60 * IDLE_UNLOAD
        async with models.using("alpha"):
            async with models.using("alpha", keep_sec=0):
                pass
            assert models.find("alpha").state == "loaded"
        await until(lambda: models.find("alpha").state == "unloaded")


async def test_a_model_that_is_unloaded_ends_what_runs_and_is_loaded_again_for_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch) as models:
        async with models.using("beta") as source:
            assert (await models.unload("beta")).state == "leaving"
            assert await text(source) == texts["beta"]
        await until(lambda: models.find("beta").state == "unloaded")
        assert (await models.unload("beta")).state == "unloaded"
        assert await text(models, "beta") == texts["beta"]


async def test_a_pinned_model_stays_whatever_needs_its_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch, memory=300, cache_ram_mb=0, idle_unload=5 / 60) as models:
        taken = (await models.pin("alpha")).memory_bytes
        monkeypatch.setattr(models, "budget_bytes", taken + taken * 3 // 2)  # for it and another
        mock_clock.jump(1_000)
        assert await text(models, "gamma-one") == texts["gamma-one"]
        mock_clock.jump(1_000)
        assert await text(models, "beta") == texts["beta"]
        assert models.find("alpha").state == "loaded"
        assert models.find("alpha").leaves_in_sec is None
        with pytest.raises(BadRequest, match="alpha is pinned"):
            await models.unload("alpha")
        await models.load("beta", keep_sec=float("inf"))  # stays, too
        with pytest.raises(ModelUnusable, match="beside alpha, beta, which stay"):
            await models.load("gamma-one")
        assert not (await models.pin("alpha", is_pinned=False)).is_pinned
        assert await text(models, "gamma-one") == texts["gamma-one"]
        assert models.find("alpha").state != "loaded"


async def test_a_model_that_fits_beside_another_by_a_shorter_context_has_that_until_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_large(tmp_path, monkeypatch, 8_192) as models:
        first, second = await models.load("alpha"), await models.load("beta")
        assert models.find("alpha").state == "loaded"
        assert first.memory_bytes + second.memory_bytes <= 1_000 * MB
        assert _cells(first) > _cells(second) >= MIN_TOKENS
        # What one request can have is the same: nothing is refused for what else is loaded.
        assert {each.info.limits.n_ctx for each in (first, second) if each.info is not None} == {8_192}
        for name in ("alpha", "beta"):
            await models.unload(name)
        await until(lambda: models.find("beta").state == "unloaded" == models.find("alpha").state)
        assert _cells(await models.load("beta")) == _cells(first)


async def test_a_context_that_one_request_can_have_whole_is_not_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_large(tmp_path, monkeypatch, 32_768) as models:
        first, second = await models.load("alpha"), await models.load("beta")
        assert models.find("alpha").state != "loaded"
        assert _cells(first) == _cells(second)


async def test_a_broken_file_takes_nothing_else_from_what_asks_for_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    async with opened(tmp_path, monkeypatch) as models:
        account = ClientAccount("bound", Bounds(models=("alpha", "beta")))
        assert account.usable(models) == frozenset({"alpha", "beta"})
        (tmp_path / "beta.gguf").write_bytes(b"GGUF")
        await models.look_again(is_changed=True)
        with pytest.raises(ModelUnusable, match="is cut short"):
            models.find("beta")
        assert account.usable(models) == frozenset({"alpha"})
        assert account.model("alpha", models) == "alpha"
        assert models.load_of("beta") is None  # sessions ask for it while they wait for a load


def _cells(model: ListedModel) -> int:
    assert model.info is not None
    assert model.info.capabilities.memory is not None
    return model.info.capabilities.memory.cells


async def test_what_the_user_has_named_is_not_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_large(tmp_path, monkeypatch, 32_768, n_ctx=16_384) as models:
        for name, other in (("alpha", "beta"), ("beta", "alpha")):
            loaded = await models.load(name)
            assert loaded.info is not None
            assert loaded.info.limits.n_ctx == 16_384
            assert models.find(other).state != "loaded"


async def test_a_pin_that_is_refused_for_memory_is_no_failure_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch, memory=300, cache_ram_mb=0) as models:
        taken = (await models.pin("alpha")).memory_bytes
        monkeypatch.setattr(models, "budget_bytes", taken * 3 // 2)  # for one
        with pytest.raises(ModelUnusable, match=r"beside alpha, which stays, there are .*; unpin it") as failed:
            await models.pin("beta")
        problem = Problem.of(failed.value)
        assert (problem.status, problem.retry_after_ms) == (503, CROWDED_MS)
        assert openai.error(problem, "")["error"]["code"] == "model_unusable"
        refused = models.find("beta")
        assert (refused.state, refused.failure, refused.retry_in_sec) == ("unloaded", "", 0)
        await models.pin("alpha", is_pinned=False)
        await models.pin("beta")
        assert await text(models, "beta") == texts["beta"]


async def test_a_load_says_whose_memory_it_waits_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch, cache_ram_mb=0) as models, trio.open_nursery() as nursery:
        async with models.using("alpha"):
            monkeypatch.setattr(models, "budget_bytes", models.find("alpha").memory_bytes * 3 // 2)
            nursery.start_soon(models.load, "beta")
            await until(lambda: models.find("beta").state == "loading")
            assert models.find("beta").waits_for == "waits for memory, which alpha has (1 request)"
        await until(lambda: models.find("beta").state == "loaded")
        assert not models.find("beta").waits_for


async def test_a_load_that_nobody_waits_for_any_longer_is_dropped_and_what_was_to_leave_for_it_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    found = list[str]()

    async def ask() -> None:
        found.append(await text(models, "alpha"))

    async with opened(folder, monkeypatch, cache_ram_mb=0) as models:
        async with models.using("alpha"), trio.open_nursery() as nursery:
            monkeypatch.setattr(models, "budget_bytes", models.find("alpha").memory_bytes * 3 // 2)
            mock_clock.jump(1_000)
            with trio.CancelScope() as client:
                nursery.start_soon(ask)
                async with trio.open_nursery() as waiting:
                    waiting.start_soon(models.load, "beta")
                    waiting.start_soon(models.load, "beta")
                    await until(lambda: models.find("alpha").state == "leaving")
                    nursery.start_soon(ask)
                    await until(lambda: models.find("alpha").waiting == 1)
                    client.cancel()
            await until(lambda: models.find("beta").state == "unloaded")
            assert models.find("alpha").state == "loaded"
            await until(lambda: len(found) == 2)  # also what had come while it was to leave
        assert found == 2 * [texts["alpha"]]
        assert [each.state for each in models.listed()] == ["loaded", "unloaded", "unloaded"]
        counted = (await models.metrics())["models"]
        assert {name: of["model_loads_total"] for name, of in counted.items()} == {"alpha": 1, "beta": 0}


async def test_an_idle_model_keeps_its_memory_from_another_no_longer_than_a_client_takes_to_ask_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch, cache_ram_mb=0) as models, trio.open_nursery() as nursery:
        others = children(os.getpid())
        nursery.start_soon(models.load, "alpha")
        await until(lambda: children(os.getpid()) - others)
        mock_clock.jump(100)  # so long its load takes
        await until(lambda: models.find("alpha").state == "loaded")
        monkeypatch.setattr(models, "budget_bytes", models.find("alpha").memory_bytes * 3 // 2)
        words = "waits for memory, which alpha has (it was used just now)"
        for _ in range(2):
            assert await text(models, "alpha") == texts["alpha"]
            nursery.start_soon(models.load, "beta")
            await until(lambda: models.find("beta").waits_for == words)
            mock_clock.jump(AGAIN_SEC / 2)
        async with models.using("alpha"):
            mock_clock.jump(AGAIN_SEC)
            await until(lambda: models.find("beta").waits_for == "waits for memory, which alpha has (1 request)")
            assert models.find("alpha").state == "loaded"
        mock_clock.jump(AGAIN_SEC)
        await until(lambda: models.find("beta").state == "loaded")


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_a_file_in_the_place_of_another_is_counted_with_what_it_takes_itself(
    monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock, is_loaded: bool
) -> None:
    with short_directory() as place:
        whole = write_model(place / "beta.gguf", context_length=16_384).read_bytes()
        path = write_model(place / "alpha.gguf", context_length=256)

        def replace(content: bytes) -> None:
            (place / "new").write_bytes(content)
            (place / "new").replace(path)

        async with opened(place, monkeypatch, models="alpha,beta", n_ctx=8_192) as models:
            await until(lambda: all(each.memory_bytes for each in models.listed()))
            if is_loaded:
                await models.load("alpha")
                replace(whole[:1_000])
                with pytest.raises(ModelUnusable):
                    await models.load("alpha")
            replace(whole)
            assert (await models.load("alpha")).memory_bytes == models.find("beta").memory_bytes


async def test_what_is_kept_by_its_last_request_is_pinned_until_it_is_unpinned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch) as models:
        assert (await models.load("alpha", keep_sec=math.inf)).is_pinned
        assert not (await models.pin("alpha", is_pinned=False)).is_pinned
        assert models.find("alpha").leaves_in_sec == 60 * IDLE_UNLOAD


async def test_a_list_has_what_a_model_will_take_before_its_first_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch) as models:
        await until(lambda: all(each.memory_bytes for each in models.listed()))
        planned = models.find("beta").memory_bytes
        assert (await models.load("beta")).memory_bytes == planned


async def test_a_third_load_waits_for_two_and_the_request_that_waits_for_it_is_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    async def generate() -> None:
        assert await text(models, "gamma-one") == texts["gamma-one"]

    async with opened(folder, monkeypatch) as models, trio.open_nursery() as nursery:
        for name in ("alpha", "beta"):
            nursery.start_soon(models.load, name)
            await until(lambda name=name: models.find(name).state == "loading")  # type: ignore[misc]
        nursery.start_soon(generate)
        words = "waits for the load of alpha and beta"
        await until(lambda: models.find("gamma-one").waits_for == words)
        activity = await models.activity("of gamma-one")
        (waiting,) = activity.waiting
        assert (waiting.waits_for, waiting.behind, waiting.model) == ("loading", words, "gamma-one")
        assert activity.waiting_normal == 1
        assert not (await models.activity("of beta")).waiting
        mock_clock.jump(2)
        shown = await models.explain("of gamma-one")
        assert shown.spent_ms == {"loading": shown.age_ms} and shown.age_ms >= 2_000
        assert "Now it waits: its model is loaded first (waits for the load of alpha and beta)." in sentences(shown)
        OWNER.set("another")
        with pytest.raises(BadRequest, match="no request of yours"):
            await models.explain("of gamma-one")


async def test_a_process_that_does_not_end_keeps_its_memory_from_others_until_it_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    begun, ends = list[subprocess.Popen[bytes]](), threading.Event()

    class Stuck(subprocess.Popen[bytes]):
        """A process that looks as if it waited for a disk."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            begun.append(self)

        def poll(self) -> int | None:
            return super().poll() if ends.is_set() or self is not begun[0] else None

        def wait(self, timeout: float | None = None) -> int:
            if self is begun[0]:
                assert ends.wait(PATIENCE_SEC)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    async with opened(folder, monkeypatch, memory=300, cache_ram_mb=0) as models:
        taken = (await models.load("alpha")).memory_bytes
        monkeypatch.setattr(models, "budget_bytes", taken * 3 // 2)  # for one alone
        with monkeypatch.context() as patch:
            patch.setattr(child, "END_SEC", 0.0)
            patch.setattr(child, "KILL_SEC", 0.0)
            await models.unload("alpha")
            await until(lambda: models.find("alpha").state == "unloaded")
        with pytest.raises(ModelUnusable, match="beside a process of another, which does not end, there are"):
            await models.load("beta")
        ends.set()
        await until(lambda: begun[0].poll() is not None)
        assert await text(models, "beta") == texts["beta"]


async def test_a_pinned_model_whose_process_has_ended_is_loaded_again_by_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    others = children(os.getpid())

    def new() -> set[int]:
        return children(os.getpid()) - others if models.find("alpha").state == "loaded" else set()

    async with opened(folder, monkeypatch, cache_ram_mb=0) as models:
        await models.pin("alpha")
        (first,) = new()
        os.kill(first, signal.SIGKILL)
        await until(lambda: new() - {first})
        budget_bytes = models.budget_bytes
        monkeypatch.setattr(models, "budget_bytes", 1)  # nothing fits, and what has failed twice waits
        os.kill(new().pop(), signal.SIGKILL)
        await until(lambda: models.find("alpha").retry_in_sec == 2)
        mock_clock.jump(2)
        await until(lambda: "all models together can have 1 B" in models.find("alpha").failure)
        assert models.find("alpha").retry_in_sec == 4
        monkeypatch.setattr(models, "budget_bytes", budget_bytes)
        mock_clock.jump(4)
        await until(new)
        assert models.find("alpha").is_pinned


async def test_a_model_that_fails_at_each_load_waits_longer_each_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch) as models:
        for wait_sec in (1, 2):
            with pytest.raises(InternalError, match="alpha") as failed:
                await fail_to_load(models)
            assert failed.value.retry_after_ms == 1000 * wait_sec
            with pytest.raises(InternalError, match=f"tried again in {wait_sec} s") as refused:
                await models.load("alpha")
            assert refused.value.retry_after_ms == 1000 * wait_sec
            assert models.find("alpha").retry_in_sec == wait_sec
            mock_clock.jump(wait_sec)
        assert await text(models, "alpha") == texts["alpha"]
        assert models.find("alpha").failure == ""
        counted = (await models.metrics())["models"]
        assert counted.keys() == {"alpha"}  # none of those that nothing has asked for
        assert (counted["alpha"]["model_load_failures_total"], counted["alpha"]["model_loads_total"]) == (2, 1)


async def fail_to_load(models: LoadedModels) -> None:
    """Load alpha, whose process is killed before it can be."""
    others = children(os.getpid())

    async def kill() -> None:
        await until(lambda: children(os.getpid()) - others)
        os.kill((children(os.getpid()) - others).pop(), signal.SIGKILL)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        try:
            await models.load("alpha")
        except InternalError as error:
            failure = error
    raise failure


async def test_a_loaded_model_answers_while_another_is_loaded_and_leaves_when_its_time_comes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch) as models, trio.open_nursery() as nursery:
        await models.load("alpha")
        others = children(os.getpid())
        nursery.start_soon(models.load, "beta")
        await until(lambda: children(os.getpid()) - others)
        (beta,) = children(os.getpid()) - others
        os.kill(beta, signal.SIGSTOP)  # so it is not loaded before
        assert await text(models, "alpha") == texts["alpha"]
        async with models.using("alpha", keep_sec=0):
            pass
        await until(lambda: models.find("alpha").state == "unloaded")
        assert models.find("beta").state == "loading"
        os.kill(beta, signal.SIGCONT)


async def test_a_model_does_not_wait_behind_the_load_of_another_that_it_fits_beside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    async with opened(folder, monkeypatch) as models, trio.open_nursery() as nursery:
        others = children(os.getpid())
        nursery.start_soon(models.load, "alpha")
        await until(lambda: children(os.getpid()) - others)
        (alpha,) = children(os.getpid()) - others
        os.kill(alpha, signal.SIGSTOP)
        assert await text(models, "beta") == texts["beta"]
        assert models.find("alpha").state == "loading"
        os.kill(alpha, signal.SIGCONT)


async def test_names_that_are_not_here_have_the_folders_looked_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    looks: list[int] = []
    read = Shelf.read

    def counted(shelf: Shelf) -> None:
        looks.append(len(looks))
        read(shelf)

    monkeypatch.setattr(Shelf, "read", counted)

    async def ask(number: int) -> None:
        with pytest.raises(UnknownModel):
            await models.load(f"nothing-{number}")

    async with opened(folder, monkeypatch) as models:
        for more in (1, 2):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(ask, number)
            assert len(looks) == 1 + more
            mock_clock.jump(RESCAN_SEC)
        for _ in range(2):
            await models.look_again(is_changed=True)
        assert len(looks) == 5


async def test_broken_files_are_told_once_at_the_start_and_not_all_of_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    with short_directory() as place:
        shutil.copy(folder / "alpha.gguf", place)
        for number in range(MAX_BROKEN + 2):
            (place / f"broken-{number}.gguf").write_bytes(b"GGUF of no kind")
        async with opened(place, monkeypatch, models="all"):
            await until(lambda: "2 more broken files" in caplog.text)
        async with opened(place, monkeypatch, models="alpha") as models:  # the others are not for it
            await models.load("alpha")
    assert len(re.findall(r"model\.broken reason=\S*broken-\d\.gguf", caplog.text.replace('"', ""))) == MAX_BROKEN


async def test_a_model_whose_file_is_gone_is_listed_until_its_last_request_has_ended(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    with short_directory() as place:
        for name in ("alpha", "beta"):
            shutil.copy(folder / f"{name}.gguf", place)
        others = children(os.getpid())
        async with opened(place, monkeypatch, models="all") as models:
            await models.load("beta")
            async with models.using("alpha"):
                for name in ("alpha", "beta"):
                    (place / f"{name}.gguf").unlink()
                await models.look_again(is_changed=True)
                assert "alpha" not in models.names
                await until(lambda: len(models.gone()) == 1)  # nothing needs beta
                (listed,) = models.gone()
                assert (listed.name, listed.state, listed.running) == ("alpha", "leaving", 1)
                assert "its file is gone" in listed.failure
            await until(lambda: not models.gone())
            await until(lambda: children(os.getpid()) == others)


async def test_a_disk_that_no_longer_answers_holds_up_neither_lists_nor_what_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str]
) -> None:
    asked, answers, stat = threading.Event(), threading.Event(), os.stat

    def hung(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("alpha.gguf"):
            asked.set()
            answers.wait()
        return stat(path, *args, **options)

    async with opened(folder, monkeypatch, models="all") as models:
        await models.load("alpha")
        monkeypatch.setattr(os, "stat", hung)
        try:
            found = dict[str, str]()

            async def ask(name: str) -> None:
                found[name] = await text(models, name)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "alpha")
                await until(asked.is_set)
                assert models.find("alpha").state == "loaded"
                assert {model.name for model in models.listed()} >= set(NAMES)
                await ask("beta")
            assert found == {name: texts[name] for name in ("alpha", "beta")}
        finally:
            answers.set()


async def test_asking_again_and_again_for_the_load_of_what_is_loaded_does_not_fill_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "uma.supervisor")
    async with opened(folder, monkeypatch) as models:
        for _ in range(3):
            await models.load("alpha")
    assert caplog.text.count("event=model.asked") == 1


async def test_the_sums_keep_what_a_model_has_counted_whose_file_is_gone(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    with short_directory() as place:
        for name in ("alpha", "beta"):
            shutil.copy(folder / f"{name}.gguf", place)
        async with opened(place, monkeypatch, models="all") as models:
            await text(models, "alpha")
            before = await models.metrics()
            await models.remove("alpha")
            await until(lambda: not models.gone())
            after = await models.metrics()
            assert (before["requests_total"], list(before["models"])) == (1, ["alpha"])
            assert (after["requests_total"], list(after["models"])) == (1, [])
            assert after["model_loads_total"] == after["model_unloads_total"]["replaced"] + 1 == 1


async def test_a_pinned_model_that_another_file_takes_the_name_of_leaves_and_is_not_loaded_again(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with short_directory() as home:
        monkeypatch.setenv("HOME", str(home))
        caplog.set_level("INFO", "uma.supervisor")
        first, second = (home / ".lmstudio" / "models" / owner / "alpha.gguf" for owner in ("one", "two"))
        first.parent.mkdir(parents=True)
        shutil.copy(folder / "alpha.gguf", first)
        async with opened(home / "none", monkeypatch, models="all") as models:
            await models.pin("alpha")
            second.parent.mkdir()
            shutil.copy(folder / "beta.gguf", second)
            await models.look_again(is_changed=True)
            assert "one/alpha" in models.names
            await until(lambda: "model.ended" in caplog.text)
            await until(lambda: not models.gone())
            assert caplog.text.count("model.loading") == 1
            assert "its file was deleted" not in caplog.text


async def test_a_file_that_was_replaced_is_loaded_for_the_next_request_and_a_deleted_one_is_told(
    monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock, folder: Path
) -> None:
    with short_directory() as place:
        path, others = write_model(place / "alpha.gguf", seed=0), children(os.getpid())
        async with opened(place, monkeypatch, models="all") as models:
            async with models.using("alpha") as source:
                write_model(place / "new.gguf", seed=1).replace(path)
                assert await text(source) == texts["alpha"]
                await models.pin("alpha")
                assert await text(models, "alpha") == texts["beta"]
                assert await text(source) == texts["alpha"]  # what had begun
                assert len(children(os.getpid()) - others) == 2
            await until(lambda: len(children(os.getpid()) - others) == 1)
            assert models.find("alpha").is_pinned
            assert await text(models, "alpha") == texts["beta"]
            await models.pin("alpha", is_pinned=False)
            path.unlink()
            with pytest.raises(UnknownModel, match=r"file of alpha is gone: .*alpha\.gguf"):
                await text(models, "alpha")
            assert [each.name for each in models.listed()] == ["builtin"]
            await until(lambda: children(os.getpid()) <= others)


async def test_a_file_that_was_incomplete_is_judged_anew_once_it_is_complete(
    monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    with short_directory() as place:
        whole = write_model(place / "alpha.gguf", seed=0).read_bytes()
        (place / "alpha.gguf").write_bytes(whole[:-1_000])
        async with opened(place, monkeypatch, models="all") as models:
            with pytest.raises(ModelUnusable, match="is cut short"):
                await text(models, "alpha")
            (place / "alpha.gguf").write_bytes(whole)
            assert await text(models, "alpha") == texts["alpha"]
            assert models.names[0] == "alpha"


async def test_a_file_that_was_replaced_waits_for_the_old_one_where_both_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    with short_directory() as place:
        path, found = write_model(place / "alpha.gguf", seed=0), list[str]()
        async with opened(place, monkeypatch, models="all", cache_ram_mb=0) as models, trio.open_nursery() as nursery:

            async def ask() -> None:
                found.append(await text(models, "alpha"))

            async with models.using("alpha") as source:
                monkeypatch.setattr(models, "budget_bytes", 3 * models.find("alpha").memory_bytes // 2)
                write_model(place / "new.gguf", seed=1).replace(path)
                nursery.start_soon(ask)
                await until(lambda: models.find("alpha").state == "loading")
                assert models.find("alpha").waits_for == "waits for the old file's requests"
                assert await text(source) == texts["alpha"]
                assert not found
        assert found == [texts["beta"]]


async def test_the_default_is_a_model_with_a_chat_template_and_that_it_changes_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with short_directory() as place:
        for name, template in (("alpha", None), ("beta", CHATML), ("gamma", CHATML)):
            write_model(place / f"{name}.gguf", chat_template=template)
        async with opened(place, monkeypatch, models="all") as models:
            assert list(models.names) == ["beta", "gamma", "alpha", "builtin"]
            (place / "beta.gguf").unlink()
            async with models.using(None) as source:  # the first request that names none
                assert source.info.model.name == "gamma"
            assert models.info.models[0] == "gamma"
    assert "model.default_changed model=gamma before=beta" in caplog.text


async def test_a_model_that_is_used_takes_more_and_never_counts_with_less_than_was_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    others = children(os.getpid())
    async with opened(folder, monkeypatch, cache_ram_mb=0, n_ubatch=128) as models:
        loaded = await models.load("alpha")
        (pid,) = children(os.getpid()) - others
        assert abs(taken_bytes(pid) - loaded.taken_bytes) < ROUNDING_BYTES
        assert loaded.memory_bytes > loaded.taken_bytes + ROUNDING_BYTES
        async with models.using("alpha") as source:
            long = Request("long", prompt=PROMPT * 20, sampling=SamplingParams(max_tokens=1), stream=False)
            async with source.generate(long) as stream:
                assert [event async for event in stream]
            mock_clock.jump(MEASURE_SEC)
            await until(lambda: models.find("alpha").taken_bytes > loaded.taken_bytes)
            assert models.find("alpha").memory_bytes >= loaded.memory_bytes


async def test_a_model_that_the_configuration_pins_is_loaded_at_the_start_and_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UMA_MODELS", str(folder))
    config = RuntimeConfig(models=",".join(NAMES), threads=1, n_ctx=512, idle_unload=5 / 60)
    pinned, too_large = ModelSettings(pin=True), ModelSettings(pin=True, values={"cache_ram_mb": 2**30})
    async with open_models(config, LoadProgress(), {"beta": pinned, "gamma-one": too_large}) as models:
        await until(lambda: models.find("beta").state == "loaded" and "model.not_pinned" in caplog.text)
        mock_clock.jump(1_000)
        assert models.find("beta").leaves_in_sec is None
        with pytest.raises(BadRequest, match="beta is pinned"):
            await models.unload("beta")
        assert [(each.state, each.is_pinned) for each in models.listed()] == [
            ("unloaded", False),
            ("loaded", True),
            ("unloaded", False),
        ]


async def test_of_models_that_are_pinned_in_no_order_the_smallest_is_loaded_first(
    monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "uma.supervisor")
    pinned = ModelSettings(pin=True)
    with short_directory() as place:
        for name, feed_forward in (("alpha", 2_000), ("beta", 64)):
            write_model(place / f"{name}.gguf", feed_forward=feed_forward)
        monkeypatch.setenv("UMA_MODELS", str(place))
        config = RuntimeConfig(models="all", threads=1, n_ctx=512)
        async with open_models(config, LoadProgress(), {"alpha": pinned, "beta": pinned}) as models:
            await until(lambda: models.find("alpha").is_pinned and models.find("alpha").state == "loaded")
    assert re.findall(r"event=model.loading model=(\S+)", caplog.text) == ["beta", "alpha"]


async def test_what_waits_for_models_that_do_not_fit_together_is_answered_model_by_model(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: Mapping[str, str],
    mock_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "uma.supervisor")
    found: list[tuple[str, str]] = []
    async with opened(folder, monkeypatch, memory=94, cache_ram_mb=0) as models:  # for one

        async def ask(number: int) -> None:
            name = NAMES[number % 2]
            found.append((name, await text(models, name)))

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(ask, number)
    assert sorted(found) == sorted((NAMES[number % 2], texts[NAMES[number % 2]]) for number in range(12))
    loaded = [record for record in caplog.records if "model.loaded" in record.getMessage()]
    assert len(loaded) == 2


async def test_of_what_comes_while_a_model_is_loaded_as_much_waits_as_runs_and_queues_there_and_all_of_that_is_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, texts: Mapping[str, str], mock_clock: trio.testing.MockClock
) -> None:
    answers, refused = list[str](), list[Overloaded]()
    async with opened(folder, monkeypatch, cache_ram_mb=0, max_sequences=2, max_queue=4) as models:

        async def ask() -> None:
            try:
                answers.append(await text(models, "alpha"))
            except Overloaded as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(14):
                nursery.start_soon(ask)
            await until(lambda: len(refused) == 8)
            nursery.start_soon(models.load, "alpha")  # which is none that queues
            async with trio.open_nursery() as others:
                CLIENT.set("another")  # for which one client's requests fill no queue
                others.start_soon(ask)
                await until(lambda: models.find("alpha").waiting == 8)
                assert (models.find("alpha").state, answers) == ("loading", [])
                others.cancel_scope.cancel()
    problem = Problem.of(refused[0])
    assert (problem.status, problem.retry_after_ms) == (429, full_queue_retry_ms(4, 4, 0.0, 2))
    assert "6 requests wait for the load of alpha (max_queue is 4)" in refused[0].message
    assert (answers, len(refused)) == ([texts["alpha"]] * 6, 8)


async def test_lanes_and_the_answers_of_a_request_count_in_the_queue_of_a_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder, monkeypatch, cache_ram_mb=0, max_sequences=2, max_queue=4) as models:
        refused = list[tuple[int, int]]()

        async def wait(lane: int, answers: int) -> None:
            QUEUED.set((lane, (answers,)))
            try:
                async with models.using("alpha", id="a"):
                    await trio.sleep_forever()
            except Overloaded:
                refused.append((lane, answers))

        async with trio.open_nursery() as nursery:
            for lane, answers, n_refused in (
                (0, 2, 0),  # these run
                (0, 2, 0),
                (-1, 1_000, 0),  # is refused once it is loaded, and so fills no more than what runs at once
                (0, 2, 0),  # what is of a lower lane is not ahead
                (0, 1, 1),  # 4 wait
                (1, 1, 1),  # in its lane nothing waits
                (-1, 1, 1),
                (-1, 1, 2),  # twice as many
            ):
                nursery.start_soon(wait, lane, answers)
                await trio.testing.wait_all_tasks_blocked()
                assert len(refused) == n_refused, (lane, answers)
            now = await models.activity()
            assert (now.waiting_interactive, now.waiting_normal, now.waiting_background) == (1, 3, 2)
            nursery.cancel_scope.cancel()


ROUNDING_BYTES = 4 * 2**20
"""Maximum by which a process's memory changes by chance between two looks."""
LOADS = int(os.environ.get("TEST_LOADS", "6"))


@pytest.mark.timeout(PATIENCE_SEC * LOADS)
async def test_the_log_has_the_reason_for_which_each_model_has_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mock_clock: trio.testing.MockClock
) -> None:
    caplog.set_level("INFO", "uma")
    with short_directory() as place:
        for seed, name in enumerate(NAMES):
            write_model(place / f"{name}.gguf", seed=seed)
        async with opened(place, monkeypatch, models="all", cache_ram_mb=0) as models:

            async def gone(name: str) -> None:
                await until(lambda: models.find(name).state == "unloaded")

            taken = (await models.load("alpha")).memory_bytes
            await models.unload("alpha")
            await gone("alpha")
            await models.load("alpha")
            monkeypatch.setattr(models, "budget_bytes", taken * 3 // 2)  # for one alone
            mock_clock.jump(60)
            await models.load("beta")
            mock_clock.jump(60 * IDLE_UNLOAD + 1)
            await gone("beta")
            await models.load("beta", keep_sec=5)
            mock_clock.jump(6)
            await gone("beta")
            await models.load("alpha")
            write_model(place / "new.gguf", seed=3).replace(place / "alpha.gguf")
            await models.load("alpha")
            counted = (await models.metrics())["models"]
            (place / "alpha.gguf").unlink()
            with pytest.raises(UnknownModel):
                await models.load("alpha")
            await models.load("gamma-one")
    assert re.findall(r'event=model.ended model=(\S+) reason="(.*?)(?: \d+ s.*)?"', caplog.text) == [
        ("alpha", "asked to (unload)"),
        ("alpha", "memory for beta"),
        ("beta", "idle for"),
        ("beta", "idle for"),
        ("alpha", "its file was replaced"),
        ("alpha", "its file was deleted"),
        ("gamma-one", "the server stops"),
    ]
    assert re.findall(r"idle for \d+ s \((\w+)\)", caplog.text) == ["idle_unload", "keep_alive"]
    reasons = {name: {why: n for why, n in of["model_unloads_total"].items() if n} for name, of in counted.items()}
    assert reasons == {"alpha": {"asked": 1, "memory": 1, "replaced": 1}, "beta": {"idle": 2}}
    assert {name: of["model_loads_total"] for name, of in counted.items()} == {"alpha": 4, "beta": 2}
    assert not any(of["model_load_failures_total"] for of in counted.values())
    assert {name: of["model_memory_bytes"] > 0 for name, of in counted.items()} == {"alpha": True, "beta": False}


async def test_loads_and_unloads_leave_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    def state() -> tuple[int, set[int], list[str]]:
        return (
            len(list(Path("/proc/self/fd").iterdir())),
            children(os.getpid()),
            sorted(path.name for path in folder.iterdir()),
        )

    before, resident = None, 0
    async with opened(folder, monkeypatch) as models:
        for number in range(LOADS):
            await text(models, NAMES[number % len(NAMES)])
            await models.unload(NAMES[number % len(NAMES)])
            await until(lambda: all(each.state == "unloaded" for each in models.listed()))
            if number == LOADS // 3:
                before, resident = state(), resident_kib()
        assert state() == before
        assert resident_kib() - resident < MAX_GROWTH_KIB


MAX_GROWTH_KIB = 8_192
"""Maximum that the allocator takes by chance. Ten times as many loads (TEST_LOADS) have the same bound."""


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
