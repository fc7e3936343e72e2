"""One fault is one request's: in sampling, in text, in delivery. What ends the whole engine ends it loudly."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from engine_world import EarlyContext, answer, answers, ask, compute_with, config_for, settled, tokens_for

from harness import PATIENCE_SEC
from uma import Request, open_engine
from uma.engine import Engine
from uma.engine.delivery.detokenize import TextStream
from uma.engine.delivery.mailbox import Mailbox
from uma.engine.kv.disk import DiskTier
from uma.engine.worker.drafts.lookup import LookupDrafter
from uma.engine.worker.loop import DecodeWorker
from uma.engine.worker.output import Output
from uma.errors import InternalError, from_code
from uma.llama.batch import Batch
from uma.llama.context import Context
from uma.llama.sampler import Sampler
from uma.types import EmbedRequest, Slo, Token

BAD = ask(tokens_for(99, 12), 20, id="bad", temperature=0.7, seed=3)


def good_requests() -> list[Request]:
    return [ask(tokens_for(seed, 10 + seed), 30, id=str(seed)) for seed in range(3)]


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("on purpose")


async def fails(engine: Engine, request: Request) -> InternalError:
    """The error that a request ends with."""
    with pytest.raises(InternalError) as error, trio.fail_after(PATIENCE_SEC):
        await answer(engine, request)
    return error.value


def fail_in_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "sample", fail)


def fail_in_the_making_of_a_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uma.engine.worker.slots.Sampler", fail)


def fail_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Output._accept

    def faulty(output: Output, sequence: Any, *rest: Any) -> Any:
        if sequence.request.id == "bad" and sequence.generated == 5:
            monkeypatch.setattr(TextStream, "push", fail)
            try:
                return accept(output, sequence, *rest)
            finally:
                monkeypatch.undo()
        return accept(output, sequence, *rest)

    monkeypatch.setattr(Output, "_accept", faulty)


@pytest.mark.parametrize("context", [Context, EarlyContext])
@pytest.mark.parametrize("break_it", [fail_in_sampling, fail_in_the_making_of_a_sampler, fail_in_text])
async def test_a_fault_in_sampling_or_text_ends_one_request_and_is_logged_with_its_traceback(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, break_it: Any, context: type[Context]
) -> None:
    compute_with(monkeypatch, context)
    async with open_engine(config_for(tiny)) as engine:
        expected = [each.token_ids for each in await answers(engine, good_requests())]
        break_it(monkeypatch)
        got: list[tuple[int, ...]] = []

        async def read_good() -> None:
            got.extend([each.token_ids for each in await answers(engine, good_requests())])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_good)
            error = await fails(engine, BAD)
        metrics = await settled(engine)
    assert got == expected
    assert "ZeroDivisionError: on purpose" in str(error)
    assert from_code("E_RUNTIME_INTERNAL", "x").code == error.code
    assert "Traceback" in caplog.text and "on purpose" in caplog.text
    assert (metrics["requests_error"], metrics["active_sequences"], metrics["cache_protected_size"]) == (1, 0, 0)


async def test_a_fault_in_what_is_asked_of_a_running_request_ends_it_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.worker.sequence.Sequence.end_thinking", fail)
    good, told = good_requests()[0], list[tuple[int, ...]]()
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        expected = (await answer(engine, good)).token_ids

        async def read_good() -> None:
            told.append((await answer(engine, good)).token_ids)

        async with engine.generate(ask(max_tokens=1_000, id="bad")) as stream:
            nursery.start_soon(read_good)
            await anext(aiter(stream))
            stream.end_thinking()
            with trio.fail_after(PATIENCE_SEC), pytest.raises(InternalError, match="on purpose"):
                async for _ in stream:
                    pass
    assert told == [expected]


async def test_a_fault_as_embeddings_are_taken_on_ends_their_request_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine(config_for(tiny)) as engine:
        with monkeypatch.context() as broken, trio.fail_after(PATIENCE_SEC):
            broken.setattr("uma.engine.worker.embedding.Embedder.add", fail)
            with pytest.raises(InternalError, match="on purpose"):
                await engine.embed(EmbedRequest("e", texts=["a fox"]))
        assert (await engine.embed(EmbedRequest("e", texts=["a fox"]))).vectors[0]


@pytest.mark.parametrize("method", ["guess", "on_token"])
async def test_a_fault_in_a_drafter_turns_drafts_off_and_changes_no_text(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    repeats = ask((97, 98, 99) * 30, 40)
    sampling = attrs.evolve(repeats.sampling, logit_bias={"97": 100.0})  # what it writes repeats, too
    repeats = attrs.evolve(repeats, sampling=sampling)
    async with open_engine(config_for(tiny)) as engine:
        expected = await answer(engine, repeats)
    monkeypatch.setattr(LookupDrafter, method, fail)
    async with open_engine(config_for(tiny, speculate="always")) as engine:
        assert engine.info.capabilities.speculation == "prompt look-up"
        assert (await answer(engine, repeats)).token_ids == expected.token_ids
        assert engine.info.capabilities.speculation.startswith("none: a fault ended drafts (ZeroDivisionError")
    assert "drafts are off from now on" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize("context", [Context, EarlyContext])
async def test_a_fault_and_a_batch_that_is_aborted_in_one_stride_end_one_request(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, context: type[Context]
) -> None:
    compute_with(monkeypatch, context)
    patient = Slo(target_tbt_ms=3_600_000.0)
    good, bad = (attrs.evolve(ask(tokens_for(seed, 12), 30, id=id), slo=patient) for seed, id in ((1, "a"), (9, "bad")))
    async with open_engine(config_for(tiny)) as engine:
        expected = await answer(engine, good)
    fail_in_text(monkeypatch)  # in its sixth token, which comes of what is computed at position 16
    begin, aborted = context.begin, list[int]()

    def disturbed(self: Context, batch: Batch) -> int:
        if list(batch.pos[: batch.n_tokens]) == [17, 17] and not aborted:
            aborted.append(batch.n_tokens)
            self.request_retry()
        return begin(self, batch)

    monkeypatch.setattr(context, "begin", disturbed)
    got: list[tuple[int, ...]] = []
    async with open_engine(config_for(tiny)) as engine:

        async def read_good() -> None:
            got.append((await answer(engine, good)).token_ids)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_good)
            await fails(engine, bad)
        metrics = await settled(engine)
    assert got == [expected.token_ids]
    assert (metrics["requests_error"], metrics["active_sequences"], metrics["cache_protected_size"]) == (1, 0, 0)
    assert aborted


async def test_a_fault_of_the_whole_thread_is_told_logged_raised_and_saves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16, cache_tokens=1_024)
    told: list[InternalError] = []

    class BreakingContext(Context):
        breaks = False

        def begin(self, batch: Batch) -> int:
            return fail() if self.breaks else super().begin(batch)

    compute_with(monkeypatch, BreakingContext)
    with pytest.raises(ZeroDivisionError, match="on purpose"), trio.fail_after(PATIENCE_SEC):
        async with open_engine(config) as engine:
            await answer(engine, ask(tokens_for(1, 600), 2))
            monkeypatch.setattr(BreakingContext, "breaks", True)
            with trio.CancelScope(shield=True):
                told.append(await fails(engine, ask()))
            await trio.sleep_forever()
    assert "on purpose" in str(told[0])
    assert "Traceback" in caplog.text
    assert not list((tmp_path / "kv").rglob("*.umakv")), "what a broken thread held was saved"


async def test_after_a_fault_of_the_whole_thread_every_request_is_refused_at_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16)
    on_disk = ask((*tokens_for(1, 600), 97), 2, id="on disk")
    async with open_engine(config) as engine:
        await answer(engine, ask(tokens_for(1, 600), 2))
    is_there, may_fail, is_asked, is_written = threading.Event(), threading.Event(), trio.Event(), trio.Event()
    count_known, run = DecodeWorker.count_known, DiskTier.run

    class BreakingContext(Context):
        def begin(self, batch: Batch) -> int:
            is_there.set()
            assert may_fail.wait(PATIENCE_SEC)
            raise ZeroDivisionError("on purpose")

    def watched(worker: DecodeWorker, *asked: Any) -> None:
        count_known(worker, *asked)
        is_asked.set()

    async def run_slowly(disk: DiskTier) -> None:
        await run(disk)
        await is_written.wait()

    compute_with(monkeypatch, BreakingContext)
    monkeypatch.setattr(DecodeWorker, "count_known", watched)
    monkeypatch.setattr(DiskTier, "run", run_slowly)
    told: list[InternalError] = []
    with pytest.raises(ZeroDivisionError, match="on purpose"), trio.fail_after(PATIENCE_SEC):
        async with open_engine(config) as engine:
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:

                    async def read(request: Request) -> None:
                        told.append(await fails(engine, request))

                    nursery.start_soon(read, ask())
                    assert await trio.to_thread.run_sync(is_there.wait, PATIENCE_SEC)
                    nursery.start_soon(read, on_disk)
                    await is_asked.wait()
                    may_fail.set()
                await read(ask())
            is_written.set()
            await trio.sleep_forever()
    assert ["on purpose" in str(error) for error in told] == [True] * 3


# Delivery


async def test_a_tap_that_raises_ends_its_own_stream_alone(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_engine(config_for(tiny)) as engine:
        expected = [each.token_ids for each in await answers(engine, good_requests())]
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(ask(max_tokens=500, id="bad")) as stream:
                stream.tap = fail
                got = await answers(engine, good_requests())
                with pytest.raises(InternalError, match="on purpose"):
                    async for _ in stream:
                        pass
                with pytest.raises(StopAsyncIteration):
                    await stream.__anext__()
        metrics = await settled(engine)
    assert [each.token_ids for each in got] == expected
    assert "Traceback" in caplog.text
    assert metrics["active_sequences"] == 0


async def test_an_engine_that_can_deliver_nothing_any_more_ends_says_why_and_saves_its_cache(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = Mailbox.empty

    def broken(mailbox: Mailbox) -> list[threading.Event]:
        monkeypatch.setattr(Mailbox, "empty", empty)
        fail()
        return []

    with pytest.raises(ZeroDivisionError, match="on purpose"), trio.fail_after(PATIENCE_SEC):
        async with open_engine(config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16)) as engine:
            await answer(engine, ask(tokens_for(1, 600), 2))
            monkeypatch.setattr(Mailbox, "empty", broken)
            await answer(engine, ask())
            await trio.sleep_forever()
    assert any(record.levelno == logging.CRITICAL and record.exc_info for record in caplog.records)
    assert list((tmp_path / "kv").rglob("*.umakv")), "what the decode thread held was sound"


# Health


async def test_however_many_ask_one_probe_is_on_its_way(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        await answer(engine, ask(max_tokens=2))
        before = engine.snapshot()["batch_calls_total"]
        async with trio.open_nursery() as nursery:
            for _ in range(1_000):
                nursery.start_soon(engine.health)
        metrics = engine.snapshot()
    assert metrics["batch_calls_total"] - before <= 2
    assert metrics["queued_requests"] == 0


async def test_while_tokens_are_generated_health_costs_no_batch(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        async with engine.generate(ask(max_tokens=40, stream=False)) as stream:
            while engine.snapshot()["tokens_generated_total"] == 0:
                await trio.to_thread.run_sync(int)
            async with trio.open_nursery() as nursery:
                for _ in range(100):
                    nursery.start_soon(engine.health)
            async for event in stream:
                assert not isinstance(event, Token)
        metrics = engine.snapshot()
    assert metrics["batch_calls_total"] <= 40 + 1


async def test_a_probe_leaves_nothing_behind(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        await answer(engine, ask())
        before = engine.snapshot()
        for _ in range(300):  # more than there are sequence ids
            assert (await engine.health()).status == "ok"
        after = engine.snapshot()
    for name in ("kv_cells_used", "sequence_ids_used", "tokens_generated_total", "requests_total", "cache_misses"):
        assert after[name] == before[name], name
    assert after["health_probes_total"] == 300
