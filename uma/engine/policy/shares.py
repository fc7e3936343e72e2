"""Fair shares of what is computed, among clients that have rows.

It is self-clocked fair queueing (Golestani 1994) of prompts, by counters of tokens (as in VTC, arXiv 2401.00588) to
which the prefix cache is free (as in DLPM, arXiv 2501.14312). `order.in_order` puts prompts in order by it.
"""

from __future__ import annotations

from collections.abc import Hashable


class Share:
    """What one client has had: tokens computed for it, of prompts and of answers. Cached ones cost nothing."""

    __slots__ = ("_shares", "client", "level", "rows")

    def __init__(self, shares: Shares, client: Hashable) -> None:
        self._shares = shares
        self.client = client
        self.level = 0.0
        """Tokens that it has had, or was put level with."""
        self.rows = 0
        """Its rows that wait or run."""

    def was_read(self, tokens: int) -> None:
        """So many tokens of its prompts were computed."""
        self.level += tokens
        self._shares.clock = max(self._shares.clock, self.level)

    def was_given(self, tokens: int) -> None:
        """So many tokens were computed that its answers end in."""
        self.level += tokens


class Shares:
    """The shares of all clients.

    Of two clients that always have prompts waiting, neither has had more than the other by more than one prompt and one
    batch. A client that comes anew is put level with those that are read: it does not catch up on what it did not ask
    for.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        """The level at which prompts are read. A client that comes begins there."""
        self._shares: dict[Hashable, Share] = {}

    def came(self, client: Hashable) -> Share:
        """A row of this client has come."""
        share = self._shares.get(client)
        if share is None:
            share = self._shares[client] = Share(self, client)
        if not share.rows:
            share.level = max(share.level, self.clock)
        share.rows += 1
        return share

    def left(self, share: Share) -> None:
        """A row of it has ended."""
        share.rows -= 1
        if not share.rows and share.level <= self.clock:
            del self._shares[share.client]
        if not any(each.rows for each in self._shares.values()):
            self._shares.clear()  # nobody waits: all begin anew
            self.clock = 0.0
