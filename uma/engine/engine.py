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

import outcome
import trio

import uma
from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.kv import KvPool
from uma.engine.policy import Row, Scheduler, Targets
from uma.engine.sequence import Sequence
from uma.engine.stream import CREDITS, RequestStream
from uma.engine.worker import DecodeWorker, Delivery, now_ms
from uma.errors import BadRequest, Overloaded, PromptTooLarge, ShuttingDown, UmaError
from uma.llama.catalog import resolve
from uma.llama.context import Context
from uma.llama.model import Model
from uma.metrics import EngineMetrics
from uma.types import (
    MAX_SEED,
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

SHORT_PROMPT_CHARS = 2_000
"""Prompts up to this length are tokenized on the Trio thread: faster than the way to another one."""
PROBE_TIMEOUT_SEC = 10.0
"""A health probe that has no token by then reports `stalled`."""

_log = logging.getLogger("uma.engine")
_trace_log = logging.getLogger("uma.engine.scheduler")


@asynccontextmanager
async def open_engine(config: RuntimeConfig | None = None) -> AsyncIterator[Engine]:
    """Load the model and serve requests until the block is left, which cancels whatever still runs.

    Raises `ModelError` or `ConfigError` where that cannot be. Loading happens in a thread; it cannot be interrupted.
    """
    config = config or RuntimeConfig()
    async with AsyncExitStack() as stack:
        model = await trio.to_thread.run_sync(_load, config)
        stack.callback(model.close)
        context = await trio.to_thread.run_sync(_make_context, model, config)
        stack.callback(context.close)
        engine = Engine(config, model, context)
        # What ends the block goes on as it is, not inside the exception group that the nursery would make of it.
        ended: outcome.Outcome[None] = outcome.Value(None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_run_worker, engine, nursery.cancel_scope)
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
        use_mmap=config.use_mmap,
        use_mlock=config.use_mlock,
        is_builtin=found.is_builtin,
    )


def _make_context(model: Model, config: RuntimeConfig) -> Context:
    return Context(model, sizing.context_params(model, config))


async def _run_worker(engine: Engine, scope: trio.CancelScope) -> None:
    with trio.CancelScope(shield=True):
        # A limiter of its own: the decode thread lives as long as the engine and must not take a place from others.
        limiter = trio.CapacityLimiter(1)
        engine.worker_ended = await outcome.acapture(
            partial(trio.to_thread.run_sync, engine.worker.run, limiter=limiter)
        )
    # Without its thread an engine is nothing: a fault there ends the block, and is raised from it.
    if isinstance(engine.worker_ended, outcome.Error):
        scope.cancel()


class Engine:
    """A `types.Source` in this process. Make one with `open_engine`."""

    def __init__(self, config: RuntimeConfig, model: Model, context: Context) -> None:
        self.config = config
        self._model = model
        self._context = context
        self._metrics = EngineMetrics(kv_cells_total=context.n_ctx)
        self._pool = KvPool(context, shares=sizing.shares_prefixes(context))
        self._trio_token = trio.lowlevel.current_trio_token()
        self._next_key = 1
        self._open: dict[int, RequestStream] = {}
        self._is_draining = False
        self._drained = trio.Event()
        self.worker_ended: outcome.Outcome[None] = outcome.Value(None)
        self.max_request_tokens = sizing.max_request_tokens(context)
        """Most tokens, prompt and output together, of one request."""
        targets = Targets(config.tick_budget_ms, config.slo_ttft_ms, context.n_batch, config.start_target_tokens)
        self.worker = DecodeWorker(
            context,
            self._pool,
            Scheduler(targets),
            self._metrics,
            self._deliver_soon,
            min(config.max_sequences, context.n_seq_max),
            _trace_log.debug if _trace_log.isEnabledFor(logging.DEBUG) else None,
        )
        self.info = self._describe()

    # types.Source

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[RequestStream]:
        """See `types.Source.generate`. Raises `BadRequest`, `PromptTooLarge`, `Overloaded` or `ShuttingDown` on entry."""
        try:
            tokens = await self._tokens_of(request)
            self._check_fits(len(tokens))
            self._check_open()
        except UmaError:
            self._metrics.requests_total += 1
            self._metrics.requests_rejected += 1
            raise
        self._metrics.requests_total += 1
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

    def snapshot(self) -> dict[str, Any]:
        """The metrics of now, without waiting for anything."""
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
        if size <= SHORT_PROMPT_CHARS:
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
        waiting = len(self._open) - self._metrics.active_sequences
        if waiting >= self.config.max_queue:
            raise Overloaded(
                f"the queue is full: {waiting:,} requests wait (max_queue is {self.config.max_queue:,})",
                retry_after_ms=max(100, math.ceil(self._metrics.decode_ms_ewma * 10)),
            )

    def _submit(self, request: Request, tokens: array[int], *, is_probe: bool = False) -> RequestStream:
        sampling = request.sampling
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
        self._open[key] = stream
        self.worker.submit(
            Sequence(
                request=request,
                stream=stream,
                tokens=tokens,
                prompt_tokens=len(tokens),
                max_tokens=min(sampling.max_tokens or self.config.max_tokens, self.config.max_tokens, room),
                seed=sampling.seed if sampling.seed is not None else secrets.randbelow(MAX_SEED),
                row=row,
                credits=CREDITS,
                is_probe=is_probe,
            )
        )
        return stream

    # Out

    def _deliver_soon(self, deliveries: list[Delivery]) -> None:
        """On the decode thread: hand one tick's events over."""
        self._trio_token.run_sync_soon(_deliver, deliveries)

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
                prefix_sharing=sizing.prefix_sharing(context),
                kv_unified=context.params.kv_unified,
                max_stop_sequences=16,
                sampling_params=sizing.sampling_params(),
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


def _deliver(deliveries: list[Delivery]) -> None:
    for stream, event in deliveries:
        stream.deliver(event)
