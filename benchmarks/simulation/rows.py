"""The rows that simulations and tests of the policy plan with."""

from __future__ import annotations

import attrs

from uma.engine.policy.state import FairShare, FairShares


@attrs.define(slots=True)
class PlainRow:
    """A `Row` that is numbers and nothing else: what simulations and tests plan with."""

    key: int
    lane: int
    arrived_ms: float
    prompt_tokens: int
    prefill_left: int
    target_ttft_ms: float | None
    target_tbt_ms: float
    due_ms: float = 0.0
    last_token_ms: float = 0.0
    last_gap_ms: float = 0.0
    cells: int = 0
    is_paused: bool = False
    adapters: int = 0
    has_own_target: bool = False
    has_reader: bool = True
    branch: int = 0
    generated: int = 0
    fair_share: FairShare = attrs.field(factory=lambda: FairShares().came(None), repr=False)

    @property
    def position(self) -> int:
        """See `Row.position`."""
        return self.prompt_tokens - self.prefill_left

    def had_token(self, now_ms: float) -> None:
        """Note that its next token was sampled."""
        self.generated += 1
        self.last_gap_ms = max(0.0, now_ms - self.last_token_ms) if self.last_token_ms else 0.0
        self.last_token_ms = now_ms
