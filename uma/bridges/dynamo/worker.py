"""Backend worker: `dynamo.common.backend.LLMEngine` over an engine on a Trio thread.

The only module that imports Dynamo. Its async methods run on Dynamo's asyncio loop. Some callbacks come on Dynamo's
Rust threads, and only store their arguments.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn

import attrs
import trio
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.backend.run import run
from dynamo.llm import exceptions

from uma.bridges.dynamo import model_directory
from uma.bridges.dynamo.answers import DynamoAnswers
from uma.bridges.dynamo.host import EngineHost
from uma.bridges.dynamo.mapping import PLACES
from uma.bridges.dynamo.model_directory import ModelFiles
from uma.bridges.dynamo.router_view import RouterView
from uma.bridges.dynamo.tokenizer import check_tokenizer, make_tokenizer, read_tokenizer
from uma.config import RuntimeConfig
from uma.contracts.card import CardRuntime, card_of, checksum, slug_of
from uma.contracts.events import BlockRemoved, BlockStored
from uma.contracts.load import (
    LoadReport,
    cache_stats_of,
    engine_stats_of,
    exposition,
    has_changed,
    is_due,
    report_of,
)
from uma.engine import Engine
from uma.errors import (
    BadRequest,
    ConfigError,
    ModelError,
    Overloaded,
    PromptTooLarge,
    ShuttingDown,
    TemplateError,
    UmaError,
)
from uma.llama.model import Model
from uma.models.catalog import resolve
from uma.net.logfmt import log
from uma.protocol.converter import unstructure
from uma.wrong import renamed

MAX_DRAIN_SEC = 20.0
"""Maximum time for running requests to end at shutdown."""
ENGINE_END_SEC = 5.0
"""Time reserved for the engine to end after them."""
POLL_SEC = 0.1
"""Interval at which the load is checked; it is published on a change, and every second."""
SLACK_MS = 200
"""Maximum time by which the report of each second is early: the next check can come late."""

_log = logging.getLogger("uma.bridges.dynamo")


@attrs.frozen
class WorkerOptions:
    """Name and address under which a worker registers."""

    namespace: str
    component: str | None
    served_name: str | None
    block_size: int
    tokenizer_dir: Path | None
    host: str
    discovery_backend: str
    request_plane: str
    event_plane: str


@attrs.frozen
class Card:
    """Facts about the model that are known before it is loaded."""

    directory: str
    """Model directory, relative to the working directory, so that it is the same on every machine."""
    bos: int | None
    context_length: int


def run_worker(config: RuntimeConfig, options: WorkerOptions) -> NoReturn:
    """Serve until SIGTERM or SIGINT, which Dynamo's runtime handles, then end the process, with exit code 1 where the
    engine failed.
    """
    for name in ("DYN_TCP_RPC_HOST", "DYN_SYSTEM_HOST", "DYN_EVENT_PLANE_HOST"):
        os.environ.setdefault(name, options.host)
    card, name = _prepare(config, options)
    # asyncio's own SIGINT handler would cancel everything instead of draining.
    signal.signal(signal.SIGINT, lambda *_: None)

    backend = UmaBackend(config, options, card, name)

    async def make(_: list[str] | None) -> tuple[LLMEngine, WorkerConfig]:
        return backend, _worker_config(options, card, name)

    run(UmaBackend, [], make)
    # Dynamo's threads outlive `run`. One that calls Python while the interpreter ends would abort the process.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(backend.has_failed))


def _prepare(config: RuntimeConfig, options: WorkerOptions) -> tuple[Card, str]:
    """Check the tokenizer, write the model's directory, and change to the directory that its name is relative to."""
    path = resolve(config.model, os.environ).path
    with Model.load(path, vocab_only=True) as model:
        if not model.is_causal:
            raise ModelError(f"{path} embeds text and does not generate; a Dynamo worker serves chats and completions")
        vocab = model.vocab
        if options.tokenizer_dir is None:
            tokenizer, what = make_tokenizer(path), f"{path}: the tokenizer made for Dynamo's frontend"
        else:
            tokenizer, what = read_tokenizer(options.tokenizer_dir), f"--tokenizer-dir: {options.tokenizer_dir}"
        check_tokenizer(
            tokenizer, lambda text: vocab.tokenize(text, add_special=False, parse_special=True).tolist(), what
        )
        text = tokenizer.to_str()
        bos = vocab.bos if vocab.adds_bos and vocab.bos >= 0 else None
        files = ModelFiles(
            model.info,
            bos,
            vocab.eos if vocab.eos >= 0 else None,
            vocab.eos_text,
            model.chat_template.source,
            text,
        )
        name = options.served_name or model.info.title or model.info.name
        context_length = min(config.n_ctx or model.n_ctx_train, model.n_ctx_train)
    base = _cache_folder() / "dynamo"
    directory = model_directory.write(base, files)
    os.chdir(base)
    return Card(directory, bos, context_length), name


def _cache_folder() -> Path:
    """UMA's folder in `$XDG_CACHE_HOME`. Raises `ConfigError` for a user without that and without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # The XDG specification says to ignore a relative path.
        return (named if named.is_absolute() else Path.home() / ".cache") / "uma"
    except RuntimeError:
        raise ConfigError("XDG_CACHE_HOME: name a folder for the model's files; this user has no home") from None


def _worker_config(options: WorkerOptions, card: Card, name: str) -> WorkerConfig:
    return WorkerConfig(
        namespace=options.namespace,
        component=options.component or slug_of(name),
        model_name=card.directory,
        served_model_name=name,
        discovery_backend=options.discovery_backend,
        request_plane=options.request_plane,
        event_plane=options.event_plane,
        enable_kv_routing=True,
        metrics_labels=[("model", name)],
    )


class UmaBackend(LLMEngine):  # type: ignore[misc]
    """One engine as a Dynamo backend. `dynamo.common.backend.LLMEngine` documents the order of calls."""

    def __init__(self, config: RuntimeConfig, options: WorkerOptions, card: Card, name: str) -> None:
        self._options, self._card, self._name = options, card, name
        self._host = EngineHost(config, (self._publish_load,), _end_process)
        self._max_running = config.max_sequences
        self._answers = DynamoAnswers(self._host, card.bos, self._show_blocks)
        self._kv: Any = None
        self._load: Any = None
        self._worker_id = 0
        self._report: LoadReport | None = None
        """Load as last published. Replaced on the Trio thread, read on any thread."""
        self._views: set[int] = set()
        """Numbers of tokens that the worker puts before requests; KV blocks are published once for each number."""

    @property
    def has_failed(self) -> bool:
        """Whether a fault ended the engine. The worker ends with it."""
        return self._host.fault is not None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> NoReturn:
        """Unused: `run_worker` makes the worker from UMA's own options."""
        raise NotImplementedError("start it by `uma worker`")

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model."""
        self._worker_id = worker_id
        engine = await self._host.start()
        info, size = engine.info, self._options.block_size
        self._max_running = info.limits.max_sequences
        cells = engine.snapshot()["kv_cells_total"]
        runtime = CardRuntime(cells // size, self._max_running, None)
        card = card_of(info, block_size=size, context_length=self._card.context_length, runtime=runtime)
        return EngineConfig(
            model=self._card.directory,
            served_model_name=self._name,
            runtime_data={"uma": {"server": info.server, "card": unstructure(card), "checksum": checksum(card)}},
            llm=LlmRegistration(
                context_length=self._card.context_length,
                kv_cache_block_size=size,
                total_kv_blocks=cells // size,
                max_num_seqs=self._max_running,
            ),
        )

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Answer one request, in chunks of all tokens that are ready."""
        try:
            async with aclosing(self._answers.generate(request, context.id())) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Exception as error:
            raise _mapped(error) from error

    async def abort(self, context: Any) -> None:
        """See `DynamoAnswers.abort`."""
        self._answers.abort(context.id())

    async def cleanup(self) -> None:
        """Let running requests finish, then end the engine."""
        await self._host.close(drain_sec(os.environ))

    async def kv_event_sources(self) -> list[PushSource]:
        """The source that KV events are pushed to."""
        return [PushSource(on_ready=self._on_kv_publisher)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """The only rank."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Store the publisher of the load. Called on one of Dynamo's threads."""
        self._load = publisher

    async def register_prometheus(self, metrics: Any) -> None:
        """Add UMA's counters to those of Dynamo."""
        metrics.register_prometheus_expfmt_callback(self._expose)

    def _expose(self) -> str:
        kind, report = "# TYPE uma_contract_violations_total counter", self._report
        load = "" if report is None else exposition(report, _unix_ms())
        return f"{kind}\numa_contract_violations_total {self._answers.violations}\n{load}"

    def _on_kv_publisher(self, publisher: Any) -> None:
        self._kv = publisher

    async def health_check_payload(self) -> dict[str, Any]:
        """A probe of one token."""
        payload: dict[str, Any] = build_health_check_payload(self._card.bos or 0)
        return payload

    def _show_blocks(self, added_tokens: int) -> None:
        """Have the KV blocks of requests with so many added tokens published to the router, from now on.

        A frontend's tokens begin with the beginning of text where the chat template writes it; otherwise this worker
        adds it. The same cells are different blocks for these two kinds of requests.
        """
        if added_tokens not in self._views:
            self._views.add(added_tokens)
            self._host.run_beside(self._publish_kv, added_tokens)

    # On the Trio thread

    async def _publish_kv(self, engine: Engine, skip: int) -> None:
        """Publish KV events without the first `skip` tokens of each sequence, which the worker has added."""
        feed = engine.kv_events(self._options.block_size, skip=skip)
        while self._kv is None:  # noqa: ASYNC110  (it comes from a thread of Dynamo's, once)
            await trio.sleep(POLL_SEC)
        router, sequence = RouterView(), 0
        while True:
            missed = await feed.changes(sequence)
            sequence = missed.sequence
            for event in router.events_for(missed):
                self._publish_event(event)

    def _publish_event(self, event: BlockStored | BlockRemoved) -> None:
        if isinstance(event, BlockRemoved):
            self._kv.publish_removed(list(event.block_hashes))
            return
        self._kv.publish_stored(
            list(event.token_ids),
            [event.block_size] * len(event.block_hashes),
            list(event.block_hashes),
            event.parent_block_hash,
        )

    async def _publish_load(self, engine: Engine) -> None:
        published_ms = None
        while True:
            figures, now_ms = engine.snapshot(), int(time.monotonic() * 1000)
            report = report_of(
                figures,
                worker_id=self._worker_id,
                timestamp_ms=_unix_ms(),
                total_slots=self._max_running,
                block_size=self._options.block_size,
                engine_stats=engine_stats_of(figures, self._host.times, queue_capacity=engine.info.limits.max_queue),
                cache_stats=cache_stats_of(figures),
            )
            if is_due(published_ms, now_ms, has_changed=has_changed(self._report, report), slack_ms=SLACK_MS):
                self._report = report
                if self._load is not None:
                    self._load.publish(0, _component_snapshot(report, figures))
                    published_ms = now_ms
            await trio.sleep(POLL_SEC)


def drain_sec(environ: Mapping[str, str]) -> float:
    """Maximum time for running requests to end at shutdown.

    Dynamo ends the process with exit code 911 once its timeout is over, which includes its own grace period. For values
    that Dynamo cannot parse, its defaults hold.
    """
    timeout = _seconds(environ, "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", 30.0)
    grace = _seconds(environ, "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", 5.0)
    return max(0.0, min(MAX_DRAIN_SEC, timeout - grace - ENGINE_END_SEC))


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        found = float(environ.get(name, default))
    except ValueError:
        return default
    return max(0.0, found) if math.isfinite(found) else default


def _end_process() -> None:
    """End this worker by a signal, as from outside: Dynamo's runtime then takes it out of routing first.

    Without its engine it would stay registered, and get requests that it can only refuse.
    """
    os.kill(os.getpid(), signal.SIGTERM)


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


def _component_snapshot(report: LoadReport, figures: Mapping[str, Any]) -> ComponentSnapshot:
    """Dynamo's form of a report. A hit rate before any request is unknown, not 0."""
    kv, has_asked = report.kv_stats, figures["cache_hits"] + figures["cache_misses"] > 0
    return ComponentSnapshot(
        kv_used_blocks=kv.kv_active_blocks,
        kv_total_blocks=kv.kv_total_blocks,
        gpu_cache_usage=kv.gpu_cache_usage_perc,
        dp_rank=0,
        kv_cache_hit_rate=kv.gpu_prefix_cache_hit_rate if has_asked else None,
    )


def _mapped(error: Exception) -> Exception:
    """The exception that Dynamo's frontend turns into the right status: 400 for a client's mistake, 429 for a full
    queue.

    Not a `ValueError`: the frontend takes that for the client's mistake. Any error that is not a `UmaError` is a bug on
    this side.
    """
    if isinstance(error, BadRequest | PromptTooLarge | TemplateError):
        made: Exception = exceptions.InvalidArgument("\n".join(renamed(error.lines, PLACES)))
    elif isinstance(error, Overloaded):
        made = exceptions.HttpError(429, error.message)
    elif isinstance(error, ShuttingDown):
        made = exceptions.EngineShutdown(error.message)
    elif isinstance(error, UmaError):
        made = exceptions.Unknown(f"{error.code}: {error.message}")
    else:
        log(_log, logging.ERROR, "dynamo.internal_error", fault=error)
        made = exceptions.Unknown("the request failed in the worker; its log has the traceback")
    return made
