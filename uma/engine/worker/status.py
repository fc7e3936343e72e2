"""The states of a sequence, and the events that lead from one to another: one table, `TRANSITIONS`.

An event that the table does not name for a state raises `IllegalTransitionError`, so that no sequence gets two slots,
or tokens after its end.
"""

from __future__ import annotations

from enum import Enum, auto


class Status(Enum):
    """State of a sequence. It has a slot (a sequence id and KV cells) only in the three in the middle."""

    WAITING = auto()
    """Queued for a slot."""
    FOLLOWING = auto()
    """Queued; another sequence is computing a prefix that it will share."""
    PREFILLING = auto()
    """Has a slot; computes tokens that are known already."""
    DECODING = auto()
    """Has a slot; each step computes the last sampled token, and samples the next."""
    PAUSED = auto()
    """Has a slot; its reader has used up the credit window (backpressure), so it takes no part in batches."""
    PARKED = auto()
    """Preempted while paused; it is queued again once its reader has caught up."""
    ENDED = auto()
    """The last event has been sent."""


class Change(Enum):
    """What happens to a sequence."""

    FOLLOW = auto()
    """The sequence begins to wait for a prefix that another one computes."""
    UNFOLLOW = auto()
    """That prefix is computed, or will never be."""
    START = auto()
    """The sequence got a slot; some of its tokens have yet to be computed."""
    RESTORE = auto()
    """The sequence got a slot in which all but its last sampled token are computed."""
    PREFILLED = auto()
    """The last of its known tokens was computed, so the next can be sampled."""
    FALL_BEHIND = auto()
    """The reader has no credit left."""
    CATCH_UP = auto()
    """The reader has credit again."""
    PREEMPT = auto()
    """The slot was taken for another sequence, or because a failed batch could not be undone."""
    END = auto()
    """Finished, cancelled or failed."""


TRANSITIONS: dict[Status, dict[Change, Status]] = {
    Status.WAITING: {
        Change.FOLLOW: Status.FOLLOWING,
        Change.START: Status.PREFILLING,
        Change.RESTORE: Status.DECODING,
        Change.END: Status.ENDED,
    },
    Status.FOLLOWING: {
        Change.UNFOLLOW: Status.WAITING,
        Change.END: Status.ENDED,
    },
    Status.PREFILLING: {
        Change.PREFILLED: Status.DECODING,
        Change.PREEMPT: Status.WAITING,
        Change.END: Status.ENDED,
    },
    Status.DECODING: {
        Change.FALL_BEHIND: Status.PAUSED,
        Change.PREEMPT: Status.WAITING,
        Change.END: Status.ENDED,
    },
    Status.PAUSED: {
        Change.CATCH_UP: Status.DECODING,
        Change.PREEMPT: Status.PARKED,
        Change.END: Status.ENDED,
    },
    Status.PARKED: {
        Change.CATCH_UP: Status.WAITING,
        Change.END: Status.ENDED,
    },
    Status.ENDED: {},
}
"""The whole life of a sequence. It begins in `WAITING`."""

HAS_SLOT = frozenset({Status.PREFILLING, Status.DECODING, Status.PAUSED})


class IllegalTransitionError(RuntimeError):
    """A sequence met an event that its state does not allow: a fault of the engine."""
