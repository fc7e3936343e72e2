"""Many simulated workers behind one router: events in order of time, and the same policy on every worker."""

from __future__ import annotations

import heapq
import itertools
import random
from functools import partial

import attrs

from benchmarks.simulation.conversations import Conversations, Turn
from benchmarks.simulation.machines import Machine
from benchmarks.simulation.outcome import is_attained, percentile, ttft_ms
from benchmarks.simulation.policies import Uma, default_targets
from benchmarks.simulation.prefix_cache import Node, PrefixCache
from benchmarks.simulation.router import ROUTERS
from benchmarks.simulation.worker import Worker

ARRIVAL, EVENT, APPLIED, FIRST_TOKEN, END, TICK = range(6)
ROUTER_BLOCKS_PER_SECOND = 328_000.0
"""One thread of Dynamo 1.6.1's indexer (`python -m benchmarks.indexer`), measured on 2 cores beside other programs."""
WARM_UP = 0.25
"""Share of the time whose requests count for nothing: caches are empty at first."""


@attrs.frozen
class Setup:
    """One experiment."""

    workers: int
    router: str
    event_delay_ms: tuple[float, float] = (1.0, 50.0)
    """KV events reach the router after between so many milliseconds."""
    block_size: int = 16
    requests_per_second: float = 20.0
    """For each worker, once conversations have gone on for long: near what one can serve where half of each prompt is
    at hand."""
    seconds: float = 8.0
    seed: int = 7
    router_blocks_per_second: float = ROUTER_BLOCKS_PER_SECOND
    """Of events that the router applies, one after another; those that come faster wait."""
    checkpoints: int = 0
    """Of a model with recurrent states: as many as each worker's memory holds. 0: memory can be cut at any token."""


@attrs.frozen
class ClusterOutcome:
    """What came of it."""

    setup: Setup
    requests: int
    refused: int
    hit_rate: float
    """Prompt tokens that were at hand, of all."""
    attained: float
    """Requests whose first token and worst gap met their targets, of all that came, refused ones too."""
    ttft_p50_ms: float
    ttft_p95_ms: float
    events_per_second: float
    blocks_per_second: float
    requests_per_second: float
    """For each worker, as they came: most conversations' later turns come after the simulated time."""
    router_behind_p99_ms: float
    """From an event's coming to the router until it is applied."""


@attrs.frozen
class Told:
    """An event at the router."""

    came_ms: float
    applied_ms: float
    blocks: int


class Cluster:
    """Workers, a router and the conversations that they serve."""

    def __init__(self, machine: Machine, setup: Setup) -> None:
        self._setup = setup
        self._rng = random.Random(setup.seed)
        self._router = ROUTERS[setup.router](setup.workers, setup.block_size, setup.seed)
        self._workers = [self._make_worker(machine, index) for index in range(setup.workers)]
        self._ticking = [False] * setup.workers
        self._conversations = Conversations(setup.seed)
        self._agenda: list[tuple[float, int, int, object]] = []
        self._numbers = itertools.count()
        self._turns: list[Turn] = []
        self._now_ms = 0.0
        self._last_told_ms = [0.0] * setup.workers
        self._router_free_ms = 0.0
        self._told: list[Told] = []

    def _make_worker(self, machine: Machine, index: int) -> Worker:
        cache = PrefixCache(self._setup.block_size, partial(self._tell, index), self._setup.checkpoints)
        return Worker(machine, Uma(default_targets()), self._setup.seed + index, cache)

    def run(self) -> ClusterOutcome:
        """Until the time is over and all requests have ended."""
        until_ms = 1_000 * self._setup.seconds
        per_second = self._setup.requests_per_second * self._setup.workers
        self._plan(self._conversations.between_ms(per_second), ARRIVAL, None)
        while self._agenda:
            self._now_ms, _, kind, what = heapq.heappop(self._agenda)
            if kind == ARRIVAL:
                if self._now_ms > until_ms:
                    continue
                if what is None:
                    self._arrive(self._conversations.begin(self._now_ms))
                    self._plan(self._now_ms + self._conversations.between_ms(per_second), ARRIVAL, None)
                elif isinstance(what, Turn):
                    self._arrive(what)
            else:
                self._do(kind, what)
        return self._judge(until_ms)

    def _do(self, kind: int, what: object) -> None:
        if kind == TICK and isinstance(what, int):
            self._tick(what)
        elif kind == EVENT and isinstance(what, tuple):
            self._take_in(*what)
        elif kind == APPLIED and isinstance(what, tuple):
            self._router.told(*what)
        elif kind == FIRST_TOKEN and isinstance(what, Turn):
            self._router.had_first_token(what)
        elif kind == END and isinstance(what, Turn):
            self._router.ended(what)

    def _plan(self, at_ms: float, kind: int, what: object) -> None:
        heapq.heappush(self._agenda, (at_ms, next(self._numbers), kind, what))

    def _arrive(self, turn: Turn) -> None:
        self._turns.append(turn)
        turn.worker = self._router.route(turn)
        worker = self._workers[turn.worker]
        worker.offer(turn, self._now_ms)
        if turn.is_refused:
            self._router.had_first_token(turn)
            self._router.ended(turn)
        elif not self._ticking[turn.worker]:
            self._ticking[turn.worker] = True
            self._plan(self._now_ms, TICK, turn.worker)

    def _tick(self, index: int) -> None:
        worker = self._workers[index]
        worker.tick()
        for turn in worker.finished:
            assert isinstance(turn, Turn)
            assert turn.first_ms is not None
            self._plan(max(self._now_ms, turn.first_ms), FIRST_TOKEN, turn)
            self._plan(worker.now_ms, END, turn)
            if (following := self._conversations.after(turn)) is not None:
                self._plan(following.row.arrived_ms, ARRIVAL, following)
        worker.finished.clear()
        self._ticking[index] = worker.has_work
        if worker.has_work:
            self._plan(worker.now_ms, TICK, index)

    def _tell(self, index: int, node: Node, tokens: int, blocks: int) -> None:
        """An event leaves a worker, and stays behind those before it."""
        if not blocks:
            return
        at_ms = self._workers[index].now_ms + self._rng.uniform(*self._setup.event_delay_ms)
        self._last_told_ms[index] = at_ms = max(at_ms, self._last_told_ms[index])
        self._plan(at_ms, EVENT, (index, node, tokens, blocks))

    def _take_in(self, index: int, node: Node, tokens: int, blocks: int) -> None:
        """An event has come to the router, which applies it once it has applied those before it."""
        took_ms = 1_000 * abs(blocks) / self._setup.router_blocks_per_second
        self._router_free_ms = max(self._now_ms, self._router_free_ms) + took_ms
        self._told.append(Told(self._now_ms, self._router_free_ms, abs(blocks)))
        self._plan(self._router_free_ms, APPLIED, (index, node, tokens))

    def _judge(self, until_ms: float) -> ClusterOutcome:
        counted = [each for each in self._turns if each.row.arrived_ms >= WARM_UP * until_ms]
        served = [each for each in counted if each.done_ms is not None]
        prompts = sum(each.prompt_tokens for each in served)
        first = [ttft_ms(each) for each in served]
        told = [each for each in self._told if WARM_UP * until_ms <= each.came_ms < until_ms]
        window_s = (1 - WARM_UP) * until_ms / 1_000
        return ClusterOutcome(
            self._setup,
            requests=len(counted),
            refused=sum(each.is_refused for each in counted),
            hit_rate=sum(each.cached_tokens for each in served) / max(1, prompts),
            attained=sum(map(is_attained, served)) / max(1, len(counted)),
            ttft_p50_ms=percentile(first, 0.5),
            ttft_p95_ms=percentile(first, 0.95),
            events_per_second=len(told) / window_s,
            blocks_per_second=sum(each.blocks for each in told) / window_s,
            requests_per_second=len(counted) / window_s / self._setup.workers,
            router_behind_p99_ms=percentile([each.applied_ms - each.came_ms for each in told], 0.99),
        )
