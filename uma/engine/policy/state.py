"""The policy's input as plain numbers: rows, cells, targets, and the service that each client has received."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

import attrs

MAX_PAST = 1_024
"""Maximum clients without rows whose levels are remembered. Forgetting one matters only if the client returns before
the clock has reached its level."""


class FairShare:
    """The service that one client has received: tokens computed for its prompts and answers. Cached tokens are free."""

    __slots__ = ("_shares", "client", "level", "rows")

    def __init__(self, shares: FairShares, client: Hashable) -> None:
        self._shares = shares
        self.client = client
        self.level = 0.0
        """Tokens computed for the client, on top of the clock's value when it came."""
        self.rows = 0
        """Rows of the client that wait or run."""

    def was_read(self, tokens: int) -> None:
        """Count computed prompt tokens. They move the clock."""
        self.level += tokens
        self._shares.clock = max(self._shares.clock, self.level)

    def was_given(self, tokens: int) -> None:
        """Count computed tokens of answers."""
        self.level += tokens


class Row(Protocol):
    """One sequence as the policy sees it, read-only. The engine's `Sequence` implements it."""

    @property
    def key(self) -> int:
        """Rises with arrival, so it also says which of two rows is younger."""

    @property
    def lane(self) -> int:
        """-1 background, 0 normal, 1 interactive."""

    @property
    def arrived_ms(self) -> float:
        """When it was submitted."""

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt."""

    @property
    def prefill_left(self) -> int:
        """Tokens still to be computed before it decodes; 0: it decodes."""

    @property
    def position(self) -> int:
        """Tokens computed."""

    @property
    def branch(self) -> int:
        """Length of the prefix that followers wait for, the shortest of several; 0: no sequence follows this one."""

    @property
    def target_ttft_ms(self) -> float | None:
        """The request's own target for its first token; None: it has none."""

    @property
    def target_tbt_ms(self) -> float:
        """The target between two tokens."""

    @property
    def has_own_target(self) -> bool:
        """Whether the request names `target_tbt_ms`: it is then kept where any schedule can (`lead.choose_pacing`)."""

    @property
    def has_reader(self) -> bool:
        """Whether its tokens are streamed. Without (`stream: false`) the gaps between them do not matter."""

    @property
    def due_ms(self) -> float:
        """When its first token is due (`order.due_ms`), fixed on arrival."""

    @property
    def fair_share(self) -> FairShare:
        """Service that its client has received."""

    @property
    def generated(self) -> int:
        """Tokens that were generated for it."""

    @property
    def last_token_ms(self) -> float:
        """When its last token reaches its reader: in the future if it was decoded ahead; 0 before the first."""

    @property
    def last_gap_ms(self) -> float:
        """Time between its last two tokens."""

    @property
    def cells(self) -> int:
        """KV cells that preempting it would free; up to date only if `State.free_cells` is too few for all rows."""

    @property
    def is_paused(self) -> bool:
        """Whether its reader is behind; it takes no part until the reader has caught up."""

    @property
    def adapters(self) -> Hashable:
        """Set of LoRA adapters of its next tokens: all rows of a batch have the same."""


@attrs.frozen
class Targets:
    """The configuration's part of the policy."""

    tick_budget_ms: float
    batch_tokens: int
    """Maximum tokens of one batch."""
    start_tokens: int
    """Tokens of the first piece, before any cost is known."""
    slo_ttft_ms: float = 2_000.0
    """Time to first token to aim for where the request names none."""
    solo_tokens: int = 512
    """Maximum tokens of a piece while nothing decodes: more would be no faster."""
    mixes_prompts: bool = True
    """Whether pieces of unequal length can share a batch. Not with split KV, which needs rows of equal length."""
    has_flash_attention: bool = True
    """Whether attention skips the cells of other sequences."""

    @property
    def attends_all(self) -> bool:
        """Whether a token's attention takes time with all cells in use, not only with the tokens before it."""
        return self.mixes_prompts and not self.has_flash_attention


@attrs.define(slots=True)
class State:
    """All a plan depends on, besides the time."""

    decoding: Sequence[Row]
    prefilling: Sequence[Row]
    free_cells: int
    """KV cells that are unused, or used only by cache that can be evicted at once."""
    used_cells: int
    """Cells a batch has to attend over, for the cost of a tick."""
    neighbour_load: float = 0.0
    """Threads of other programs that want the compute cores."""
    answered_ms: float = -math.inf
    """When the reader of the last streamed answer, of any lane but background, had its end."""
    queued: Row | None = None
    """The prompt that begins next, as soon as there is a slot for it."""
    unreadable: Collection[int] = ()
    """Keys of `prefilling` rows that cannot be read now: their next picture is not encoded yet."""
    has_sets: bool = False
    """Whether rows have different sets of adapters: a decode step is then a batch for each, and a piece has one set."""


class FairShares:
    """Fair shares of what is computed, among clients that have rows.

    It is self-clocked fair queueing (Golestani 1994) of prompts, by counters of tokens (as in VTC, arXiv 2401.00588) to
    which the prefix cache is free (as in DLPM, arXiv 2501.14312). `order.in_order` puts prompts in order by it.

    Of two clients that always have prompts waiting, neither gets ahead of the other by more than one prompt and one
    batch. A client that returns starts at the clock: it does not catch up on what it did not ask for.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        """The highest level at which a prompt was read (virtual time). A new client starts there."""
        # By name. Not by connection: one long stream then kept all closed connections in memory.
        self._shares: dict[Hashable, FairShare] = {}
        """Clients that have rows."""
        self._past: dict[Hashable, float] = {}
        """Levels of departed clients that are above the clock, oldest first: they return at these."""

    def __len__(self) -> int:
        """Number of clients that are remembered."""
        return len(self._shares) + len(self._past)

    def came(self, client: Hashable) -> FairShare:
        """Count a new row of this client."""
        share = self._shares.get(client)
        if share is None:
            share = self._shares[client] = FairShare(self, client)
            share.level = max(self.clock, self._past.pop(client, 0.0))
        share.rows += 1
        return share

    def left(self, share: FairShare) -> None:
        """Count a row of this client that has ended."""
        share.rows -= 1
        if share.rows:
            return
        del self._shares[share.client]
        if not self._shares:  # no client waits: levels start at 0 again
            self._past.clear()
            self.clock = 0.0
        elif share.level > self.clock:
            self._past[share.client] = share.level
            if len(self._past) > MAX_PAST:
                del self._past[next(iter(self._past))]
