"""The engine with many requests: cancelling, slow readers, health, draining, the end, and nothing left behind."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import attrs
import llama_cpp.llama_cpp as lib
import pytest
import trio
from engine_world import Answer, answer, answers, ask, break_decode_thread, config_for, settled, tokens_for

from harness import PATIENCE_SEC
from uma import Request, open_engine
from uma.engine import Engine
from uma.engine.delivery.pacing import CREDITS
from uma.engine.intake.overload import full_queue_retry_ms
from uma.engine.kv.pool import KvPool
from uma.errors import Overloaded, ShuttingDown, UmaError
from uma.llama.backend import MAX_SEQUENCES
from uma.llama.context import Context
from uma.llama.vocab import Vocab
from uma.net.client import CLIENT
from uma.types import EmbedRequest, Finished, Slo, Token

FOREVER = 1_500
"""Tokens; more than any test here waits for."""


async def first_token(engine: Engine, request_id: str = "a", prompt: str = "Once") -> None:
    """Begin a request that would run for long, and leave it after its first token."""
    async with engine.generate(ask(prompt, FOREVER, id=request_id)) as stream:
        assert isinstance(await stream.__anext__(), Token)


# Cancelling


async def test_leaving_the_block_frees_the_sequence_and_its_cells(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            await first_token(engine)
        metrics = await settled(engine)
    assert metrics["requests_cancelled"] == 1
    assert metrics["active_sequences"] == metrics["queued_requests"] == 0
    assert metrics["cache_protected_size"] == 0, "cells are still held"
    assert metrics["kv_cells_used"] == metrics["cache_evictable_size"]


async def test_cancel_ends_the_stream_with_what_was_generated_until_then(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        whole = await answer(engine, ask(max_tokens=FOREVER))
        tokens: list[Token] = []
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(ask(max_tokens=FOREVER)) as stream:
                while isinstance(event := await stream.__anext__(), Token):
                    tokens.append(event)
                    if len(tokens) == 3:
                        stream.cancel()
                        stream.cancel()
    assert isinstance(event, Finished)
    assert event.reason == "cancelled"
    if len(tokens) > event.usage.completion_tokens:
        held = tokens.pop()  # half a character, given out at the end: no token, and not counted
        assert (held.text, held.token_id) == ("\N{REPLACEMENT CHARACTER}", tokens[-1].token_id)
    assert event.usage.completion_tokens == len(tokens) < FOREVER
    assert [token.token_id for token in tokens] == list(whole.token_ids[: len(tokens)])


async def test_a_cancelled_read_loses_no_event(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        whole = await answer(engine, ask(max_tokens=50))
        tokens: list[int] = []
        async with engine.generate(ask(max_tokens=50)) as stream:
            while True:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await stream.__anext__()
                event = await stream.__anext__()
                if isinstance(event, Finished):
                    break
                assert isinstance(event, Token)
                tokens.append(event.token_id)
    assert tokens == list(whole.token_ids)


async def test_a_request_that_waits_for_its_turn_can_be_cancelled(tiny: Path) -> None:
    async with (
        open_engine(config_for(tiny, max_sequences=1)) as engine,
        engine.generate(ask(max_tokens=FOREVER)) as one,
    ):
        await one.__anext__()
        async with engine.generate(ask("Another", FOREVER, id="b")) as two:
            assert (await settled(engine))["queued_requests"] == 1
            two.cancel()
            with trio.fail_after(PATIENCE_SEC):
                event = await two.__anext__()
        assert isinstance(event, Finished)
        assert (event.reason, event.usage.completion_tokens) == ("cancelled", 0)
        assert (await settled(engine))["queued_requests"] == 0


async def test_a_prompt_that_is_being_read_can_be_cancelled(tiny: Path) -> None:
    config = config_for(tiny, n_ctx=16_384, n_batch=32, n_ubatch=32)
    async with open_engine(config) as engine:
        async with engine.generate(ask(tokens_for(1, 12_000), 5)):
            await engine.health()
        metrics = await settled(engine)
    assert 0 < metrics["prefill_tokens_total"] < 12_000
    assert metrics["cache_protected_size"] == metrics["active_sequences"] == 0


async def test_a_follower_goes_on_when_its_leader_is_cancelled(tiny: Path) -> None:
    common = tokens_for(1, 4_000)
    async with open_engine(config_for(tiny, n_ctx=8_192)) as engine:
        expected = await answer(engine, ask((*common, 1), 5))
    config = config_for(tiny, n_ctx=8_192, n_batch=32, n_ubatch=32)
    async with open_engine(config) as engine, engine.generate(ask((*common, 2), 5)) as leader:
        async with engine.generate(ask((*common, 1), 5)) as follower:
            metrics = await settled(engine)
            assert (metrics["active_sequences"], metrics["queued_requests"]) == (1, 1), "the follower does not wait"
            leader.cancel()
            with trio.fail_after(PATIENCE_SEC):
                events = [event async for event in follower]
        cancelled = await leader.__anext__()
    assert isinstance(cancelled, Finished)
    assert (cancelled.reason, cancelled.usage.completion_tokens) == ("cancelled", 0)
    assert tuple(event.token_id for event in events if isinstance(event, Token)) == expected.token_ids


async def test_a_thousand_cancels_at_random_moments_leave_nothing_behind(tiny: Path) -> None:
    rng = random.Random(1)
    prompts = [tokens_for(seed % 7, rng.randrange(2, 150)) for seed in range(400)]
    async with open_engine(config_for(tiny, n_batch=64, n_ubatch=64, max_queue=2_000)) as engine:
        expected = await answer(engine, ask(tokens_for(99, 40), 30))

        async def live(prompt: tuple[int, ...], reads: int) -> None:
            async with engine.generate(ask(prompt, 200)) as stream:
                for _ in range(reads):
                    await stream.__anext__()

        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery:
                for prompt in prompts:
                    nursery.start_soon(live, prompt, rng.choice((0, 0, 1, 2, 20)))
                    if rng.random() < 0.3:
                        await trio.lowlevel.checkpoint()
        metrics = await settled(engine)
        assert metrics["active_sequences"] == metrics["queued_requests"] == metrics["cache_protected_size"] == 0
        assert metrics["requests_cancelled"] == 400
        assert metrics["kv_cells_used"] == metrics["cache_evictable_size"] <= 2_048
        assert (await answer(engine, ask(tokens_for(99, 40), 30))).token_ids == expected.token_ids
        assert (await answer(engine, ask(tokens_for(98, 1_500), 3))).finished.reason == "length"


# Slow readers


async def test_a_slow_reader_pauses_only_itself(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        expected = await answer(engine, ask(max_tokens=300))
        before = engine.snapshot()["tokens_generated_total"]
        async with engine.generate(ask(max_tokens=300)) as slow:
            fast = await answer(engine, ask("Another", 200))
            metrics = await settled(engine)
            assert len(fast.tokens) == 200
            assert metrics["tokens_generated_total"] - before == 200 + CREDITS
            events = [event async for event in slow]
    assert [event.token_id for event in events[:-1] if isinstance(event, Token)] == list(expected.token_ids)
    assert isinstance(events[-1], Finished)


async def test_slow_readers_take_no_places_from_others(tiny: Path) -> None:
    async with open_engine(config_for(tiny, max_sequences=2, n_ctx=512)) as engine:
        expected = await answer(engine, ask("One", 200))
        async with engine.generate(ask("One", 200)) as one, engine.generate(ask("Two", 200)) as two:
            others = await answers(engine, [ask(str(index), 100, id=str(index)) for index in range(5)])
            assert all(len(each.tokens) == 100 for each in others)
            with trio.fail_after(PATIENCE_SEC):
                tokens = [event.token_id async for event in one if isinstance(event, Token)]
                assert len([event async for event in two]) == 201
    assert tokens == list(expected.token_ids)


async def test_cells_of_slow_readers_are_given_to_prompts_that_need_them(tiny: Path) -> None:
    config = config_for(tiny, n_ctx=256)
    async with open_engine(config) as engine, engine.generate(ask(tokens_for(1, 100), 100)) as slow:
        other = await answer(engine, ask(tokens_for(2, 200), 50))
        with trio.fail_after(PATIENCE_SEC):
            events = [event async for event in slow]
    assert len(other.tokens) == 50
    assert len(events) == 101


async def test_unstreamed_requests_have_no_reader_to_wait_for(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine, engine.generate(ask(max_tokens=300, stream=False)) as stream:
        await answer(engine, ask(max_tokens=400))
        await settled(engine)
        assert engine.snapshot()["requests_length"] == 2
        event = await stream.__anext__()
    assert isinstance(event, Finished)
    assert len(event.token_ids or ()) == 300


# Health


async def test_a_probe_is_answered_while_a_long_prompt_that_fills_the_memory_is_read(tiny: Path) -> None:
    config = config_for(tiny, n_ctx=3_072, n_batch=32, n_ubatch=32)
    async with open_engine(config) as engine, engine.generate(ask(tokens_for(1, 3_070), 1)) as stream:
        await settled(engine)
        for _ in range(2):
            before = engine.snapshot()["prefill_tokens_total"]
            health = await engine.health()
            after = engine.snapshot()["prefill_tokens_total"]
            assert (health.status, health.tokens_generated) == ("ok", 1)
            assert health.latency_ms > 0
            assert 0 < before < after < 3_070
        assert isinstance(await stream.__anext__(), Token)


async def test_a_probe_is_answered_while_all_places_are_taken(tiny: Path) -> None:
    config = config_for(tiny, max_sequences=1)
    async with open_engine(config) as engine, engine.generate(ask(max_tokens=FOREVER)) as stream:
        await stream.__anext__()
        assert (await engine.health()).tokens_generated == 1
        metrics = engine.snapshot()
    assert metrics["health_probes_total"] == 1
    assert metrics["requests_total"] == 1


async def test_as_many_run_at_once_as_llama_cpp_has_ids_and_a_probe_is_answered_beside_them(tiny: Path) -> None:
    async with open_engine(config_for(tiny, max_sequences=MAX_SEQUENCES, n_ctx=0)) as engine, AsyncExitStack() as stack:
        async with trio.open_nursery() as nursery:
            for _ in range(MAX_SEQUENCES):
                stream = await stack.enter_async_context(engine.generate(ask(max_tokens=FOREVER)))
                nursery.start_soon(stream.__anext__)
        assert engine.snapshot()["active_sequences"] == MAX_SEQUENCES
        assert (await engine.health()).tokens_generated == 1


async def test_health_without_a_probe_costs_no_token(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        assert (await engine.health(probe=False)).tokens_generated == 0
        assert engine.snapshot()["batch_calls_total"] == 0


# Draining, and the end


async def test_draining_lets_running_requests_finish_and_takes_no_new_ones(tiny: Path) -> None:
    async with open_engine(config_for(tiny, max_sequences=1)) as engine:
        got: list[Answer] = []

        async def read(id: str) -> None:
            got.append(await answer(engine, ask(id=id, max_tokens=150)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, "running")
            nursery.start_soon(read, "waiting")
            await settled(engine)
            engine.begin_drain()
            assert engine.status == "draining"
            assert (await engine.health()).status == "draining"
            with pytest.raises(ShuttingDown):
                await answer(engine, ask())
    assert [len(each.tokens) for each in got] == [150, 150]


async def test_an_idle_engine_stops_trimming_its_cache_when_a_command_comes(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over: list[bool] = []
    is_trimming, is_posted = threading.Event(), threading.Event()

    def trim_cache(pool: KvPool, until: Callable[[], bool]) -> None:
        is_over.append(until())
        is_trimming.set()
        assert is_posted.wait(PATIENCE_SEC)
        is_over.append(until())

    monkeypatch.setattr(KvPool, "trim_cache", trim_cache)
    async with open_engine(config_for(tiny)) as engine:
        assert await trio.to_thread.run_sync(is_trimming.wait, PATIENCE_SEC)
        engine.worker.commands.call(lambda: None)
        is_posted.set()
    assert is_over[:2] == [False, True]


async def test_the_end_of_the_engine_is_an_error_for_streams_that_are_still_read(tiny: Path) -> None:
    ended: list[type[BaseException]] = []
    async with trio.open_nursery() as nursery, open_engine(config_for(tiny, max_sequences=1)) as engine:

        async def read() -> None:
            with pytest.raises(ShuttingDown) as error:
                await answer(engine, ask(max_tokens=FOREVER))
            ended.append(error.type)

        for _ in range(3):
            nursery.start_soon(read)
        await settled(engine)
    assert ended == [ShuttingDown] * 3


@pytest.mark.parametrize("texts", [None, ["a fox " * 20] * 50], ids=["ids", "texts"])
async def test_what_is_embedded_as_the_engine_ends_is_refused_and_keeps_no_model(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str] | None
) -> None:
    freed, is_making, may_go_on, told = list[int](), threading.Event(), threading.Event(), list[UmaError]()
    free = lib.llama_model_free

    def make(*args: Any) -> Context:
        is_making.set()
        assert may_go_on.wait(PATIENCE_SEC)
        return Context(*args)

    def freeing(handle: int) -> None:
        freed.append(handle)
        free(handle)

    monkeypatch.setattr(lib, "llama_model_free", freeing)
    monkeypatch.setattr("uma.engine.embeddings.Context", make)
    request = EmbedRequest("e", texts=texts, token_ids=None if texts else ((1, 2, 3),))

    async def embed(engine: Engine) -> None:
        with pytest.raises(ShuttingDown) as error:
            await engine.embed(request)
        told.append(error.value)

    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:  # of the program: it outlives the block
            async with open_engine(config_for(tiny)) as engine:
                nursery.start_soon(embed, engine)
                assert await trio.to_thread.run_sync(is_making.wait, PATIENCE_SEC)
            may_go_on.set()
    assert len(told) == len(freed) == 1


@pytest.mark.parametrize("is_generated", [True, False], ids=["generate", "tokenize"])
async def test_a_prompt_that_is_read_as_the_engine_ends_is_refused_and_its_model_stays_until_then(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, is_generated: bool
) -> None:
    order, is_reading, may_go_on = list[str](), threading.Event(), threading.Event()
    free, tokenize = lib.llama_model_free, Vocab.tokenize

    def freeing(handle: int) -> None:
        order.append("freed")
        free(handle)

    def reading(vocab: Vocab, *args: Any, **kwargs: Any) -> Any:
        is_reading.set()
        assert may_go_on.wait(PATIENCE_SEC)
        try:
            return tokenize(vocab, *args, **kwargs)
        finally:
            order.append("read")

    monkeypatch.setattr(lib, "llama_model_free", freeing)
    request = Request("long", prompt="once upon a time " * 2_000)

    async def read(engine: Engine) -> None:
        with suppress(ShuttingDown):  # what it tells where it is generated
            if is_generated:
                await answer(engine, request)
                pytest.fail("an answer of an engine that has ended")
            else:
                await engine.tokenize(request)

    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:  # of the program: it outlives the block
            async with open_engine(config_for(tiny, n_ctx=65_536)) as engine:
                monkeypatch.setattr(Vocab, "tokenize", reading)
                nursery.start_soon(read, engine)
                assert await trio.to_thread.run_sync(is_reading.wait, PATIENCE_SEC)
            may_go_on.set()
    assert order[-1] == "freed" and "read" in order


async def test_a_command_after_the_end_of_the_engine_is_answered(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        pass
    told = list[object]()
    engine.worker.probe(told.append)
    engine.worker.count_known(array("i", [1, 2, 3]), told.append)
    assert told == [False, 0]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), ExceptionGroup("g", [OSError()])])
async def test_what_ends_the_block_comes_out_as_it_is(tiny: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        async with open_engine(config_for(tiny)) as engine:
            await answer(engine, ask(max_tokens=2))
            raise error
    assert raised.value is error


async def test_a_cancelled_block_ends_quietly_with_requests_running(tiny: Path) -> None:
    with trio.fail_after(PATIENCE_SEC), trio.CancelScope() as scope:
        async with open_engine(config_for(tiny)) as engine, engine.generate(ask(max_tokens=FOREVER)) as stream:
            await stream.__anext__()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_fault_of_the_decode_thread_ends_the_block_and_is_raised_from_it(
    tiny: Path,
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_engine(config_for(tiny)) as engine:
            break_decode_thread(engine)
            with trio.fail_after(PATIENCE_SEC):
                await answer(engine, ask())


async def test_two_engines_in_one_process_do_not_disturb_each_other(tiny: Path) -> None:
    requests = [ask(tokens_for(seed, 20 + seed), 40, id=str(seed)) for seed in range(4)]
    async with open_engine(config_for(tiny)) as engine:
        expected = [each.token_ids for each in await answers(engine, requests)]
    found: dict[int, list[Answer]] = {}
    async with open_engine(config_for(tiny)) as one, open_engine(config_for(tiny, n_ctx=512)) as two:

        async def run(index: int, engine: Engine) -> None:
            found[index] = await answers(engine, requests)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, 0, one)
            nursery.start_soon(run, 1, two)
    assert [[each.token_ids for each in got] for got in found.values()] == [expected, expected]


# Counting, and saying no


async def test_all_counters_agree_with_what_readers_counted(tiny: Path) -> None:
    async with open_engine(config_for(tiny, max_sequences=4)) as engine:
        got = await answers(engine, [ask(tokens_for(seed, 30), 5 + seed, id=str(seed)) for seed in range(9)])
        got.append(await answer(engine, ask(max_tokens=20, stop=(got[0].text[:1], "e", "t", "a"))))
        with pytest.raises(ShuttingDown):
            engine.begin_drain()
            await answer(engine, ask())
        metrics = engine.snapshot()
    usage = [each.finished.usage for each in got]
    reasons = [each.finished.reason for each in got]
    assert metrics["tokens_generated_total"] == sum(len(each.tokens) for each in got)
    assert metrics["tokens_generated_total"] == sum(each.completion_tokens for each in usage)
    assert metrics["prompt_tokens_total"] == sum(each.prompt_tokens for each in usage)
    assert metrics["cached_tokens_total"] == sum(each.cached_tokens for each in usage)
    # A prompt whose last batch would be of one token has that of two: one is read again.
    again = metrics["prefill_tokens_total"] - (metrics["prompt_tokens_total"] - metrics["cached_tokens_total"])
    assert 0 <= again <= len(got)
    assert metrics["requests_stop"] == reasons.count("stop")
    assert metrics["requests_length"] == reasons.count("length")
    assert (metrics["requests_total"], metrics["requests_rejected"]) == (11, 1)
    assert metrics["ttft_ms_count"] == 10
    assert metrics["inter_token_ms_count"] == metrics["tokens_generated_total"] - 10
    assert metrics["decode_ms_count"] == metrics["batch_size_count"] == metrics["batch_calls_total"]
    assert metrics["active_sequences"] == metrics["queued_requests"] == 0
    assert max(each.finished.metrics.batch_size for each in got) <= 4


async def test_a_full_queue_says_no_with_a_time_to_come_back(tiny: Path) -> None:
    async with open_engine(config_for(tiny, max_sequences=2, max_queue=3)) as engine:
        async with trio.open_nursery() as nursery:
            for index in range(5):
                nursery.start_soon(answer, engine, ask(str(index), 100, id=str(index)))
            await trio.testing.wait_all_tasks_blocked()
            before = engine.snapshot()
            with pytest.raises(Overloaded, match="max_queue is 3") as error:
                await answer(engine, ask("too many", 100))
            after = engine.snapshot()
        metrics = engine.snapshot()
    known = (each["service_ms_ewma"] for each in (before, after))
    least_ms = min(full_queue_retry_ms(3, 3, service_ms, 2) for service_ms in known)
    assert error.value.retry_after_ms is not None
    assert error.value.retry_after_ms >= least_ms
    assert (metrics["requests_length"], metrics["requests_overloaded"]) == (5, 1)


@pytest.mark.parametrize("lane", [0, -1])
async def test_one_client_s_requests_fill_the_queue_for_no_other(tiny: Path, lane: Literal[0, -1]) -> None:
    def of_lane(id: str) -> Request:
        return attrs.evolve(ask(id, 20, id=id), priority=lane)

    async with open_engine(config_for(tiny, max_sequences=2, max_queue=3)) as engine, trio.open_nursery() as nursery:
        CLIENT.set("bob")
        for index in range(5 if lane == 0 else 8):
            nursery.start_soon(answer, engine, of_lane(str(index)))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="max_queue is 3"):
            await answer(engine, of_lane("too many"))
        CLIENT.set("anna")
        assert (await answer(engine, ask("anna's", 2))).finished.reason == "length"


async def test_a_first_token_that_cannot_come_in_time_is_refused_and_without_hurry_is_not(tiny: Path) -> None:
    config = config_for(tiny, n_ctx=8_192, n_batch=64, n_ubatch=64)
    async with open_engine(config) as engine:
        await answer(engine, ask(tokens_for(5, 500), 5))
        hasty = ask(tokens_for(6, 4_000), 2)
        hasty = type(hasty)(id="h", token_ids=hasty.token_ids, sampling=hasty.sampling, slo=Slo(target_ttft_ms=0.01))
        with pytest.raises(Overloaded, match="target_ttft_ms"):
            await answer(engine, hasty)
        assert (await answer(engine, ask(tokens_for(6, 4_000), 2))).finished.reason == "length"
