"""Batches: filled from sequences, computed by llama.cpp, and booked (counted in pool, accounts and metrics).

Decode rows and prefill are separate batches, or a decode step and a piece of the prompts are one (`prefill`). With
split KV they are always separate: llama.cpp would compute such a batch in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Rows
from functools import partial
from itertools import groupby, takewhile
from types import MappingProxyType
from typing import NamedTuple

from uma.engine.adapters import NO_ADAPTERS
from uma.engine.clock import now_ms
from uma.engine.delivery.outbox import Outbox
from uma.engine.delivery.pacing import Stride
from uma.engine.kv.pool import KvPool
from uma.engine.policy import CostModel
from uma.engine.policy.scheduler import mixed_position
from uma.engine.recorder import DECODE
from uma.engine.worker.account import Instruments
from uma.engine.worker.canceller import BatchCanceller
from uma.engine.worker.commands import Commands
from uma.engine.worker.cores.threads import SAMPLE_MS
from uma.engine.worker.cores.watch import ComputeThreads, StallWatch
from uma.engine.worker.drafts.policy import saved_ms
from uma.engine.worker.drafts.speculator import Draft, Drafts
from uma.engine.worker.sampling import RowResult, RowSampler, SampledToken
from uma.engine.worker.sequence import PlacedPicture, Sequence, being_computed
from uma.engine.worker.status import Change, Status
from uma.llama.batch import Batch
from uma.llama.context import ABORTED, DONE, INVALID_BATCH, Context
from uma.llama.projector import Projector
from uma.metrics import EngineMetrics

Work = list[tuple[Sequence, int]]
"""Work of a batch: sequences, each with the number of its tokens."""
Computed = Rows[tuple[Sequence, Rows[int]]]
"""Sequences of a computed batch, each with those of its tokens that are in memory now."""

MAX_READ_BYTES = 32 * 2**20
"""Maximum bytes of logits of prompt tokens in one batch: llama.cpp keeps that much memory from then on."""


class DecodeStep(NamedTuple):
    """One computed batch of decode rows."""

    given: list[RowResult]
    """Next tokens of each row."""
    at_ms: float
    """When they were known."""
    took_ms: float
    is_last: bool
    """Whether it is the last of the stride."""


class BatchOutcome(NamedTuple):
    """Outcome of a batch: computed, failed, aborted or cancelled, and which states in memory are known after it."""

    code: int
    """llama.cpp's code (`Context.decode`)."""
    took_ms: float
    is_cancelled: bool = False
    """Whether it was aborted because all its requests were cancelled or gave way: it must not be retried now."""
    is_state_lost: bool = False
    """Whether llama.cpp broke it off: the states of its sequences are not known."""
    are_others_lost: bool = False
    """Whether states of other sequences are not known either: for a batch of several, llama.cpp moves all their states,
    and others with them."""
    ends: Mapping[Sequence, int] = MappingProxyType({})
    """Sequences that have logits, with their indices; empty where the batch failed."""

    @property
    def is_done(self) -> bool:
        """Whether all of it was computed."""
        return self.code == DONE


class VerifiedDrafts(NamedTuple):
    """Rows whose drafts were verified, and their next tokens."""

    outcome: BatchOutcome
    """Outcome of the last batch."""
    sequences: list[Sequence]
    """Rows of the batches that were computed."""
    given: list[RowResult]
    """Their next tokens."""
    at_ms: float


class DecodeSteps:
    """Steps of a stride, to be iterated once; afterwards `outcome` is that of the last batch."""

    outcome: BatchOutcome

    def __init__(self, steps: Generator[DecodeStep, None, BatchOutcome]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[DecodeStep]:
        self.outcome = yield from self._steps


class ModelRunner:
    """Computes given rows. The policy chooses them; the executor handles a batch that fails.

    Belongs to the decode thread. A stride ends early where `commands.is_called`.
    """

    def __init__(
        self,
        context: Context,
        pool: KvPool,
        cost: CostModel,
        outbox: Outbox,
        commands: Commands,
        instruments: Instruments,
        projector: Projector | None,
    ) -> None:
        self._context = context
        self._projector = projector
        self._pool = pool
        self._cost = cost
        self._outbox = outbox
        self._commands = commands
        self._metrics = instruments.metrics
        self._instruments = instruments
        self._totals = instruments.totals
        self.sampling = RowSampler(context)
        self.canceller = BatchCanceller(context, can_abort=pool.cells.survives_abort)
        self.compute_threads = ComputeThreads(context, self._metrics)
        self.stall_watch = StallWatch(context, is_able=pool.cells.survives_abort)
        self._threads = 0
        """Compute threads of the prepared batch."""
        self.should_end_stride: Callable[[list[Sequence], list[int]], bool] | None = None
        """Called with the tokens of each step of a stride: whether to end it, because a draft is faster."""
        self._batch = Batch(context.n_batch)
        self.decode_ms = math.inf
        """Time of the last batch of decode rows, which predicts the next."""
        self._adapters = NO_ADAPTERS
        """LoRA adapters of the last batch: all sequences of a batch have the same."""
        self._code = DONE
        """llama.cpp's code for the batch that was begun."""
        self._is_state_lost = self._are_others_lost = False
        """Whether llama.cpp broke that batch off: see `BatchOutcome`."""
        self.began_ms = 0.0
        """When the last batch went to llama.cpp."""

    @property
    def is_called(self) -> bool:
        """Whether a command has come that waits for the decode thread."""
        return self._commands.is_called

    def decode(self, sequences: list[Sequence], stride: Stride) -> DecodeSteps:
        """Give each row a token, step after step: the batches of nearly every tick, so they take the shortest path.

        Ends with the stride, with the end of a row's text, when a command calls, before a buffered event is late, or
        where a draft is faster. The caller must book each step (`book_step`) and accept its tokens, in the order in
        which this method leaves `sequences`, before it does anything else. On a GPU it does so step by step: the next
        batch is being computed when a step is yielded. On a CPU it does so for all steps at the end: a batch's weights
        evict everything from the caches, so code that runs between two batches is slow.
        """
        return DecodeSteps(self._steps(sequences, stride))

    def _steps(self, sequences: list[Sequence], stride: Stride) -> Generator[DecodeStep, None, BatchOutcome]:
        if self._pool.cells.is_split:
            sequences.sort(key=lambda sequence: sequence.slot.seq_id)
        size = len(sequences)
        self._pool.make_room(size * stride.steps)
        self._batch.clear()
        self._batch.add_decode(
            [sequence.tokens[-1] for sequence in sequences],
            [sequence.next_position for sequence in sequences],
            [sequence.slot.seq_id for sequence in sequences],
        )
        returns_early = self._context.returns_early
        # Last of all: the readers that it wakes run while llama.cpp computes.
        self._outbox.flush_due(now_ms() + (self.decode_ms if returns_early else stride.lasts_ms(self.decode_ms)))
        count, last_ms = 0, math.inf if returns_early else self._outbox.due_ms
        ids = [sequence.request.id for sequence in sequences]
        self._prepare(sequences)
        self._begin(sequences, self.decode_ms)
        while True:
            outcome = self._wait()
            if not outcome.is_done:
                return outcome
            took_ms = outcome.took_ms
            count += 1
            given, at_ms = self.sampling.sample(sequences, range(size)), now_ms()
            self._record("decode", took_ms, ids, at_ms)
            last_ms = min(last_ms, at_ms + stride.within_ms)
            is_over = count == stride.steps or at_ms + took_ms > last_ms or self._commands.is_called
            tokens = [] if is_over else self._tokens_to_go_on_with(sequences, given)
            if not tokens:
                yield DecodeStep(given, at_ms, took_ms, is_last=True)
                return outcome
            self._batch.advance(tokens)
            if not self.sampling.is_plain or at_ms >= self.compute_threads.due_ms:
                self._prepare(sequences)
            self._begin(sequences, self.decode_ms)
            yield DecodeStep(given, at_ms, took_ms, is_last=False)
            if returns_early:
                self._outbox.flush_due(now_ms() + self.decode_ms)
                if any(sequence.holding is None for sequence in sequences):
                    # An exception has ended one: the batch that is being computed is the last with a row of it.
                    last_ms = -math.inf

    def _tokens_to_go_on_with(self, sequences: list[Sequence], given: list[RowResult]) -> list[int]:
        """Next token of each row; empty where the batch cannot continue with a row, because of an exception, several
        tokens or an end, or where a draft is faster.
        """
        tokens = [row[0].token for row in given if isinstance(row, tuple) and len(row) == 1 and not row[0].is_end]
        if len(tokens) < len(given) or not self._context.model.vocab.eog.isdisjoint(tokens):
            return []
        return [] if self.should_end_stride is not None and self.should_end_stride(sequences, tokens) else tokens

    def book_step(self, sequences: list[Sequence], step: DecodeStep) -> None:
        """Book a step of `decode`, before its tokens are accepted. The cost model observes a stride's last step."""
        self.decode_ms = step.took_ms
        self._book([(sequence, sequence.tokens[-1:]) for sequence in sequences], step.took_ms)
        if step.is_last:
            self._cost.observe_decode(len(sequences), self._pool.used_cells, step.took_ms)

    def _book(self, rows: Computed, took_ms: float, *, size: int = 0) -> None:
        """Book a batch (`book`), and add its tokens to the pool."""
        for sequence, computed in rows:
            if sequence.status is Status.PREFILLING or len(computed) > 1:
                self._pool.extend(sequence.slot, computed)
            else:
                self._pool.append(sequence.slot, computed[0])
        book(self._instruments, [(sequence, len(computed)) for sequence, computed in rows], took_ms, size=size)
        for sequence, _ in rows:
            if sequence.is_at_checkpoint():
                self._pool.checkpoints.take(sequence.slot.tip, sequence.slot.seq_id)

    def prefill(self, work: Work) -> BatchOutcome:
        """Compute and book pieces of prompts, and possibly a decode step with them (a mixed batch). A sequence whose
        last token is computed has logits.

        A piece of a prompt whose logits are read (`split_pending`) comes alone, and so does a picture. The cost model
        does not observe them.
        """
        if (placed := work[0][0].picture) is not None:
            return self._read_picture(*work[0], placed)
        is_reported = any(reads_logits(sequence) for sequence, _ in work)
        rows = [sequence.computed for sequence, _ in work if sequence.status is Status.DECODING]
        tokens, cells = sum(count for _, count in work) - len(rows), self._pool.used_cells
        if not tokens:  # the rest of a mixed batch that is retried
            return self.decode_several(work)
        position = self._position(work, tokens, rows)
        expected_ms = (
            self._cost.mixed_ms(len(rows), cells, tokens, position) if rows else self._cost.prefill_ms(tokens, position)
        )
        with being_computed(work, self._context):
            outcome = self._extend(work, tokens + len(rows), expected_ms or 0.0)
        if outcome.is_done and rows:
            self._metrics.mixed_batches_total += 1
            self._cost.observe_mixed(len(rows), cells, tokens, position, outcome.took_ms)
        elif outcome.is_done and not is_reported:
            self._cost.observe_prefill(tokens, position, outcome.took_ms)
        return outcome

    def _read_picture(self, sequence: Sequence, count: int, placed: PlacedPicture) -> BatchOutcome:
        """Compute and book an encoded picture, or as many of its parts as `count` tokens hold, at least one."""
        assert self._projector is not None
        position, seq_id = sequence.next_position, sequence.slot.seq_id
        start, end = placed.run.start, placed.run.end
        for part in sequence.pictures:
            follows = part.run.start == end and part.start == placed.start + end - start
            if follows and part.picture is placed.picture and part.run.end - start <= min(count, self._context.n_batch):
                end = part.run.end
        tokens = end - start
        parts = range(placed.start, placed.start + tokens)
        self._pool.make_room(tokens)
        self._outbox.flush()  # a batch of many tokens takes longer than any token can wait
        decode = partial(self._projector.decode, self._context, placed.picture, parts, position, seq_id, placed.before)
        with being_computed([(sequence, tokens)], self._context):
            outcome = self._compute([sequence], [], decode=decode)
            if outcome.is_done:
                self._record("batch", outcome.took_ms, [f"{sequence.request.id}: {tokens} at {start}"])
                self._book([(sequence, sequence.tokens[start:end])], outcome.took_ms)
        return outcome

    @property
    def _attends_all(self) -> bool:
        """Whether attention takes time with all cells in use: see `policy.Targets.attends_all`."""
        return self._context.params.flash_attn == "off" and not self._pool.cells.is_split

    def _position(self, work: Work, tokens: int, rows: list[int]) -> float:
        """Mean number of tokens that each of the `tokens` prompt tokens attends to, beside decode rows at the positions
        `rows`: as the policy plans with it.
        """
        if self._attends_all:
            return self._pool.used_cells
        position = sum(count * sequence.computed for sequence, count in work if sequence.status is not Status.DECODING)
        return mixed_position(position / tokens, tokens, rows) if rows else position / tokens

    def decode_several(self, work: Work) -> BatchOutcome:
        """Decode rows that have more than one token to compute, because they were given several in one step.

        Computed and booked like `prefill`, but not observed by the cost model: rows of unequal length do not predict
        usual ones.
        """
        return self._extend(work, sum(count for _, count in work))

    def verify(self, drafts: Drafts) -> VerifiedDrafts:
        """Verify each row's last token and draft: the row gets the tokens that it would get without a draft, as many as
        are known. They are booked, and the memory behind them is cut off. Ends with a batch that fails.
        """
        rows, drafting, spent_ms = drafts
        tokens = sum(1 + len(draft) for _, draft in rows)
        self._pool.make_room(tokens)
        self._outbox.flush_due(now_ms() + drafting.batch_ms)
        verified, given, took_ms, outcome = list[Draft](), list[RowResult](), 0.0, BatchOutcome(DONE, 0.0)
        for together in self._cut_together(rows):
            outcome, given_together = self._verify_together(together)
            took_ms += outcome.took_ms
            if not outcome.is_done:
                break
            verified += together
            given += given_together
        for (sequence, draft), tokens_given in zip(verified, given, strict=True):
            if draft:
                count = len(tokens_given) if isinstance(tokens_given, tuple) else 0
                spared_ms = saved_ms(count, drafting, spent_ms + took_ms)
                sequence.batches.saved_ms += spared_ms
                self._metrics.draft_saved_ms_total += spared_ms
        return VerifiedDrafts(outcome, [sequence for sequence, _ in verified], given, now_ms())

    def _cut_together(self, rows: list[Draft]) -> Iterator[list[Draft]]:
        """Rows in batches that llama.cpp computes in one ubatch each, where they have a state.

        llama.cpp splits rows of unequal length, and each ubatch can move states of rows outside of it, but not the
        saved ones from which a draft is cut off. After the cut, states are moved correctly.
        """
        if not self._context.rolled_back:
            yield rows
            return
        # Not all cut off at the end: a draft was then cut back to another sequence's state now and then, and the text
        # was another.
        for length, group in groupby(sorted(rows, key=_draft_length), _draft_length):
            equal, most = list(group), max(1, self._context.n_ubatch // (1 + length))
            for start in range(0, len(equal), most):
                yield equal[start : start + most]

    def _verify_together(self, rows: list[Draft]) -> tuple[BatchOutcome, list[RowResult]]:
        tokens = sum(1 + len(draft) for _, draft in rows)
        self._batch.clear()
        for sequence, draft in rows:
            run = [sequence.tokens[-1], *draft]
            self._batch.add(run, sequence.next_position, sequence.slot.seq_id, last_logits=True, all_logits=True)
        sequences = [sequence for sequence, _ in rows]
        outcome = self._compute(sequences, sequences, drafts=[draft for _, draft in rows])
        if not outcome.is_done:
            return outcome, []
        took_ms = outcome.took_ms
        self._cost.observe_decode(tokens, self._pool.used_cells, took_ms)
        given = self.sampling.verify(rows)
        self._record("verify", took_ms, [sequence.request.id for sequence in sequences], now_ms())
        # The last token that is given must be computed next, even if it ends a draft that was accepted to its end.
        held = [
            draft[: min(_agreed(draft, result), len(result) - 1)] if isinstance(result, tuple) else []
            for (_, draft), result in zip(rows, given, strict=True)
        ]
        computed = [(sequence, [sequence.tokens[-1], *kept]) for sequence, kept in zip(sequences, held, strict=True)]
        self._book(computed, took_ms, size=tokens)
        for (sequence, draft), kept, result in zip(rows, held, given, strict=True):
            if len(kept) < len(draft):
                self._pool.cut_draft(sequence.slot)
            accepted = _agreed(draft, result) if isinstance(result, tuple) else 0
            sequence.batches.drafted += len(draft)
            sequence.batches.accepted += accepted
            self._metrics.draft_tokens_total += len(draft)
            self._metrics.draft_accepted_total += accepted
        return outcome, given

    def probe(self) -> bool:
        """Compute and sample one token of its own. False if there is no KV cell or sequence id for it now."""
        seq_id = self._pool.borrow_id()
        if seq_id is None:
            return False
        self._pool.make_room(1)
        self._batch.clear()
        self._batch.add_decode((max(self._context.model.vocab.bos, 0),), (0,), (seq_id,))
        outcome = self._compute([], [])
        self._pool.give_back_id(seq_id)
        if not self._context.model.is_causal:
            return outcome.is_done
        return outcome.is_done and bool(self._context.logits(1).argmax() >= 0)

    def _extend(self, work: Work, tokens: int, expected_ms: float = math.inf) -> BatchOutcome:
        """Compute and book the next tokens of each sequence."""
        if self._pool.cells.is_split:
            work.sort(key=lambda row: row[0].slot.seq_id)
        self._pool.make_room(tokens)
        self._batch.clear()
        ends: dict[Sequence, int] = {}
        for sequence, count in work:
            first, last = sequence.computed, sequence.computed + count
            is_whole = last == len(sequence.tokens)
            index = self._batch.add(
                sequence.tokens[first:last],
                sequence.next_position,
                sequence.slot.seq_id,
                last_logits=is_whole,
                all_logits=reads_logits(sequence),
            )
            if is_whole:
                ends[sequence] = index
        self._outbox.flush()  # a batch of many tokens takes longer than any token can wait
        outcome = self._compute([sequence for sequence, _ in work], list(ends), expected_ms)
        if not outcome.is_done:
            return outcome
        self._record("batch", outcome.took_ms, [f"{s.request.id}: {count} at {s.computed}" for s, count in work])
        for sequence, count in work:
            if reads_logits(sequence):
                self._read_prompt(sequence, count)
        computed = [(s, s.tokens[s.computed : s.computed + count]) for s, count in work]
        self._book(computed, outcome.took_ms)
        return outcome._replace(ends=ends)

    def _record(self, name: str, took_ms: float, rows: list[str], sampled_ms: float | None = None) -> None:
        """Record the spans of the batch just computed; tokens were chosen until `sampled_ms`."""
        ended_ms = self.began_ms + took_ms
        if sampled_ms is not None:
            self._totals.sample_ms += sampled_ms - ended_ms
        if (recorder := self._instruments.recorder) is not None:
            recorder.span(DECODE, name, self.began_ms, ended_ms, rows, cells=self._pool.used_cells)
            if sampled_ms is not None:
                recorder.span(DECODE, "sample", ended_ms, sampled_ms)

    def split_pending(self, work: Work) -> list[Work]:
        """Split work into batches: one for all that can be computed together, then one for each prompt whose logits are
        read, as far as a batch can hold them.
        """
        together = [(sequence, count) for sequence, count in work if not sequence.logprobs_pending]
        alone = [[(sequence, self._piece(sequence, count))] for sequence, count in work if sequence.logprobs_pending]
        return [*self.in_one_ubatch(together), *alone]

    def in_one_ubatch(self, work: Work) -> list[Work]:
        """Work in batches that llama.cpp computes whole: with split KV it takes rows of unequal length apart, which a
        sliding window does not survive (`sizing.context_params`).
        """
        is_taken_apart = self._pool.cells.is_split and self._context.model.shape.memory == "sliding-window"
        return [[row] for row in work] if is_taken_apart else [work]

    def _piece(self, sequence: Sequence, count: int) -> int:
        """Number of next prompt tokens to compute, at most `count`: all of them with logits, or none."""
        report = sequence.report
        assert report is not None
        if not reads_logits(sequence):
            return min(count, report.read - sequence.computed)
        most = max(1, MAX_READ_BYTES // (4 * self._context.model.vocab.n_tokens))
        return min(count, most, sequence.logprobs_pending)

    def _read_prompt(self, sequence: Sequence, count: int) -> None:
        """Read the log probabilities of the prompt tokens that follow those just computed."""
        report, first = sequence.report, sequence.computed + 1
        assert report is not None
        assert report.count is not None
        report.add(self.sampling.prompt_logprobs(sequence.tokens[first : first + count], report.count))

    def _compute(
        self,
        sequences: list[Sequence],
        sampled: list[Sequence],
        expected_ms: float = math.inf,
        drafts: list[list[int]] | None = None,
        decode: Callable[[], int] | None = None,
    ) -> BatchOutcome:
        """Compute the batch of `sequences`. `sampled` have logits.

        The code is `ABORTED` where a batch takes far longer than predicted because its threads wait for cores, and
        where all its requests are cancelled. `decode` computes what is no batch of tokens.
        """
        self._prepare(sampled, drafts)
        self._begin(sequences, expected_ms, decode)
        return self._wait()

    def _prepare(self, sampled: list[Sequence], drafts: list[list[int]] | None = None) -> None:
        """Set the compute threads of the next batch, and start computing what constrains its tokens."""
        self._threads = self.compute_threads.before_batch()
        self.sampling.prepare(sampled, drafts)
        self._cost.use(self._threads)

    def _begin(self, sequences: list[Sequence], expected_ms: float, decode: Callable[[], int] | None = None) -> None:
        self.began_ms = now_ms()
        self.stall_watch.begin(self.began_ms, expected_ms, self._threads)
        is_begun = self.canceller.begin(sequences)
        if sequences and sequences[0].adapters is not self._adapters:
            self._adapters = sequences[0].adapters
            self._context.use_adapters(self._adapters.scaled)
        self._code = (decode or partial(self._context.begin, self._batch))() if is_begun else ABORTED
        # (With states kept for drafts, llama.cpp takes a broken-off batch for one that can be rolled back as well.)
        is_broken = self._code == ABORTED or (self._context.rolled_back > 0 and self._code < INVALID_BATCH)
        self._is_state_lost = is_begun and is_broken and not self._pool.cells.survives_abort
        self._are_others_lost = self._is_state_lost and len(sequences) > 1

    def _wait(self) -> BatchOutcome:
        """Outcome of the batch that was begun, when it is over."""
        self._context.wait()
        is_stalled, is_cancelled = self.stall_watch.end(), self.canceller.end()
        took_ms = now_ms() - self.began_ms
        outcome = BatchOutcome(self._code, took_ms, is_cancelled, self._is_state_lost, self._are_others_lost)
        is_aborted = outcome.code == ABORTED
        if is_aborted or is_stalled or is_cancelled:
            self._context.resume()
        if outcome.are_others_lost:
            self._pool.invalidate_cached_states()
        if (is_aborted and not is_cancelled) or is_stalled:
            self.compute_threads.sample_next()
            self._metrics.stalls_total += is_aborted and not self._context.is_ended
        return outcome


class Probes:
    """Health probes that wait for their answer: whether a token really comes out of the engine.

    The next token of any sequence answers them. If none is decoding, one token is computed for them, between two ticks,
    in a sequence id that is empty again afterwards. Belongs to the decode thread.
    """

    def __init__(self, runner: ModelRunner, metrics: EngineMetrics) -> None:
        self._runner = runner
        self._metrics = metrics
        self.waiting: list[Callable[[bool], None]] = []

    def add(self, answer: Callable[[bool], None]) -> None:
        """Add a probe; `answer` is called with whether a token was generated."""
        self.waiting.append(answer)

    def run(self) -> None:
        """Compute a token for the waiting probes. Without a free KV cell they wait for a sequence's token."""
        if self._runner.probe():
            self.answer(is_alive=True)

    def answer(self, *, is_alive: bool) -> None:
        """Answer all probes: a token was generated, or none will be any more."""
        waiting, self.waiting = self.waiting, []
        self._metrics.health_probes_total += len(waiting)
        for answer in waiting:
            answer(is_alive)


def book(instruments: Instruments, rows: Work, took_ms: float, *, size: int = 0, is_isolated: bool = False) -> None:
    """Book a batch of any kind, of `size` tokens if not all stay in memory: count its time for its requests, and its
    tokens. Prompts that were read to their ends decode from now on.
    """
    metrics, totals = instruments.metrics, instruments.totals
    totals.cpu_waits.sample(now_ms(), SAMPLE_MS)
    reading = [sequence for sequence, _ in rows if sequence.status is Status.PREFILLING]
    if is_isolated:
        totals.isolated_ms += took_ms
    elif reading:
        totals.prompts_ms += took_ms
    else:
        totals.steps_ms += took_ms
    for sequence in [sequence for sequence, _ in rows] if is_isolated else reading:
        sequence.account.own_ms += took_ms
    for sequence, count in rows:
        sequence.was_computed(count, len(rows))
        if sequence.status is Status.PREFILLING:
            metrics.prefill_tokens_total += count
            if sequence.uncomputed == 0:
                sequence.change(Change.PREFILLED)
    metrics.tick(size or sum(count for _, count in rows), took_ms)


def reads_logits(sequence: Sequence) -> bool:
    """Whether the logits of its next prompt tokens are read for its report."""
    report = sequence.report
    return report is not None and sequence.computed == report.read and sequence.logprobs_pending > 0


def _draft_length(draft: Draft) -> int:
    return len(draft.tokens)


def _agreed(draft: list[int], given: tuple[SampledToken, ...]) -> int:
    """Number of drafted tokens that the row was given."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token, zip(draft, given, strict=False)))
