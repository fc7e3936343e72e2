"""The simulator runs the engine's policy whole, and what is published of it holds."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from rich.console import Console

from benchmarks.document import between
from benchmarks.simulate import HERE, KEPT, simulate
from benchmarks.simulation import scale
from benchmarks.simulation.cluster import Cluster, ClusterOutcome, Setup
from benchmarks.simulation.conversations import Conversations
from benchmarks.simulation.load import Load, Session
from benchmarks.simulation.machines import MACHINES
from benchmarks.simulation.outcome import IN_TIME, LANES
from benchmarks.simulation.policies import Uma, default_targets
from benchmarks.simulation.prefix_cache import Node, PrefixCache
from benchmarks.simulation.worker import Worker, run
from uma.engine.policy import Plan, State

READ = {"decode", "prefill", "preempt", "is_decode_only", "is_mixed", "steps"}
READ |= {"pace_ms", "needed_ms"}
TOLD = {"lead_ms"}
"""Figures for metrics, which change nothing in what is computed."""

UNASKED = {"embed_tokens"}
"""What no simulated request asks for."""


def test_the_simulator_knows_every_part_of_a_plan() -> None:
    assert set(attrs.fields_dict(Plan)) == READ | TOLD | UNASKED


class Watched(Uma):
    """The engine's scheduler; its plans are kept."""

    def plan(self, state: State, now_ms: float) -> Plan:
        plan = super().plan(state, now_ms)
        self.plans.append(plan)
        return plan

    plans: list[Plan]


def test_tokens_computed_ahead_of_a_piece_are_given_evenly() -> None:
    policy = Watched(default_targets())
    policy.plans = []
    stream, document = Session.make(1, 0, 0.0, 16, 200), Session.make(2, 0, 500.0, 4_000, 4)
    run(Worker(MACHINES["cpu"], policy), [stream, document])
    assert max(plan.steps for plan in policy.plans) > 1
    longest_ms = max(MACHINES["cpu"].prefill_ms(count, 0) for plan in policy.plans for _, count in plan.prefill)
    assert stream.worst_gap_ms < IN_TIME * stream.row.target_tbt_ms < longest_ms


@pytest.mark.parametrize("load", [0.75, 0.9])
def test_no_lane_pays_for_the_policy_on_a_machine_that_can_serve_all(load: float) -> None:
    usual, ours = (simulate(MACHINES["gpu"], policy, Load(600, load)) for policy in ("greedy", "uma"))
    for lane in LANES:
        assert ours.attained[lane] >= usual.attained[lane] - 0.01  # one request of a lane
    assert ours.tokens_per_second > 0.98 * usual.tokens_per_second


def test_a_router_that_knows_the_prefixes_finds_more_of_them_and_late_events_cost_some() -> None:
    def hit_rate(router: str, delay_ms: float) -> float:
        setups = [Setup(4, router, (delay_ms, delay_ms), seconds=6, seed=seed) for seed in (7, 8)]
        return sum(Cluster(MACHINES["gpu"], setup).run().hit_rate for setup in setups)  # of one, chance decides

    informed, ignorant = hit_rate("kv", 10.0), hit_rate("round robin", 10.0)
    assert informed > hit_rate("kv", 60_000.0)
    assert informed > ignorant


def test_where_a_worker_has_few_checkpoints_less_is_at_hand_and_the_router_is_told_so() -> None:
    def found(checkpoints: int) -> ClusterOutcome:
        return Cluster(MACHINES["gpu"], Setup(4, "kv", seconds=6, checkpoints=checkpoints)).run()

    plenty, enough, few = found(0), found(10_000), found(8)
    assert enough.hit_rate == plenty.hit_rate > few.hit_rate > 0
    assert few.blocks_per_second > plenty.blocks_per_second, "what is given up is not told of"


def test_what_was_simulated_is_kept_and_not_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setups, runs, kept, silent = (
        (Setup(1, "kv", seconds=1), Setup(2, "kv", seconds=1)),
        [],
        tmp_path / "scale.json",
        Console(quiet=True),
    )

    class Counted(Cluster):
        def run(self) -> ClusterOutcome:
            runs.append(self._setup)
            return super().run()

    monkeypatch.setattr(scale, "Cluster", Counted)
    monkeypatch.setattr(scale, "setups", lambda *_: setups[:1])
    (first,) = scale.run(MACHINES["gpu"], [1], setups[0], kept, silent)
    monkeypatch.setattr(scale, "setups", lambda *_: setups)
    assert scale.run(MACHINES["gpu"], [1, 2], setups[0], kept, silent)[0] == first
    assert tuple(runs) == setups


def test_the_page_s_table_of_many_machines_is_what_was_simulated() -> None:
    outcomes = scale.read(KEPT)
    wanted = list(scale.setups((1, 10, 100, 1_000), Setup(1, "kv")))
    published = between(HERE / "README.md", scale.BEGIN, scale.END)
    assert published.strip() == scale.markdown([outcomes[setup] for setup in wanted])


@pytest.mark.parametrize("checkpoints", [0, 12])
def test_every_simulated_block_that_is_told_is_held_or_told_away(checkpoints: int) -> None:
    told: dict[Node, int] = {}

    def tell(node: Node, tokens: int, blocks: int) -> None:
        told[node] = told.get(node, 0) + blocks
        assert told[node] == tokens // 16

    cache, talk = PrefixCache(16, tell, checkpoints), Conversations(1)
    turns = [talk.begin(0.0) for _ in range(200)]
    for turn in turns:
        cache.begin(turn)
        turn.row.prefill_left = 0
        cache.read(turn)
        cache.end(turn)
        cache.shrink(20_000)
        assert cache.tokens <= 20_000
        assert cache.pinned_tokens == 0
        assert not checkpoints or sum(map(bool, told.values())) <= checkpoints
    cache.shrink(0)
    assert not any(told.values())
