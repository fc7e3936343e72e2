"""The decode thread: it owns the context, and turns plans into tokens.

Each turn of its loop is one tick: take what came in, ask the policy, compute a token for each decoding sequence (or
several, while nothing changes), then a chunk of the prompts, hand over what readers are due, and go straight on.
`llama_decode` runs without the GIL, so frames are written while it computes. Nothing else may touch the context, the
pool or a submitted `Sequence`.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from uma.engine.clock import now_ms
from uma.engine.delivery.outbox import Deliver, Outbox
from uma.engine.delivery.output import Output, choose_tokens, hold_ms, tokens_alike
from uma.engine.kv.pool import KvPool
from uma.engine.kv.snapshots import Snapshot
from uma.engine.policy import Plan, Row, Scheduler, State
from uma.engine.policy.order import RESERVE_PER_ROW, gives_way, preemption_order
from uma.engine.worker.runner import ONE_STEP, ModelRunner, Step, Stride, Work
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.waiting import WaitingRoom
from uma.errors import DecodeFailed, ShuttingDown, UmaError
from uma.llama.context import ABORTED, DONE, NO_ROOM, Context
from uma.llama.sampler import Sampler
from uma.metrics import EngineMetrics
from uma.types import Event, Finished, FinishReason

PATIENCE_MS = 250.0
"""A request whose reader is behind keeps its place for this long, whoever waits."""
STRIDE_STEPS = 16
"""Most tokens of a row at a stretch."""
SAMPLED_BATCHES = 32
"""After so many batches a tick has its CPU time measured, is planned anew, and teaches what decode rows cost. (So does
each that reads prompts, or tries something: then it matters.) In between, few milliseconds have no time for it."""
IDLE_SEC = 0.25
"""Without work for this long, the thread takes snapshots of what is cached: a follow-up comes sooner or much later."""


class DecodeWorker:
    """The loop of the decode thread: `run`. The public methods before it may be called from any thread."""

    def __init__(
        self,
        context: Context,
        pool: KvPool,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        deliver: Deliver,
        max_active: int,
        saves_at_end: bool,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self._context = context
        self._vocab = context.model.vocab
        self._pool = pool
        self._scheduler = scheduler
        self._metrics = metrics
        self._sampled_at = 0
        """Batches there had been before the last sampled tick."""
        self._outbox = Outbox(deliver)
        self._output = Output(self._vocab, metrics, self._outbox)
        self._saves_at_end = saves_at_end
        self._trace = trace
        self._runner = ModelRunner(context, pool, scheduler.cost, metrics, self._outbox, lambda: self._is_called, trace)
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wakeup = threading.Event()
        self._is_called = False
        """There is a command for which no stride goes on."""
        self._is_stopping = False
        self._active: dict[int, Sequence] = {}
        self._steady: list[Sequence] = []
        """Everyone, where the last tick was tokens for each and no more."""
        self._hold_ms = 0.0
        """For how long the readers of `_steady` would not mind to be given nothing."""
        self._is_one_by_one = False
        """How the last plan would have its decode rows."""
        self._waiting = WaitingRoom(pool, max_active, scheduler.cost)
        self._parked: set[int] = set()
        """Keys of those whose reader is behind and who gave their place to others meanwhile."""
        self._sequences: dict[int, Sequence] = {}

    def submit(self, sequence: Sequence) -> None:
        """Take on a request. Its stream is given events until a `Finished` or an error. Call `wake` some time after."""
        self._inbox.append((self._on_submit, (sequence,)))

    def wake(self) -> None:
        """Have what was submitted looked at: after the batch that runs, or at once by a thread that rests."""
        self._is_called = True
        self._wakeup.set()

    def cancel(self, key: int) -> None:
        """End a request at the next tick boundary; unknown or finished ones are ignored."""
        self._post(self._on_cancel, key)

    def credit(self, key: int, events: int) -> None:
        """The reader has made room for so many more events."""
        self._inbox.append((self._on_credit, (key, events)))
        if key in self._parked:
            self._is_called = True  # (for the others a stride need not end: it is no longer than there was room for)
        self._wakeup.set()

    def preload(self, snapshot: Snapshot) -> None:
        """Take in a snapshot that was read from disk."""
        self._post(self._on_preload, snapshot)

    def count_known(self, tokens: array[int], answer: Callable[[int], None]) -> None:
        """Have `answer` called, on the decode thread, with how many of `tokens` need not be computed now."""
        self._post(self._on_count_known, tokens, answer)

    def stop(self) -> None:
        """End everything with `ShuttingDown`, then the thread, in the middle of a batch if need be."""
        self._post(self._on_stop)
        self._context.request_abort()

    @property
    def active_count(self) -> int:
        """Sequences that hold a place now. Any thread."""
        return len(self._active)

    def has(self, key: int) -> bool:
        """Whether the request of this key has not ended. Any thread."""
        return key in self._sequences

    def read_gauges(self) -> None:
        """Bring the gauges of the metrics up to date. Any thread: each is one number, read as it is just now."""
        metrics, pool = self._metrics, self._pool
        metrics.active_sequences = len(self._active)
        metrics.queued_requests = len(self._sequences) - len(self._active)
        metrics.kv_cells_used = pool.used_cells
        metrics.sequence_ids_used = pool.used_ids
        tree, store, cache = pool.tree, pool.store, metrics.cache
        cache.hits, cache.misses, cache.evictions = tree.stats.hits, tree.stats.misses, tree.stats.evictions
        cache.protected_size, cache.total_cached = tree.protected_tokens, tree.total_tokens
        cache.evictable_size, cache.node_count = tree.total_tokens - tree.protected_tokens, tree.node_count
        cache.ram_bytes, cache.ram_snapshots = store.size_bytes, len(store)
        cache.ram_hits, cache.ram_evictions = store.hits, store.evictions

    def _post(self, command: Callable[..., None], *args: Any) -> None:
        self._inbox.append((command, args))
        self.wake()

    def run(self) -> None:
        """The thread. Returns after `stop`."""
        try:
            while not self._is_stopping:
                if self._wakeup.is_set():
                    # Before the commands, and in this order, for `wake` has the other: what comes now sets both again,
                    # or at least the one that this thread rests on.
                    self._wakeup.clear()
                    self._is_called = False
                self._take_commands()
                if self._is_stopping or (self._tick() and self._sequences):
                    continue
                # Also where the last has ended and others are on their way in: who begins a burst, waits for it.
                self._outbox.flush()
                self._rest()
        finally:
            for sequence in list(self._sequences.values()):
                self._end(sequence, ShuttingDown("the engine is stopping"))
            if self._saves_at_end:
                self._pool.save_all_cached()
            self._outbox.flush()

    def _rest(self) -> None:
        """Wait for a command; when none comes for a while, use the time to take snapshots."""
        if self._active and len(self._waiting):
            # Nothing runs because readers are behind, and somebody waits for what their requests hold.
            self._wakeup.wait(PATIENCE_MS / 1000)
            return
        while not self._wakeup.wait(IDLE_SEC):
            self._pool.someone_decodes = False
            if self._active or not self._pool.save_cached():
                self._pool.trim_cache()
                self._wakeup.wait()
                return

    # Commands, on the thread

    def _take_commands(self) -> None:
        while self._inbox:
            command, args = self._inbox.popleft()
            command(*args)

    def _on_submit(self, sequence: Sequence) -> None:
        self._sequences[sequence.row.key] = sequence
        self._waiting.add(sequence)
        if self._trace:
            self._trace(f"queue {_whose(sequence)} lane={sequence.row.lane} tokens={len(sequence.tokens)}")

    def _on_cancel(self, key: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._finish(sequence, "cancelled", now_ms())

    def _on_credit(self, key: int, events: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None:
            sequence.credits += events
            sequence.row.is_paused = sequence.credits <= 0
            if key in self._parked and not sequence.row.is_paused:
                self._parked.remove(key)
                self._waiting.add(sequence)

    def _on_preload(self, snapshot: Snapshot) -> None:
        self._pool.store.add(snapshot)

    def _on_count_known(self, tokens: array[int], answer: Callable[[int], None]) -> None:
        answer(self._pool.known_tokens(tokens))

    def _on_stop(self) -> None:
        self._is_stopping = True

    # One tick

    def _tick(self) -> bool:
        """Compute what the policy says; False if there was nothing to compute."""
        began = now_ms()
        batches = self._metrics.batch_calls_total
        is_sampled = self._runner.is_sampled = batches - self._sampled_at >= SAMPLED_BATCHES
        cpu_began = self._runner.cpu_sec()
        decode: list[Sequence] = self._steady
        prefill: tuple[tuple[int, int], ...] = ()
        if is_sampled or not self._goes_on():
            plan = self._plan(began)
            decode, prefill = [self._active[key] for key in plan.decode], plan.prefill
            self._steady, self._is_one_by_one = decode if plan.is_everyday else [], plan.is_one_by_one
            self._hold_ms = min(map(hold_ms, self._steady), default=0.0)
            if not decode and not prefill:
                return bool(plan.preempt)
        computing_ms = self._metrics.decode_ms.sum
        if decode:
            self._decode(decode, learns=is_sampled or not self._steady)
        if prefill:
            self._prefill([(self._active[key], count) for key, count in prefill if key in self._active])
        if is_sampled:
            # It stands for all batches since the last sample.
            weight = (batches - self._sampled_at) / max(1, self._metrics.batch_calls_total - batches)
            self._metrics.outside_decode_cpu_ms_total += (self._runner.cpu_sec() - cpu_began) * 1000 * weight
            self._sampled_at = batches
        computing_ms = self._metrics.decode_ms.sum - computing_ms
        self._metrics.outside_decode_ms_total += now_ms() - began - computing_ms
        return True

    def _goes_on(self) -> bool:
        """Whether a plan could only say once more what the last one said: nobody came, went, or has to be held back."""
        rows = self._steady
        if not rows or len(rows) != len(self._active) or not self._waiting.is_empty or self._trace:
            return False
        return len(rows) <= self._pool.free_cells and not any(sequence.row.is_paused for sequence in rows)

    def _plan(self, now: float) -> Plan:
        """Admit who may begin, and ask the policy; whoever is to give way has done so after it."""
        self._admit(now)
        state = self._state()
        plan = self._scheduler.plan(state, now)
        if self._trace and self._active:
            self._trace_plan(self._trace, state, plan)
        for key in plan.preempt:
            self._preempt(self._active[key], now)
        return plan

    def _admit(self, now: float) -> None:
        """Begin whoever may begin; for those who may not, others give way: slow readers' requests, then background."""
        while not self._waiting.is_empty:
            sequence = self._waiting.next(self._active)
            if sequence is not None:
                self._start(sequence, now)
                continue
            head = self._waiting.head()
            if head is None or not (victims := self._find_victims(head, now)):
                return
            for victim in victims:
                self._preempt(victim, now)

    def _find_victims(self, head: Sequence, now: float) -> list[Sequence]:
        """Who gives way to `head`: as few as will do, and nobody if all of them would not do."""
        places, cells = self._waiting.lacks(head, self._active)
        behind = [each for each in self._active.values() if each.row.is_paused and now - each.paused_ms >= PATIENCE_MS]
        lower = [
            self._active[row.key] for row in gives_way(head.row, (each.row for each in self._active.values()), now)
        ]
        victims: list[Sequence] = []
        for each in dict.fromkeys([*behind, *lower]):
            if places <= 0 and cells <= 0:
                break
            assert each.holding is not None
            victims.append(each)
            places -= 1
            cells -= self._pool.own_cells(each.holding) + each.missing + RESERVE_PER_ROW
        return victims if places <= 0 and cells <= 0 else []

    def _state(self) -> State:
        decoding: list[Row] = []
        prefilling: list[Row] = []
        for sequence in self._active.values():
            (prefilling if sequence.row.remaining else decoding).append(sequence.row)
        self._pool.someone_decodes = bool(decoding)
        free = self._pool.free_cells
        if free < len(decoding) + len(prefilling):
            # Only now may someone have to give way, and only then does it matter how much each would give.
            for sequence in self._active.values():
                sequence.row.cells = self._pool.own_cells(sequence.holding) if sequence.holding else 0
        return State(decoding, prefilling, free, self._pool.used_cells)

    def _start(self, sequence: Sequence, now: float) -> None:
        first = sequence.started_ms == 0.0
        sequence.holding, sequence.computed = self._pool.acquire(sequence.tokens, now)
        self._unpin(sequence)
        sequence.update_row()
        self._active[sequence.row.key] = sequence
        if first:
            sequence.started_ms = now
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if not sequence.is_probe:
                self._pool.count_use(sequence.computed)
                self._metrics.prompt_tokens_total += sequence.prompt_tokens
                self._metrics.cached_tokens_total += sequence.cached_tokens
            if not sequence.request.sampling.is_greedy:
                sampling = sequence.request.sampling
                sequence.sampler = Sampler(self._vocab, sampling, sequence.seed, sequence.tokens)
        if self._trace:
            self._trace(f"start {_whose(sequence)} tokens={len(sequence.tokens)} cached={sequence.computed}")

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Take a sequence's cells; it waits, and gets them back from a snapshot, or computed again, when there is room.

        Its reader sees a pause, and then exactly the tokens it would have seen.
        """
        assert sequence.holding is not None
        key = sequence.row.key
        self._metrics.preemptions_total += 1
        sequence.kept = self._pool.save(sequence.holding, now)
        if sequence.kept is not None:
            sequence.kept.is_pinned = True
        self._pool.release(sequence.holding, now, keep=False)
        sequence.holding, sequence.computed = None, 0
        sequence.update_row()
        del self._active[key]
        # Whoever waits for its reader anyway comes back only when that has caught up.
        if sequence.row.is_paused:
            self._parked.add(key)
        else:
            self._waiting.add(sequence)
        if self._trace:
            self._trace(f"preempt {_whose(sequence)} tokens={len(sequence.tokens)} kept={sequence.kept is not None}")

    def _unpin(self, sequence: Sequence) -> None:
        if sequence.kept is not None:
            sequence.kept.is_pinned = False
            sequence.kept = None

    # Batches

    def _decode(self, sequences: list[Sequence], *, learns: bool) -> None:
        """A token for each, at once or one by one, as the plan says."""
        if not self._is_one_by_one:
            self._decode_at_once(sequences, learns)
            return
        for sequence in sequences:
            if sequence.holding is not None:  # (as one has not that had to give way to those before)
                self._decode_at_once([sequence], learns)

    def _decode_at_once(self, sequences: list[Sequence], learns: bool) -> None:
        while sequences:
            stride = self._stride() if sequences is self._steady else ONE_STEP
            code, steps = self._runner.decode(sequences, stride)
            self._book(sequences, steps, learns)
            self._outbox.flush_due(self._runner.began_ms)
            if code == DONE:
                return
            sequences = [sequence for sequence, _ in self._failed(code, [(sequence, 1) for sequence in sequences])]

    def _stride(self) -> Stride:
        """How far `_steady` may go on at a stretch: until something about one changes, or its reader would mind."""
        if self._hold_ms < self._runner.decode_ms:
            return ONE_STEP
        steps = min(STRIDE_STEPS, self._pool.free_cells // len(self._steady))
        for sequence in self._steady:
            steps = min(steps, tokens_alike(sequence))
        return Stride(steps, self._hold_ms) if steps > 1 else ONE_STEP

    def _book(self, sequences: list[Sequence], steps: list[Step], learns: bool) -> None:
        for step in steps:
            self._runner.book(sequences, step, learns=learns and step is steps[-1])
            self._accept(sequences, step.tokens, step.at_ms)

    def _prefill(self, work: Work) -> None:
        """Pieces of prompts; fewer or shorter ones where llama.cpp finds no room for all."""
        while work:
            code, ends = self._runner.prefill(work)
            if code == DONE:
                if ends:
                    self._sample(ends)
                self._outbox.flush_due(self._runner.began_ms)
                return
            work = self._failed(code, work)

    def _failed(self, code: int, work: Work) -> Work:
        """Deal with a batch that could not be computed; returns what to try instead."""
        if code == NO_ROOM:
            return self._with_less(work)
        if code != ABORTED:
            self._run_alone(work)
        return []

    def _with_less(self, work: Work) -> Work:
        """What to try after `llama_decode` found no room: drop cache, then prefill less, then preempt the youngest."""
        self._metrics.kv_retries_total += 1
        if self._pool.drop_cache():
            return work
        if work[0][0].row.remaining and (half := sum(count for _, count in work) // 2):
            less: Work = []
            for sequence, count in work:
                if half > 0:
                    less.append((sequence, min(count, half)))
                    half -= count
            return less
        candidates = preemption_order(each.row for each in self._active.values())
        if len(candidates) > 1:
            victim = self._active[candidates[0].key]
            self._preempt(victim, now_ms())
            return [each for each in work if each[0] is not victim]
        # Alone, with no cache left, and still no room: the context is full.
        for sequence, _ in work:
            self._finish(sequence, "length", now_ms())
        return []

    def _run_alone(self, work: Work) -> None:
        """After a failed batch: put memory back as it was, and run each of its rows alone; who fails then, ends."""
        for sequence, count in work:
            if not self._cut_back(sequence):
                continue
            if sequence.row.remaining:
                code, ends = self._runner.prefill([(sequence, count)])
                if ends:
                    self._sample(ends)
            else:
                code, steps = self._runner.decode([sequence], ONE_STEP)
                self._book([sequence], steps, learns=False)
            if code == NO_ROOM:
                self._preempt(sequence, now_ms())
            elif code not in (DONE, ABORTED):
                self._cut_back(sequence)
                self._end(sequence, DecodeFailed(f"llama_decode failed with {code} for this request"))

    def _cut_back(self, sequence: Sequence) -> bool:
        """Forget what a failed batch may have left in memory. False where memory cannot be cut: it begins anew."""
        assert sequence.holding is not None
        if self._context.seq_rm(sequence.holding.seq_id, sequence.computed, -1):
            return True
        self._pool.release(sequence.holding, now_ms(), keep=False)
        sequence.holding, sequence.computed = None, 0
        sequence.update_row()
        del self._active[sequence.row.key]
        self._waiting.add(sequence)
        return False

    # Tokens out

    def _sample(self, ends: dict[Sequence, int]) -> None:
        """First tokens, of those whose prompts have been read, each with the index of its logits."""
        sequences = list(ends)
        self._accept(sequences, choose_tokens(self._context, sequences, list(ends.values())), now_ms())

    def _accept(self, sequences: list[Sequence], tokens: list[int], now: float) -> None:
        for sequence, token in zip(sequences, tokens, strict=True):
            reason = self._output.accept(sequence, token, now)
            if reason is not None:
                self._finish(sequence, reason, now)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._output.release_held(sequence)
        request = sequence.request
        generated = sequence.tokens[sequence.prompt_tokens :]
        event = Finished(
            id=request.id,
            reason=reason,
            usage=sequence.usage(),
            metrics=sequence.metrics(reason, now),
            seed=sequence.seed,
            text=None if request.stream else "".join(sequence.pieces),
            token_ids=None if request.stream else tuple(generated),
            warnings=sequence.warnings,
        )
        self._end(sequence, event)

    def _end(self, sequence: Sequence, event: Event | UmaError) -> None:
        """Give the last event, and take back all that the sequence held."""
        key = sequence.row.key
        self._active.pop(key, None)
        self._parked.discard(key)
        self._waiting.discard(sequence)
        self._unpin(sequence)
        if sequence.holding is not None:
            others = (each.row for each in self._active.values())
            self._pool.someone_decodes = any(not row.remaining and not row.is_paused for row in others)
            if isinstance(event, Finished) and not self._pool.shares:
                self._pool.save(sequence.holding, now_ms())
            self._pool.release(sequence.holding, now_ms(), keep=not isinstance(event, UmaError))
            sequence.holding = None
        if sequence.sampler is not None:
            sequence.sampler.close()
            sequence.sampler = None
        if sequence.is_probe:
            self._metrics.health_probes_total += 1
        else:
            if sequence.started_ms and isinstance(event, Finished) and event.reason in ("stop", "length"):
                self._metrics.served(now_ms() - sequence.started_ms)
            self._metrics.finished(event.reason if isinstance(event, Finished) else "error")
        self._outbox.add(sequence.stream, event)
        # Last of all: whoever sees in the metrics that nothing runs any more finds it counted and its cells free.
        del self._sequences[key]
        if self._trace:
            how = event.reason if isinstance(event, Finished) else event.code if isinstance(event, UmaError) else ""
            self._trace(f"end {_whose(sequence)} reason={how} generated={sequence.generated}")

    def _trace_plan(self, trace: Callable[[str], None], state: State, plan: Plan) -> None:
        """The decision, row by row: who decodes, who is read and by how much, and who has to wait or give way."""

        def name(key: int) -> str:
            return f"{key}={self._active[key].request.id!r}"

        cost = self._scheduler.cost
        chunks = [(tokens, self._active[key].computed) for key, tokens in plan.prefill]
        expected_ms = cost.decode_ms(len(plan.decode), state.used_cells) + sum(
            cost.prefill_ms(*each) for each in chunks
        )
        trace(
            f"plan decode=[{', '.join(map(name, plan.decode))}]"
            f" prefill=[{', '.join(f'{name(key)}:{tokens}' for key, tokens in plan.prefill)}]"
            f" unread={len(state.prefilling)} held={plan.held} preempted=[{', '.join(map(name, plan.preempt))}]"
            f" waiting={len(self._waiting)} budget_ms={self._scheduler.targets.tick_budget_ms:g}"
            f" expected_ms={expected_ms:.2f}"
            f" cells={state.used_cells} free={state.free_cells}"
        )


def _whose(sequence: Sequence) -> str:
    """For log lines: the engine's key, which the plans name, and the request's own id."""
    return f"key={sequence.row.key} request={sequence.request.id!r}"
