"""The policy's input: rows, cells, targets, and what each client has had, all plain numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

import attrs

MAX_PAST = 1_024
"""Maximum clients without rows whose levels are remembered. The clock comes up to a level soon, so that only a client
that returns at once is forgiven by this bound, and only where as many others have left meanwhile."""


class FairShare:
    """What one client has had: tokens computed for it, of prompts and of answers. Cached ones cost nothing."""

    __slots__ = ("_shares", "client", "level", "rows")

    def __init__(self, shares: FairShares, client: Hashable) -> None:
        self._shares = shares
        self.client = client
        self.level = 0.0
        """Tokens that it has had, or was put level with."""
        self.rows = 0
        """Rows of the client that wait or run."""

    def was_read(self, tokens: int) -> None:
        """So many tokens of its prompts were computed."""
        self.level += tokens
        self._shares.clock = max(self._shares.clock, self.level)

    def was_given(self, tokens: int) -> None:
        """So many tokens were computed that its answers end in."""
        self.level += tokens


class Row(Protocol):
    """One sequence as the policy sees it: it only reads. The engine's `Sequence` is one."""

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
        """Tokens of it that sequences which wait for them share, the fewest of several; 0: none waits."""

    @property
    def target_ttft_ms(self) -> float | None:
        """The request's own target for its first token; None: it has none."""

    @property
    def target_tbt_ms(self) -> float:
        """The target between two tokens."""

    @property
    def has_own_target(self) -> bool:
        """Whether its request names that target: then it is kept where any schedule can (`pace`)."""

    @property
    def has_reader(self) -> bool:
        """Whether its tokens are read as they come. Without (`stream: false`) no gap between them is felt."""

    @property
    def due_ms(self) -> float:
        """When its first token is due (`order.due_ms`), fixed on arrival."""

    @property
    def fair_share(self) -> FairShare:
        """What its client has had."""

    @property
    def generated(self) -> int:
        """Tokens that it was given."""

    @property
    def last_token_ms(self) -> float:
        """When its last token is handed to its reader, which can be ahead of now; 0 before the first."""

    @property
    def last_gap_ms(self) -> float:
        """Time between its last two tokens."""

    @property
    def cells(self) -> int:
        """KV cells that preempting it would free; current where `State.free_cells` does not suffice for all rows."""

    @property
    def is_paused(self) -> bool:
        """Whether its reader is behind; it takes no part until the reader has caught up."""

    @property
    def adapters(self) -> Hashable:
        """Set of LoRA adapters that its next tokens are computed with: all rows of a batch have the same."""


@attrs.frozen
class Targets:
    """The configuration's part of the policy."""

    tick_budget_ms: float
    batch_tokens: int
    """Maximum tokens of one batch."""
    start_tokens: int
    """Tokens of the first piece on a machine that is not known yet."""
    slo_ttft_ms: float = 2_000.0
    """Time to first token to aim for where the request names none."""
    solo_tokens: int = 512
    """Maximum tokens of a piece while nothing decodes: more would be no faster."""
    mixes_prompts: bool = True
    """Whether pieces of several prompts make one even batch. Not with split KV: there only rows of equal number do."""
    has_flash_attention: bool = True
    """Whether attention skips the cells of other sequences."""

    @property
    def attends_all(self) -> bool:
        """Whether a token's attention takes time with all cells in use, and not with the tokens before it alone."""
        return self.mixes_prompts and not self.has_flash_attention


@attrs.define(slots=True)
class State:
    """All a plan depends on, besides the time."""

    decoding: Sequence[Row]
    prefilling: Sequence[Row]
    free_cells: int
    """KV cells unused, or in use only by cache that can be dropped at once."""
    used_cells: int
    """Cells a batch has to attend over, for the cost of a tick."""
    neighbour_load: float = 0.0
    """Threads of other programs that want the cores that compute."""
    answered_ms: float = -math.inf
    """When the last answer with a reader, of any lane but background, ended for that reader."""
    queued: Row | None = None
    """The prompt that begins next, as soon as there is a slot for it."""
    unreadable: Collection[int] = ()
    """Keys of those of `prefilling` that cannot be read now: a picture comes next in them that is not encoded."""
    has_sets: bool = False
    """Whether rows have different sets of adapters. A step is then a batch for each, and prompts of one are read."""


class FairShares:
    """Fair shares of what is computed, among clients that have rows.

    It is self-clocked fair queueing (Golestani 1994) of prompts, by counters of tokens (as in VTC, arXiv 2401.00588) to
    which the prefix cache is free (as in DLPM, arXiv 2501.14312). `order.in_order` puts prompts in order by it.

    Of two clients that always have prompts waiting, neither has had more than the other by more than one prompt and one
    batch. A client that returns is put level with those that are read: it does not catch up on what it did not ask for.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        """The level at which prompts are read. A client that comes begins there."""
        # By name: with the connection itself as the key, one lasting stream kept all that had closed in memory.
        self._shares: dict[Hashable, FairShare] = {}
        """Clients that have rows."""
        self._past: dict[Hashable, float] = {}
        """Levels above the clock of clients that have left, oldest first: each would begin at the clock again."""

    def __len__(self) -> int:
        """Clients that anything is remembered of."""
        return len(self._shares) + len(self._past)

    def came(self, client: Hashable) -> FairShare:
        """A row of this client has come."""
        share = self._shares.get(client)
        if share is None:
            share = self._shares[client] = FairShare(self, client)
            share.level = max(self.clock, self._past.pop(client, 0.0))
        share.rows += 1
        return share

    def left(self, share: FairShare) -> None:
        """A row of it has ended."""
        share.rows -= 1
        if share.rows:
            return
        del self._shares[share.client]
        if not self._shares:  # no client waits: all begin at 0 again
            self._past.clear()
            self.clock = 0.0
        elif share.level > self.clock:
            self._past[share.client] = share.level
            if len(self._past) > MAX_PAST:
                del self._past[next(iter(self._past))]
