"""States of a session, all steps between them, and the effect of each error on a session.

States (`PHASES`)
=================

::

    START ──hello──▶ HELLO      many requests at once, told apart by id; stays open
    START ──request──▶ PLAIN    one request at a time; closes after its eos or error (or stays, with keep_alive)
    START, PLAIN, HELLO ──close──▶ CLOSING ──flushed──▶ CLOSED

A request or query runs, and has its id, from its frame to its last event. The id is free as soon as that event is
returned to the caller: the client can reply to an `eos` before the writing task knows that it was sent.

Errors
======

`AFTER_ERROR` says which error closes the session. An error event carries the id of the request that it ends, or of the
frame that it refuses. Where another running request has that id (a frame used it twice), the event carries none, and
the message names the id: the client takes an error with a running request's id for that request's end. An error without
an id that closes the session ends all that ran there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

import attrs
import orjson

from uma import errors


class Phase(Enum):
    """A session's state."""

    START = "start"
    PLAIN = "plain"
    HELLO = "hello"
    CLOSING = "closing"
    CLOSED = "closed"


PhaseStep = Literal["hello", "request", "close", "flushed"]
"""Step of a session: its first frame, a request, its last event, or that event being written."""

PHASES: Mapping[tuple[Phase, PhaseStep], Phase] = MappingProxyType(
    {
        (Phase.START, "hello"): Phase.HELLO,
        (Phase.START, "request"): Phase.PLAIN,
        (Phase.PLAIN, "request"): Phase.PLAIN,  # one after another, with keep_alive
        (Phase.HELLO, "request"): Phase.HELLO,
        (Phase.START, "close"): Phase.CLOSING,
        (Phase.PLAIN, "close"): Phase.CLOSING,
        (Phase.HELLO, "close"): Phase.CLOSING,
        (Phase.CLOSING, "flushed"): Phase.CLOSED,
    }
)
"""Every step that a session can take. A hello that is not the first frame is a bad request."""


class After(Enum):
    """State of the session after an error."""

    CLOSED = "closed"
    OPEN = "open"
    CLOSED_IF_PLAIN = "closed where the session is plain and nothing else runs"


AFTER_ERROR: Mapping[str, After] = MappingProxyType(
    {
        errors.FrameTooLarge.code: After.CLOSED,
        errors.InvalidJson.code: After.CLOSED,
        errors.BadRequest.code: After.CLOSED_IF_PLAIN,
        errors.UnknownModel.code: After.CLOSED_IF_PLAIN,
        errors.TemplateError.code: After.CLOSED_IF_PLAIN,
        errors.Busy.code: After.OPEN,
        errors.VersionMismatch.code: After.CLOSED,
        errors.PromptTooLarge.code: After.CLOSED_IF_PLAIN,
        errors.TooManySessions.code: After.CLOSED,
        errors.Overloaded.code: After.OPEN,
        errors.IdleTimeout.code: After.CLOSED,
        errors.DecodeFailed.code: After.CLOSED_IF_PLAIN,
        errors.InternalError.code: After.CLOSED_IF_PLAIN,
        errors.ModelUnusable.code: After.CLOSED_IF_PLAIN,
        errors.Ended.code: After.CLOSED_IF_PLAIN,
        errors.ShuttingDown.code: After.CLOSED,
    }
)
"""State of the session after an error, by code. A code outside of the protocol is treated like a bad request's. Where a
request is refused because the server stops, others that run in its session end first."""


class LocalProtocolError(RuntimeError):
    """The calling program asked for a step that the session's state does not allow: a bug here, not the peer's."""


@attrs.define(eq=False)
class RequestExchange:
    """A request or query from its frame to its last event, and the fields that its events repeat."""

    metadata: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    keep_alive: bool = False
    can_cancel: bool = False
    """Whether it can be cancelled (not a query that is answered at once), and was not yet."""
    can_think: bool = False
    """Whether it is a generation whose thinking no command has ended, and that was not cancelled."""
    fragment: orjson.Fragment | None = None
    """`metadata` encoded once, for every token."""
