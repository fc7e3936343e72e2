"""The backend as Dynamo calls it, without a frontend: errors by their class, `abort`, probes."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_world import config_for

from harness import PATIENCE_SEC
from models import BOS, write_encoder, write_model
from uma.errors import BadRequest, InternalError, ModelError, Overloaded, PromptTooLarge, ShuttingDown

pytestmark = pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="needs the extra [dynamo]")


@attrs.frozen
class Context:
    """What the backend asks of Dynamo's context."""

    name: str = "a"

    def id(self) -> str:
        return self.name


def on_a_backend(tmp_path: Path, body: Callable[[Any], Awaitable[None]], **settings: Any) -> None:
    """Start a backend over a tiny model, run `body`, and clean up."""
    from uma.bridges.dynamo.worker import Card, UmaBackend, WorkerOptions

    path = write_model(tmp_path / "tiny.gguf", context_length=8_192)
    options = WorkerOptions("dynamo", None, "tiny", 16, None, "127.0.0.1", "file", "tcp", "zmq")
    backend = UmaBackend(config_for(path, n_ctx=8_192, **settings), options, Card("tiny", BOS, 8_192), "tiny")

    async def main() -> None:
        try:
            await backend.start(1)
            await body(backend)
        finally:
            await backend.cleanup()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SEC))


def wanted(tokens: int = 8_000, **more: Any) -> dict[str, Any]:
    """A request that leaves everything but its length to the engine."""
    stop = {"max_tokens": tokens, "ignore_eos": True}
    return {"token_ids": [5, 6, 7], "sampling_options": {}, "stop_conditions": stop, **more}


def test_an_aborted_request_is_freed_while_its_generator_is_still_held(tmp_path: Path) -> None:
    async def body(backend: Any) -> None:
        held = backend.generate(wanted(), context=Context())
        assert (await anext(held))["token_ids"]
        await backend.abort(Context())
        while backend._engine.snapshot()["requests_cancelled"] == 0:  # noqa: ASYNC110  (another thread counts)
            await asyncio.sleep(0.01)
        await held.aclose()

    on_a_backend(tmp_path, body)


def test_a_request_that_comes_again_with_its_id_is_answered_beside_the_first_and_aborted_apart(tmp_path: Path) -> None:
    """A migration brings a request to another worker, and perhaps back, with its id."""

    async def body(backend: Any) -> None:
        first = backend.generate(wanted(), context=Context())
        await anext(first)
        (*_, last) = [chunk async for chunk in backend.generate(wanted(3), context=Context())]
        assert (last["finish_reason"], last["completion_usage"]["completion_tokens"]) == ("length", 3)
        await backend.abort(Context())
        while backend._engine.snapshot()["requests_cancelled"] == 0:  # noqa: ASYNC110  (another thread counts)
            await asyncio.sleep(0.01)
        await first.aclose()

    on_a_backend(tmp_path, body)


def test_a_health_probe_is_answered_where_no_other_request_would_be(tmp_path: Path) -> None:
    async def body(backend: Any) -> None:
        running = backend.generate(wanted(), context=Context("a"))
        await anext(running)
        probe = {**await backend.health_check_payload(), "model": ""}
        (chunk,) = [each async for each in backend.generate(probe, context=Context("b"))]
        assert (chunk["finish_reason"], chunk["completion_usage"]["completion_tokens"]) == ("length", 1)
        await backend.abort(Context("a"))
        await running.aclose()

    on_a_backend(tmp_path, body, max_sequences=1)


def test_a_prompt_that_the_frontend_did_not_measure_is_the_client_s_mistake(tmp_path: Path) -> None:
    from dynamo.llm.exceptions import InvalidArgument

    async def body(backend: Any) -> None:
        with pytest.raises(InvalidArgument, match="do not fit the context"):
            await anext(backend.generate(wanted(token_ids=[5] * 9_000), context=Context()))

    on_a_backend(tmp_path, body)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (BadRequest("top_k: too small"), "InvalidArgument"),
        (PromptTooLarge("too long"), "InvalidArgument"),
        (ShuttingDown("stopping"), "EngineShutdown"),
        (InternalError("a fault"), "Unknown"),
        (ValueError("a fault that Dynamo would take for the client's"), "Unknown"),
    ],
)
def test_an_error_is_the_client_s_or_ours_by_its_class(error: Exception, name: str) -> None:
    from dynamo.llm import exceptions

    from uma.bridges.dynamo.worker import _mapped

    assert type(_mapped(error)) is getattr(exceptions, name)


def test_a_full_queue_is_status_429() -> None:
    from uma.bridges.dynamo.worker import _mapped

    assert _mapped(Overloaded("the queue is full")).code == 429  # type: ignore[attr-defined]


def test_a_model_that_does_not_generate_is_refused_at_the_start(tmp_path: Path) -> None:
    from uma.bridges.dynamo.worker import WorkerOptions, _prepare

    path = write_encoder(tmp_path / "bert.gguf")
    options = WorkerOptions("dynamo", None, None, 16, None, "127.0.0.1", "file", "tcp", "zmq")
    with pytest.raises(ModelError, match="does not generate"):
        _prepare(config_for(path), options)


class Publisher:
    """Dynamo's publisher of KV events, as far as the backend calls it."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.has_come = threading.Event()

    def publish_stored(self, tokens: list[int], sizes: list[int], names: list[int], parent: int | None) -> None:
        if parent is None:
            self.first = tokens[: sizes[0]]
            self.has_come.set()

    def publish_removed(self, names: list[int]) -> None:
        """Not looked at."""


def test_the_load_is_told_with_its_time(tmp_path: Path) -> None:
    async def body(backend: Any) -> None:
        running = backend.generate(wanted(), context=Context())
        await anext(running)
        while "uma_worker_request_active_slots 1\n" not in backend._expose():  # noqa: ASYNC110  (the Trio thread tells)
            await asyncio.sleep(0.01)
        assert "uma_worker_report_timestamp_seconds 1" in backend._expose()
        await backend.abort(Context())
        await running.aclose()

    on_a_backend(tmp_path, body)


def test_a_router_is_told_of_blocks_as_its_frontend_counts_tokens(tmp_path: Path) -> None:
    async def body(backend: Any) -> None:
        publisher = Publisher()
        (source,) = await backend.kv_event_sources()
        source.on_ready(publisher)
        prompt = list(range(40, 80))
        assert [each async for each in backend.generate(wanted(4, token_ids=prompt), context=Context())]
        assert await asyncio.to_thread(publisher.has_come.wait, PATIENCE_SEC)
        assert publisher.first == prompt[:16]  # the worker put the beginning of text before them

    on_a_backend(tmp_path, body)
