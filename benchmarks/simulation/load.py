"""What simulated machines are asked for: requests with lanes, lengths and times of arrival."""

from __future__ import annotations

import random

import attrs

from benchmarks.experience import Experience
from benchmarks.simulation.machines import Machine
from benchmarks.simulation.rows import PlainRow

TARGET_TTFT_MS = {1: 2_000.0, 0: None, -1: None}
"""By lane, what a request asks for its first token."""
EXPECTED_TTFT_MS = 10_000.0
"""A first token within this is in time where the request asks for nothing."""
TARGET_TBT_MS = 80.0


@attrs.define(eq=False)
class Session:
    """One request of the load, and what became of it."""

    row: PlainRow
    prompt_tokens: int
    output_tokens: int
    expected_ttft_ms: float
    experience: Experience
    generated: int = 0
    first_ms: float | None = None
    done_ms: float | None = None
    worst_gap_ms: float = 0.0
    is_refused: bool = False
    client: int = 0
    """Who asks. Clients have equal shares."""
    cached_tokens: int = 0
    """Of its prompt, what its worker held already when it began."""

    @classmethod
    def make(cls, key: int, lane: int, arrived_ms: float, prompt_tokens: int, output_tokens: int) -> Session:
        """A request of some lane with that lane's targets."""
        target = TARGET_TTFT_MS[lane]
        row = PlainRow(key, lane, arrived_ms, prompt_tokens, prompt_tokens, target, TARGET_TBT_MS)
        expected = target or EXPECTED_TTFT_MS
        return cls(row, prompt_tokens, output_tokens, expected, Experience(arrived_ms + expected, TARGET_TBT_MS))

    def had_token(self, given_ms: float) -> None:
        """Its reader is given its next token at this time."""
        if self.first_ms is None:
            self.first_ms = given_ms
        else:
            self.worst_gap_ms = max(self.worst_gap_ms, given_ms - self.row.last_token_ms)
        self.row.had_token(given_ms)
        self.experience.had_token(given_ms)
        self.generated += 1


@attrs.frozen
class Load:
    """Lanes mixed, prompts mostly short with a long tail, arrivals at random."""

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
            sessions.append(Session.make(key, lane, now, prompt, output))
        return sessions

    @staticmethod
    def _draw(rng: random.Random) -> tuple[int, int, int]:
        lane = rng.choices((1, 0, -1), (0.3, 0.5, 0.2))[0]
        prompt = min(4_000, max(8, round(rng.lognormvariate(4.6, 1.1))))
        output = min(400, max(4, round(rng.expovariate(1 / 80))))
        return lane, prompt, output
