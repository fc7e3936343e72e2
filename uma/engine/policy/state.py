"""What the policy sees of the world: rows, cells and targets, all plain numbers."""

from __future__ import annotations

import attrs


@attrs.define(slots=True)
class Row:
    """One sequence as the policy sees it. Its owner keeps it current; the policy only reads."""

    key: int
    """Rises with arrival, so it also says who is younger."""
    lane: int
    """-1 background, 0 normal, 1 interactive."""
    arrived_ms: float
    prompt_tokens: int
    """Tokens to be read before it decodes: its prompt; after a preemption what it had generated, too."""
    remaining: int
    """Those of them still to be computed; 0: the sequence decodes."""
    target_ttft_ms: float | None
    """What the asker asked for; None: no wish of its own."""
    target_tbt_ms: float
    due_ms: float = 0.0
    """When its first token is due (`order.due_ms`), fixed on arrival."""
    last_token_ms: float = 0.0
    """When its last token was handed over, or when it began to decode."""
    last_gap_ms: float = 0.0
    """Time between its last two tokens."""
    cells: int = 0
    """KV cells that preempting it would give back."""
    is_paused: bool = False
    """Its reader is behind; it takes no part until the reader has caught up."""

    @property
    def position(self) -> int:
        """How many of `prompt_tokens` are computed."""
        return self.prompt_tokens - self.remaining

    def had_token(self, now_ms: float) -> None:
        """Its next token was just handed over."""
        self.last_gap_ms = now_ms - self.last_token_ms if self.last_token_ms else 0.0
        self.last_token_ms = now_ms


@attrs.frozen
class Targets:
    """The configuration's part of the policy."""

    tick_budget_ms: float
    batch_tokens: int
    """Most tokens of one batch."""
    start_chunk_tokens: int
    """Prefill chunk while nothing is known of this machine."""
    slo_ttft_ms: float = 2_000.0
    """Time to first token to aim for where the asker has named none."""
    solo_tokens: int = 512
    """Prefill tokens of one batch while nobody decodes: as many as are computed at once. More would be no faster, and
    whoever comes next would wait for all of it."""
    mixes_prompts: bool = True
    """Whether pieces of several prompts make one even batch. Not with split KV: there only rows of equal number do."""


@attrs.define(slots=True)
class State:
    """All a plan depends on, besides the time."""

    decoding: list[Row]
    prefilling: list[Row]
    free_cells: int
    """KV cells unused, or in use only by cache that may be dropped at once."""
    used_cells: int
    """Cells a batch has to attend over, for the cost of a tick."""
