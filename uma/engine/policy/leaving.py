"""Whether cached sequences leave their cells for host memory, because others have begun that have no use for them.

In one buffer attention goes over every cell in use, also over those that are masked: cache is passed by with each token
that is read and with each decode step. A copy costs its time once, and again when the cache is used; a cached sequence
that has a snapshot already costs only the way back. All of that grows with the cells, so a long prompt or a crowd sends
any cache away, and a short request beside few others none. That it comes back is taken for sure: cache that is worth
less than that must not be lost sooner.
"""

from __future__ import annotations

import math

import attrs

WAY_BACK = 0.5
"""Time to put a state back into cells, as a share of the time to copy it out and back."""
MAX_FELT_MS = 8.0
"""Maximum time for copies before a batch while any sequence decodes: a tenth of the usual target between tokens."""
MAX_COPYING_MS = 50.0
"""Maximum time for copies before a batch while prompts alone are read: a request that comes meanwhile waits for it."""


@attrs.frozen
class Leaving:
    """What a cached token costs in its cell, and on its way."""

    passing_ms: float
    """Time in which the running sequences pass it by, until they are probably done."""
    carrying_ms: float
    """Time to copy its state out and back."""

    def pays(self, freed: int, kept: int, tokens: int, *, has_snapshot: bool) -> bool:
        """Whether a cached sequence of `tokens` leaves its cells.

        `freed`: those of them that no other sequence holds. `kept`: those that others do, which the sequence has in
        cells of its own when it comes back.
        """
        share = WAY_BACK if has_snapshot else 1.0
        return self.passing_ms * (freed - kept) > share * self.carrying_ms * tokens

    def max_tokens(self, *, decodes: bool) -> int:
        """Maximum tokens copied before the next batch, while any sequence decodes or none does; at least 1."""
        most_ms, out_ms = MAX_FELT_MS if decodes else MAX_COPYING_MS, (1 - WAY_BACK) * self.carrying_ms
        return max(1, math.floor(most_ms / max(out_ms, 1e-9)))
