"""The states of a sequence, and the events that lead from one to another: one table, `TRANSITIONS`.

An event that the table does not name for a state raises `IllegalTransitionError`: no sequence can have a slot twice, or
be given tokens after its end.
"""

from __future__ import annotations

from enum import Enum, auto


class Status(Enum):
    """Where a sequence is in its life. It holds a slot (a sequence id, KV cells) in the three middle states only."""

    WAITING = auto()
    """Queued for a slot."""
    FOLLOWING = auto()
    """Queued; another sequence is computing a prefix that it will share."""
    PREFILLING = auto()
    """Has a slot; tokens are computed whose successor is known."""
    DECODING = auto()
    """Has a slot; each step computes what it sampled last and samples the next."""
    PAUSED = auto()
    """Has a slot; its reader has used up the credit window (backpressure), so it takes no part in batches."""
    PARKED = auto()
    """Preempted while paused; it is queued again once its reader has caught up."""
    ENDED = auto()
    """The last event is out."""


class Change(Enum):
    """What happens to a sequence."""

    FOLLOW = auto()
    """Another sequence turned out to be computing its prefix."""
    UNFOLLOW = auto()
    """That prefix is there, or will never be."""
    START = auto()
    """A slot was given; some of its tokens are still to be computed."""
    RESTORE = auto()
    """A slot was given in which all but its last sampled token are computed already."""
    PREFILLED = auto()
    """The last of its known tokens was computed, so the next can be sampled."""
    FALL_BEHIND = auto()
    """The reader has no credit left."""
    CATCH_UP = auto()
    """The reader has credit again."""
    PREEMPT = auto()
    """The slot was taken for another sequence, or to a failed batch that could not be undone."""
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
    """A sequence met an event that its state does not know: a fault of the engine."""
