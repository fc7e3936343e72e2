"""What a worker answers to what Dynamo's frontends send, on the real engine, without Dynamo."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from engine_world import config_for

from harness import PATIENCE_SEC
from models import BOS, write_model
from uma.bridges.dynamo.answers import DynamoAnswers
from uma.bridges.dynamo.host import DynamoJob, EngineHost
from uma.bridges.dynamo.mapping import Chunks
from uma.contracts.load import report_of
from uma.contracts.response import OutputChecker
from uma.errors import ContractViolation, InternalError, PromptTooLarge, ShuttingDown
from uma.types import Request

PROBE: dict[str, Any] = {
    "token_ids": [BOS],
    "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
    "sampling_options": {"temperature": 0.0},
    "_HEALTH_CHECK": True,
}
"""As the canary of a worker of Dynamo 1.6.1 asks for its `/health`."""


def on_answers(tmp_path: Path, body: Callable[[EngineHost, DynamoAnswers], Awaitable[None]], **settings: Any) -> None:
    """Start an engine of a tiny model, run `body` on a loop beside it, and end it."""
    path = write_model(tmp_path / "tiny.gguf", context_length=8_192)

    async def main() -> None:
        host = EngineHost(config_for(path, n_ctx=8_192, **settings))
        try:
            await host.start()
            await body(host, DynamoAnswers(host, BOS))
        finally:
            await host.close(0)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SEC))


def wanted(tokens: int = 8_000, **more: Any) -> dict[str, Any]:
    """A request that leaves everything but its length to the engine."""
    stop = {"max_tokens": tokens, "ignore_eos": True}
    return {"token_ids": [5, 6, 7], "sampling_options": {}, "stop_conditions": stop, **more}


def test_an_aborted_request_is_freed_while_its_generator_is_still_held(tmp_path: Path) -> None:
    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        held = answers.generate(wanted(), "a")
        assert (await anext(held))["token_ids"]
        answers.abort("a")
        while host.engine.snapshot()["requests_cancelled"] == 0:  # noqa: ASYNC110  (another thread counts)
            await asyncio.sleep(0.01)
        await held.aclose()

    on_answers(tmp_path, body)


def test_a_request_that_comes_again_with_its_id_is_answered_beside_the_first_and_aborted_apart(tmp_path: Path) -> None:
    """A migration brings a request to another worker, and perhaps back, with its id."""

    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        first = answers.generate(wanted(), "a")
        await anext(first)
        (*_, last) = [chunk async for chunk in answers.generate(wanted(3), "a")]
        assert (last["finish_reason"], last["completion_usage"]["completion_tokens"]) == ("length", 3)
        answers.abort("a")
        while host.engine.snapshot()["requests_cancelled"] == 0:  # noqa: ASYNC110  (another thread counts)
            await asyncio.sleep(0.01)
        await first.aclose()

    on_answers(tmp_path, body)


def test_an_answer_of_which_a_migration_left_only_the_end_ends(tmp_path: Path) -> None:
    """Its worker died between the last token and the end; the frontend takes what came off `max_tokens`."""

    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        (chunk,) = [each async for each in answers.generate(wanted(0), "a")]
        assert (chunk["token_ids"], chunk["finish_reason"]) == ([], "length")
        usage = chunk["completion_usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)

    on_answers(tmp_path, body)


def test_a_health_probe_is_answered_where_no_other_request_would_be(tmp_path: Path) -> None:
    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        running = answers.generate(wanted(), "a")
        await anext(running)
        (chunk,) = [each async for each in answers.generate({**PROBE, "model": ""}, "b")]
        assert (chunk["finish_reason"], chunk["completion_usage"]["completion_tokens"]) == ("length", 1)
        answers.abort("a")
        await running.aclose()

    on_answers(tmp_path, body, max_sequences=1)


def test_a_probe_of_an_engine_that_stands_still_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo neither aborts nor stops a probe that takes too long."""
    monkeypatch.setattr("uma.engine.engine.PROBE_TIMEOUT_SEC", 0.05)
    goes_on = threading.Event()

    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        def stand_still(_: object) -> None:
            goes_on.wait(PATIENCE_SEC)

        host.engine.inspect_kv(stand_still)
        try:
            with pytest.raises(InternalError, match="the engine is stalled"):
                await anext(answers.generate(PROBE, "a"))
        finally:
            goes_on.set()

    on_answers(tmp_path, body)


def test_a_prompt_that_the_frontend_did_not_measure_is_the_client_s_mistake(tmp_path: Path) -> None:
    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        with pytest.raises(PromptTooLarge, match="do not fit the context"):
            await anext(answers.generate(wanted(token_ids=[5] * 9_000), "a"))

    on_answers(tmp_path, body)


def test_a_stream_that_ends_without_its_end_is_an_error_not_a_short_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, jobs = EngineHost.submit, []

    def noted(host: EngineHost, request: Request) -> DynamoJob:
        jobs.append(submit(host, request))
        return jobs[-1]

    monkeypatch.setattr(EngineHost, "submit", noted)

    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        running = answers.generate(wanted(), "a")
        await anext(running)
        (job,) = jobs
        job.cancel()  # (as `abort` does, but of itself)
        with pytest.raises(InternalError, match="ended before the answer did"):
            while True:
                await anext(running)

    on_answers(tmp_path, body)


def test_a_newer_frontend_s_field_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        for name in "ab":
            assert [each async for each in answers.generate(wanted(2, sparkle=1), name)]

    on_answers(tmp_path, body)
    assert [each for each in caplog.messages if "ignored_field" in each] == ["event=dynamo.ignored_field field=sparkle"]


def test_an_answer_that_breaks_the_contract_is_counted_logged_and_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # As if the engine had made tokens that its vocabulary does not have.
    monkeypatch.setattr(
        "uma.bridges.dynamo.answers.chunks_for",
        lambda asked, _: Chunks(asked, OutputChecker(1, asked.prompt_tokens)),
    )

    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        with pytest.raises(ContractViolation, match="is not in the vocabulary"):
            await anext(answers.generate(wanted(), "a"))
        assert answers.violations == 1
        while host.engine.snapshot()["requests_cancelled"] == 0:  # noqa: ASYNC110  (another thread counts)
            await asyncio.sleep(0.01)

    on_answers(tmp_path, body)
    assert [each for each in caplog.messages if "event=dynamo.contract_violation" in each]


def test_cleanup_lets_an_answer_end_whole_and_refuses_others_as_a_worker_that_stops(tmp_path: Path) -> None:
    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        running = answers.generate(wanted(500), "a")
        chunks = [await anext(running)]
        end = asyncio.create_task(host.close(PATIENCE_SEC))
        await asyncio.sleep(0)  # the drain has begun
        for request in (wanted(), PROBE):
            with pytest.raises(ShuttingDown):
                await anext(answers.generate(request, "b"))
        chunks += [each async for each in running]
        await end
        assert sum(len(each["token_ids"]) for each in chunks) == 500
        assert chunks[-1]["finish_reason"] == "length"

    on_answers(tmp_path, body)


def test_a_chat_in_json_is_a_json_object(tmp_path: Path) -> None:
    """The frontend hands `response_format: {"type": "json_object"}` on as a schema."""

    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        asked = wanted(500, sampling_options={"guided_decoding": {"json": {"type": "object"}}, "seed": 5})
        chunks = [chunk async for chunk in answers.generate(asked, "a")]
        text = "".join(chunk.get("text") or "" for chunk in chunks)
        assert text.startswith("{")
        assert chunks[-1]["finish_reason"] == "length" or isinstance(json.loads(text), dict)

    on_answers(tmp_path, body)


def test_blocks_of_nothing_but_cache_are_told_as_free(tmp_path: Path) -> None:
    async def body(host: EngineHost, answers: DynamoAnswers) -> None:
        def active() -> int:
            told = report_of(host.engine.snapshot(), worker_id=1, timestamp_ms=0, total_slots=4, block_size=16)
            return told.kv_stats.kv_active_blocks

        running = answers.generate(wanted(token_ids=list(range(40, 80))), "a")
        await anext(running)
        while active() < 3:  # noqa: ASYNC110  (another thread counts)
            await asyncio.sleep(0.01)
        await running.aclose()
        while active():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert host.engine.snapshot()["kv_cells_used"] >= 40

    on_answers(tmp_path, body)
