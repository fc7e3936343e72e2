"""Passes requests of RustInfer's servers to a `types.Source`, and sends the answers back."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count

import attrs
import trio

from uma.bridges.pieces import TokenFollower
from uma.bridges.rustinfer.codec import (
    BadMessageError,
    RustInferMetricsQuery,
    WireForm,
    decode,
    encode,
    refuse_oversized,
)
from uma.bridges.rustinfer.messages import (
    NO_METRICS,
    Answer,
    InferenceMetrics,
    InferenceRequest,
    InferenceResponse,
    RustInferMetrics,
    StreamChunk,
)
from uma.bridges.rustinfer.socket import Envelope, PeerGoneError, PeerStalledError, RouterSocket
from uma.contracts.load import RequestTimes, cache_stats_of, engine_stats_of
from uma.contracts.response import BackendOutput, CompletionUsage, OutputChecker
from uma.errors import ContractViolation, IdleTimeout
from uma.net.faults import as_uma_error
from uma.net.logfmt import log
from uma.types import Finished, Request, RequestMetrics, SamplingParams, Source, Token

TokenizeRendered = Callable[[str], Awaitable[tuple[int, ...]]]
"""Token ids of a prompt to which the chat template was applied: spellings of special tokens are parsed as these
tokens."""

OVERSIZE_FACTOR = 4
"""Messages of up to this many times the limit are refused with an error. A peer that sends a longer one is
disconnected."""

_log = logging.getLogger("uma.bridges.rustinfer")


@attrs.frozen
class Caller:
    """Address of an answer, and its encoding."""

    to: Envelope
    form: WireForm


@attrs.define(eq=False)
class RustInferEngine:
    """Serves one ROUTER socket from one source. Belongs to the source's Trio thread."""

    source: Source
    tokenize: TokenizeRendered
    socket: RouterSocket
    max_message_bytes: int
    max_peer_requests: int
    """Maximum requests of one peer, running and waiting; further ones are refused."""
    drain_timeout_sec: float
    times: RequestTimes = attrs.field(factory=RequestTimes, init=False)
    violations: int = attrs.field(default=0, init=False)
    """Number of this side's answers that broke the contract, and were replaced by errors."""
    _running: dict[tuple[bytes, str], trio.CancelScope] = attrs.field(factory=dict, init=False)
    _connections: dict[int, set[tuple[bytes, str]]] = attrs.field(factory=dict, init=False)
    """Running requests by connection."""
    _ids: count[int] = attrs.field(factory=lambda: count(1), init=False)
    _drained: trio.Event = attrs.field(factory=trio.Event, init=False)
    _draining: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `begin_drain`. Returns once all requests have ended or `drain_timeout_sec` is over."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._receive, nursery)
            task_status.started()
            await self._draining.wait()
            with trio.move_on_after(self.drain_timeout_sec):
                await self._drained.wait()
            nursery.cancel_scope.cancel()
        self.socket.close()

    def begin_drain(self) -> None:
        """Refuse new requests; running ones go on."""
        self._draining.set()
        self._note_drained()

    async def _receive(self, nursery: trio.Nursery) -> None:
        while True:
            to, message = await self.socket.receive()
            # The next connection can reuse a descriptor: process ended connections before counting a request for it.
            self._cancel_disconnected()
            self._take(to, message, nursery)

    # In

    def _take(self, to: Envelope, message: bytes, nursery: trio.Nursery) -> None:
        try:
            if len(message) > self.max_message_bytes:
                raise refuse_oversized(message, self.max_message_bytes)
            request, form = decode(message)
        except BadMessageError as error:
            log(_log, logging.WARNING, "rustinfer.refused", reason=error.reason)
            self._refuse(Caller(to, error.form), error.request_id or "", error.reason, nursery)
            return
        caller = Caller(to, form)
        if isinstance(request, RustInferMetricsQuery):
            nursery.start_soon(self._tell_metrics, caller)
        elif (key := (to.peer, request.request_id)) in self._running:
            # Not as a chunk: the peer would take it for the end of the running stream.
            why = f"E_PROTO_BAD_REQUEST: request_id: {request.request_id!r} is running already"
            self._refuse(caller, request.request_id, why, nursery)
        elif (problem := self._objection(to.peer)) is not None:
            nursery.start_soon(self._post, caller, _failure(request, problem))
        else:
            self._running[key] = trio.CancelScope()
            self._connections.setdefault(to.connection, set()).add(key)
            nursery.start_soon(self._serve, caller, request, key)

    def _objection(self, peer: bytes) -> str | None:
        """Why a request of this peer is refused now; None where it is accepted."""
        if self._draining.is_set():
            return "E_RUNTIME_SHUTDOWN: the engine is stopping and takes no new requests"
        if sum(other == peer for other, _ in self._running) >= self.max_peer_requests:
            return f"E_LIMIT_OVERLOADED: {self.max_peer_requests} requests of this server run or wait already"
        return None

    def _refuse(self, caller: Caller, id: str, why: str, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._post, caller, InferenceResponse(id, "Error", None, None, 0, why, NO_METRICS))

    async def _watch(self) -> None:
        """Cancel the requests of peers that have disconnected."""
        while True:
            await self.socket.something_ended()
            self._cancel_disconnected()

    def _cancel_disconnected(self) -> None:
        for connection in self.socket.ended_connections():
            for key in self._connections.pop(connection, ()):
                self._running[key].cancel()

    # Out

    async def _serve(self, caller: Caller, request: InferenceRequest, key: tuple[bytes, str]) -> None:
        try:
            with self._running[key], suppress(PeerGoneError):
                try:
                    await self._generate(caller, request)
                except PeerStalledError:
                    log(_log, logging.WARNING, "rustinfer.stalled", request=request.request_id)
                    late = _failure(request, f"{IdleTimeout.code}: the answer was not read for long, and was cancelled")
                    await self.socket.send_late(caller.to, encode(late, caller.form))
        finally:
            del self._running[key]
            self._connections.get(caller.to.connection, set()).discard(key)
            self._note_drained()

    async def _generate(self, caller: Caller, request: InferenceRequest) -> None:
        follower = TokenFollower()
        try:
            wanted = await self._request(request)
            checker = OutputChecker(self.source.info.model.vocab_size, len(wanted.token_ids or ()))
            async with self.source.generate(wanted) as stream:
                async for event in stream:
                    if isinstance(event, Token):
                        for token in follower.take(event):
                            await self._give(caller, request, token, checker)
                    elif isinstance(event, Finished):
                        await self._finish(caller, request, event, follower, checker)
        except (PeerGoneError, PeerStalledError):
            raise
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this request's alone)
            error = as_uma_error(fault, _log, "rustinfer.crashed", request=request.request_id)
            if isinstance(error, ContractViolation):
                self.violations += 1
                log(
                    _log,
                    logging.ERROR,
                    "rustinfer.contract_violation",
                    request=request.request_id,
                    reason=error.message,
                )
            await self._send(caller, _failure(request, f"{error.code}: {error.message}"))

    async def _give(self, caller: Caller, request: InferenceRequest, token: Token, checker: OutputChecker) -> None:
        checker.check(BackendOutput((token.token_id,)))
        await self._send(caller, _token(request, token.text, token.token_id))

    async def _finish(
        self,
        caller: Caller,
        request: InferenceRequest,
        event: Finished,
        follower: TokenFollower,
        checker: OutputChecker,
    ) -> None:
        token, rest = follower.finish(event.usage.completion_tokens)
        if token is not None:
            await self._give(caller, request, token, checker)
        checker.check(_last_output(event))
        self.times.add(event.metrics.queue_ms, event.metrics.prefill_ms, event.metrics.decode_ms)
        if rest:
            await self._send(caller, _token(request, rest, None))
        await self._send(caller, _end(request, event))

    async def _request(self, asked: InferenceRequest) -> Request:
        sampling = SamplingParams(
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop=asked.stop_sequences,
        )
        return Request(
            id=f"rustinfer-{next(self._ids)}",
            token_ids=await self.tokenize(asked.prompt),
            sampling=sampling,
            stream=asked.stream,
            priority=(asked.priority > 0) - (asked.priority < 0),  # type: ignore[arg-type]
        )

    async def _tell_metrics(self, caller: Caller) -> None:
        snapshot = await self.source.metrics()
        stats = engine_stats_of(snapshot, self.times, queue_capacity=self.source.info.limits.max_queue)
        # The engine has counted answers that broke the contract as completed or cancelled.
        stats = attrs.evolve(stats, failed_requests=stats.failed_requests + self.violations)
        await self._post(caller, RustInferMetrics(stats, cache_stats_of(snapshot)))

    async def _post(self, caller: Caller, answer: Answer) -> None:
        with suppress(PeerGoneError, PeerStalledError):
            await self._send(caller, answer)

    async def _send(self, caller: Caller, answer: Answer) -> None:
        await self.socket.send(caller.to, encode(answer, caller.form))

    def _note_drained(self) -> None:
        if self._draining.is_set() and not self._running:
            self._drained.set()


def _token(request: InferenceRequest, text: str, token_id: int | None) -> StreamChunk:
    return StreamChunk(request.request_id, "Token", text, token_id, None, None)


def _last_output(event: Finished) -> BackendOutput:
    """End of an answer as the contract has it; with all tokens where it was not streamed."""
    prompt, completion = event.usage.prompt_tokens, event.usage.completion_tokens
    usage = CompletionUsage(prompt, completion, prompt + completion)
    return BackendOutput(event.token_ids or (), finish_reason=event.reason, completion_usage=usage)


def _end(request: InferenceRequest, event: Finished) -> Answer:
    metrics = _metrics(event.metrics)
    if request.stream:
        return StreamChunk(request.request_id, "Done", None, None, event.reason, metrics)
    count = event.usage.completion_tokens
    return InferenceResponse(request.request_id, "Success", event.text, event.token_ids, count, None, metrics)


def _failure(request: InferenceRequest, why: str) -> Answer:
    if request.stream:
        return StreamChunk(request.request_id, "Error", None, None, why, None)
    return InferenceResponse(request.request_id, "Error", None, None, 0, why, NO_METRICS)


def _metrics(metrics: RequestMetrics) -> InferenceMetrics:
    return InferenceMetrics(
        round(metrics.prefill_ms),
        round(metrics.decode_ms),
        round(metrics.queue_ms),
        metrics.batch_size,
        metrics.tokens_per_second,
        metrics.decode_iterations,
    )
