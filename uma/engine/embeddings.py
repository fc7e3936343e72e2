"""Embeddings and rankings on Trio's side: requests are checked, tokenized, and computed by the decode thread as jobs.
Their context is made with the first request, in a thread, so that a model that only generates needs none. Belongs to
the Trio thread that opened the engine.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TypeVar

import attrs
import trio

from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.engine.delivery.mailbox import Reply
from uma.engine.intake.overload import full_queue_retry_ms, is_full
from uma.engine.intake.prompt import LANE_SHARE, PromptReader
from uma.engine.intake.texts import TextReader
from uma.engine.ledger import Ledger
from uma.engine.worker.embedding import EmbedJob
from uma.engine.worker.loop import DecodeWorker
from uma.errors import BadRequest, ConfigError, ModelUnusable, Overloaded, ShuttingDown, UmaError
from uma.llama.context import Context, ContextParams
from uma.metrics import EngineMetrics
from uma.net.client import CLIENT, ORIGIN, span_of
from uma.types import Embeddings, EmbedRequest, Ranked, Ranking, RerankRequest, warnings_of_empty

R = TypeVar("R", EmbedRequest, RerankRequest)
A = TypeVar("A", Embeddings, Ranking)

NO_CLASSIFIER = (
    "this model has no classifier to rank documents with; load a reranker. One that answers yes or no, such as "
    "Qwen3-Reranker, has its classifier in files that llama.cpp's own convert_hf_to_gguf.py has made, which keeps the "
    "weights of both words; where another tool made the file, convert the model again"
)
MAX_OPEN_BYTES = 64 * 2**20
"""Maximum size of tokens and results of all requests in progress: further ones are refused as overload."""


@attrs.frozen
class Embedded:
    """A finished request for embeddings or a ranking."""

    request: EmbedRequest | RerankRequest
    origin: str
    traceparent: str
    """Trace parent as `net.client.span_of` has it."""
    prompt_tokens: int | None
    """Tokens of all its texts; None: it was refused, failed or cancelled."""
    error: str
    """Code of the error that refused or failed it; else empty."""
    began_at: float
    """Seconds since 1970, as the next."""
    ended_at: float


class EmbedService:
    """Answers requests for embeddings and rankings."""

    def __init__(
        self,
        config: RuntimeConfig,
        context: Context,
        ledger: Ledger,
        prompts: PromptReader,
        worker: DecodeWorker,
        metrics: EngineMetrics,
    ) -> None:
        self._config = config
        self._model = context.model
        self._ledger = ledger
        self._worker = worker
        self._metrics = metrics
        self._texts = TextReader(context.model, prompts)
        self._pooling = sizing.pooling(context.model.shape, config)
        self._max_request_tokens = sizing.max_request_tokens(context)
        self.on_over: Callable[[Embedded], None] | None = None
        """Called with each finished request, however it ended."""
        self._lock = trio.Lock()
        self._context: Context | None = None
        self._own_context: Context | None = None
        """Context that was made here, to be closed."""
        self._is_closed = False
        if not context.model.is_causal:
            self._use(context)
        self._next_key = 1
        self._open: dict[EmbedJob, tuple[int, Hashable]] = {}
        """Jobs in progress, with the bytes of their tokens and results, and their clients."""

    def close(self) -> None:
        """Free the context, once the decode thread has ended."""
        self._is_closed = True
        if self._own_context is not None:
            self._own_context.close()

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """See `types.Source.embed`."""
        return await self._reported(request, self._embed, lambda found: sum(found.prompt_tokens))

    async def rerank(self, request: RerankRequest) -> Ranking:
        """See `types.Source.rerank`."""
        return await self._reported(request, self._rerank, lambda ranking: ranking.prompt_tokens)

    async def _reported(self, request: R, compute: Callable[[R], Awaitable[A]], tokens_of: Callable[[A], int]) -> A:
        """Call `compute`, and report the end of the request to `on_over`."""
        began_at, tokens, code = time.time(), None, ""
        try:
            found = await compute(request)
            tokens = tokens_of(found)
        except UmaError as error:
            code = error.code
            raise
        finally:
            if self.on_over is not None:
                span = span_of(request.metadata)
                self.on_over(Embedded(request, ORIGIN.get(), span, tokens, code, began_at, time.time()))
        return found

    async def _embed(self, request: EmbedRequest) -> Embeddings:
        width = self._model.n_embedding
        if self._pooling == "rank":
            raise BadRequest.at("texts", "this model ranks documents and gives no embeddings; ask it to rerank")
        if request.dimensions is not None and request.dimensions > width:
            raise BadRequest.at(
                "dimensions", f"{request.dimensions:,} is over the {width:,} that this model's embeddings have"
            )
        count = len(request.texts or request.token_ids or ())
        self._check_load(count * width * 4, request.priority)
        longest = sizing.max_text_tokens(await self._ready())
        if request.texts is not None:
            texts = await self._texts.read(
                request.texts, longest, lane=request.priority, takes_empty=not request.fail_on_empty
            )
        else:
            texts = await self._texts.check_ids(request.token_ids or (), longest, lane=request.priority)
        vectors: Iterable[array[float]] = ()
        if some := [text for text in texts if text]:
            job = await self._run(
                some, count * width * 4, request.priority, dimensions=request.dimensions, normalize=request.normalize
            )
            vectors = job.vectors
        following = iter(vectors)
        every = tuple(next(following) if text else None for text in texts)
        return Embeddings(request.id, every, tuple(map(len, texts)), warnings_of_empty(every))

    async def _rerank(self, request: RerankRequest) -> Ranking:
        if self._pooling != "rank":
            raise BadRequest.at("query", NO_CLASSIFIER)
        self._check_load(0, request.priority)
        longest = sizing.max_text_tokens(await self._ready())
        pairs = await self._texts.read_pairs(request.query, request.documents, longest, lane=request.priority)
        job = await self._run(pairs, len(pairs) * 4, request.priority, dimensions=1, normalize=False)
        scores = [vector[0] for vector in job.vectors]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
        return Ranking(request.id, tuple(Ranked(index, scores[index]) for index in order), sum(map(len, pairs)))

    async def _run(
        self, texts: list[array[int]], size_bytes: int, lane: int, *, dimensions: int | None, normalize: bool
    ) -> EmbedJob:
        """Have the decode thread compute a job. A cancelled call ends it with the running batch."""
        size_bytes += sum(4 * len(text) for text in texts)
        self._check_load(size_bytes, lane)  # others came meanwhile
        done = Reply(self._worker.mailbox, None)
        key, self._next_key = self._next_key, self._next_key + 1
        job = EmbedJob(
            key,
            lane,
            texts,
            lambda: done.give(None),
            dimensions=dimensions,
            normalize=normalize,
        )
        self._open[job] = size_bytes, CLIENT.get()
        self._metrics.embed_requests_total += 1
        self._worker.embed(job)
        try:
            await done.wait()
        finally:
            del self._open[job]
            if not done.is_given.is_set():
                self._worker.end_embedding(job)
        if job.error is not None:
            raise job.error
        return job

    def _check_load(self, size_bytes: int, lane: int) -> None:
        waiting, limit = len(self._open), self._config.max_queue
        spare = all(client != CLIENT.get() for _, client in self._open.values())  # one client fills it for no other
        if is_full(lane, waiting, waiting, limit, is_first=spare):
            retry_ms = full_queue_retry_ms(waiting, limit, self._metrics.service_ms_ewma, 1)
            raise Overloaded(
                f"the queue is full: {waiting:,} requests wait for embeddings (max_queue is {limit:,})",
                retry_after_ms=retry_ms,
            )
        held_bytes = sum(n_bytes for n_bytes, _ in self._open.values())
        # A single request is always accepted: it has limits of its own.
        if held_bytes and held_bytes + size_bytes > (LANE_SHARE[lane] + spare) * MAX_OPEN_BYTES:
            raise Overloaded(
                f"too many embeddings are being computed: {held_bytes:,} bytes of texts and results are held for them",
                retry_after_ms=full_queue_retry_ms(waiting, limit, self._metrics.service_ms_ewma, 1),
            )

    async def _ready(self) -> Context:
        """The context, made if needed; not on the decode thread, where streams would wait for it."""
        async with self._lock:
            if self._context is None:
                try:
                    params = self._params(self._config, self._ledger)
                except ConfigError as error:
                    raise ModelUnusable(f"{error.message}{await trio.to_thread.run_sync(self._enough)}") from None
                with self._ledger.promised(self._model.shape, params):
                    self._own_context = await trio.to_thread.run_sync(Context, self._model, params)
                if self._is_closed:
                    self._own_context.close()
                    raise ShuttingDown("the engine is stopping")
                self._use(self._own_context)
            assert self._context is not None
            return self._context

    def _params(self, config: RuntimeConfig, ledger: Ledger) -> ContextParams:
        return sizing.embed_params(self._model.shape, config, ledger.kv_bytes, self._max_request_tokens)

    def _enough(self) -> str:
        """Advice for settings that leave memory for texts. Any thread."""
        shape = self._model.shape

        def plan(memory: int) -> None:
            config = attrs.evolve(self._config, memory=memory)
            ledger = Ledger(config, shape)
            with ledger.promised(shape, ledger.context_params()):
                ledger.promise_cache()
                self._params(config, ledger)

        if self._config.memory and (enough := sizing.enough_mb(self._config.memory, plan)):
            return f"; --memory {enough} is enough, or a smaller --n-ctx"
        return "; a smaller --n-ctx leaves some, or end other programs"

    def _use(self, context: Context) -> None:
        self._context = context
        self._worker.use_embedder(context)
