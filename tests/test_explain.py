"""Where a request's time went, as `Source.explain` tells it."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
from engine_world import answer, ask, at_once, config_for, tokens_for

from harness import PATIENCE_SEC
from uma.cli.explain import show_explained
from uma.contracts.explaining import CURES, sentences
from uma.engine import Engine, open_engine
from uma.engine.clock import now_ms
from uma.engine.worker.account import Account, Totals
from uma.engine.worker.cores.waits import CpuWaits
from uma.engine.worker.status import Status
from uma.errors import BadRequest
from uma.net.client import OWNER
from uma.types import CAUSES, CacheUse, Explained, RecordedText, RequestMetrics


@asynccontextmanager
async def engine_of(model: Path, **settings: object) -> AsyncIterator[Engine]:
    async with open_engine(config_for(model, **settings)) as engine:
        yield engine


async def explained(engine: Engine, id: str, is_right: Callable[[Explained], bool] = lambda _: True) -> Explained:
    """As soon as it is right. Its time is told apart without a rest."""
    with trio.fail_after(PATIENCE_SEC):
        while not is_right(told := await engine.explain(id)):
            pass
    assert list(told.spent_ms) == [cause for cause in CAUSES if cause in told.spent_ms]
    assert sum(told.spent_ms.values()) == pytest.approx(told.age_ms, abs=0.01 * len(CAUSES))
    return told


async def test_a_request_that_waits_for_a_slot_says_so_while_it_waits_and_afterwards(tiny: Path) -> None:
    async with engine_of(tiny, max_sequences=1) as engine, engine.generate(ask(max_tokens=1_500, id="a")) as first:
        await anext(first)
        async with engine.generate(ask(max_tokens=4, id="b")) as second:
            waits = await explained(engine, "b", lambda told: told.spent_ms.get("slot", 0) > 1)
            assert waits.now is not None
            assert (waits.now.waits_for, waits.reason) == ("slot", "")
            async with engine.generate(ask(max_tokens=4, id="c", priority=1)) as third:
                first.cancel()
                for stream in (third, second):
                    async for _ in stream:
                        pass
            told = await explained(engine, "b", lambda told: bool(told.reason))
    assert (told.now, told.reason, told.generated_tokens) == (None, "length", 4)
    assert told.spent_ms["slot"] >= waits.spent_ms["slot"]
    assert {"read", "write"} <= told.spent_ms.keys()
    assert (told.started_before, told.started_before_higher) == (1, 1)
    assert told.metrics.ttft_ms > 0
    assert 0 < told.worst_gap_ms <= told.age_ms
    assert 1 <= told.worst_gap_token < 4


async def test_while_the_server_is_paused_all_wait_for_that_and_its_time_is_told_apart(tiny: Path) -> None:
    async with engine_of(tiny) as engine, engine.generate(ask(max_tokens=1_500, id="a")) as first:
        await anext(first)
        await engine.pause(PATIENCE_SEC)
        async with engine.generate(ask(max_tokens=4, id="b")) as second:
            for id in "ab":
                waits = await explained(engine, id, lambda told: told.spent_ms.get("paused", 0) > 1)
                assert waits.now is not None and waits.now.waits_for == "paused"
            assert "Now it waits: the server is paused, and `uma resume` continues." in sentences(waits)
            await engine.pause(0)
            async for _ in second:
                pass
        told = await explained(engine, "b", lambda told: bool(told.reason))
        first.cancel()
    assert told.spent_ms["paused"] >= waits.spent_ms["paused"]
    assert {"read", "write"} <= told.spent_ms.keys()


async def test_the_cache_is_told_by_its_tier_and_by_the_first_token_that_is_not_in_it(tiny: Path) -> None:
    ids, other = tokens_for(1, 200), tokens_for(2, 200)
    fork = (*ids[:100], *(token + 1 if index == 0 else token for index, token in enumerate(other[:100])))
    assert fork[100] != ids[100]
    told = {}
    async with engine_of(tiny) as engine:
        for id, prompt in (("new", ids), ("again", ids), ("fork", fork), ("none", other), ("apart", ids)):
            sampling = {"reproducible": True} if id == "apart" else {}
            await answer(engine, attrs.evolve(ask(prompt, 2, id=id, **sampling), cache_prompt=id != "none"))
            told[id] = await explained(engine, id, lambda told: bool(told.reason))
        first = await engine.explain("new")
        written = (await answer(engine, ask(ids, 2))).token_ids
        longer = (*ids, written[0], 7, 7, 7)
        await answer(engine, ask(longer, 2, id="longer"))
        told["longer"] = await engine.explain("longer")
    assert first.cache == told["new"].cache
    assert (first.cache.tier, first.cached_tokens, first.cache.why) == ("", 0, "none")
    assert (told["again"].cache.tier, told["again"].cache.why) == ("cells", "")
    parted = told["fork"].cache
    assert (parted.tier, parted.known_tokens, parted.why, parted.token_id) == ("cells", 100, "differs", fork[100])
    assert told["fork"].cached_tokens == 100
    assert not any(f"token {fork[100]}" in said for said in sentences(told["fork"])), (
        "a token's id tells a person nothing"
    )
    recorded = attrs.evolve(told["fork"], text=RecordedText("", "", "a fox", " ran"))
    assert any("a fox ▸  ran" in said for said in sentences(recorded))
    assert (told["none"].cache.why, told["none"].cached_tokens) == ("asked", 0)
    assert (told["apart"].cache.why, told["apart"].reason) == ("reproducible", "length")
    assert told["apart"].spent_ms["write"] > 0
    assert told["longer"].cache.why in ("end", "differs")
    assert told["longer"].cached_tokens == told["longer"].cache.known_tokens >= len(ids)
    assert told["longer"].cache.token_id == longer[told["longer"].cache.known_tokens]


async def test_a_reader_that_is_behind_is_told_of_and_its_time_is_the_reader_s(tiny: Path) -> None:
    async with engine_of(tiny) as engine, engine.generate(ask(max_tokens=1_500, id="a")) as stream:
        await explained(engine, "a", lambda told: told.spent_ms.get("reader", 0) > 1)
        waits = await engine.explain("a")
        assert waits.now is not None
        assert (waits.now.waits_for, waits.pauses) == ("reader", 1)
        stream.cancel()
        told = await explained(engine, "a", lambda told: bool(told.reason))
    assert told.reason == "cancelled"
    assert told.spent_ms["reader"] >= waits.spent_ms["reader"]


async def test_prompts_that_are_read_beside_each_other_name_each_other(heavy: Path) -> None:
    requests = [ask(tokens_for(seed, 600), 40, id=str(seed)) for seed in range(2)]
    async with engine_of(heavy, n_ctx=4_096) as engine:
        await at_once(engine, requests)
        both = [await explained(engine, each.id, lambda told: bool(told.reason)) for each in requests]
    named = {told.id: [(each.id, each.prompt_tokens) for each in told.beside] for told in both}
    assert named == {"0": [("1", 600)], "1": [("0", 600)]}
    assert any(told.spent_ms.get("prompt", 0) > 0 for told in both)


async def test_a_request_that_lost_its_cells_says_how_often_and_for_how_long(tiny: Path) -> None:
    requests = [ask(tokens_for(seed, 70), 150, id=str(seed)) for seed in range(6)]
    async with engine_of(tiny, n_ctx=256, n_batch=64, n_ubatch=64) as engine:
        await at_once(engine, requests)
        told = [await explained(engine, each.id) for each in requests]
        preemptions = engine.snapshot()["preemptions_total"]
    assert sum(each.preemptions for each in told) == preemptions > 0
    assert all((each.preemptions > 0) == ("preempted" in each.spent_ms) for each in told)
    assert any("cells" in each.spent_ms for each in told)


async def test_only_its_owner_and_the_server_s_own_ask_about_a_request(tiny: Path) -> None:
    async with engine_of(tiny) as engine:
        for uid in (1, 2):
            token = OWNER.set(("user", uid))
            await answer(engine, ask(max_tokens=1, id="same"))
            await answer(engine, ask(max_tokens=1, id=f"own {uid}"))
            OWNER.reset(token)
        token = OWNER.set(("user", 1))
        assert (await engine.explain()).id == "own 1"
        assert (await engine.explain("same")).came_at < (await engine.explain("own 1")).came_at
        with pytest.raises(BadRequest, match="own 2"):
            await engine.explain("own 2")
        OWNER.reset(token)
        assert (await engine.explain("own 1")).id == "own 1"
        assert (await engine.explain()).id == "own 2"


@pytest.mark.parametrize("records", [False, True])
async def test_text_is_kept_only_where_it_is_to_be_recorded(tiny: Path, records: bool) -> None:
    async with engine_of(tiny, record_text=records) as engine:
        done = await answer(engine, ask("Once upon a time", 8, id="a"))
        text = (await explained(engine, "a")).text
    if records:
        assert text is not None
        assert text.prompt_end.endswith("Once upon a time")
        assert text.answer_begin == done.text
    else:
        assert text is None


def kernel_counts(proc: Path, **waited_ms: float) -> None:
    """Threads, by their ids behind a `t`, with how long each has waited for a core."""
    for name, ms in waited_ms.items():
        file = proc / "self" / "task" / name.removeprefix("t") / "schedstat"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"1000000 {int(ms * 1e6)} 7\n")


def test_a_batch_waits_for_a_cpu_where_any_of_its_threads_does(tmp_path: Path) -> None:
    begin, waits = now_ms(), CpuWaits(proc=tmp_path)
    python_threads = {f"t{thread.native_id}": 0.0 for thread in threading.enumerate()}
    own = f"t{threading.get_native_id()}"
    kernel_counts(tmp_path, **python_threads, t0=500.0)
    waits.sample(begin)
    assert waits.total_ms == 0, "what was before is not known"
    kernel_counts(tmp_path, **{own: 50.0}, t0=550.0)
    waits.sample(begin + 1.0)
    assert waits.total_ms == 0, "too soon for a sample"
    waits.sample(begin + 1e6)
    kernel_counts(tmp_path, **{own: 100.0}, t0=600.0)
    before = waits.total_ms
    waits.sample(begin + 1e6 + 1e5)
    assert waits.total_ms - before == pytest.approx(100.0, abs=0.1), "both, hardly ever at the same time"
    kernel_counts(tmp_path, t0=1e9)
    before = waits.total_ms
    waits.sample(begin + 3e6)
    assert waits.total_ms - before == pytest.approx(1.9e6), "no more than has passed"


def test_a_thread_of_python_waits_without_a_batch_and_a_system_without_counts_has_none(tmp_path: Path) -> None:
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    kernel_counts(tmp_path, t0=0.0, **{f"t{other.native_id}": 0.0})
    begin, waits = now_ms(), CpuWaits(proc=tmp_path)
    waits.sample(begin)
    kernel_counts(tmp_path, **{f"t{other.native_id}": 1e9})
    waits.sample(begin + 1e6)
    is_over.set()
    other.join()
    assert waits.total_ms == 0
    none = CpuWaits(proc=tmp_path / "none")
    none.sample(begin)
    none.sample(begin + 1e6)
    assert none.total_ms == 0


def test_what_was_waited_for_a_cpu_is_a_share_of_what_was_computed_meanwhile() -> None:
    now = now_ms()
    totals = Totals(cpu_waits=CpuWaits(proc=Path("/none")))
    account = Account("a", None, 0, "", 1, 32, False, False, now - 1_000, {}, totals)
    totals.cpu_waits.total_ms += 400
    account.turns_to(Status.PREFILLING)
    assert account.spent_ms["cpu"] == 0, "it has waited in the queue all the time"
    began = sum(account.spent_ms.values())
    totals.prompts_ms, account.own_ms = 800, 800
    totals.cpu_waits.total_ms += 750
    spent = account.spent_until(account.came_ms + began + 1_000)
    assert spent["cpu"] == pytest.approx(750)
    assert spent["read"] == pytest.approx(200)
    assert spent["rest"] == pytest.approx(50)
    assert sum(spent.values()) == pytest.approx(began + 1_000)
    totals.cpu_waits.total_ms, totals.cpu_waits.share = 1e6, 0.25
    short = account.spent_until(account.came_ms + began + 80)
    assert short["cpu"] == pytest.approx(20), "a sample that is longer than this is no measure of it"
    assert account.spent_until(account.came_ms + began + 1_000)["read"] > 0, "it was computed"


def told_of(**spent_ms: float) -> Explained:
    """A request that ended, with its time by cause."""
    age_ms = sum(spent_ms.values())
    return Explained(
        "a", 0, "", 0.0, age_ms, spent_ms, 32, 0, 8, CacheUse(), RequestMetrics(0.0, 0.0, 0.0, 0.0, 1, 0.0, 8), "length"
    )


def test_the_last_sentence_says_what_helps_against_the_largest_cause() -> None:
    *_, last = sentences(told_of(read=4_000, cpu=15_000))
    assert last.startswith(f"The most time: {CAUSES['cpu']}. What helps: ")
    assert "the system's `top`" in last
    assert [*sentences(told_of(cpu=4_000, rest=15_000))][-1].startswith("Cache: "), "nothing helps against all else"


def test_the_page_of_causes_has_the_same_cures() -> None:
    page = (Path(__file__).parents[1] / "docs" / "slow.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", page, re.MULTILINE))
    told = {cause: cure for causes, cure in rows.items() for cause in causes.split("; ")}
    assert CURES.keys() < CAUSES.keys()
    for cause, cure in CURES.items():
        assert re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", told[CAUSES[cause]]).startswith(cure)


def test_the_shares_add_up_to_a_hundred_percent(capsys: pytest.CaptureFixture[str]) -> None:
    thirds = dict.fromkeys(("batch", "slot", "read"), 100.0)
    for spent in (thirds, {**thirds, "write": 0.4}, dict.fromkeys(CAUSES, 7.0), {"read": 0.004}):
        show_explained(told_of(**spent))
        assert sum(map(int, re.findall(r"(\d+)%", capsys.readouterr().out))) == 100
