"""One simulated worker: a machine under one policy, tick by tick, with the engine's rules for its queue.

What the engine's decode thread does with a plan is done here with the same parts: decode steps one after another, each
token given to its reader when `delivery.pacing` says, and the prompt's piece only after all of them and only if no
request came meanwhile. The machine's time is made up; nothing else is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Protocol

from benchmarks.simulation.load import Session
from benchmarks.simulation.machines import Machine
from benchmarks.simulation.policies import Policy
from benchmarks.simulation.rows import PlainRow
from uma.engine.delivery.pacing import reader_ms
from uma.engine.intake.overload import BEYOND_REPAIR, Load, wait_ms
from uma.engine.policy import Plan, State
from uma.engine.policy.lead import lead_ms, steps_lacking
from uma.engine.policy.order import admission_key, due_ms, gives_way, may_begin
from uma.engine.policy.scheduler import mixed_position
from uma.engine.policy.state import FairShares

MAX_QUEUE = 1_024
"""Maximum requests that wait under UMA: the default of its `max_queue`."""
NOISE = 0.05
"""Standard deviation of the logarithm of what a batch takes."""
SERVICE_WEIGHT = 0.1
"""Weight of a request's time in the running average that admission goes by."""


class Cache(Protocol):
    """What a worker holds of prompts it has computed."""

    @property
    def tokens(self) -> int:
        """Cells in use by what is held."""

    @property
    def pinned_tokens(self) -> int:
        """Of these, what running requests share."""

    def begin(self, session: Session) -> int:
        """Pin what is held of its prompt, and return how many tokens that is."""

    def read(self, session: Session) -> int:
        """Its prompt is read: share what others can begin with. Returns the tokens that are the cache's from now on."""

    def end(self, session: Session) -> None:
        """Keep what it has computed, and unpin it."""

    def shrink(self, tokens: int) -> None:
        """Drop what no running request shares until at most `tokens` are held."""


class NoCache:
    """Prompts have nothing in common."""

    tokens = pinned_tokens = 0

    def begin(self, session: Session) -> int:
        """Nothing is held."""
        return 0

    def read(self, session: Session) -> int:
        """Nothing is shared."""
        return 0

    def end(self, session: Session) -> None:
        """Nothing is kept."""

    def shrink(self, tokens: int) -> None:
        """There is nothing to drop."""


class Worker:
    """A machine and its queue. `offer` it requests, and `tick` while it `has_work`."""

    def __init__(self, machine: Machine, policy: Policy, seed: int = 1, cache: Cache | None = None) -> None:
        self._machine = machine
        self._policy = policy
        self._rng = random.Random(seed)
        self._cache = cache or NoCache()
        self._waiting: dict[int, Session] = {}
        self._active: dict[int, Session] = {}
        self._by_key: dict[int, Session] = {}
        self._service_ms = 0.0
        self._shares = FairShares()
        self._answered_ms = -math.inf
        self.now_ms = 0.0
        """When its last batch ended."""
        self.finished: list[Session] = []
        """Sessions that have ended, for the caller to take."""
        self.next_arrival_ms = float("inf")
        """When the next request comes, if that is known: a tick that runs ahead stops for it."""

    @property
    def has_work(self) -> bool:
        """Whether a tick would do anything."""
        return bool(self._active or self._waiting)

    @property
    def _own_cells(self) -> int:
        return sum(each.row.cells for each in self._active.values())

    @property
    def _free_cells(self) -> int:
        return self._machine.cells - self._own_cells - self._cache.pinned_tokens

    # Requests come

    def offer(self, session: Session, now_ms: float) -> None:
        """Queue a request that comes now, or refuse it as the engine would."""
        if not self.has_work:
            self.now_ms = max(self.now_ms, now_ms)
        row = session.row
        row.due_ms = due_ms(row, self._policy.cost)
        if self._policy.is_uma and (self._is_full(row) or self._is_hopeless(row)):
            session.is_refused = True
            return
        row.fair_share = self._shares.came(session.client)
        self._by_key[row.key] = session
        self._waiting[row.key] = session

    def _is_full(self, row: PlainRow) -> bool:
        """Whether the queue is, by the engine's rule for it."""
        places = max(0, self._machine.places - len(self._active))
        if len(self._waiting) - places < MAX_QUEUE:
            return False
        ahead = sum(each.row.lane >= row.lane for each in self._waiting.values()) - places
        return (row.lane >= 0 and ahead >= MAX_QUEUE) or len(self._waiting) - places >= 2 * MAX_QUEUE

    def _is_hopeless(self, row: PlainRow) -> bool:
        """Whether the first token that it asks for is out of reach, as the engine would see it."""
        if row.target_ttft_ms is None:
            return False
        mine = admission_key(row, self.now_ms)
        ahead = [each for each in self._waiting.values() if admission_key(each.row, self.now_ms) < mine]
        running = [each for each in self._active.values() if admission_key(each.row, self.now_ms) < mine]
        load = Load(
            ahead_tokens=sum(each.row.prefill_left for each in (*ahead, *running)),
            ahead_waiting=len(ahead),
            running=sum(each.row.lane >= min(row.lane, 0) for each in self._active.values()),
            decoding=sum(each.row.prefill_left == 0 for each in self._active.values()),
            max_running=self._machine.places,
            service_ms=self._service_ms,
            used_cells=self._own_cells,
            tick_budget_ms=self._policy.targets.tick_budget_ms,
        )
        return wait_ms(load, row.prompt_tokens, self._policy.cost) > BEYOND_REPAIR * row.target_ttft_ms

    def _admit(self) -> None:
        while self._waiting:
            session = min(self._waiting.values(), key=lambda each: self._policy.place(each.row, self.now_ms))
            unread = sum(each.row.prefill_left for each in self._active.values())
            needed = session.prompt_tokens + session.generated
            has_place = len(self._active) < self._machine.places
            if not (has_place and may_begin(needed, self._free_cells, unread, len(self._active))):
                victims = gives_way(session.row, [each.row for each in self._active.values()], self.now_ms)
                if has_place or not victims or not self._policy.is_uma:
                    return
                self._preempt(victims[0].key)
                continue
            del self._waiting[session.row.key]
            self._begin(session)

    def _begin(self, session: Session) -> None:
        row, held = session.row, self._cache.begin(session)
        row.prefill_left = max(1, row.prefill_left - held)
        if not session.generated:
            session.cached_tokens = row.prompt_tokens - row.prefill_left
        self._active[row.key] = session

    # A tick

    def tick(self) -> None:
        """Admit, plan, and compute: the decode steps of the plan, then its pieces of prompts."""
        self._admit()
        used = self._own_cells + self._cache.pinned_tokens
        self._cache.shrink(self._machine.cells - self._own_cells)
        plan = self._next_plan(used)
        for key in plan.preempt:
            self._preempt(key)
        if self._policy.is_uma:
            if self._decode(plan, used):
                self._read(plan, used)
        else:
            self._all_at_once(plan, used)

    def _next_plan(self, used: int) -> Plan:
        """The plan of the engine's policy."""
        decoding = [each.row for each in self._active.values() if each.row.prefill_left == 0]
        prefilling = [each.row for each in self._active.values() if each.row.prefill_left]
        state = State(
            decoding,
            prefilling,
            self._machine.cells - used,
            used,
            answered_ms=self._answered_ms,
        )
        return self._policy.plan(state, self.now_ms)

    def _decode(self, plan: Plan, used: int) -> bool:
        """The decode steps. False where a request came before the last of them: then nothing is read in this tick."""
        step, steps = 0, plan.steps if plan.decode else 0
        while step < steps:
            rows = [self._active[key] for key in plan.decode if key in self._active]
            if not rows:
                break
            if step and self.next_arrival_ms <= self.now_ms:
                return False
            took = self._pass(self._machine.decode_ms(len(rows), used + step * len(rows)))
            if step == 0:
                self._policy.cost.observe_decode(len(rows), used, took)
            for session in rows:
                self._give(session, plan.pace_ms)
            step += 1
            if step == plan.steps:
                steps += self._steps_lacking(plan, took)
        return True

    def _steps_lacking(self, plan: Plan, step_ms: float) -> int:
        """Decode steps that the readers lack before the prefill, as in the engine."""
        rows = [self._active[key].row for key in plan.decode if key in self._active]
        lead = lead_ms((row for row in rows if row.lane >= 0), plan.pace_ms, self.now_ms)
        return steps_lacking(plan.needed_ms, lead, plan.pace_ms, step_ms)

    def _read(self, plan: Plan, used: int) -> None:
        """The pieces of prompts, in a mixed batch with one more decode step where the plan says so."""
        tokens = sum(count for _, count in plan.prefill)
        if not tokens:
            return
        position, cost = self._position(plan, tokens), self._policy.cost
        rows = [self._active[key] for key in plan.decode if key in self._active] if plan.is_mixed else []
        if rows:
            took = self._pass(self._machine.mixed_ms(len(rows), tokens, position, used))
            position = mixed_position(position, tokens, [session.row.position for session in rows])
            cost.observe_mixed(len(rows), used, tokens, position, took)
        else:
            took = self._pass(self._machine.prefill_ms(tokens, position))
            cost.observe_prefill(tokens, position, took)
        for session in rows:
            self._give(session, plan.pace_ms)
        self._count_read(plan)

    def _all_at_once(self, plan: Plan, used: int) -> None:
        """One batch of decode rows and prompts."""
        tokens = sum(count for _, count in plan.prefill)
        rows = [self._active[key] for key in plan.decode]
        if tokens:
            self._pass(self._machine.mixed_ms(len(rows), tokens, self._position(plan, tokens), used))
        elif rows:
            self._pass(self._machine.decode_ms(len(rows), used))
        for session in rows:
            self._give(session, 0.0)
        self._count_read(plan)

    def _position(self, plan: Plan, tokens: int) -> float:
        """Where the tokens to be read stand in their prompts, on the average."""
        return sum(count * self._active[key].row.position for key, count in plan.prefill) / tokens

    def _count_read(self, plan: Plan) -> None:
        for key, count in plan.prefill:
            session = self._active[key]
            session.row.prefill_left -= count
            session.row.cells += count
            session.row.fair_share.was_read(count)
            if session.row.prefill_left == 0:
                session.row.cells -= self._cache.read(session)
                self._give(session, plan.pace_ms)

    def _pass(self, ms: float) -> float:
        """A batch that should take so long: how long it really takes."""
        took = ms * self._rng.lognormvariate(0, NOISE)
        self.now_ms += took
        return took

    def _preempt(self, key: int) -> None:
        session = self._active.pop(key)
        self._cache.end(session)
        session.row.cells = 0
        session.row.prompt_tokens = session.row.prefill_left = session.prompt_tokens + session.generated
        self._waiting[session.row.key] = session

    def _give(self, session: Session, pace_ms: float) -> None:
        """A token was sampled: its reader has it when it is due."""
        row = session.row
        session.had_token(reader_ms(row.last_token_ms, self.now_ms, pace_ms))
        row.cells += 1
        row.fair_share.was_given(1)
        if session.generated >= session.output_tokens:
            self._finish(session)

    def _finish(self, session: Session) -> None:
        assert session.first_ms is not None
        # The end of a background stream waits for no pace.
        session.done_ms = session.row.last_token_ms if session.row.lane >= 0 else self.now_ms
        if session.row.lane >= 0:
            self._answered_ms = session.done_ms
        self._shares.left(session.row.fair_share)
        self.finished.append(session)
        del self._active[session.row.key], self._by_key[session.row.key]
        self._cache.end(session)
        self._service_ms += (session.done_ms - session.first_ms - self._service_ms) * SERVICE_WEIGHT


def run(worker: Worker, sessions: Iterable[Session]) -> None:
    """Give one worker all these requests, in order of arrival, until each is done or refused."""
    arrivals = iter(sessions)
    upcoming = next(arrivals, None)
    while upcoming is not None or worker.has_work:
        while upcoming is not None and (upcoming.row.arrived_ms <= worker.now_ms or not worker.has_work):
            worker.offer(upcoming, upcoming.row.arrived_ms)
            upcoming = next(arrivals, None)
        worker.next_arrival_ms = float("inf") if upcoming is None else upcoming.row.arrived_ms
        if worker.has_work:
            worker.tick()
