"""The engine as Trio sees it: one model, one decode thread, any number of requests.

Everything here runs on the Trio thread that opened the engine. Requests are checked, tokenized and handed to the
decode thread; what comes back, one call a tick, is put into each request's own stream.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import outcome
import trio

import uma
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.activity import activity_of
from uma.engine.clock import now_ms
from uma.engine.delivery.mailbox import Mailbox
from uma.engine.delivery.stream import CREDITS, RequestStream
from uma.engine.intake import features
from uma.engine.intake.coalesce import WhenIdle
from uma.engine.kv.disk import DiskTier
from uma.engine.kv.pool import KvPool
from uma.engine.kv.snapshots import Snapshot, SnapshotStore
from uma.engine.policy import Row, Scheduler, Targets
from uma.engine.policy.order import LANE_DELAY_MS, admission_key
from uma.engine.policy.overload import BEYOND_REPAIR, Load, retry_after_ms, wait_ms
from uma.engine.worker.loop import DecodeWorker
from uma.engine.worker.sequence import Sequence
from uma.errors import BadRequest, Overloaded, PromptTooLarge, ShuttingDown, UmaError
from uma.llama.catalog import resolve
from uma.llama.context import Context
from uma.llama.model import Model
from uma.metrics import EngineMetrics
from uma.types import (
    MAX_SEED,
    Activity,
    Capabilities,
    Health,
    HealthStatus,
    Limits,
    Priority,
    Request,
    SamplingParams,
    ServerInfo,
    Tokenized,
)

GATHER_SEC = 0.02
"""While requests keep coming in, a decode thread that rests or is at a stretch is left alone for this long at most."""
SHORT_PROMPT_CHARS, SHORT_CHAT_MESSAGES = 2_000, 32
"""Prompts up to this length are tokenized on the Trio thread: faster than the way to another one. A message takes time
to render however short it is."""
LAST_WRITES_SEC = 10.0
"""At the end, snapshots still being written to disk get this long."""
PROBE_TIMEOUT_SEC = 10.0
"""A health probe that has no token by then reports `stalled`."""

_log = logging.getLogger("uma.engine")
_trace_log = logging.getLogger("uma.engine.scheduler")


@asynccontextmanager
async def open_engine(config: RuntimeConfig | None = None) -> AsyncIterator[Engine]:
    """Load the model and serve requests until the block is left, which cancels whatever still runs.

    Raises `ModelError` or `ConfigError` where that cannot be. Loading happens in a thread; it cannot be interrupted.
    Only `config` counts: `UMA_…` settings and files are read by `uma.config.load` alone.
    """
    config = config or RuntimeConfig()
    async with AsyncExitStack() as stack:
        model = await trio.to_thread.run_sync(_load, config)
        stack.callback(model.close)
        context = await trio.to_thread.run_sync(_make_context, model, config)
        stack.callback(context.close)
        disk = await _open_disk(config, context)
        engine = Engine(config, model, context, disk)
        # What ends the block goes on as it is, not inside the exception group that the nursery would make of it.
        ended: outcome.Outcome[None] = outcome.Value(None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run, nursery.cancel_scope)
            try:
                yield engine
            except trio.Cancelled:
                raise
            except BaseException as error:  # noqa: BLE001  (raised again below)
                ended = outcome.Error(error)
            finally:
                engine.begin_drain()
                engine.worker.stop()
        engine.worker_ended.unwrap()
        ended.unwrap()


def _load(config: RuntimeConfig) -> Model:
    found = resolve(config.model, os.environ)
    return Model.load(
        Path(found.path),
        n_gpu_layers=config.n_gpu_layers,
        map_above_bytes=sizing.map_above_bytes(config),
        use_mlock=config.use_mlock,
        is_builtin=found.is_builtin,
        extra_buffers=config.extra_buffers,
    )


def _make_context(model: Model, config: RuntimeConfig) -> Context:
    return Context(model, sizing.context_params(model, config))


async def _open_disk(config: RuntimeConfig, context: Context) -> DiskTier | None:
    if not config.cache_dir:
        return None
    identity = await trio.to_thread.run_sync(sizing.snapshot_identity, context)
    exact_ends = not sizing.shares_prefixes(context)
    disk = DiskTier(
        Path(config.cache_dir),
        identity,
        config.cache_disk_mb * 2**20,
        sizing.cache_ram_bytes(config),
        exact_ends=exact_ends,
    )
    await disk.open()
    return disk


class Engine:
    """A `types.Source` in this process. Make one with `open_engine`."""

    def __init__(self, config: RuntimeConfig, model: Model, context: Context, disk: DiskTier | None) -> None:
        self.config = config
        self._model = model
        self._context = context
        self._metrics = EngineMetrics(kv_cells_total=context.n_ctx)
        self._metrics.cache.total_capacity = context.n_ctx
        self._disk = disk
        self._to_disk, self._snapshots = trio.open_memory_channel[Snapshot](math.inf)
        self._trio_token = trio.lowlevel.current_trio_token()
        shares = sizing.shares_prefixes(context)
        store = SnapshotStore(
            sizing.cache_ram_bytes(config), exact_ends=not shares, on_added=None if disk is None else self._write_soon
        )
        self._pool = KvPool(context, store, shares=shares, cache_cells=sizing.cache_cells(context, config))
        self._mailbox = Mailbox()
        self._next_key = 1
        self._open: dict[int, Sequence] = {}
        self._is_draining = False
        self._drained = trio.Event()
        self.worker_ended: outcome.Outcome[None] = outcome.Value(None)
        self.max_request_tokens = sizing.max_request_tokens(context)
        """Most tokens, prompt and output together, of one request."""
        self._scheduler = Scheduler(
            Targets(
                config.tick_budget_ms,
                context.n_batch,
                config.start_target_tokens,
                config.slo_ttft_ms,
                context.n_ubatch,
                mixes_prompts=context.params.kv_unified,
            )
        )
        # One id is left for health probes.
        self._max_running = max(1, min(config.max_sequences, context.n_seq_max - 1))
        self.worker = DecodeWorker(
            context,
            self._pool,
            self._scheduler,
            self._metrics,
            self._mailbox.post,
            self._max_running,
            disk is not None,
            _trace_log.debug if _trace_log.isEnabledFor(logging.DEBUG) else None,
        )
        # Who comes in one burst is read in one batch, and decodes in step. (A thread that computes takes up what there
        # is between its ticks; a stretch of tokens for the others ends with the call.)
        self._wake_worker = WhenIdle(self.worker.wake, GATHER_SEC)
        self.info = self._describe()

    async def run(self, scope: trio.CancelScope) -> None:
        """For `open_engine`: the decode thread, and the writing of snapshots. Ends some time after `worker.stop`."""
        with trio.CancelScope(shield=True) as shield:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_snapshots)
                # A limiter of its own: this thread lives as long as the engine and must take no place from others.
                run = partial(trio.to_thread.run_sync, self.worker.run, limiter=trio.CapacityLimiter(1))
                async with trio.open_nursery() as while_it_runs:
                    while_it_runs.start_soon(self._mailbox.run)
                    self.worker_ended = await outcome.acapture(run)
                    while_it_runs.cancel_scope.cancel()
                self._mailbox.empty()
                self._mailbox.close()
                # Whatever the thread handed over is in the channel before this runs.
                self._trio_token.run_sync_soon(self._to_disk.close)
                shield.deadline = trio.current_time() + LAST_WRITES_SEC
        # Without its thread an engine is nothing: a fault there ends the block, and is raised from it.
        if isinstance(self.worker_ended, outcome.Error):
            scope.cancel()

    # types.Source

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[RequestStream]:
        """See `types.Source.generate`. `BadRequest`, `PromptTooLarge`, `Overloaded`, `ShuttingDown` come on entry."""
        self._metrics.requests_total += 1
        try:
            self._check_open()
            features.check_features(request)
            self._check_queue(request.priority)
            tokens = await self._tokens_of(request)
            self._check_fits(len(tokens))
            await self._fetch_from_disk(tokens)
            # Others came meanwhile. From here on nothing waits, so what is checked holds.
            self._check_open()
            self._check_queue(request.priority)
            self._check_deadline(request, len(tokens))
        except UmaError as error:
            self._metrics.requests_rejected += 1
            self._metrics.requests_overloaded += isinstance(error, Overloaded)
            raise
        except trio.Cancelled:
            self._metrics.requests_withdrawn += 1
            raise
        stream = self._submit(request, tokens)
        try:
            yield stream
        finally:
            stream.abandon()

    async def tokenize(self, request: Request) -> Tokenized:
        """See `types.Source.tokenize`."""
        return Tokenized(tuple(await self._tokens_of(request)))

    async def health(self, *, probe: bool = True) -> Health:
        """See `types.Source.health`. A probe goes before everything else; without an answer the status is `stalled`."""
        began = now_ms()
        if not probe or self._is_draining:
            return Health(self.status, 0.0, 0)
        request = Request(
            id="health", token_ids=(max(self._model.vocab.bos, 0),), sampling=SamplingParams(max_tokens=1), priority=1
        )
        stream = self._submit(request, array("i", request.token_ids or ()), is_probe=True)
        tokens = 0
        try:
            with trio.move_on_after(PROBE_TIMEOUT_SEC):
                async for _ in stream:
                    tokens = 1
        finally:
            stream.abandon()
        return Health(self.status if tokens else "stalled", round(now_ms() - began, 3), int(tokens > 0))

    async def metrics(self) -> dict[str, Any]:
        """See `types.Source.metrics`."""
        await trio.lowlevel.checkpoint()
        return self.snapshot()

    async def activity(self) -> Activity:
        """See `types.Source.activity`. Health probes are not part of it."""
        await trio.lowlevel.checkpoint()
        running = [each for each in self._open.values() if each.started_ms == 0 or self.worker.has(each.row.key)]
        return activity_of(running, now_ms())

    def snapshot(self) -> dict[str, Any]:
        """The metrics of now, without waiting for anything."""
        self.worker.read_gauges()
        return self._metrics.snapshot()

    # Draining

    @property
    def status(self) -> HealthStatus:
        """`ok`, or `draining` once the end has begun."""
        return "draining" if self._is_draining else "ok"

    def begin_drain(self) -> None:
        """Take no more requests; those running go on."""
        self._is_draining = True
        self._note_drained()

    async def drained(self) -> None:
        """Wait, after `begin_drain`, until no request is left."""
        await self._drained.wait()

    def _note_drained(self) -> None:
        if self._is_draining and not self._open:
            self._drained.set()

    # In

    async def _tokens_of(self, request: Request) -> array[int]:
        if request.token_ids is not None:
            limit = self._model.vocab.n_tokens
            if max(request.token_ids) >= limit:
                raise BadRequest(f"token_ids: {max(request.token_ids)} is not in the vocabulary of {limit:,} tokens")
            return array("i", request.token_ids)
        size = len(request.prompt or "") + sum(len(message.content) for message in request.messages or ())
        self._check_bytes(request, size)
        if size <= SHORT_PROMPT_CHARS and len(request.messages or ()) <= SHORT_CHAT_MESSAGES:
            tokens = self._tokenize(request)
        else:
            tokens = await trio.to_thread.run_sync(self._tokenize, request)
        if not tokens:
            raise BadRequest("prompt: gives no token at all, so there is nothing to continue")
        return tokens

    def _check_bytes(self, request: Request, chars: int) -> None:
        limit = self.config.max_prompt_bytes
        if chars * 4 <= limit:
            return
        texts = [request.prompt or "", *(message.content for message in request.messages or ())]
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > limit:
            raise PromptTooLarge(f"prompt: {size:,} bytes are over this server's limit of {limit:,} (max_prompt_bytes)")

    def _tokenize(self, request: Request) -> array[int]:
        vocab = self._model.vocab
        if request.messages is not None:
            template = self._model.chat_template
            text = template.render(request.messages)
            ids = vocab.tokenize(text, add_special=template.needs_bos(text), parse_special=True)
        else:
            ids = vocab.tokenize(request.prompt or "", add_special=True, parse_special=False)
        tokens: array[int] = array("i")
        tokens.frombytes(ids.tobytes())
        return tokens

    def _check_fits(self, prompt_tokens: int) -> None:
        if prompt_tokens >= self.max_request_tokens:
            raise PromptTooLarge(
                f"prompt: {prompt_tokens:,} tokens do not fit the context of {self.max_request_tokens:,} tokens, "
                "which must also hold the answer; shorten the prompt, or run with a larger --n-ctx"
            )

    def _check_open(self) -> None:
        if self._is_draining:
            raise ShuttingDown("the server is stopping and takes no new requests")

    async def _fetch_from_disk(self, tokens: array[int]) -> None:
        if self._disk is None or not self._disk.offers(tokens):
            return
        snapshot = await self._disk.fetch(tokens, await self._known_tokens(tokens))
        if snapshot is not None:
            self.worker.preload(snapshot)

    async def _known_tokens(self, tokens: array[int]) -> int:
        """How many of `tokens` cells or memory hold already: the decode thread says so between two ticks."""
        known, answered = 0, trio.Event()

        def take(count: int) -> None:
            nonlocal known
            known = count
            self._trio_token.run_sync_soon(answered.set)

        self._check_open()  # a thread that was stopped answers no more
        self.worker.count_known(tokens, take)
        await answered.wait()
        return known

    def _check_queue(self, lane: int) -> None:
        """Refuse what finds the queue full. A background request has no hurry, but the queue has an end for it too."""
        running, most = self.worker.active_count, self.config.max_queue
        # Those who came a moment ago and begin with the next tick do not wait.
        places = max(0, self._max_running - running)
        waiting = len(self._open) - running - places
        if waiting < most:
            return
        # What waits in a lower lane is in nobody's way.
        ahead = sum(each.row.lane >= lane and each.started_ms == 0 for each in self._open.values()) - places
        if (lane >= 0 and ahead >= most) or waiting >= 2 * most:
            raise Overloaded(
                f"the queue is full: {waiting:,} requests wait (max_queue is {most:,})",
                retry_after_ms=retry_after_ms(self._metrics.service_ms_ewma / self._max_running, 0),
            )

    def _check_deadline(self, request: Request, prompt_tokens: int) -> None:
        """Refuse what would wait too long for its first token, while the asker can still go elsewhere."""
        target = request.slo.target_ttft_ms
        if target is None or request.priority < 0:
            return
        due_ms = now_ms() + target + LANE_DELAY_MS[request.priority]
        wait = wait_ms(self._load_before(request.priority, due_ms), prompt_tokens, self._scheduler.cost)
        if wait > BEYOND_REPAIR * target:
            raise Overloaded(
                f"the first token would take about {math.ceil(wait):,} ms; target_ttft_ms asks for {target:g}",
                retry_after_ms=retry_after_ms(wait, target),
            )

    def _load_before(self, lane: int, due_ms: float) -> Load:
        # A glimpse at what the decode thread is working on; an estimate needs no more. (It has not yet told those who
        # came just now when they are due.)
        ahead = [
            each
            for each in self._open.values()
            if (admission_key(each.row)[0] <= due_ms if each.row.due_ms else each.row.lane >= lane)
        ]
        # Background gives its places up; and of prompts, a part will be in the cache, as it was for those before.
        running = sum(each.holding is not None and each.row.lane >= min(lane, 0) for each in self._open.values())
        uncached = 1 - self._metrics.cached_tokens_total / max(1, self._metrics.prompt_tokens_total)
        return Load(
            ahead_tokens=round(uncached * sum(each.row.remaining for each in ahead)),
            ahead_waiting=sum(each.started_ms == 0 for each in ahead),
            running=running,
            decoding=sum(each.generated > 0 for each in self._open.values()),
            max_running=self._max_running,
            service_ms=self._metrics.service_ms_ewma,
            used_cells=self._pool.used_cells,
            tick_budget_ms=self.config.tick_budget_ms,
        )

    def _submit(self, request: Request, tokens: array[int], *, is_probe: bool = False) -> RequestStream:
        sampling = request.sampling.over(self.config.sampler)
        if sampling is not request.sampling:
            request = attrs.evolve(request, sampling=sampling)
        key, self._next_key = self._next_key, self._next_key + 1
        room = self.max_request_tokens - len(tokens)
        row = Row(
            key=key,
            lane=Priority.INTERACTIVE if is_probe else request.priority,
            arrived_ms=now_ms(),
            prompt_tokens=len(tokens),
            remaining=len(tokens),
            target_ttft_ms=0.0 if is_probe else request.slo.target_ttft_ms,
            target_tbt_ms=request.slo.target_tbt_ms or self.config.slo_tbt_ms,
        )
        stream = RequestStream(key, self.worker, self._forget)
        most = self.config.max_tokens
        asked = sampling.max_tokens or most
        cut = (f"max_tokens: {asked:,} is over the limit of {most:,} and was cut to it",) if asked > most else ()
        sequence = Sequence(
            request=request,
            stream=stream,
            tokens=tokens,
            prompt_tokens=len(tokens),
            max_tokens=min(asked, most, room),
            warnings=cut,
            seed=sampling.seed if sampling.seed is not None else secrets.randbelow(MAX_SEED),
            row=row,
            credits=CREDITS,
            is_probe=is_probe,
        )
        self._open[key] = sequence
        self.worker.submit(sequence)
        self._wake_worker.ask()
        return stream

    # Out

    def _write_soon(self, snapshot: Snapshot) -> None:
        """On the decode thread: have a snapshot written to disk."""
        self._trio_token.run_sync_soon(self._to_disk.send_nowait, snapshot)

    async def _write_snapshots(self) -> None:
        async for snapshot in self._snapshots:
            assert self._disk is not None
            await self._disk.write(snapshot)

    def _forget(self, key: int) -> None:
        if self._open.pop(key, None) is not None:
            self._note_drained()

    def _describe(self) -> ServerInfo:
        config, context, model = self.config, self._context, self._model
        return ServerInfo(
            server=f"uma/{uma.__version__}",
            model=model.info,
            capabilities=Capabilities(
                streaming=True,
                chat=model.info.has_chat_template,
                cancel=True,
                tokenize=True,
                token_ids_input=True,
                prefix_sharing=sizing.prefix_sharing(context, config),
                kv_unified=context.params.kv_unified,
                max_stop_sequences=16,
                sampling_params=features.sampling_params(),
            ),
            limits=Limits(
                n_ctx=self.max_request_tokens,
                max_tokens=config.max_tokens,
                max_prompt_bytes=config.max_prompt_bytes,
                max_frame_bytes=config.max_frame_bytes,
                max_sessions=config.max_sessions,
                max_queue=config.max_queue,
            ),
        )
