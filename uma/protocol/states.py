"""The states of a session and the only steps between them, and what each error does to a session.

States (`PHASES`)
=================

::

    START ──hello──▶ HELLO      many requests at once, told apart by id; stays open
    START ──request──▶ PLAIN    one request at a time; closes after its eos or error (or stays, with keep_alive)
    START, PLAIN, HELLO ──close──▶ CLOSING ──flushed──▶ CLOSED

A request or query runs, and has its id, from its frame to its last event. The id is free as soon as that is handed out:
the client can answer an `eos` before the writing task knows that it is out.

Errors
======

`AFTER_ERROR` says which error closes the session. An error event carries the id of the request it ends, or of the frame
it refuses; where that id belongs to another request that runs (a second one of the same id), it carries none and the
message names the id, because an error with a running request's id would end it in the client's eyes. An error without
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
"""What moves a session on: its first frame, a request, its last event, and that event being written."""

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
    """What becomes of the session after an error."""

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
"""Transitions by error code. A code that is not of the protocol is treated as a bad request's. Where a request is
refused because the server stops, others that still run in its session come to their end first."""


class LocalProtocolError(RuntimeError):
    """This side's own program asked for what the session's state does not allow: a bug here, not the peer's fault."""


@attrs.define(eq=False)
class RequestExchange:
    """A request or query from its frame to its last event, and what its events carry along."""

    metadata: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    keep_alive: bool = False
    can_cancel: bool = False
    """Whether it is no query that is answered at once, and no cancel has come for it yet."""
    can_think: bool = False
    """Whether it is a generation, and nothing has ended it or its thinking yet."""
    fragment: orjson.Fragment | None = None
    """`metadata` written once, for every token."""
