"""What a scenario is: rounds that give rows of measures, and the claims their medians have to bear out."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Literal, TypeVar

import attrs

from benchmarks.measure import Measures, median_of
from benchmarks.models import BenchModel

T = TypeVar("T")


@attrs.frozen
class Bench:
    """What a scenario has to work with."""

    model: BenchModel
    threads: int
    is_quick: bool
    """Less of everything: to see that it runs, not to publish."""
    has_llama_server: bool
    has_llama_cpp_python: bool
    has_gpu: bool = False
    """The model is computed on a GPU, which takes more streams at once."""
    has_named_threads: bool = False
    """`--threads` was given. Otherwise UMA with its defaults chooses by itself; the others get all CPUs."""

    @property
    def default_threads(self) -> int | None:
        """What UMA with its defaults is told; None: nothing."""
        return self.threads if self.has_named_threads else None

    def pick(self, full: T, quick: T) -> T:
        """`quick` in a quick run, else `full`."""
        return quick if self.is_quick else full


@attrs.frozen
class Row:
    """What one target did in one case of one round."""

    case: str
    target: str
    measures: Measures


@attrs.frozen
class Summary:
    """Medians over the rounds, by case and target, in the order they were first measured."""

    medians: dict[tuple[str, str], Measures]
    turns: tuple[dict[tuple[str, str], Measures], ...] = ()
    """What was measured side by side: what the targets of a round did first, then what they did second, and so on."""

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Row]]) -> Summary:
        """The medians of all rounds' rows."""
        rows: dict[tuple[str, str], list[Measures]] = {}
        turns: list[dict[tuple[str, str], Measures]] = []
        for each in rounds:
            of_round: dict[tuple[str, str], list[Measures]] = {}
            for row in each:
                of_round.setdefault((row.case, row.target), []).append(row.measures)
            for key, measured in of_round.items():
                rows.setdefault(key, []).extend(measured)
            most = max(map(len, of_round.values()), default=0)
            turns += [
                {key: found[turn] for key, found in of_round.items() if turn < len(found)} for turn in range(most)
            ]
        return cls({key: median_of(measures) for key, measures in rows.items()}, tuple(turns))

    @property
    def cases(self) -> list[str]:
        """Every case, once."""
        return list(dict.fromkeys(case for case, _ in self.medians))

    def targets(self, case: str) -> list[str]:
        """The targets that were measured in a case."""
        return [target for each, target in self.medians if each == case]

    def get(self, case: str, target: str, measure: str) -> float:
        """One median; NaN where it was not measured."""
        return self.medians.get((case, target), {}).get(measure, math.nan)

    def best(self, case: str, prefix: str, measure: str, wanted: Literal["high", "low"]) -> float:
        """The best median of all targets whose name begins with `prefix`: a server in its better configuration."""
        return self.get(case, self.best_target(case, prefix, measure, wanted), measure)

    def best_target(self, case: str, prefix: str, measure: str, wanted: Literal["high", "low"]) -> str:
        """The target that has that median; "" where there is none."""
        found = {target: self.get(case, target, measure) for target in self.targets(case) if target.startswith(prefix)}
        known = {target: value for target, value in found.items() if not math.isnan(value)}
        if not known:
            return ""
        return (max if wanted == "high" else min)(known, key=lambda target: known[target])

    def ratio(self, case: str, ours: str, theirs: str, measure: str) -> float:
        """The median of the ratios of each turn: the machine's speed changes from one to the next. NaN without any."""
        pairs = [(each.get((case, ours), {}), each.get((case, theirs), {})) for each in self.turns]
        ratios = [mine[measure] / base[measure] for mine, base in pairs if mine.get(measure) and base.get(measure)]
        return median(ratios) if ratios else math.nan


@attrs.frozen
class Check:
    """A claim, what was measured, and the bar."""

    claim: str
    value: float
    relation: Literal["≤", "≥"]
    bar: float
    unit: str = ""
    beside: str = ""
    """What the value is to be read with: what `llama_decode` alone reaches, or what the peer has."""

    @property
    def is_known(self) -> bool:
        """Whether it was measured at all; a peer may be missing."""
        return not math.isnan(self.value)

    @property
    def holds(self) -> bool:
        """Whether the measured value is on the right side of the bar."""
        return self.value <= self.bar if self.relation == "≤" else self.value >= self.bar


def by_decode_alone(ratio: float, how: str = "alone") -> str:
    """What stands beside a check: the value that `llama_decode` has, alone or `how` else. Empty where it was not
    measured.
    """
    return "" if math.isnan(ratio) else f"`llama_decode` {how}: {ratio:.3g} x"


Emit = Callable[[str, str, Measures], None]
"""Takes a case, a target and its measures, as soon as they are known."""

Rounds = Callable[[Bench, int, Emit], Awaitable[None]]


def no_checks(_: Summary) -> list[Check]:
    """For scenarios that show, and claim nothing."""
    return []


@attrs.frozen
class Scenario:
    """One experiment. `measure(bench, index, emit)` runs one round; different rounds use different prompts."""

    name: str
    about: str
    """One sentence: what happens and what is looked at."""
    columns: tuple[str, ...]
    """The measures its table shows; the JSON holds all."""
    measure: Rounds
    checks: Callable[[Summary], list[Check]] = no_checks
    round_limit_s: float = 300
    """A round that takes longer with the 100 M shape is broken off; a larger shape has as much more time as it has
    parameters. Part of a round is not kept.
    """


def rotated(items: Sequence[T], index: int) -> list[T]:
    """The items from another start each round, so that no target is always first or last."""
    start = index % len(items) if items else 0
    return [*items[start:], *items[:start]]
