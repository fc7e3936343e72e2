"""The backend as Dynamo calls it, without a frontend: registration, errors by their class, publishers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import Queue
from typing import Any

import attrs
import pytest
from engine_world import break_decode_thread, config_for
from test_dynamo_answers import PROBE, wanted

from harness import PATIENCE_SEC
from models import BOS, write_encoder, write_model, write_vocabulary
from uma.bridges.dynamo.model_directory import FILES
from uma.bridges.dynamo.tokenizer import make_tokenizer
from uma.contracts.capabilities import capabilities_of
from uma.contracts.card import ModelDeploymentCard, checksum
from uma.contracts.parse import parse
from uma.errors import BadRequest, ConfigError, InternalError, ModelError, PromptTooLarge, ShuttingDown

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("dynamo") is None and os.environ.get("TEST_DYNAMO") != "required",
    reason="needs the extra [dynamo]",
)


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
            setattr(backend, "registered", await backend.start(1))  # noqa: B010  (what Dynamo is told)
            await body(backend)
        finally:
            await backend.cleanup()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SEC))


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


def test_a_grammar_that_cannot_be_compiled_is_named_by_the_frontend_s_path(tmp_path: Path) -> None:
    from dynamo.llm.exceptions import InvalidArgument

    async def body(backend: Any) -> None:
        guided = {"guided_decoding": {"grammar": "root ::= ((("}}
        with pytest.raises(InvalidArgument, match=r"^sampling_options\.guided_decoding\.grammar: "):
            await anext(backend.generate(wanted(sampling_options=guided), context=Context()))

    on_a_backend(tmp_path, body)


@pytest.mark.parametrize(
    ("timeout", "grace", "expected"),
    [(None, None, 20), ("30", "20", 5), ("15", None, 5), ("5", "5", 0), ("600", "0", 20), ("soon", "-1", 20)],
)
def test_a_drain_ends_before_dynamo_ends_the_process(timeout: str | None, grace: str | None, expected: float) -> None:
    from uma.bridges.dynamo.worker import drain_sec

    given = {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": timeout, "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": grace}
    assert drain_sec({name: value for name, value in given.items() if value is not None}) == expected


def test_a_full_queue_is_status_429(tmp_path: Path) -> None:
    from dynamo.llm.exceptions import HttpError

    async def body(backend: Any) -> None:
        running = backend.generate(wanted(), context=Context("a"))
        await anext(running)
        waits = asyncio.create_task(anext(backend.generate(wanted(), context=Context("b"))))
        while backend._host.engine.snapshot()["queued_requests"] == 0:  # noqa: ASYNC110  (another thread counts)
            await asyncio.sleep(0.01)
        with pytest.raises(HttpError, match="max_queue is 1") as refused:
            await anext(backend.generate(wanted(), context=Context("c")))
        assert refused.value.code == 429
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await running.aclose()

    on_a_backend(tmp_path, body, max_sequences=1, max_queue=1)


def test_a_worker_whose_engine_failed_ends_itself_and_its_requests_go_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamo.llm.exceptions import EngineShutdown

    async def body(backend: Any) -> None:
        told: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        monkeypatch.setattr(os, "kill", lambda *arguments: told.put_nowait(arguments))
        running = backend.generate(wanted(), context=Context())
        await anext(running)
        break_decode_thread(backend._host.engine)
        with pytest.raises(EngineShutdown):
            while True:
                await anext(running)
        assert await told.get() == (os.getpid(), signal.SIGTERM)
        assert backend.has_failed
        with pytest.raises(EngineShutdown):
            await anext(backend.generate(wanted(), context=Context("b")))

    on_a_backend(tmp_path, body)


def test_workers_of_one_model_on_any_machines_register_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend keeps the first card of a model, and leaves a worker with another one idle without telling it."""
    from uma.bridges.dynamo.worker import WorkerOptions, _prepare, _worker_config

    options = WorkerOptions("dynamo", None, "Tiny 1.5", 16, None, "127.0.0.1", "file", "tcp", "zmq")
    found = set()
    for machine in ("one", "other"):
        (tmp_path / machine).mkdir()
        path = write_model(tmp_path / machine / f"{machine}.gguf")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        monkeypatch.chdir(tmp_path)  # and back, when the test is over
        # Without --n-ctx the running context is chosen from the memory that is free.
        card, name = _prepare(config_for(path, n_ctx=0), options)
        made = _worker_config(options, card, name)
        assert not Path(made.model_name).is_absolute()
        assert {each.name for each in Path(made.model_name).iterdir()} == set(FILES)
        found.add((card, made.model_name, made.served_model_name, made.component))
    ((card, _, served, component),) = found
    assert (card.context_length, served, component) == (512, "Tiny 1.5", "tiny-1-5")


def test_a_model_that_does_not_generate_is_refused_at_the_start(tmp_path: Path) -> None:
    from uma.bridges.dynamo.worker import WorkerOptions, _prepare

    path = write_encoder(tmp_path / "bert.gguf")
    options = WorkerOptions("dynamo", None, None, 16, None, "127.0.0.1", "file", "tcp", "zmq")
    with pytest.raises(ModelError, match="does not generate"):
        _prepare(config_for(path), options)


class Publisher:
    """Dynamo's publishers of KV events and of the load, as far as the backend calls them."""

    def __init__(self) -> None:
        self.first_blocks: Queue[list[int]] = Queue()
        self.loads: Queue[Any] = Queue()

    def publish_stored(self, tokens: list[int], sizes: list[int], names: list[int], parent: int | None) -> None:
        if parent is None:
            self.first_blocks.put(tokens[: sizes[0]])

    def publish_removed(self, names: list[int]) -> None:
        """Not looked at."""

    def publish(self, rank: int, load: Any) -> None:
        self.loads.put(load)


async def comes(queue: Queue[Any], is_it: Callable[[Any], bool]) -> None:
    """Wait until what another thread puts there is it."""
    while not is_it(await asyncio.to_thread(queue.get, timeout=PATIENCE_SEC)):
        pass


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


def test_the_router_is_told_of_the_load_as_it_changes(tmp_path: Path) -> None:
    async def body(backend: Any) -> None:
        publisher = Publisher()
        backend.attach_snapshot_publisher(publisher)
        total = backend.registered.llm.total_kv_blocks
        await comes(publisher.loads, lambda load: (load.kv_used_blocks, load.kv_total_blocks) == (0, total))
        running = backend.generate(wanted(token_ids=list(range(40, 80))), context=Context())
        await anext(running)
        await comes(publisher.loads, lambda load: load.kv_used_blocks >= 3 and load.gpu_cache_usage > 0)
        await running.aclose()
        await comes(publisher.loads, lambda load: load.kv_used_blocks == 0)

    on_a_backend(tmp_path, body)


def test_the_canary_s_probe_is_the_one_that_is_answered(tmp_path: Path) -> None:
    async def body(backend: Any) -> None:
        assert await backend.health_check_payload() == PROBE
        (chunk,) = [each async for each in backend.generate(PROBE, context=Context())]
        assert chunk["completion_usage"]["completion_tokens"] == 1

    on_a_backend(tmp_path, body)


def test_a_worker_registers_with_its_card(tmp_path: Path) -> None:
    async def body(backend: Any) -> None:
        told = json.loads(json.dumps(backend.registered.runtime_data))["uma"]
        card = parse(told["card"], ModelDeploymentCard)
        assert checksum(card) == told["checksum"]
        assert (card.context_length, card.kv_cache_block_size) == (8_192, 16)
        assert card.runtime_config is not None
        assert card.runtime_config.total_kv_blocks == backend.registered.llm.total_kv_blocks
        assert card.capabilities == capabilities_of(backend._host.engine.info.capabilities)

    on_a_backend(tmp_path, body)


def test_a_router_is_told_of_blocks_as_each_frontend_counts_tokens(tmp_path: Path) -> None:
    async def body(backend: Any) -> None:
        publisher = Publisher()
        (source,) = await backend.kv_event_sources()
        source.on_ready(publisher)
        prompt = list(range(40, 80))
        # The worker puts the beginning of text before the first; the second's template has spelled it.
        for ids in (prompt, [BOS, *prompt]):
            assert [each async for each in backend.generate(wanted(4, token_ids=ids), context=Context())]
            await comes(publisher.first_blocks, lambda block, ids=ids: block == ids[:16])  # type: ignore[misc]

    on_a_backend(tmp_path, body)


def test_another_model_s_tokenizer_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    from uma.bridges.dynamo.worker import WorkerOptions, _prepare

    path = write_model(tmp_path / "tiny.gguf")
    other = make_tokenizer(write_vocabulary(tmp_path / "other.gguf", merges=[("e", "r")]))
    other.save(str(tmp_path / "tokenizer.json"))
    options = WorkerOptions("dynamo", None, None, 16, tmp_path, "127.0.0.1", "file", "tcp", "zmq")
    with pytest.raises(ModelError, match=r"--tokenizer-dir: .* gives other tokens than llama.cpp: token \d+ of"):
        _prepare(config_for(path), options)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="--tokenizer-dir: "):
        _prepare(config_for(path), options)
