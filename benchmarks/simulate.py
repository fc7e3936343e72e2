"""A discrete-event simulator that drives the engine's own policy code with cost models of real machines.

    python -m benchmarks.simulate                      # table, and plots in benchmarks/results/
    python -m benchmarks.simulate --sessions 10000

Nothing of the policy is written again here: `Scheduler`, `admission_key`, `may_begin`, `gives_way`, `wait_ms` are the
engine's. What is simulated is the machine (how long a batch takes), the people (who asks for what, when) and the KV
cells. The same load is run under UMA's policy and under the usual one, which takes requests as they come, fills each
batch with as many prompt tokens as it holds and refuses nobody; so the table shows what the policy buys and what it
costs.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

from uma.engine.policy import CostModel, PlainRow, Scheduler, State, Targets
from uma.engine.policy.order import admission_key, due_ms, gives_way, may_begin
from uma.engine.policy.overload import BEYOND_REPAIR, Load, wait_ms

LANES = {1: "interactive", 0: "normal", -1: "background"}
RESULTS = Path(__file__).parent / "results"
READ_TOKENS = 512
"""Prompt tokens that are computed at once while nobody decodes."""
MAX_QUEUE = 1_024
"""Most requests waiting under UMA: the default of its `max_queue`."""


Curve = tuple[tuple[int, float], ...]
"""Points (tokens, milliseconds) as measured; straight lines between and beyond them."""


def at(curve: Curve, tokens: float) -> float:
    """The curve's milliseconds."""
    right = min(max(1, bisect_left(curve, (tokens, 0.0))), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return max(0.0, y0 + (tokens - x0) * (y1 - y0) / (x1 - x0))


@attrs.frozen
class Machine:
    """How long a batch really takes, in milliseconds; the policy has to find out."""

    name: str
    decode: Curve
    """A batch of decode rows, before attention."""
    cell_ms: float
    """Each cell in use that a decode batch attends over."""
    prefill: tuple[tuple[int, Curve], ...]
    """A chunk of a prompt, at several positions in it."""
    cells: int
    places: int

    def decode_ms(self, rows: int, cells: int) -> float:
        """A batch of decode rows, with so many cells in use by all of them."""
        return at(self.decode, rows) + cells * self.cell_ms

    def prefill_ms(self, tokens: int, position: float) -> float:
        """A chunk after `position` tokens of its prompt."""
        return at(tuple((where, at(curve, tokens)) for where, curve in self.prefill), position)

    def mixed_ms(self, rows: int, tokens: int, position: float, cells: int) -> float:
        """Decode rows and a chunk in one batch: the weights are read once for both."""
        return self.prefill_ms(rows + tokens, position * tokens / (rows + tokens)) + cells * self.cell_ms

    def read_ms(self, prompt: int) -> float:
        """A whole prompt, alone, at the best rate."""
        return sum(self.prefill_ms(min(READ_TOKENS, prompt - done), done) for done in range(0, prompt, READ_TOKENS))


MACHINES = {
    # This repository's own measurements: a 100 M-parameter Llama (Q8_0), flash attention, 2 x86 cores. Decode was
    # measured with 300 cells a stream, which are taken off here.
    "cpu": Machine(
        "2-core CPU, 100 M Llama",
        decode=((1, 3.6), (8, 15.6), (32, 31.4)),
        cell_ms=1e-3,
        prefill=(
            (0, ((8, 12), (16, 15), (32, 25), (64, 43), (128, 80), (256, 164), (512, 357))),
            (1_000, ((8, 20), (16, 29), (32, 52), (64, 68), (128, 125), (256, 250), (512, 509))),
            (3_000, ((8, 35), (16, 59), (32, 111), (64, 128), (128, 223), (256, 441), (512, 970))),
        ),
        cells=16_384,
        places=32,
    ),
    # From what is published with llama.cpp's own changes for an RTX 4090 and Q4_0:
    # - 16 to 512 tokens, Llama 3 8B: ggml-org/llama.cpp#7676 (1,937 3,428 5,420 7,444 9,602 10,359 tokens/s);
    #   #15131 has about 8.2 ms for anything from 10 to 16 tokens.
    # - 2 and 4 tokens against 1: 5 % and 6 % more (Llama 7B, #6646: 146.4 279.2 552.0 tokens/s).
    # - 1 token after 32,768 others, Llama 3 8B: 9.73 ms (#17505, 102.8 tokens/s). Reading their 4 GiB of KV takes 4.3
    #   of it at the 1,008 GB/s of the card, which leaves 5.4 for a token without them.
    # - Attention of prefill: what #17505 has for an RTX 3090 (16 and 512 tokens after 32,768: 18.3 and 354 ms) comes to
    #   about 1.5e-5 ms a token and position; half of that is assumed here, for twice the tensor throughput.
    # Cells are those that fit beside the weights in 24 GB at 128 KiB each.
    "gpu": Machine(
        "RTX 4090, Llama 3 8B",
        decode=((1, 5.4), (2, 5.7), (4, 5.8), (10, 8.2), (16, 8.3), (32, 9.3), (64, 11.8), (128, 17.2)),
        cell_ms=1.3e-4,
        prefill=(
            (0, ((8, 7.4), (16, 8.3), (32, 9.3), (64, 11.8), (128, 17.2), (256, 26.7), (512, 49.4))),
            (4_000, ((8, 7.6), (16, 8.8), (32, 10.3), (64, 13.7), (128, 21.0), (256, 34.4), (512, 64.8))),
        ),
        cells=131_072,
        places=64,
    ),
}


@attrs.define(eq=False)
class Session:
    """One request of the load, and what became of it."""

    row: PlainRow
    prompt_tokens: int
    output_tokens: int
    waited_for_ms: float
    """Its hope for the first token."""
    generated: int = 0
    first_ms: float | None = None
    done_ms: float | None = None
    worst_gap_ms: float = 0.0
    is_refused: bool = False


@attrs.frozen
class Load10k:
    """Who asks for what: lanes mixed, prompts mostly short with a long tail, arrivals at random."""

    sessions: int
    utilization: float
    """Of what the machine could do with prompts read alone and all places decoding, what is asked for."""
    seed: int = 7

    def make(self, machine: Machine) -> list[Session]:
        """The sessions, in order of arrival."""
        rng = random.Random(self.seed)
        drawn = [self._draw(rng) for _ in range(self.sessions)]
        token_ms = machine.decode_ms(machine.places, machine.cells // 4) / machine.places
        busy_ms = sum(machine.read_ms(prompt) + output * token_ms for _, prompt, output in drawn)
        mean_gap_ms = busy_ms / self.sessions / self.utilization
        sessions, now = [], 0.0
        for key, (lane, prompt, output) in enumerate(drawn, 1):
            now += rng.expovariate(1 / mean_gap_ms)
            target = 2_000.0 if lane > 0 else None
            row = PlainRow(key, lane, now, prompt, prompt, target, 80.0)
            sessions.append(Session(row, prompt, output, target or 10_000.0))
        return sessions

    @staticmethod
    def _draw(rng: random.Random) -> tuple[int, int, int]:
        lane = rng.choices((1, 0, -1), (0.3, 0.5, 0.2))[0]
        prompt = min(4_000, max(8, round(rng.lognormvariate(4.6, 1.1))))
        output = min(400, max(4, round(rng.expovariate(1 / 80))))
        return lane, prompt, output


Planned = tuple[Sequence[int], Sequence[tuple[int, int]], Sequence[int]]
"""Decode keys, prefill, preempted keys."""


class Greedy:
    """The usual policy: a token for everyone, and prompts in order of arrival until the batch is full."""

    is_uma = False

    def __init__(self, targets: Targets) -> None:
        self.cost = CostModel()

    def place(self, row: PlainRow) -> tuple[float, int]:
        """Sorts those who wait."""
        return (row.arrived_ms, row.key)

    def plan(self, state: State, now_ms: float) -> Planned:
        """One batch of everything."""
        decode = [row.key for row in state.decoding]
        left = min(READ_TOKENS - len(decode), state.free_cells - len(decode))
        prefill = []
        for row in sorted(state.prefilling, key=lambda each: each.key):
            count = min(row.remaining, left)
            if count <= 0:
                break
            prefill.append((row.key, count))
            left -= count
        return decode, prefill, ()


class Uma:
    """The engine's scheduler."""

    is_uma = True

    def __init__(self, targets: Targets) -> None:
        self._scheduler = Scheduler(targets)
        self.cost = self._scheduler.cost

    def place(self, row: PlainRow) -> tuple[float, int]:
        """Sorts those who wait."""
        return admission_key(row)

    def plan(self, state: State, now_ms: float) -> Planned:
        """Two batches: decode rows, then prefill."""
        plan = self._scheduler.plan(state, now_ms)
        return plan.decode, plan.prefill, plan.preempt


Policy = Uma | Greedy


class Simulation:
    """One load on one machine under one policy."""

    def __init__(self, machine: Machine, policy: Policy, targets: Targets, seed: int = 1) -> None:
        self._machine = machine
        self._policy = policy
        self._targets = targets
        self._rng = random.Random(seed)
        self._waiting: list[tuple[float, int]] = []
        self._active: dict[int, Session] = {}
        self._by_key: dict[int, Session] = {}
        self._service_ms = 0.0
        self.now_ms = 0.0
        self.ticks = 0

    def run(self, sessions: list[Session]) -> None:
        """Until every session is done or refused."""
        arrivals = iter(sessions)
        upcoming = next(arrivals, None)
        while upcoming is not None or self._waiting or self._active:
            while upcoming is not None and upcoming.row.arrived_ms <= self.now_ms:
                self._arrive(upcoming)
                upcoming = next(arrivals, None)
            self._admit()
            if not self._active:
                assert upcoming is not None
                self.now_ms = upcoming.row.arrived_ms
                continue
            self._tick()

    @property
    def _used(self) -> int:
        return sum(each.row.cells for each in self._active.values())

    def _arrive(self, session: Session) -> None:
        row = session.row
        row.due_ms = due_ms(row, self._policy.cost)
        if self._policy.is_uma and (self._is_full(row) or self._is_hopeless(row)):
            session.is_refused = True
            return
        self._by_key[row.key] = session
        heapq.heappush(self._waiting, self._policy.place(row))

    def _is_full(self, row: PlainRow) -> bool:
        """Whether the queue is, by the engine's rule for it."""
        places = max(0, self._machine.places - len(self._active))
        if len(self._waiting) - places < MAX_QUEUE:
            return False
        ahead = sum(self._by_key[key].row.lane >= row.lane for _, key in self._waiting) - places
        return (row.lane >= 0 and ahead >= MAX_QUEUE) or len(self._waiting) - places >= 2 * MAX_QUEUE

    def _is_hopeless(self, row: PlainRow) -> bool:
        """Whether the first token it wishes for is out of reach, as the engine would see it."""
        if row.target_ttft_ms is None:
            return False
        waiting = [self._by_key[key] for _, key in self._waiting]
        mine = admission_key(row)
        ahead = [each for each in waiting if admission_key(each.row) < mine]
        running = [each for each in self._active.values() if admission_key(each.row) < mine]
        load = Load(
            ahead_tokens=sum(each.row.remaining for each in (*ahead, *running)),
            ahead_waiting=len(ahead),
            running=sum(each.row.lane >= min(row.lane, 0) for each in self._active.values()),
            decoding=sum(each.row.remaining == 0 for each in self._active.values()),
            max_running=self._machine.places,
            service_ms=self._service_ms,
            used_cells=self._used,
            tick_budget_ms=self._targets.tick_budget_ms,
        )
        return wait_ms(load, row.prompt_tokens, self._policy.cost) > BEYOND_REPAIR * row.target_ttft_ms

    def _admit(self) -> None:
        while self._waiting:
            session = self._by_key[self._waiting[0][-1]]
            unread = sum(each.row.remaining for each in self._active.values())
            free = self._machine.cells - self._used
            needed = session.prompt_tokens + session.generated
            has_place = len(self._active) < self._machine.places
            if not (has_place and may_begin(needed, free, unread, len(self._active))):
                victims = gives_way(session.row, [each.row for each in self._active.values()], self.now_ms)
                if has_place or not victims or not self._policy.is_uma:
                    return
                self._preempt(victims[0].key)
                continue
            heapq.heappop(self._waiting)
            self._active[session.row.key] = session

    def _tick(self) -> None:
        decoding = [each.row for each in self._active.values() if each.row.remaining == 0]
        prefilling = [each.row for each in self._active.values() if each.row.remaining]
        used = self._used
        decode, prefill, preempt = self._policy.plan(
            State(decoding, prefilling, self._machine.cells - used, used), self.now_ms
        )
        for key in preempt:
            self._preempt(key)
        self.ticks += 1
        rows, tokens = len(decode), sum(count for _, count in prefill)
        position = sum(count * self._active[key].row.cells for key, count in prefill) / max(1, tokens)
        if not self._policy.is_uma and tokens:
            self._pass(self._machine.mixed_ms(rows, tokens, position, used))
        elif decode:
            took = self._pass(self._machine.decode_ms(rows, used))
            self._policy.cost.observe_decode(rows, used, took)
        for key in decode:
            self._give(self._active[key])
        if self._policy.is_uma and tokens:
            took = self._pass(self._machine.prefill_ms(tokens, position))
            self._policy.cost.observe_prefill(tokens, position, took)
        for key, count in prefill:
            session = self._active[key]
            session.row.remaining -= count
            session.row.cells += count
            if session.row.remaining == 0:
                self._give(session)

    def _pass(self, ms: float) -> float:
        """A batch that should take so long: how long it really takes."""
        took = ms * self._rng.lognormvariate(0, 0.05)
        self.now_ms += took
        return took

    def _preempt(self, key: int) -> None:
        session = self._active.pop(key)
        session.row.cells = 0
        session.row.prompt_tokens = session.row.remaining = session.prompt_tokens + session.generated
        heapq.heappush(self._waiting, self._policy.place(session.row))

    def _give(self, session: Session) -> None:
        row = session.row
        if session.first_ms is None:
            session.first_ms = self.now_ms
        else:
            session.worst_gap_ms = max(session.worst_gap_ms, self.now_ms - row.last_token_ms)
        row.had_token(self.now_ms)
        row.cells += 1
        session.generated += 1
        if session.generated >= session.output_tokens:
            session.done_ms = self.now_ms
            del self._active[row.key]
            service = self.now_ms - session.first_ms
            self._service_ms += (service - self._service_ms) * 0.1


@attrs.frozen
class Outcome:
    """What a run is judged by."""

    policy: str
    machine: str
    utilization: float
    refused: int
    attained: dict[int, float]
    """Share of finished sessions whose first token and worst gap met their targets, by lane."""
    ttft_p95_ms: dict[int, float]
    worst_gap_p99_ms: float
    jain: float
    tokens_per_second: float
    gaps: list[float]


def jain_index(values: Sequence[float]) -> float:
    """Jain, Chiu, Hawe 1984: (Σx)² / (n Σx²); 1 where all get the same, 1/n where one gets all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def judge(name: str, machine: Machine, utilization: float, sessions: list[Session], end_ms: float) -> Outcome:
    """Figures of a finished run. Fairness is over each session's slowdown against having the machine to itself."""
    finished = [each for each in sessions if each.done_ms is not None]
    attained, ttft = {}, {}
    for lane in LANES:
        group = [each for each in finished if each.row.lane == lane]
        met = [
            _ttft(each) <= each.waited_for_ms and each.worst_gap_ms <= 1.5 * each.row.target_tbt_ms for each in group
        ]
        attained[lane] = sum(met) / max(1, len(met))
        ttft[lane] = _percentile([_ttft(each) for each in group], 0.95)
    shares = [_alone_ms(each, machine) / max(1e-9, (each.done_ms or 0) - each.row.arrived_ms) for each in finished]
    # Background streams are meant to pause while others are at risk: their gaps say nothing.
    gaps = [each.worst_gap_ms for each in finished if each.generated > 1 and each.row.lane >= 0]
    tokens = sum(each.generated + each.prompt_tokens for each in finished)
    refused = sum(each.is_refused for each in sessions)
    seconds = end_ms / 1000
    worst = _percentile(gaps, 0.99)
    return Outcome(
        name, machine.name, utilization, refused, attained, ttft, worst, jain_index(shares), tokens / seconds, gaps
    )


def _ttft(session: Session) -> float:
    assert session.first_ms is not None
    return session.first_ms - session.row.arrived_ms


def _alone_ms(session: Session, machine: Machine) -> float:
    prompt = session.prompt_tokens
    return machine.read_ms(prompt) + session.output_tokens * machine.decode_ms(1, prompt)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def simulate(machine: Machine, make: Callable[[Targets], Policy], name: str, load: Load10k) -> Outcome:
    """One run."""
    targets = Targets(tick_budget_ms=80.0, batch_tokens=2048, start_chunk_tokens=64, solo_tokens=READ_TOKENS)
    simulation = Simulation(machine, make(targets), targets)
    sessions = load.make(machine)
    simulation.run(sessions)
    return judge(name, machine, load.utilization, sessions, simulation.now_ms)


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """The table, as Markdown."""
    table = Table(box=box.MARKDOWN)
    for column in ("machine", "load", "policy", "refused", "interactive", "normal", "background"):
        table.add_column(column)
    for column in ("TTFT p95 interactive", "worst gap p99", "Jain", "tokens/s"):
        table.add_column(column, justify="right")
    for each in outcomes:
        lanes = [f"{each.attained[lane]:.1%}" for lane in LANES]
        table.add_row(
            each.machine, f"{each.utilization:g}", each.policy, str(each.refused), *lanes,
            f"{each.ttft_p95_ms[1]:,.0f} ms", f"{each.worst_gap_p99_ms:,.0f} ms", f"{each.jain:.2f}",
            f"{each.tokens_per_second:,.0f}",
        )  # fmt: skip
    console.print(table)
    console.print("By lane: sessions whose first token and worst gap met their targets, of those who were not refused.")


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Worst gaps of all sessions, as distributions, for each machine and policy."""
    import matplotlib  # noqa: PLC0415  (only the plot needs it)

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    machines = list(dict.fromkeys(each.machine for each in outcomes))
    figure, axes = plt.subplots(1, len(machines), figsize=(5.5 * len(machines), 3.6), squeeze=False)
    for axis, machine in zip(axes[0], machines, strict=True):
        for each in outcomes:
            if each.machine == machine and each.gaps:
                share = [index / len(each.gaps) for index in range(len(each.gaps))]
                axis.plot(sorted(each.gaps), share, label=f"{each.policy}, load {each.utilization:g}")
        axis.set(title=machine, xlabel="a session's worst gap, ms", ylabel="share of sessions", xscale="log")
        axis.axvline(80, color="grey", linestyle=":", linewidth=1)
        axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all, print the table, write the plot."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--sessions", type=int, default=2_000, help="requests of each load (default 2000)")
    parser.add_argument("--machine", choices=sorted(MACHINES), action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--load", type=float, action="append", help="share of capacity asked for (default 0.6, 0.75, 0.9, 1.5)"
    )
    args = parser.parse_args()
    outcomes = []
    for name in args.machine or sorted(MACHINES):
        for utilization in args.load or (0.6, 0.75, 0.9, 1.5):
            for label, make in (("greedy", Greedy), ("uma", Uma)):
                outcomes.append(simulate(MACHINES[name], make, label, Load10k(args.sessions, utilization)))
    show(outcomes, Console(width=180))
    plot(outcomes, RESULTS / "simulation.png")
    attained = statistics.mean(each.attained[1] for each in outcomes if each.policy == "uma")
    print(f"interactive SLO attainment under UMA, mean of all loads: {attained:.1%}")


if __name__ == "__main__":
    main()
