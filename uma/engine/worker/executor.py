"""Computes one tick's batches, and retries those that fail (the retry ladder).

Decode rows come before prefill, so that their tokens do not wait for it. A batch for which llama.cpp finds no KV cells
is retried with less: evict cache, halve the prefill, preempt a sequence. After any other failure each row is computed
alone, and a row that fails alone ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple

import attrs

from uma.engine.adapters import AdapterSet
from uma.engine.clock import now_ms
from uma.engine.delivery.pacing import ONE_STEP, Stride, plan_stride
from uma.engine.kv.checkpoints import LAST_TOKENS
from uma.engine.kv.pictures import outside
from uma.engine.kv.pool import KvPool
from uma.engine.policy import Plan
from uma.engine.policy.cost import TILE_TOKENS
from uma.engine.policy.lead import lead_ms, steps_lacking
from uma.engine.policy.order import preemption_order
from uma.engine.worker.drafts.speculator import Drafts
from uma.engine.worker.output import steps_ahead
from uma.engine.worker.runner import BatchOutcome, DecodeSteps, ModelRunner, Work
from uma.engine.worker.sampling import RowResult
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.slots import Slots
from uma.engine.worker.status import Status
from uma.errors import DecodeFailed
from uma.llama.context import ABORTED, NO_ROOM, Context
from uma.metrics import EngineMetrics


@attrs.define(slots=True)
class Tick:
    """What to compute until the inbox is read again: a plan, with the sequences that it names."""

    plan: Plan
    decode: list[Sequence]
    prefill: Work
    drafts: Drafts | None = None
    """Drafts that are verified with the decode rows' next tokens, in one batch."""
    hold_ms: float = 0.0
    """Maximum time between the first and the last token of a stride."""
    has_sets: bool = False
    """Whether rows have different sets of adapters: each set then decodes in batches of its own."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decode and not self.prefill and not self.plan.embed_tokens


class Result(NamedTuple):
    """Tokens that one step gave its rows, in order."""

    sequences: list[Sequence]
    given: list[RowResult]
    at_ms: float


StepResults = Iterable[Result]
"""Results of the steps of one batch or stride. Each must be given to its readers before the next is taken."""


@attrs.frozen(eq=False)
class Executor:
    """Computes ticks. Belongs to the decode thread."""

    _context: Context
    _pool: KvPool
    _runner: ModelRunner
    _slots: Slots
    _metrics: EngineMetrics

    def run(self, tick: Tick) -> Iterator[StepResults]:
        """Compute a tick, batch by batch. The caller delivers a batch's results before it asks for the next."""
        if tick.decode and tick.plan.steps:
            for turn in _turns(tick):
                yield from self._decode(turn)
                # A request that comes meanwhile is planned before anything is read: it waited half a second for a piece
                # of a background prompt once.
                if turn.plan.steps > 1 and not (yield from self._decode_ahead(turn, turn.plan.steps - 1)):
                    return
            lacking = self._steps_lacking(tick)
            for turn in _turns(tick) if lacking else ():
                if not (yield from self._decode_ahead(turn, lacking)):
                    return
        if not tick.prefill:
            return
        # Sequences that were preempted for the decode rows have no slot.
        prefill = [row for row in tick.prefill if row[0].holding is not None]
        if tick.plan.is_mixed:
            yield from self._mixed(tick, prefill)
        elif prefill:
            yield from self._prefill(prefill)

    def _decode(self, tick: Tick) -> Iterator[StepResults]:
        if any(sequence.uncomputed != 1 for sequence in tick.decode):
            return self._decode_several(tick.decode)
        if tick.drafts is not None:
            return self._verify(tick.drafts)
        return self._decode_at_once(tick.decode, self._stride(tick))

    def _steps_lacking(self, tick: Tick) -> int:
        """Decode steps that readers still need before the prefill, as the planned ones took longer than predicted."""
        if not tick.plan.needed_ms:
            return 0
        readers = [row for row in tick.decode if row.status is Status.DECODING and row.lane >= 0 and row.is_paced]
        lead = lead_ms(readers, tick.plan.pace_ms, now_ms())
        return steps_lacking(tick.plan.needed_ms, lead, tick.plan.pace_ms, self._runner.decode_ms)

    def _decode_ahead(self, tick: Tick, steps: int) -> Generator[StepResults, None, bool]:
        """Run more steps of a tick that reads prompts. False where a command ended them early."""
        while steps > 0:
            rows = [row for row in tick.decode if row.status is Status.DECODING and row.uncomputed == 1]
            if not rows:
                return True
            if self._runner.is_called:
                return False
            most = min(steps, self._pool.free_cells // len(rows))
            stride = plan_stride(map(steps_ahead, rows), tick.hold_ms, self._runner.decode_ms, most)
            before = rows[0].computed
            yield from self._decode_at_once(list(rows), stride)
            steps -= max(1, rows[0].computed - before)
        return True

    def _stride(self, tick: Tick) -> Stride:
        """The stride of the decode rows: until a row's text can end, or a buffered token is due."""
        if not tick.plan.is_decode_only:
            return ONE_STEP
        steps = map(steps_ahead, tick.decode)
        return plan_stride(steps, tick.hold_ms, self._runner.decode_ms, self._pool.free_cells // len(tick.decode))

    def _decode_at_once(self, sequences: list[Sequence], stride: Stride) -> Iterator[StepResults]:
        while sequences:
            decoding = self._runner.decode(sequences, stride)
            yield self._booked(sequences, decoding)
            if decoding.outcome.is_done:
                return
            retry: Work = []
            yield from self._failed(decoding.outcome, [(sequence, 1) for sequence in sequences], retry)
            sequences, stride = [sequence for sequence, _ in retry], ONE_STEP

    def _booked(self, sequences: list[Sequence], decoding: DecodeSteps) -> StepResults:
        """Results of a stride's steps, each step booked just before it is given, because booking needs the tokens
        before it to be accepted. See `ModelRunner.decode` for when.
        """
        for step in decoding if self._context.returns_early else list(decoding):
            rows, given = [row for row in sequences if row.holding is not None], step.given
            if len(rows) < len(sequences):
                # An exception has ended a sequence in the middle of the stride: its further tokens are dropped.
                given = [result for result, row in zip(given, sequences, strict=True) if row.holding is not None]
            self._runner.book_step(rows, step)
            yield Result(rows, given, step.at_ms)

    def _verify(self, drafts: Drafts) -> Iterator[StepResults]:
        """Verify drafts. Rows of a batch that fails, and of those behind it, are decoded without drafts, where the
        retry ladder applies.
        """
        outcome, verified, given, at_ms = self._runner.verify(drafts)
        if verified:
            yield [Result(verified, given, at_ms)]
        if outcome.is_done or self._context.is_ended:
            return
        left = [sequence for sequence, _ in drafts.rows if sequence not in verified]
        self._restart_others(left, outcome)
        left = [row for row in left if outcome.code == NO_ROOM or self._cut_back(row, outcome)]
        yield from self._decode_at_once([] if self._is_given_up(outcome) else left, ONE_STEP)

    def _decode_several(self, sequences: list[Sequence]) -> Iterator[StepResults]:
        """Decode rows of which some have several tokens to compute, which were given in one step."""
        left, work = self._context.n_batch, list[tuple[Sequence, int]]()
        for index, sequence in enumerate(sequences):
            count = min(sequence.uncomputed, left - (len(sequences) - index - 1))
            work.append((sequence, count))
            left -= count
        for batch in self._runner.in_one_ubatch(work):
            # The retries of an earlier batch can have preempted some.
            holding = [row for row in batch if row[0].holding is not None]
            yield from self._until_done(self._runner.decode_several, holding)

    def _prefill(self, work: Work) -> Iterator[StepResults]:
        pictures = [row for row in work if row[0].picture is not None]
        if pictures:
            work = [row for row in work if row[0].picture is None]
        for part in self._to_checkpoints([(sequence, min(count, sequence.to_picture)) for sequence, count in work]):
            for batch in [batch for some in self._runner.split_pending(part) for batch in self._with_last_alone(some)]:
                # The retries of an earlier batch can have preempted it.
                left = [row for row in batch if row[0].holding is not None]
                yield from self._until_done(self._runner.prefill, left)
        for sequence, count in pictures:
            placed = sequence.picture
            # One that is not encoded yet waits (`worker.pictures`).
            if sequence.holding is not None and placed is not None and placed.picture.embedding is not None:
                most = min(count, sequence.until_checkpoint(sequence.computed))
                yield from self._until_done(self._runner.prefill, [(sequence, most)])

    def _to_checkpoints(self, work: Work) -> list[Work]:
        """Split work into several parts, so that in each a sequence ends at its next checkpoint or before it. What
        comes after a leader's branch is not read yet: its followers begin first.
        """
        found: list[Work] = []
        for sequence, count in work:
            computed, end = sequence.computed, sequence.computed + count
            for turn in itertools.count():
                size = min(end - computed, sequence.until_checkpoint(computed))
                if turn == len(found):
                    found.append([])
                found[turn].append((sequence, size))
                computed += size
                # Behind `adapted_from` the adapters differ, and a batch has one set: the rest waits for the next tick.
                if computed in (end, sequence.branch, sequence.adapted_from):
                    break
        return found

    def _with_last_alone(self, work: Work) -> list[Work]:
        """Work in batches: if nothing else runs, the last `LAST_TOKENS` tokens of a prompt are a batch of their own.

        Kernels sum in another order for another number of rows, so logits differ in their last bits. A cached prompt
        computes these tokens alone; without this split an uncached one would compute them with the rest, and at a near
        tie have another answer.
        """
        if len(work) != 1 or len(self._slots.active) != 1:
            return [work]
        ((sequence, count),) = work
        if sequence.report is not None or count != sequence.uncomputed:
            return [work]
        if count - LAST_TOKENS < TILE_TOKENS <= count and sequence.computed > LAST_TOKENS:
            # The batch before the last fills its tile with tokens that are computed again, if there are any.
            sequence, count = self._begin_again(sequence, count + LAST_TOKENS)
        elif count == LAST_TOKENS + 1 and sequence.computed > 1:
            # No row is computed alone, wherever the piece before it ended, which depends on the machine's speed.
            sequence, count = self._begin_again(sequence, count + 1)
            if count == LAST_TOKENS + 1:  # it was not cut back (at a checkpoint): it ends there each time
                return [[(sequence, count)]]
        if count < LAST_TOKENS:
            return [[self._begin_again(sequence, max(count, min(LAST_TOKENS, len(sequence.tokens) - 1)))]]
        return [[(sequence, count - LAST_TOKENS)], [(sequence, LAST_TOKENS)]] if count > LAST_TOKENS else [work]

    def _begin_again(self, sequence: Sequence, count: int) -> tuple[Sequence, int]:
        """Cut a sequence back so that `count` tokens are uncomputed; returns it, and how many it can compute now.

        Not one at a checkpoint, which would be lost: the same prompt, or the next turn, resumes there.
        """
        extra = count - sequence.uncomputed
        if (
            extra > 0
            and sequence.holding is not None
            and sequence.holding.tip.checkpoint is None
            and sequence.computed - extra >= sequence.adapted_from
            and self._pool.truncate(sequence.holding, sequence.computed - extra)
        ):
            sequence.cut_back(sequence.computed - extra)
            self._metrics.reread_tokens_total += extra
        return sequence, min(count, sequence.uncomputed)

    def _mixed(self, tick: Tick, prefill: Work) -> Iterator[StepResults]:
        """Compute decode rows and prefill in one batch, or in two where that is impossible."""
        rows: Work = [(row, 1) for row in tick.decode if row.status is Status.DECODING]
        work = [*self._to_checkpoints(prefill)[0], *rows] if prefill else rows
        if rows and prefill and sum(count for _, count in work) <= self._context.n_batch and _is_plain(work):
            yield from self._until_done(self._runner.prefill, work)
            return
        if rows:
            yield from self._decode(attrs.evolve(tick, decode=[row for row, _ in rows], drafts=None))
        prefill = [row for row in prefill if row[0].holding is not None]
        if prefill:
            yield from self._prefill(prefill)

    def _until_done(self, compute: Callable[[Work], BatchOutcome], work: Work) -> Iterator[StepResults]:
        """Compute `work`; after a failed batch, what the retry ladder leaves of it."""
        while work:
            outcome = compute(work)
            if outcome.is_done:
                yield self._sampled(outcome)
                return
            retry: Work = []
            yield from self._failed(outcome, work, retry)
            work = retry

    def _sampled(self, outcome: BatchOutcome) -> StepResults:
        """Sample the rows that have logits in the batch just computed."""
        sequences, indices = list(outcome.ends), list(outcome.ends.values())
        if sequences:
            yield Result(sequences, self._runner.sampling.sample(sequences, indices), now_ms())

    # The retry ladder

    def _is_given_up(self, outcome: BatchOutcome) -> bool:
        """Whether an aborted batch must not be retried."""
        return self._context.is_ended or outcome.is_cancelled

    def _failed(self, outcome: BatchOutcome, work: Work, retry: Work) -> Iterator[StepResults]:
        """Handle a failed batch: append to `retry` what to compute instead.

        Sequences that an exception ended in an earlier step of the stride are left out.
        """
        work = [row for row in work if row[0].holding is not None]
        if not work:
            return
        if outcome.code == NO_ROOM:
            retry += self._with_less(work)
        elif outcome.code == ABORTED:
            back = self._put_back(work, outcome)
            retry += [] if self._is_given_up(outcome) else back
        else:
            yield from self._run_alone(self._put_back(work, outcome))

    def _with_less(self, work: Work) -> Work:
        """Work to retry after `llama_decode` found no cells: evict cache, prefill less, then preempt the youngest."""
        self._metrics.kv_retries_total += 1
        if self._pool.drop_cache():
            return work
        if work[0][0].status is Status.PREFILLING and (half := sum(count for _, count in work) // 2):
            less: Work = []
            for sequence, count in work:
                if half > 0:
                    less.append((sequence, min(count, half)))
                    half -= count
            return less
        candidates = preemption_order(self._slots.active.values())
        if len(candidates) > 1:
            victim = candidates[0]
            self._slots.preempt(victim, now_ms())
            return [row for row in work if row[0] is not victim]
        # Alone, with no cache left, and still no cells: the context is full.
        for sequence, _ in work:
            self._slots.finish(sequence, "length")
        return []

    def _run_alone(self, work: Work) -> Iterator[StepResults]:
        """Compute each row of a failed batch alone. One that fails again ends."""
        for sequence, count in work:
            if sequence.status is Status.PREFILLING or count > 1:
                is_read = sequence.status is Status.PREFILLING
                outcome = (self._runner.prefill if is_read else self._runner.decode_several)([(sequence, count)])
                yield self._sampled(outcome)
            else:
                decoding = self._runner.decode([sequence], ONE_STEP)
                yield self._booked([sequence], decoding)
                outcome = decoding.outcome
            if outcome.code == NO_ROOM:
                self._slots.preempt(sequence, now_ms())
            elif not outcome.is_done:
                self._cut_back(sequence, outcome)
                if outcome.code != ABORTED:
                    why = f"llama_decode failed with {outcome.code} for this request"
                    self._slots.end(sequence, DecodeFailed(why))

    def _put_back(self, work: Work, outcome: BatchOutcome) -> Work:
        """Restore memory to the state before a failed batch. Returns the work that can be retried."""
        back = [row for row in work if self._cut_back(row[0], outcome)]
        self._restart_others([sequence for sequence, _ in work], outcome)
        return back

    def _restart_others(self, sequences: list[Sequence], outcome: BatchOutcome) -> None:
        """Restart sequences outside of an aborted batch of `sequences` where llama.cpp can have moved their states."""
        if not outcome.are_others_lost:
            return
        for other in list(self._slots.active.values()):
            if other not in sequences:
                self._slots.restart(other)

    def _cut_back(self, sequence: Sequence, outcome: BatchOutcome) -> bool:
        """Remove what a failed batch can have left in memory. False if memory cannot be cut: it is queued again."""
        computed = outside(sequence.tokens, sequence.computed)
        if not outcome.is_state_lost and self._pool.truncate(sequence.slot, computed):
            sequence.cut_back(computed)
            return True
        self._slots.restart(sequence)
        return False


def _is_plain(work: Work) -> bool:
    """Whether rows have one token to compute each, no prompt's logits are read, and no prompt comes to a picture."""
    return all(
        sequence.uncomputed == 1
        if sequence.status is Status.DECODING
        else not sequence.logprobs_pending and count <= sequence.to_picture
        for sequence, count in work
    )


def _turns(tick: Tick) -> Iterator[Tick]:
    """The tick's decode rows by set of adapters, the row that was longest without a token first."""
    if not tick.has_sets:
        yield tick
        return
    by_set: dict[AdapterSet, list[Sequence]] = {}
    for row in sorted(tick.decode, key=lambda row: row.last_token_ms):
        by_set.setdefault(row.adapters, []).append(row)
    for rows in by_set.values():
        # Retries of the turn before can have preempted some.
        if left := [row for row in rows if row.holding is not None]:
            yield attrs.evolve(tick, decode=left, has_sets=False)
