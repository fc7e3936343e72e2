"""The decode thread: it owns the context, and turns plans into tokens.

Each turn of its loop is one tick: take commands, ask the policy for a plan, compute it, deliver the results, and go on
at once. `llama_decode` runs without the GIL, so frames are written while it computes. No other thread touches the
context, the pool or a submitted `Sequence`, except to read single numbers.

    commands.take() ─▶ policy.plan(state) ─▶ executor.run(tick) ─▶ output ─▶ outbox
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable

import attrs

from uma.config import Speculate
from uma.engine.clock import now_ms
from uma.engine.delivery.mailbox import Mailbox
from uma.engine.delivery.outbox import Outbox
from uma.engine.kv.events import KvListener
from uma.engine.kv.pool import KvPool
from uma.engine.kv.snapshots import Snapshot
from uma.engine.policy import Plan, Scheduler
from uma.engine.recorder import DECODE, Recorder
from uma.engine.worker.account import PAUSED, Instruments, Totals
from uma.engine.worker.commands import Commands
from uma.engine.worker.drafts.drafter import Drafter
from uma.engine.worker.drafts.head_drafter import HeadDrafter
from uma.engine.worker.drafts.lookup import LookupDrafter
from uma.engine.worker.drafts.model_drafter import ModelDrafter
from uma.engine.worker.drafts.speculator import Speculator
from uma.engine.worker.embedding import Embedder, EmbedJob
from uma.engine.worker.executor import Executor, Result, Tick
from uma.engine.worker.output import Output
from uma.engine.worker.pictures import Encoder
from uma.engine.worker.reproducer import Reproduced, Reproducer
from uma.engine.worker.runner import ModelRunner, Probes
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.slots import PATIENCE_MS, Slots
from uma.engine.worker.status import Status
from uma.errors import InternalError, ShuttingDown, UmaError
from uma.llama import devices
from uma.llama.context import Context
from uma.llama.grammar import GrammarDelayedError
from uma.llama.heads import PredictionHeads
from uma.llama.projector import Projector
from uma.metrics import EngineMetrics

IDLE_SEC = 0.25
"""Idle time (s) before cached sequences are copied to snapshots: a follow-up request comes sooner, or much later."""


_log = logging.getLogger("uma.engine")


def ended_by(fault: BaseException) -> InternalError:
    """The error of every request after an exception that ends the engine."""
    return InternalError(f"a fault ended the engine ({type(fault).__name__}: {fault})")


@attrs.frozen(kw_only=True)
class WorkerSettings:
    """Settings of a decode thread."""

    max_active: int
    """Maximum sequences that run at once."""
    saves_at_end: bool
    """Cached prefixes become snapshots at the end, for the disk tier."""
    speculate: Speculate = "off"
    draft: Context | None = None
    """The draft model's context."""
    heads: PredictionHeads | None = None
    """The model's own prediction head."""
    projector: Projector | None = None
    """What makes embeddings of pictures."""


class DecodeWorker:
    """The decode thread: `run`. Methods under "Any thread", and `commands`, can be called from any thread."""

    def __init__(
        self,
        context: Context,
        pool: KvPool,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        mailbox: Mailbox,
        settings: WorkerSettings,
    ) -> None:
        self._context = context
        self._pool = pool
        self._scheduler = scheduler
        self.mailbox = mailbox
        """The way to the Trio thread."""
        self._metrics = metrics
        self._saves_at_end = settings.saves_at_end
        vocab = context.model.vocab
        self.totals = Totals()
        """Where its time went. Any thread can read it."""
        self._instruments = instruments = Instruments(metrics, self.totals)
        self.commands = Commands()
        self._outbox = Outbox(mailbox.post, waits=not context.returns_early)
        self._output = Output(vocab, metrics, self._outbox)
        self._slots = Slots(
            vocab,
            pool,
            settings.max_active,
            scheduler.cost,
            self._output,
            self._outbox,
            instruments,
            has_adapters=bool(context.model.adapters),
        )
        self._runner = ModelRunner(
            context, pool, scheduler.cost, self._outbox, self.commands, instruments, settings.projector
        )
        self._encoder = Encoder(settings.projector, self._slots, instruments)
        self._executor = Executor(context, pool, self._runner, self._slots, metrics)
        threads = self._runner.compute_threads.before_batch
        self._guessing: list[ModelDrafter | HeadDrafter] = []
        """Drafters that compute."""
        if settings.draft is not None:
            self._guessing.append(ModelDrafter(settings.draft, vocab, threads, metrics))
        if settings.heads is not None:
            self._guessing.append(HeadDrafter(settings.heads, threads, metrics))
        drafters: list[Drafter] = [] if settings.speculate == "mtp" else [LookupDrafter(vocab)]
        drafters += self._guessing
        self._speculator = Speculator(scheduler.cost, pool, context, settings.speculate, drafters, metrics)
        if settings.speculate != "off":
            self._runner.should_end_stride = self._speculator.should_end_stride
        self._probes = Probes(self._runner, metrics)
        self._embedder = Embedder(scheduler.embeds, threads, metrics)
        self._reproducer = Reproducer(self._slots, threads, instruments)
        self._is_ahead = False
        """Whether streams decoded ahead in the last tick, to cover work beside it."""
        self._is_stopping = False
        self._paused_until_ms = 0.0
        self.has_failed = False
        """Whether an exception has ended the thread. Any thread can read it."""

    # Any thread

    def stop(self) -> None:
        """End everything with `ShuttingDown`, then the thread; a running batch is aborted."""
        self.commands.call(self._stop)
        self._context.request_abort()
        for drafter in self._guessing:
            drafter.abort()
        self._embedder.abort()
        self._reproducer.abort()

    def _stop(self) -> None:
        self._is_stopping = True

    def pause(self, seconds: float) -> None:
        """Compute nothing for `seconds` from now on; 0: go on. Commands, cancels among them, are still taken."""
        until_ms = now_ms() + 1000 * seconds
        self.commands.call(lambda: setattr(self, "_paused_until_ms", until_ms))

    def yield_memory(self) -> None:
        """Give half of the memory for cached prefixes back to the system: those that are worth least."""
        self.commands.call(self._pool.store.halve)

    @property
    def paused_sec(self) -> float:
        """Seconds until the pause ends; 0: none."""
        return max(0.0, self._paused_until_ms - now_ms()) / 1000

    def record(self, recorder: Recorder | None) -> None:
        """Send this recorder, from now on, a span of all that the thread does; None: no longer."""
        self._instruments.recorder = recorder

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence, without waking the thread: call `commands.wake` once for all that come in one burst."""
        # Not a wakeup for each: the first of a burst was then read alone, and the others in the batch behind it.
        self._runner.canceller.submitted(sequence)
        self.commands.add(lambda: self._take(sequence), lambda error: self._refuse(sequence, error))

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence with a `Finished` of reason `cancelled`, between two ticks, and abort a batch that computes
        nothing else. One that has ended is ignored.
        """
        canceller = self._reproducer if sequence.is_reproducible else self._runner.canceller
        canceller.cancel(sequence)
        self._command(sequence, lambda: self._take_cancel(sequence))

    def credit(self, sequence: Sequence, events: int) -> None:
        """Add space for `events` more events at a sequence's reader. It ends a stride only for a parked sequence: a
        running one has as much credit as its stride has steps.
        """
        is_parked = sequence.status is Status.PARKED
        self._command(sequence, lambda: self._slots.credit(sequence, events), ends_stride=is_parked)

    def end_thinking(self, sequence: Sequence) -> None:
        """Close a sequence's thinking with its next token."""
        self._command(sequence, sequence.end_thinking)

    def _command(self, sequence: Sequence, act: Callable[[], object], *, ends_stride: bool = True) -> None:
        """Post a command for one sequence. If it fails, only this sequence ends, or nothing if that has ended."""

        def fail(error: UmaError) -> None:
            if sequence in self._slots.all:
                self._slots.fail(sequence, error)

        self.commands.call(act, fail, ends_stride=ends_stride)

    def use_isolated(self, context: Context) -> None:
        """Compute requests that are to be reproducible in this context; call it before the first is submitted."""
        self.commands.call(lambda: self._reproducer.attach(context))

    def use_embedder(self, context: Context) -> None:
        """Compute embeddings in this context; call it before the first job."""
        self.commands.call(lambda: self._embedder.attach(context))

    def embed(self, job: EmbedJob) -> None:
        """Embed a request's texts, beside what is generated."""
        self.commands.call(lambda: self._embedder.add(job), job.refuse)

    def end_embedding(self, job: EmbedJob) -> None:
        """End a job at this tick boundary. One that has ended is ignored."""
        self.commands.call(lambda: self._embedder.end(job), job.refuse)

    def preload(self, snapshot: Snapshot) -> None:
        """Take in a snapshot that was read from disk. Without it these tokens are computed."""
        self.commands.call(lambda: self._pool.store.add(snapshot), lambda _: None)

    def forget_adapters(self, number: int) -> None:
        """Drop all prefixes of a set of LoRA adapters that no sequence uses, before a later submission begins."""
        self.commands.call(lambda: self._pool.forget_adapters(number), lambda _: None)

    def count_known(self, tokens: array[int], answer: Callable[[int], None]) -> None:
        """Call `answer`, on the decode thread, with how many of `tokens` are cached or run already."""
        self.commands.call(lambda: answer(self._pool.known_tokens(tokens)), lambda _: answer(0))

    def probe(self, answer: Callable[[bool], None]) -> None:
        """Call `answer`, on the decode thread, with True once a token was generated, or with False if none will be."""
        self.commands.call(lambda: self._probes.add(answer), lambda _: answer(False))

    def listen(self, listener: KvListener) -> None:
        """Call `listener` with all that cells and memory hold, and with every change."""
        self.commands.call(lambda: self._pool.listen(listener))

    @property
    def draft_fault(self) -> str:
        """See `Speculator.fault`."""
        return self._speculator.fault

    @property
    def active_count(self) -> int:
        """Sequences that have a slot now."""
        return len(self._slots.active)

    @property
    def used_cells(self) -> int:
        """KV cells in use now."""
        return self._pool.used_cells

    def read_gauges(self) -> None:
        """Update the gauges of the metrics. Each is a single number, read as it is at the moment."""
        metrics, pool = self._metrics, self._pool
        metrics.active_sequences = len(self._slots.active) + self._reproducer.running
        metrics.queued_requests = len(self._slots.all) - metrics.active_sequences
        metrics.kv_cells_used, metrics.kv_cells_share = pool.used_cells, pool.cells.max_seq_cells
        metrics.sequence_ids_used = pool.cells.used_ids
        metrics.paused_sec = round(self.paused_sec, 3)
        metrics.gpu_free_bytes = min((gpu.free_bytes for gpu in devices.gpus()), default=0)
        tree, store, cache = pool.tree, pool.store, metrics.cache
        cache.evictions = tree.evictions
        cache.protected_size, cache.total_cached = tree.protected_tokens, tree.total_tokens
        cache.evictable_size, cache.node_count = tree.total_tokens - tree.protected_tokens, tree.node_count
        cache.ram_bytes, cache.ram_snapshots = store.size_bytes + tree.checkpoint_bytes, len(store)
        cache.ram_hits, cache.ram_evictions = store.hits, store.evictions

    # The thread

    def run(self) -> None:
        """Tick until `stop`."""
        try:
            with self._runner.stall_watch.watching():
                self._tick_until_stopped()
            self._slots.end_all(ShuttingDown("the engine is stopping"))
            self._embedder.end_all(ShuttingDown("the engine is stopping"))
            # Not after a fault: what the cells hold then is not known.
            if self._saves_at_end:
                self._pool.save_all_cached()
        except BaseException as fault:
            self.has_failed = True
            _log.critical("the decode thread ends: a fault in the engine", exc_info=fault)
            error = ended_by(fault)
            self._slots.abandon_all(error)
            self._embedder.end_all(error)
            raise
        finally:
            self._probes.answer(is_alive=False)
            self._runner.sampling.close()
            self._reproducer.close()
            for drafter in self._guessing:
                drafter.close()
            self._pool.report_end()
            self._outbox.flush()

    def _refuse(self, sequence: Sequence, error: UmaError) -> None:
        """End a sequence whose submission was refused, or has failed."""
        if sequence in self._slots.all:
            self._slots.fail(sequence, error)
        else:
            self.mailbox.post([(sequence.stream, error, 0.0)], None)
            self._metrics.finished("error")

    def _tick_until_stopped(self) -> None:
        while not self._is_stopping:
            self._obey_all()
            if self._is_stopping:
                return
            had_work = self._turn()
            had_work = self._encode() or had_work
            if had_work and (self._slots.all or self._embedder):
                continue
            # Flush also where the last sequence has ended and others arrive: a burst's first waits for these events.
            self._outbox.flush()
            began = now_ms()
            self._rest()
            self._runner.compute_threads.was_idle(now_ms() - began)

    def _obey_all(self) -> None:
        """Obey all commands; while the engine is paused, do nothing else."""
        self._obey_waiting()
        while self.paused_sec and not self._is_stopping:
            self.totals.set_blocked_on(PAUSED, now_ms())
            self._outbox.flush()
            self._probes.answer(is_alive=True)  # without the pause it would generate
            began = now_ms()
            self.commands.wait(self.paused_sec)
            self._runner.compute_threads.was_idle(now_ms() - began)
            self._obey_waiting()
        if self.totals.blocked_on == PAUSED:
            self.totals.set_blocked_on("", now_ms())

    def _obey_waiting(self) -> None:
        for command in self.commands.take():
            try:
                command.act()
            # (An exception in `end_thinking` of one request ended the engine once.)
            except Exception as fault:
                if command.refuse is None:
                    raise
                _log.error("a command failed: a fault in the engine", exc_info=fault)
                command.refuse(InternalError(f"a fault ended this request ({type(fault).__name__}: {fault})"))

    def _turn(self) -> bool:
        """A tick, and all else that is done between two ticks but pictures; False if there was nothing."""
        had_work = self._tick()
        had_work = self._load() or had_work
        had_work = self._reproduce(is_alone=not had_work) or had_work
        if self._probes.waiting and not self._slots.is_decoding:
            self._probes.run()
        return had_work

    def _tick(self, *, is_before_piece: bool = False) -> bool:
        """Compute what the policy plans; False if there was nothing to compute. Before a piece of a picture no prompt
        is read.
        """
        began, computing_ms = now_ms(), self._computing_ms
        tick, has_preempted = self._next_tick(began, self._encode_ms if is_before_piece else 0.0)
        if tick.is_empty:
            return has_preempted
        for results in self._executor.run(tick):
            for result in results:
                self._give(result)
            self._outbox.flush_due(self._runner.began_ms)
        recorder = self._instruments.recorder
        if tick.plan.embed_tokens:
            embedding_ms = now_ms()
            self._outbox.flush()  # a batch of many tokens takes longer than any token can wait
            self._embedder.run(tick.plan.embed_tokens)
            if recorder is not None:
                recorder.span(DECODE, "embed", embedding_ms, now_ms())
        ended = now_ms()
        self._reproducer.turns.ticked(ended - began)
        self._metrics.outside_decode_ms_total += ended - began - (self._computing_ms - computing_ms)
        if recorder is not None:
            waiting = len(self._slots.all) - len(self._slots.active)
            recorder.span(DECODE, "tick", began, ended, steps=tick.plan.steps, waiting=waiting)
        return True

    @property
    def _computing_ms(self) -> float:
        """Total time in `llama_decode`, until now."""
        return self._metrics.decode_ms.sum + self._metrics.draft_model_ms_total

    def _load(self) -> bool:
        """Load a part of a prompt's beginning from a snapshot; False if there is none. In parts, because 516 MiB at
        once held up streams for 0.74 s.
        """
        if self._slots.load_ms > self._scheduler.encode_ms:
            self._outbox.flush()  # it takes longer than any token can wait
        return self._slots.load()

    def _reproduce(self, *, is_alone: bool) -> bool:
        """Compute a batch of the reproducible request; False if there was none to compute now."""
        began = now_ms()
        step = self._reproducer.step(is_alone=is_alone)
        if step and (recorder := self._instruments.recorder) is not None:
            recorder.span(DECODE, "reproducible", began, now_ms())
        if isinstance(step, Reproduced):
            self._give(Result([step.sequence], [step.given], step.at_ms))
        if step:
            self._outbox.flush()
        return bool(step)

    def _encode(self) -> bool:
        """Encode the next picture of a prompt, in turn with all else; False if there is none."""
        if self._encoder.next() is None:
            return False
        self._prepare_piece()
        return self._encoder.step(self._is_piece_over, self._between_pieces)

    def _is_piece_over(self, began_ms: float) -> bool:
        return self.commands.is_called or now_ms() - began_ms >= self._scheduler.encode_ms

    def _between_pieces(self) -> bool:
        """Do one turn of the loop, in the middle of a picture; False once the engine stops."""
        # Not a thread of its own: that would have compute threads of its own, and once a process has more of these
        # than there are cores, libgomp's barriers hardly spin, and decoding is slower.
        self._obey_all()
        if self._is_stopping:
            return False
        self._turn()
        self._prepare_piece()
        return True

    def _prepare_piece(self) -> None:
        """Have streams decode ahead of a piece of a picture, unless the last tick did so for this piece alone."""
        if self._is_beside_others or not self._is_ahead:
            self._tick(is_before_piece=True)
        self._outbox.flush()  # a piece takes longer than any token can wait

    def _give(self, result: Result) -> None:
        """Deliver the tokens of a step. An exception in one row's sampling or text ends only that sequence."""
        for sequence, given in zip(result.sequences, result.given, strict=True):
            if isinstance(given, GrammarDelayedError):
                self._park(sequence, given)
                continue
            if isinstance(given, Exception):
                self._slots.fail(sequence, given)
                continue
            try:
                reason = self._output.accept(sequence, given, result.at_ms)
                if reason is not None:
                    self._slots.finish(sequence, reason)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this row's alone)
                self._slots.fail(sequence, error)
        if self._probes.waiting and any(isinstance(given, tuple) for given in result.given):
            self._probes.answer(is_alive=True)

    def _park(self, sequence: Sequence, delay: GrammarDelayedError) -> None:
        """Take a row's slot until its grammar is compiled again; the other rows go on."""
        self._slots.park(sequence, now_ms())
        delay.renewed.add_done_callback(
            lambda _: self.commands.call(lambda: self._slots.credit(sequence, 0), lambda _: None)
        )

    def _next_tick(self, now: float, pause_ms: float) -> tuple[Tick, bool]:
        """The next tick, and whether a sequence was preempted for it."""
        plan = self._plan(now, pause_ms)
        active = self._slots.active
        tick = Tick(
            plan,
            decode=[active[key] for key in plan.decode],
            prefill=[(active[key], count) for key, count in plan.prefill],
            has_sets=self._slots.has_sets,
        )
        self._output.pace_ms = plan.pace_ms
        if plan.pace_ms:
            self._metrics.lead_ms = plan.lead_ms
            if plan.prefill:
                self._metrics.piece_lead_ms.observe(plan.lead_ms)
        if plan.is_decode_only or plan.steps > 1:
            returns_early = self._context.returns_early  # then no token waits for the end of the stride
            tick.hold_ms = math.inf if returns_early else min((row.hold_ms for row in tick.decode), default=0.0)
        tick.drafts = self._speculator.draft(tick.decode if plan.is_decode_only else [])
        return tick, bool(plan.preempt)

    def _plan(self, now: float, pause_ms: float) -> Plan:
        """Admit what can start, ask the policy for a plan, and preempt as it says. With `pause_ms`, or other work to
        come after the tick, streams decode ahead of that.
        """
        slots = self._slots
        slots.admit(now)
        state = slots.state(now)
        state.neighbour_load = self._runner.compute_threads.load
        pause_ms = pause_ms or self._pause_beside_ms
        self._is_ahead = pause_ms > 0
        plan = self._scheduler.plan(state, now, self._embedder.demand(), pause_ms=pause_ms)
        for key in plan.preempt:
            slots.preempt(slots.active[key], now)
        return plan

    @property
    def _pause_beside_ms(self) -> float:
        """Time of other work after this tick, for which streams decode ahead: a prompt in a context of its own, a piece
        of a picture, or a state that is loaded in one part. 0 if this tick reads a prompt of theirs instead.
        """
        if (load_ms := self._slots.load_ms) > self._scheduler.encode_ms:
            return load_ms
        if (encode_ms := self._encode_ms) and not self._is_beside_others:
            return encode_ms
        has_prompts = any(sequence.status is Status.PREFILLING for sequence in self._slots.active.values())
        return 0.0 if has_prompts else self._reproducer.pause_ms

    @property
    def _encode_ms(self) -> float:
        """Expected time of the next piece of a picture; 0 where there is none."""
        return self._encoder.pause_ms(self._scheduler.encode_ms)

    @property
    def _is_beside_others(self) -> bool:
        """Whether something other than pictures is to be read or embedded, which a tick before a piece leaves out."""
        active = self._slots.active.values()
        waiting = (sequence for sequence in active if sequence.status is Status.PREFILLING)
        reads = any(not sequence.awaits_encoding and not sequence.is_loading for sequence in waiting)
        return reads or bool(self._embedder) or self._reproducer.running > 0

    def _rest(self) -> None:
        """Wait for a command; if none comes for a while, use the time to take snapshots."""
        if self._slots.active and self._slots.wants_slot:
            # All sequences with a slot are paused, and others wait for slots.
            self.commands.wait(PATIENCE_MS / 1000)
            return
        idle_sec = IDLE_SEC
        while not self.commands.wait(idle_sec):
            idle_sec = 0.0  # between two parts of a snapshot, only a look at the inbox
            if self._slots.active or not self._pool.copies.go_on():
                self._pool.trim_cache(until=lambda: self.commands.wait(0.0))
                self.commands.wait()
                return

    def _take(self, sequence: Sequence) -> None:
        self._runner.canceller.submit_taken(sequence)
        self._slots.submit(sequence)
        if sequence.is_reproducible:
            self._reproducer.add(sequence)

    def _take_cancel(self, sequence: Sequence) -> None:
        self._runner.canceller.cancel_taken(sequence)
        self._reproducer.cancel_taken(sequence)
        self._slots.finish(sequence, "cancelled")


@attrs.frozen
class SequenceControl:
    """Commands for one sequence: `delivery.stream.Control`."""

    worker: DecodeWorker
    sequence: Sequence

    def cancel(self) -> None:
        """See `DecodeWorker.cancel`."""
        self.worker.cancel(self.sequence)

    def end_thinking(self) -> None:
        """See `DecodeWorker.end_thinking`."""
        self.worker.end_thinking(self.sequence)

    def credit(self, events: int) -> None:
        """See `DecodeWorker.credit`."""
        self.worker.credit(self.sequence, events)
