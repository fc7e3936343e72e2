"""KV memory that changes its layout while sequences run: readers notice it by the clock alone.

Every output is compared with that of the same request alone, in an engine whose memory is one buffer and stays it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest
import trio
from engine_world import Answer, answer, answers, ask, config_for, settled, tokens_for

from models import write_model
from uma import Request, RuntimeConfig, open_engine
from uma.engine.kv.events import Run, Tier
from uma.engine.policy.layout import Attended, AttentionCost, Crowd, Held, Layout, PauseCost
from uma.engine.policy.layout_policy import LayoutPolicy
from uma.engine.policy.lead import PACE_SHARE
from uma.engine.policy.state import Row
from uma.engine.worker.relayout import Relayout
from uma.engine.worker.sequence import Status
from uma.errors import ModelError
from uma.llama.context import Context, ContextParams
from uma.types import Grammar, Message, SamplingParams, Token

SHARE = 256
MAX_SEQUENCES = 10
PACE_MS = PACE_SHARE * 80.0
"""At the default target."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that attends, with a context of several shares."""
    return write_model(tmp_path_factory.mktemp("layout") / "attention.gguf", context_length=2_048)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any crowd that fits a split layout has one with the next plan, and is expected to write little."""
    demand(monkeypatch, masked_row_ns=1e12)
    monkeypatch.setattr("uma.engine.policy.layout.FEW_IDS", ())
    monkeypatch.setattr("uma.engine.policy.layout.EXPECTED_TOKENS", 40)
    monkeypatch.setattr("uma.engine.worker.loop.REPLAN_BATCHES", 4)


def demand(monkeypatch: pytest.MonkeyPatch, **costs: float) -> None:
    """Attention costs this, and nothing else."""
    cost = AttentionCost(**(dict.fromkeys(attrs.fields_dict(AttentionCost), 0.0) | costs))
    monkeypatch.setattr("uma.engine.sizing.attention_cost", lambda _model: cost)


def config(model: Path, **settings: object) -> RuntimeConfig:
    sizes = {"n_ctx": (MAX_SEQUENCES + 1) * SHARE, "max_sequences": MAX_SEQUENCES, "kv_unified": "auto"}
    return config_for(model, **(sizes | settings))


async def expected(model: Path, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """What each says alone."""
    found = []
    for request in requests:
        async with open_engine(config(model, kv_unified="on", cache_tokens=0, cache_ram_mb=0)) as engine:
            found.append((await answer(engine, request)).token_ids)
    return found


def crowd(count: int = 9, tokens: int = 50) -> list[Request]:
    """Short requests, one of them sampled with a memory of what it wrote."""
    requests = [ask(tokens_for(seed, 20 + 3 * seed), tokens, id=str(seed)) for seed in range(count - 1)]
    return [*requests, ask(tokens_for(99, 30), tokens, id="s", seed=7, temperature=0.9, repetition_penalty=1.2)]


async def test_a_crowd_is_given_buffers_of_its_own_and_says_what_each_says_alone(model: Path) -> None:
    requests, book = crowd(), Counter[tuple[int, ...]]()
    async with open_engine(config(model)) as engine:
        engine.listen_to_kv(Ledger(book))
        got = await answers(engine, requests)
        metrics = await settled(engine)
        assert metrics["kv_layout_changes_total"] == 1
        assert metrics["preemptions_total"] == 0
        assert book.total() == metrics["kv_cells_used"], "what listeners were told is not what there is"
        assert engine.info.capabilities.kv_unified and engine.info.limits.n_ctx == 2_048
    assert [each.token_ids for each in got] == await expected(model, requests)


async def test_a_sequence_that_outgrows_its_share_takes_all_back_to_the_pool(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{8}$"}, "minItems": 30, "maxItems": 30}
    held = ask(tokens_for(72, 20), 400, id="held", grammar=Grammar(json_schema=words), temperature=1, seed=5)
    requests = [ask(tokens_for(70, 100), 400, id="long"), held, *crowd(8)]
    change, written, layouts = Relayout._change, list[int](), list[Layout]()

    def watched(relayout: Relayout, layout: Layout, now: float) -> None:
        layouts.append(layout)
        written.extend(each.generated for each in relayout._residency.active.values() if each.grammar is not None)
        change(relayout, layout, now)

    monkeypatch.setattr(Relayout, "_change", watched)
    async with open_engine(config(model)) as engine:
        got = await answers(engine, requests)
        assert engine.snapshot()["preemptions_total"] == 0
    assert [each.is_unified for each in layouts[:2]] == [False, True], "there, and back"
    assert [each.token_ids for each in got] == await expected(model, requests)
    assert any(0 < tokens < len(got[1].tokens) for tokens in written), "no change came within its text"
    jsonschema.validate(json.loads(got[1].text), words)


@pytest.mark.parametrize("free_bytes", [2**40, 1_000])
async def test_a_document_among_short_prompts_has_buffers_beyond_the_pool_where_there_is_memory_for_them(
    model: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    requests = [*crowd(9), ask(tokens_for(73, 1_700), 10, id="document")]
    seen = watch_changes(monkeypatch)
    async with open_engine(config(model, n_ctx=0)) as engine:
        with monkeypatch.context() as patched:
            patched.setattr("uma.engine.sizing.free_memory_bytes", lambda: free_bytes)  # after the engine's start
            pool_cells = engine.snapshot()["kv_cells_total"]
            got = await answers(engine, requests)
    shares = [each.layout.share for each in seen if each.layout.ids == MAX_SEQUENCES + 1]
    assert (2_048 in shares) is (free_bytes > 1_000), shares
    assert pool_cells < (MAX_SEQUENCES + 1) * 2_048, "as many cells as the pool has would do"
    assert [each.token_ids for each in got] == await expected(model, requests)


async def test_a_long_prompt_has_the_pool_at_once_and_streams_go_on(model: Path) -> None:
    requests, long = crowd(tokens=150), ask(tokens_for(71, 1_200), 10, id="long")
    async with open_engine(config(model)) as engine:
        got = {}
        async with trio.open_nursery() as nursery:

            async def read(request: Request) -> None:
                got[request.id] = await answer(engine, request)

            async with engine.generate(requests[0]) as stream:
                for request in requests[1:]:
                    nursery.start_soon(read, request)
                async for event in stream:
                    if isinstance(event, Token) and engine.snapshot()["kv_layout_changes_total"] == 1:
                        break  # which cancels it, in its buffer
            nursery.start_soon(read, long)
        assert engine.snapshot()["kv_layout_changes_total"] >= 2
    requests = [*requests[1:], long]
    assert [got[each.id].token_ids for each in requests] == await expected(model, requests)


async def test_rows_run_ahead_of_a_change_until_no_reader_feels_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_ms = 300.0
    felt: list[Row] = []
    change = Relayout._change

    def watched(relayout: Relayout, layout: Layout, now: float) -> None:
        rows = [each for each in relayout._residency.active.values() if each.status is Status.DECODING]
        # The first takes as long as it may: nothing is known of it.
        most_ms = relayout._policy.most_pause_ms(layout, relayout._held)
        felt.extend(each for each in rows if each.last_token_ms - now < most_ms - PACE_MS)
        change(relayout, layout, now)

    monkeypatch.setattr(Relayout, "_change", watched)
    monkeypatch.setattr(PauseCost, "ms", lambda *_: pause_ms)
    requests, long = crowd(tokens=150), ask(tokens_for(71, 1_200), 10, id="long")
    async with open_engine(config(model)) as engine:
        got = await answers(engine, [*requests, long])
        assert engine.snapshot()["kv_layout_changes_total"] > 0
    assert not felt
    assert [each.token_ids for each in got] == await expected(model, [*requests, long])


@pytest.mark.parametrize(("most_ms", "changes"), [(0.0, 1), (1e9, 0)])
async def test_a_change_waits_for_a_reader_that_is_about_to_ask_again_for_a_bounded_time(
    model: Path, monkeypatch: pytest.MonkeyPatch, most_ms: float, changes: int
) -> None:
    monkeypatch.setattr("uma.engine.worker.residency.Residency.awaits_reader", lambda _self, _now: True)
    monkeypatch.setattr("uma.engine.worker.relayout.MOST_PUT_OFF_MS", most_ms)
    requests = crowd()
    async with open_engine(config(model)) as engine:
        got = await answers(engine, requests)
        assert (await settled(engine))["kv_layout_changes_total"] == changes
    assert [each.token_ids for each in got] == await expected(model, requests)


async def test_the_layout_is_chosen_for_readers_that_wait_and_for_turns_to_come(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Crowd] = []
    choose = LayoutPolicy.choose

    def watched(policy: LayoutPolicy, crowd: Crowd, attended: Attended, held: Held) -> Layout:
        seen.append(crowd)
        return choose(policy, crowd, attended, held)

    monkeypatch.setattr(LayoutPolicy, "choose", watched)
    first, new, answered = tokens_for(1, 200), tokens_for(2, 30), 5
    async with open_engine(config(model)) as engine:
        said = await answer(engine, ask(first, answered, id="first"))
        alone = seen.copy()
        seen.clear()
        await answer(engine, ask((*first, *said.token_ids, *new), answered, id="second"))
    assert any(each.is_awaited and each.soon.read_tokens for each in alone)
    assert all(each.longest_next - each.longest <= answered for each in alone), "it is not known to go on"
    decoding = [each for each in seen if not each.soon.read_tokens and each.sequences]
    assert decoding and all(each.longest_next - each.longest >= len(new) for each in decoding)
    assert not any(each.is_awaited for each in decoding)


async def test_prefixes_are_shared_in_either_layout_and_across_a_change(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.policy.layout.MOST_SHARED", 1.0)
    common = tokens_for(5, 120)
    first = [ask((*common, *tokens_for(seed, 10)), 30, id=str(seed)) for seed in range(9)]
    again = [ask((*common, *tokens_for(seed + 20, 10)), 30, id=str(seed)) for seed in range(9)]
    long = ask((*common, *tokens_for(60, 400)), 5)
    async with open_engine(config(model)) as engine:
        got = await answers(engine, first) + await answers(engine, again)
        assert engine.snapshot()["kv_layout_changes_total"] == 1
        got.append(await answer(engine, long))
        assert engine.snapshot()["kv_layout_changes_total"] == 2
    cached = sorted(each.finished.usage.cached_tokens for each in got)
    assert cached[0] == 0 and cached[1] >= 120, "a prefix was computed again"
    assert [each.token_ids for each in got] == await expected(model, [*first, *again, long])


async def test_one_that_was_preempted_continues_in_the_other_layout(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses its slot where one buffer serves a long prompt, and its snapshot goes into a buffer of its own."""
    monkeypatch.setattr("uma.engine.policy.order.GIVE_WAY_AFTER_MS", 0.0)
    slow = ask(tokens_for(81, 130), 100, id="slow", priority=-1)
    requests = [slow, *crowd(MAX_SEQUENCES - 1, 80), ask(tokens_for(71, 800), 5, id="long", priority=1)]
    got = {}
    async with open_engine(config(model)) as engine, trio.open_nursery() as nursery:

        async def read(request: Request) -> None:
            got[request.id] = await answer(engine, request)

        nursery.start_soon(read, slow)
        while engine.snapshot()["tokens_generated_total"] == 0:
            await settled(engine)
        for request in requests[1:-1]:
            nursery.start_soon(read, request)
        while engine.snapshot()["kv_layout_changes_total"] == 0 or engine.worker.active_count < MAX_SEQUENCES:
            await settled(engine)
        nursery.start_soon(read, requests[-1])
        while len(got) < len(requests):
            metrics = await settled(engine)
    assert metrics["kv_layout_changes_total"] >= 2 and metrics["preemptions_total"] > 0
    assert metrics["cache_ram_hits"] > 0, "it was computed again"
    assert [got[each.id].token_ids for each in requests] == await expected(model, requests)


async def test_memory_that_cannot_be_had_leaves_the_layout_and_everything_in_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PoorContext(Context):
        def _open(self, params: ContextParams) -> None:
            if not params.kv_unified:
                raise ModelError("no memory")
            super()._open(params)

    monkeypatch.setattr("uma.engine.open.Context", PoorContext)
    requests = crowd()
    async with open_engine(config(model)) as engine:
        got = await answers(engine, [*requests, ask(tokens_for(71, 1_200), 10, id="long")])
        assert engine.snapshot()["kv_layout_changes_total"] == 1, "it was tried again and again"
    assert [each.token_ids for each in got][:-1] == await expected(model, requests)


@pytest.mark.parametrize("kv_unified", ["on", "off"])
async def test_a_layout_that_was_asked_for_stays(model: Path, kv_unified: str) -> None:
    async with open_engine(config(model, kv_unified=kv_unified)) as engine:
        await answers(engine, crowd())
        assert engine.snapshot()["kv_layout_changes_total"] == 0


class Ledger:
    """A listener that counts how often each prefix is held in cells."""

    def __init__(self, held: Counter[tuple[int, ...]]) -> None:
        self._held = held

    def stored(self, tier: Tier, run: Run) -> None:
        self._count(tier, run, 1)

    def removed(self, tier: Tier, run: Run) -> None:
        self._count(tier, run, -1)

    def cleared(self, tier: Tier) -> None:
        if tier is Tier.CELLS:
            self._held.clear()

    def _count(self, tier: Tier, run: Run, change: int) -> None:
        if tier is Tier.CELLS:
            tokens = tuple(run.tokens())
            for end in range(run.start + 1, run.end + 1):
                self._held[tokens[:end]] += change


@pytest.mark.parametrize("settings", [{}, {"flash_attn": "on"}, {"cache_type_k": "q8_0"}])
async def test_a_conversation_decodes_with_plain_attention_where_that_may_be_and_goes_back_for_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """What is asked is what the built-in model knows by heart: another attention rounds in another way."""
    demand(monkeypatch, flash_row_ns=1e12)
    monkeypatch.setattr("uma.engine.policy.layout.FEW_IDS", (4,))
    built_in = RuntimeConfig(n_ctx=2_048, n_gpu_layers=0, speculate="off", **settings)
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    question = Request(id="q", messages=(Message("user", "What is UMA?"),), sampling=greedy)
    again = attrs.evolve(question, id="again", sampling=attrs.evolve(greedy, max_tokens=20))
    long = ask(tokens_for(70, 1_000), 5, id="long")
    async with open_engine(attrs.evolve(built_in, kv_unified="on")) as engine:
        expected = [await answer(engine, each) for each in (question, again)]
    async with open_engine(built_in) as engine:
        got = [await answer(engine, question)]
        is_plain = engine.worker._context.params.flash_attn == "off"
        assert is_plain is (not settings), "it was not asked for, or cannot be had"
        got.append(await answer(engine, again))
        await answer(engine, long)
        metrics = await settled(engine)
        params = engine.worker._context.params
        assert params.kv_unified and params.flash_attn == built_in.flash_attn
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert got[1].finished.usage.cached_tokens > 0, "what was computed in the other layout was lost"
    assert metrics["preemptions_total"] == 0
    assert metrics["kv_layout_changes_total"] == (0 if settings else 2)


@attrs.frozen
class Seen:
    """A change of layout."""

    layout: Layout
    sequences: int
    cells: tuple[int, int]
    """Used before and after."""
    snapshots: int
    """In memory after it."""


def watch_changes(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """The changes from now on."""
    seen: list[Seen] = []
    change = Relayout._change

    def watched(relayout: Relayout, layout: Layout, now: float) -> None:
        pool, sequences = relayout._pool, len(relayout._residency.active)
        before = pool.used_cells
        change(relayout, layout, now)
        seen.append(Seen(layout, sequences, (before, pool.used_cells), len(pool.store)))

    monkeypatch.setattr(Relayout, "_change", watched)
    return seen


async def test_a_crowd_with_one_prefix_has_a_small_pool_until_it_outgrows_that_and_leaves_its_cache_in_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is asked what the built-in model knows by heart, as above."""
    demand(monkeypatch, flash_row_ns=1e12, plain_read_ns=1e9)
    monkeypatch.setattr("uma.engine.policy.layout.SMALL_POOLS", (256, 512))
    built_in = RuntimeConfig(n_ctx=2_048, n_batch=256, n_ubatch=256, n_gpu_layers=0, speculate="off")
    question = Request(
        id="q",
        messages=(Message("user", "What is UMA?"),),
        sampling=SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
    )
    crowd = [attrs.evolve(question, id=str(number)) for number in range(4)]
    seen, book = watch_changes(monkeypatch), Counter[tuple[int, ...]]()
    async with open_engine(attrs.evolve(built_in, kv_unified="on")) as engine:
        expected = await answer(engine, question)
    async with open_engine(built_in) as engine:
        engine.listen_to_kv(Ledger(book))
        got = await answers(engine, crowd)
        metrics = await settled(engine)
        assert [(each.layout.share, each.sequences) for each in seen] == [(256, 4), (512, 4), (2_048, 0)]
        assert [each.layout.is_plain for each in seen] == [True, True, False]
        assert all(before == after > 0 for before, after in (each.cells for each in seen)), "what is shared was copied"
        assert book.total() == metrics["kv_cells_used"], "what listeners were told is not what there is"
        assert metrics["kv_cells_total"] == 2_048 and engine.worker._context.params.flash_attn == "auto"
        got.append(await answer(engine, question))
        assert got[-1].finished.usage.cached_tokens > 0, "what the crowd had computed was lost"
        metrics = await settled(engine)
        assert metrics["cache_ram_hits"] == 0, "it was found in memory alone"
        assert book.total() == metrics["kv_cells_used"]
    assert {each.token_ids for each in got} == {expected.token_ids}
    assert metrics["preemptions_total"] == 0


async def test_behind_a_crowd_one_prefix_has_a_small_pool_and_a_long_prompt_behind_that_the_pool(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.policy.layout.SMALL_POOLS", (512,))
    common = tokens_for(74, 300)
    prefix = [ask(common + tokens_for(seed, 8), 10, id=f"p{seed}") for seed in range(4)]
    requests, long = crowd(), ask(tokens_for(75, 900), 10, id="long")
    seen = watch_changes(monkeypatch)
    async with open_engine(config(model, n_batch=256, n_ubatch=256)) as engine:
        got = [*await answers(engine, requests), *await answers(engine, prefix), await answer(engine, long)]
        metrics = await settled(engine)
    assert [(each.layout.cells, each.layout.is_pool) for each in seen] == [
        ((MAX_SEQUENCES + 1) * SHARE, False), (512, True), ((MAX_SEQUENCES + 1) * SHARE, True),
    ]  # fmt: skip
    assert metrics["cache_hits"] >= 3, "the prefix was computed more than once"
    assert [each.token_ids for each in got] == await expected(model, [*requests, *prefix, long])


async def test_a_prompt_for_which_a_small_pool_has_no_cells_preempts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is of a higher lane, so that in a full pool it would, and waits for rows that run ahead of the change.

    Compared is what the built-in model knows by heart.
    """
    demand(monkeypatch, flash_row_ns=1e12)
    monkeypatch.setattr("uma.engine.policy.layout.SMALL_POOLS", (512,))
    monkeypatch.setattr("uma.engine.policy.order.GIVE_WAY_AFTER_MS", 0.0)
    monkeypatch.setattr(Relayout, "_is_felt", lambda *_: True)
    built_in = RuntimeConfig(n_ctx=2_048, n_batch=256, n_ubatch=256, n_gpu_layers=0, speculate="off")
    sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    slow = Request(id="slow", messages=(Message("user", "What is UMA?"),), sampling=sampling, priority=-1)
    rows = [slow, attrs.evolve(slow, id="read", priority=0)]
    long = ask(tokens_for(70, 468), 20, id="long", priority=1)
    seen, got = watch_changes(monkeypatch), list[Answer]()
    async with open_engine(built_in) as engine:
        async with trio.open_nursery() as nursery:

            async def read(request: Request) -> None:
                got.append(await answer(engine, request))

            for request in rows:
                nursery.start_soon(read, request)
            while not seen or engine.worker.active_count < len(rows):
                await settled(engine)
            nursery.start_soon(read, long)
        metrics = await settled(engine)
    assert metrics["preemptions_total"] == 0 and len(got) == 3
    assert [each.layout.share for each in seen][:2] == [512, 2_048]
    assert seen[1].sequences == 2, "it came too late"
    async with open_engine(attrs.evolve(built_in, kv_unified="on")) as engine:
        expected = await answer(engine, slow)
    assert {each.token_ids[:60] for each in got if len(each.tokens) == 100} == {expected.token_ids[:60]}


async def test_a_small_pool_that_cannot_be_had_leaves_the_pool_and_everything_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class PoorContext(Context):
        def _open(self, params: ContextParams) -> None:
            if params.n_ctx == 256:
                raise ModelError("no memory")
            super()._open(params)

    demand(monkeypatch, flash_row_ns=1e12, plain_read_ns=1e9)
    monkeypatch.setattr("uma.engine.open.Context", PoorContext)
    monkeypatch.setattr("uma.engine.policy.layout.SMALL_POOLS", (256,))
    built_in = RuntimeConfig(n_ctx=2_048, n_batch=256, n_ubatch=256, n_gpu_layers=0, speculate="off")
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    crowd = [Request(id=str(n), messages=(Message("user", "What is UMA?"),), sampling=sampling) for n in range(3)]
    seen = watch_changes(monkeypatch)
    async with open_engine(built_in) as engine:
        got = await answers(engine, crowd)
        metrics = await settled(engine)
    async with open_engine(attrs.evolve(built_in, kv_unified="on")) as engine:
        expected = await answer(engine, crowd[0])
    assert {each.token_ids for each in got} == {expected.token_ids}
    assert metrics["preemptions_total"] == 0 and metrics["kv_layout_changes_total"] == 1
    assert seen[0].cells[0] == seen[0].cells[1] > 0
