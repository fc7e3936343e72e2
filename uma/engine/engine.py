"""The engine on Trio's side: one model, one decode thread, any number of requests.

This is the facade: a request is checked and tokenized (`intake`), becomes a `Sequence` (`submission`), and goes to the
decode thread (`worker`); its events come back through the mailbox into its own stream (`delivery`). Everything here
belongs to the Trio thread that opened the engine.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import attrs
import trio

from uma.config import RuntimeConfig
from uma.contracts.blocks import Algorithm
from uma.contracts.card import DEFAULT_BLOCK_SIZE
from uma.engine import sizing
from uma.engine.activity import activity_of, explained
from uma.engine.adapters import AdapterSet, AdapterSets, check_beginning
from uma.engine.clock import now_ms
from uma.engine.decisions import DecisionService
from uma.engine.delivery.answers import AnswerPort
from uma.engine.delivery.mailbox import Mailbox, Reply
from uma.engine.delivery.parsed import ParsedStream
from uma.engine.delivery.stream import RequestStream
from uma.engine.embeddings import Embedded, EmbedService
from uma.engine.info import server_info
from uma.engine.intake.chat import ChatAbilities
from uma.engine.intake.compaction import Summaries
from uma.engine.intake.constraints import Constraints
from uma.engine.intake.decision_prompt import DecisionReader
from uma.engine.intake.gate import Gate, check_features, check_prompt
from uma.engine.intake.pictures import PicturePrompt, PictureReader
from uma.engine.intake.prompt import PromptReader
from uma.engine.intake.relaxed_tools import RelaxedRequest
from uma.engine.intake.trained_form import unsupported_kind
from uma.engine.intake.truncation import Cut
from uma.engine.kv.disk import DiskTier
from uma.engine.kv.events import KvListener
from uma.engine.kv.feed import BlockLedger, KvFeed
from uma.engine.kv.pool import KvPool
from uma.engine.kv.snapshots import Snapshot, SnapshotStore
from uma.engine.ledger import Ledger
from uma.engine.policy import Scheduler, Targets
from uma.engine.recorder import Recorder, Turns
from uma.engine.reproducible import ReproducibleContext
from uma.engine.submission import MAX_EXPLAINED, Over, Prepared, Preparing, Submission
from uma.engine.worker.loop import DecodeWorker, WorkerSettings, ended_by
from uma.engine.worker.sequence import PromptReport, Sequence
from uma.engine.worker.status import Status
from uma.errors import STOPPING, BadRequest, Ended, Overloaded, ShuttingDown, UmaError
from uma.llama.context import Context
from uma.llama.grammar import GrammarCompiler, GrammarState
from uma.llama.heads import PredictionHeads
from uma.llama.projector import Projector
from uma.llama.vocab import Vocab
from uma.media.fetch import Fetcher
from uma.media.files import check_count
from uma.metrics import EngineMetrics
from uma.net.client import OWNER
from uma.types import (
    Activity,
    DecisionRequest,
    Decisions,
    Embeddings,
    EmbedRequest,
    Explained,
    Health,
    HealthStatus,
    Ranking,
    Request,
    RerankRequest,
    ServerInfo,
    Tokenized,
)

PROBE_TIMEOUT_SEC = 10.0
"""Time (s) without a generated token after which a probed engine reports `stalled`."""


class Engine:
    """A model in this process, with the methods of `types.Source`. `open_engine` makes it."""

    def __init__(
        self,
        config: RuntimeConfig,
        context: Context,
        ledger: Ledger,
        disk: DiskTier | None,
        grammars: GrammarCompiler,
        draft: Context | None = None,
        heads: PredictionHeads | None = None,
        projector: Projector | None = None,
        *,
        adapters: AdapterSets,
    ) -> None:
        self.config = config
        self._adapters = adapters
        self.disk = disk
        self._chat = ChatAbilities(context.model)
        self._info = server_info(context, config, self._chat, ledger.kv_bytes, draft, projector, heads)
        self.max_request_tokens = sizing.max_request_tokens(context)
        """Maximum tokens, prompt and output together, of one request."""
        self._context = context
        self._metrics = EngineMetrics(kv_cells_total=context.n_ctx)
        self._metrics.cache.total_capacity = context.n_ctx
        self._is_draining = False
        self._fault: BaseException | None = None
        """Exception that has ended the engine."""
        self._pool = _make_pool(config, context, ledger.cache_bytes, None if disk is None else self._write_soon)
        # Last of what can raise: nothing would close its file descriptors.
        self.mailbox = Mailbox()
        scheduler = Scheduler(_targets(config, context))
        self._max_active = max_active = sizing.max_active(context, config)
        self.worker = DecodeWorker(
            context,
            self._pool,
            scheduler,
            self._metrics,
            self.mailbox,
            WorkerSettings(
                max_active=max_active,
                saves_at_end=disk is not None,
                speculate=sizing.speculate(context, config),
                draft=draft,
                heads=heads,
                projector=projector,
            ),
        )
        self._requests = Submission(config, self.worker, self._metrics)
        self._isolated = ReproducibleContext(
            config, context.model, ledger, self._info.limits.max_reproducible_tokens, self.worker.use_isolated
        )
        self._prompts = PromptReader(config, context.model, self.max_request_tokens)
        self._summaries = Summaries(self.max_request_tokens)
        self._pictures = None if projector is None else PictureReader(context, projector)
        self._fetcher = Fetcher()
        self._constraints = Constraints(context.model.vocab, grammars, sizing.grammars_at_once(context.params))
        self._embeddings = EmbedService(config, context, ledger, self._prompts, self.worker, self._metrics)
        self._probe: Reply[bool] | None = None
        """Last health probe: at most one is in progress, however many tasks ask."""
        self._gate = Gate(
            config,
            self._requests.open,
            self.worker,
            max_active,
            scheduler.cost,
            self._metrics,
        )
        self._decisions = DecisionService(
            DecisionReader(context.model, self._prompts, self._chat, self._pictures, self._with_files),
            self._prompts,
            self._requests,
            self._gate,
            self._isolated,
            context.model.vocab.eog_ids.tolist(),
            self._metrics,
            max_active,
            adapters,
        )

    # types.Source

    def __repr__(self) -> str:
        return f"<uma.Engine: {self._info.model.name}, {self._info.limits.n_ctx:,} tokens of context>"

    @property
    def info(self) -> ServerInfo:
        """See `types.Source.info`."""
        if not (fault := self.worker.draft_fault):
            return self._info
        capabilities = attrs.evolve(self._info.capabilities, speculation=f"none: {fault}")
        return attrs.evolve(self._info, capabilities=capabilities)

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[RequestStream | ParsedStream]:
        """See `types.Source.generate`. `BadRequest`, `PromptTooLarge`, `Overloaded`, `ShuttingDown` come on entry."""
        self._metrics.requests_total += 1
        spent = Preparing()
        try:
            with self._in_use():
                self._check_generates()
                check_features(request, self._max_active)
                adapters = self._adapters.asked(request.model, request.lora)
                sent = request
                cut, request, prompt = await self._prompt(sent, spent)
                asked, tokens, pictures, ends = cut.request, prompt.tokens, prompt.pictures, prompt.message_ends
                check_beginning(tokens, adapters)
                if pictures:  # requests that wait do not keep their files in memory
                    sent = sent.with_media(())
                spent.on("prepare")
                self._prompts.check_fits(len(tokens))
                check_prompt(request.sampling, len(tokens))
                report = await self._report(request)
                bias = self._constraints.bias(request.sampling)
                relaxed, grammar, forced = await self._grammar(asked, tokens)
                spent.on("grammar")
                most_tokens = self.max_request_tokens
                if request.sampling.reproducible:
                    await self._isolated.ready_for(len(tokens))
                    most_tokens = self._isolated.max_tokens
                elif request.cache_prompt:
                    await self._fetch_from_disk(tokens, adapters)
                    spent.on("disk")
                is_checkpointed = not (pictures or self._pool.cells.can_be_cut or request.sampling.reproducible)
                if is_checkpointed:
                    ends = await self._prompts.message_ends(request, tokens)
                spent.on("prepare")
                # Other requests have come meanwhile. Nothing awaits from here on, so these checks stay true.
                self._check_open()
                self._gate.check_queue(request.priority)
                self._gate.check_deadline(request, len(tokens))
                adapters = self._adapters.numbered(adapters, self._requests.adapters, self.worker.forget_adapters)
        except (UmaError, trio.Cancelled) as why:
            self._note_unqueued(request, spent, why)
            raise
        # A copy for the parser: the decode thread appends generated tokens to `tokens`.
        parsed = tokens[:] if self._chat.is_parsed(asked) else None
        left_out, of_cut = cut.told()
        warnings = (*of_cut, *self._chat.warnings(asked), *relaxed.warnings)
        bounds_thinking = self._chat.bounds_thinking(relaxed.request, tokens)
        stream = self._requests.submit(
            Prepared(
                request,
                sent,
                tokens,
                most_tokens,
                adapters,
                grammar,
                forced,
                bias,
                report,
                self._chat.spellings(asked),
                bounds_thinking,
                warnings,
                ends,
                pictures,
                left_out,
                spent.by_cause,
            )
        )
        stream.ignored = relaxed.dropped_keywords
        try:
            yield stream if parsed is None else self._parsed(relaxed.request, parsed, stream)
        finally:
            stream.abandon()

    def _note_unqueued(self, request: Request, spent: Preparing, why: UmaError | trio.Cancelled) -> None:
        """Count a request that was refused, or whose reader left, before it was queued."""
        if isinstance(why, UmaError):
            self._metrics.requests_rejected += 1
            self._metrics.requests_overloaded += isinstance(why, Overloaded)
        else:
            self._metrics.requests_withdrawn += 1
        self._requests.refused(request, spent.so_far_ms, why.code if isinstance(why, UmaError) else "")

    async def _prompt(self, sent: Request, spent: Preparing) -> tuple[Cut, Request, PicturePrompt]:
        """The request without turns that do not fit, the same as its template can render it, and its prompt."""
        request = await self._prompts.rewritten(self._chat.prepared, sent)
        self._gate.check_queue(request.priority)
        prompt = await self._read(request, sent)
        cut = await self._prompts.cut(sent, self._chat.prepared, len(prompt.tokens), prompt.file_tokens)
        if cut.gone:
            if sent.truncation == "compact":
                spent.on("prepare")
                cut = await self._summaries.compacted(cut, sent, self.generate)
                spent.on("summary")
            request = await self._prompts.rewritten(self._chat.prepared, cut.request)
            prompt = await self._read(request, cut.request)
        if prompt.pictures:  # their files are in the ids
            request, cut = request.with_media(()), attrs.evolve(cut, request=cut.request.with_media(()))
        return cut, request, prompt

    async def _read(self, request: Request, asked: Request) -> PicturePrompt:
        """The prompt of a request; `request` is `asked` as its template can render it."""
        first = len(request.messages or ()) - len(asked.messages or ())
        if not any(request.placed_media()):
            return PicturePrompt(await self._prompts.read(request, must_fit=asked.truncation == "off"))
        request = await self._with_files(request, first)
        assert self._pictures is not None
        return await self._prompts.read_pictures(partial(self._pictures.read, first=first), request)

    async def _with_files(self, request: Request, first: int = 0) -> Request:
        """The request with files in place of URLs. Raises `BadRequest` for files that it must not name."""
        if self._pictures is None:
            place, _ = next(request.placed_media(first))
            raise BadRequest.at(
                place.removesuffix("[0]").removesuffix(".media"),
                "this model does not support image or audio "
                "input; leave them out, or ask a model that has a projector (an mmproj file)",
            )
        check_count(request)
        for field, media in request.placed_media(first):
            if media.path is not None:
                raise BadRequest.at(
                    f"{field}.path", "only a client of the server's socket can name its file; send data"
                )
            if media.url is not None and not self.info.capabilities.media_urls:
                raise BadRequest.at(f"{field}.url", "this server fetches nothing (--media-urls); send data")
        return await self._fetcher.fetched(request, first)

    async def _grammar(
        self, request: Request, tokens: array[int]
    ) -> tuple[RelaxedRequest, GrammarState | None, list[int]]:
        """Relaxed tools, initial state of the grammar, and the tokens that it forces there."""
        relaxed = self._chat.known_relaxed(request)
        try:
            return (relaxed, *await self._compiled(relaxed.request, tokens))
        except BadRequest:
            tried, relaxed = relaxed, await self._chat.relaxed(request, self._constraints.serves)
            if relaxed.dropped_keywords == tried.dropped_keywords:
                raise
        return (relaxed, *await self._compiled(relaxed.request, tokens))

    async def _compiled(self, request: Request, tokens: array[int]) -> tuple[GrammarState | None, list[int]]:
        sampling = await self._chat.constrained(request, tokens)
        before = await self._chat.before_grammar(request, tokens)
        compiled = partial(self._constraints.grammar, lane=request.priority)
        try:
            return await compiled(sampling, before)
        except BadRequest as error:
            if sampling is request.sampling:
                raise
            raise await self._chat.blame(request, error, compiled) from None

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """See `types.Source.embed`."""
        with self._in_use():
            self._adapters.check_none(request.model)
            return await self._embeddings.embed(request)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """See `types.Source.rerank`."""
        with self._in_use():
            self._adapters.check_none(request.model)
            return await self._embeddings.rerank(request)

    async def decide(self, request: DecisionRequest) -> Decisions:
        """See `types.Source.decide`."""
        with self._in_use():
            self._check_generates()
            if kind := unsupported_kind(self._context.model.header):
                raise BadRequest(
                    f"{self.info.model.name} is a decision model ({kind}), whose own form is not supported; ask a chat "
                    "model (an instruct GGUF), which needs no training for decisions"
                )
            return await self._decisions.decide(request)

    async def tokenize(self, request: Request, *, pieces: bool = False) -> Tokenized:
        """See `types.Source.tokenize`."""
        with self._in_use():
            asked, request = request, await self._prompts.rewritten(self._chat.prepared, request)
            if not any(request.placed_media()):
                return await self._prompts.explain(request, pieces=pieces)
            tokens = (await self._read(request, asked)).tokens
            ids = array("i", (max(-1, token) for token in tokens))
            return await self._prompts.explained(request, ids, pieces=pieces)

    async def tokenize_rendered(self, text: str) -> tuple[int, ...]:
        """Token ids of a text to which another program has applied a chat template, for a request's `token_ids`."""
        with self._in_use():
            return await self._prompts.read_rendered(text)

    async def health(self, *, probe: bool = True) -> Health:
        """See `types.Source.health`. Concurrent probes share one; without an answer in time the status is `stalled`."""
        if not probe or self._is_draining:
            return Health(self.status, 0.0, 0, paused_sec=self.worker.paused_sec)
        began, asked = now_ms(), self._probe
        if asked is None or asked.is_given.is_set():
            asked = self._probe = Reply(self.mailbox, False)
            self.worker.probe(asked.give)
        with trio.move_on_after(PROBE_TIMEOUT_SEC):
            await asked.wait()
        status: HealthStatus = self.status if asked.value else "stalled"
        took_ms = round(now_ms() - began, 3)
        return Health(status, took_ms, int(asked.value), paused_sec=self.worker.paused_sec)

    async def metrics(self) -> dict[str, Any]:
        """See `types.Source.metrics`."""
        await trio.lowlevel.checkpoint()
        return self.snapshot()

    async def activity(self, id: str = "") -> Activity:
        """See `types.Source.activity`."""
        await trio.lowlevel.checkpoint()
        return activity_of(self._running, now_ms(), self._max_active, id)

    async def explain(self, id: str = "") -> Explained:
        """See `types.Source.explain`. A task asks about requests of its own `net.client.OWNER`."""
        await trio.lowlevel.checkpoint()
        account = self._requests.account(id, OWNER.get())
        if account is None:
            which = f"none of yours with the id {id!r}" if id else "none of yours"
            raise BadRequest.at("request", f"{which} runs, or is one of the last {MAX_EXPLAINED:,}")
        return explained(account, self._running, now_ms(), self._max_active, self._context.model.vocab.piece)

    async def record(self, seconds: float) -> Recorder:
        """Record what the engine's threads do for `seconds`. Raises as `recording`."""
        with self.recording() as recorder:
            await trio.sleep(seconds)
        return recorder

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record every thread of the engine in this block. Raises `BadRequest` if a trace is being recorded already."""
        if self.mailbox.recorder is not None:
            raise BadRequest.at("type", "a trace is on already; wait for its end")
        recorder = Recorder()
        turns = Turns(recorder)
        self._tell(recorder)
        trio.lowlevel.add_instrument(turns)
        try:
            yield recorder
        finally:
            trio.lowlevel.remove_instrument(turns)
            self._tell(None)
            recorder.close()

    def _tell(self, recorder: Recorder | None) -> None:
        self.mailbox.recorder = self._prompts.recorder = recorder
        self.worker.record(recorder)

    @property
    def _running(self) -> list[Sequence]:
        return [sequence for sequence in self._requests.open if sequence.status is not Status.ENDED]

    def on_request_over(self, listener: Callable[[Over], None]) -> None:
        """Call `listener` on the Trio thread with each request that ends from now on."""
        self._requests.on_over.append(listener)

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary, which any thread can read."""
        return self._context.model.vocab

    def on_embedded(self, listener: Callable[[Embedded], None]) -> None:
        """Call `listener` with each request for embeddings or a ranking that ends from now on."""
        self._embeddings.on_over = listener

    async def pause(self, seconds: float) -> None:
        """Compute nothing for `seconds` from now on; 0: go on. Running requests stand still, and new ones wait."""
        self.worker.pause(seconds)

    def yield_memory(self) -> None:
        """Drop half of the prefixes in host memory, for other programs."""
        self.worker.yield_memory()

    async def end_request(self, number: int) -> bool:
        """End the request with this `RunningRequest.number`, with all its answers; its reader gets `Ended`.

        Returns whether there was one.
        """
        found = next((sequence for sequence in self._requests.open if sequence.key == number), None)
        if found is None or found.status is Status.ENDED:
            return False
        found.stream.fail(Ended("the request was ended by the user that the server belongs to"))
        return True

    def streams_of(self, user: int) -> dict[str, RequestStream | AnswerPort]:
        """Streams of this user's open requests that came over a Unix socket, by request id, to be ended."""
        return {sequence.request.id: sequence.stream for sequence in self._requests.open if sequence.user == user}

    def snapshot(self) -> dict[str, Any]:
        """The metrics now, without waiting for anything."""
        self.worker.read_gauges()
        if self.disk is not None:
            self._metrics.cache.disk_drops = self.disk.dropped
        return self._metrics.snapshot()

    def listen_to_kv(self, listener: KvListener) -> None:
        """Call `listener` with every prefix that can be reused here, the present ones first. See `kv.events`."""
        self.worker.listen(listener)

    def kv_events(
        self, block_size: int = DEFAULT_BLOCK_SIZE, algorithm: Algorithm = "xxh3", *, skip: int = 0
    ) -> KvFeed:
        """Prefixes that can be reused here, as blocks of `block_size` tokens: the present ones, and every change.

        The first `skip` tokens of each sequence are in no block. Each call makes a new feed, which lasts as long as the
        engine: keep it, and ask it for `changes`.
        """
        feed = KvFeed(self.mailbox.call)
        self.listen_to_kv(BlockLedger(block_size, algorithm, feed.post, skip=skip))
        self.worker.commands.call(feed.begin)
        return feed

    def inspect_kv(self, look: Callable[[Iterable[array[int]]], None]) -> None:
        """Call `look`, on the decode thread between two batches, with the tokens of all that cells and memory hold.

        A function posted to a feed within that call is run when the feed's log has reached exactly this moment.
        """
        self.worker.commands.call(lambda: look(self._pool.held()))

    # Draining

    @property
    def status(self) -> HealthStatus:
        """`ok`, or `draining` once the end has begun."""
        return "draining" if self._is_draining else "ok"

    def begin_drain(self) -> None:
        """Accept no more requests; running ones go on, also if the engine is paused."""
        self._is_draining = True
        self.worker.pause(0)

    def has_failed(self, fault: BaseException) -> None:
        """Refuse every request from now on, because a part of the engine has ended with this exception."""
        self._fault = fault
        self.begin_drain()

    def _check_open(self) -> None:
        if self._fault is not None:
            raise ended_by(self._fault)
        if self._is_draining:
            raise ShuttingDown(STOPPING)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the model in memory for the block, because threads read it: a task can outlive the engine."""
        self._check_open()
        model = self._context.model
        model.retain()
        try:
            yield
        except ValueError:  # a closed model refuses new objects
            self._check_open()
            raise
        finally:
            model.release()

    def _check_generates(self) -> None:
        if not self._context.model.is_causal:
            raise BadRequest(
                f"{self.info.model.name} is an encoder ({self.info.model.architecture}): it embeds text and does not "
                "generate; ask for embeddings, or load another model"
            )

    def close(self) -> None:
        """Free what this object has made, once the decode thread has ended."""
        self._embeddings.close()
        self._isolated.close()
        if self._pictures is not None:
            self._pictures.close()

    # Between Trio's and the decode thread

    def _write_soon(self, snapshot: Snapshot) -> None:
        """Have a snapshot written to disk. Called on the decode thread."""
        assert self.disk is not None
        self.mailbox.call(partial(self.disk.enqueue, snapshot))

    async def _fetch_from_disk(self, tokens: array[int], adapters: AdapterSet) -> None:
        tokens = adapters.key(tokens)
        if self.disk is None or not adapters.is_named or not self.disk.offers(tokens):
            return
        snapshot = await self.disk.fetch(tokens, await self._count_known(tokens))
        if snapshot is not None:
            self.worker.preload(snapshot)

    async def _count_known(self, tokens: array[int]) -> int:
        """How many of `tokens` cells or memory hold already, as the decode thread answers between two ticks."""
        self._check_open()  # a stopped thread would never answer
        known = Reply(self.mailbox, 0)
        self.worker.count_known(tokens, known.give)
        return await known.wait()

    async def _report(self, request: Request) -> PromptReport | None:
        sampling = request.sampling
        if not sampling.echo and sampling.prompt_logprobs is None:
            return None
        return PromptReport(await self._prompts.text(request), sampling.prompt_logprobs)

    def _parsed(self, request: Request, prompt: array[int], stream: RequestStream) -> ParsedStream:
        return ParsedStream(stream, request, lambda: self._chat.parser(request, prompt), self._chat.piece)


def _make_pool(
    config: RuntimeConfig, context: Context, cache_bytes: int, on_added: Callable[[Snapshot], None] | None
) -> KvPool:
    store = SnapshotStore(cache_bytes, on_added=on_added)
    return KvPool(context, store, cache_cells=sizing.cache_cells(context, config))


def _targets(config: RuntimeConfig, context: Context) -> Targets:
    return Targets(
        config.tick_budget_ms,
        context.n_batch,
        config.start_target_tokens,
        config.slo_ttft_ms,
        sizing.solo_tokens(context),
        mixes_prompts=context.params.kv_unified,
        has_flash_attention=context.params.flash_attn != "off",
    )
