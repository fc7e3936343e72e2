"""One session of the wire, from its first frame to its end: what may come when, which requests run, what is closed
after what. No I/O: bytes go in, messages come out; events go in, bytes come out. All the states stand in this file.

Theory of operation
===================

A server drives a `ServerSession` so::

    session = ServerSession(max_frame_bytes=…, max_tokens=…, n_vocab=…)

    # the reading task
    while data := await stream.receive_some(65536):
        session.receive(data)
        while (message := session.next_message()) is not None:
            match message:
                case Refused():  write(message.data)                   # told already; `.event` is for the log
                case Hello():    write(session.welcome(engine.info))
                case Generate(): start a task for message.request      # and then, in that task:
                                     async for event in stream: write(session.relay(event))
                                     except UmaError as error: write(session.fail(error, request.id))
                case Cancel():   cancel the task of message.id         # it ends in relay(Finished(…, "cancelled", …))
                case MetricsQuery():  write(session.answer(message, snapshot))
                case HealthQuery():   write(session.answer(message, health))    or session.fail_query(message, error)
                case TokenizeQuery(): write(session.answer(message, tokenized)) or session.fail(error, request.id)

    # the writing task, each time all that was queued has been written
    if session.flushed():
        close the socket and cancel what runs

Everything that returns bytes returns whole frames in the order in which they must be written; once the session is
closing they return `b""`, so a task that comes late needs no check of its own. After `next_message` gave a `Refused`
that closes, it gives None for ever. `idle timeouts`, `max_sessions` and the end of the server are reported with
`session.fail(error)`, without an id; `session.drain()` ends the session once nothing runs.

A client drives a `ClientSession`: `write(session.hello())`, `write(session.send(Generate(request)))`,
`session.receive(data)`, `session.next_event()`.

States
======

Of the session::

    START ──hello──▶ HELLO        many requests at once, told apart by id; stays open
      │
      └──request──▶ PLAIN         one request at a time; closes after its eos or error (or stays, with keep_alive)

    START, PLAIN, HELLO ──fatal error, or a plain session's last event──▶ CLOSING ──flushed──▶ CLOSED

Of each request (`TRANSITIONS`)::

    RECV_REQ ──request──▶ PREFILL ──token──▶ DECODE ──eos──▶ STREAM ──flushed──▶ DONE
                             │                 │
                             └─────error───────┴──▶ ERRORED

A request in PREFILL or DECODE is *running*: its id is taken. In STREAM all of it is computed and its last frames wait
to be written; the id is free again, since the client may answer the `eos` before the writing task knows that it is out.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs

from uma.errors import UmaError
from uma.protocol.messages import (
    Cancel,
    ClientMessage,
    ErrorEvent,
    Generate,
    HealthQuery,
    Hello,
    MetricsQuery,
    ServerEvent,
    TokenizeQuery,
)
from uma.types import Event, Health, ServerInfo, Tokenized


class Phase(Enum):
    """A session's state."""

    START = "start"
    PLAIN = "plain"
    HELLO = "hello"
    CLOSING = "closing"
    CLOSED = "closed"


class State(Enum):
    """A request's state."""

    RECV_REQ = "recv_req"
    PREFILL = "prefill"
    DECODE = "decode"
    STREAM = "stream"
    DONE = "done"
    ERRORED = "errored"


@attrs.frozen
class Refused:
    """A frame that was not taken. `data` is the error event as a frame, to be written; the session went on or closes."""

    event: ErrorEvent
    data: bytes
    is_fatal: bool
    """The session closes once `data` is written."""


Incoming = ClientMessage | Refused


class LocalProtocolError(RuntimeError):
    """This side's own program asked for what the session's state does not allow: a bug here, not the peer's fault."""


class ServerSession:
    """One session, seen from the server. Belongs to one Trio thread; the reading, writing and request tasks share it.

    `max_tokens` and `n_vocab` are the server's bounds on a request; None: unbounded.
    """

    phase: Phase
    version: str | None
    """What was agreed on in hello; None in a plain session."""
    client: str
    """What the client called itself in hello."""

    def __init__(
        self, *, max_frame_bytes: int = 1_048_576, max_tokens: int | None = None, n_vocab: int | None = None
    ) -> None: ...

    def receive(self, data: bytes) -> None:
        """Take bytes as they came. Never raises; what is wrong with them comes out of `next_message`."""

    def next_message(self) -> Incoming | None:
        """The next message to act on, or None until more bytes are received (or for ever, once closing).

        Never raises: a bad frame comes out as `Refused`. Cancels of what does not run are swallowed here.
        """
        raise NotImplementedError

    def welcome(self, info: ServerInfo) -> bytes:
        """The answer to `Hello`."""
        raise NotImplementedError

    def relay(self, event: Event) -> bytes:
        """An engine's event for its request, as a frame: with the request's metadata, and its warnings in the `eos`."""
        raise NotImplementedError

    def answer(
        self, query: MetricsQuery | HealthQuery | TokenizeQuery, result: Mapping[str, Any] | Health | Tokenized
    ) -> bytes:
        """The answer to a query, as a frame. Ends it, and with it a plain session."""
        raise NotImplementedError

    def fail(self, error: UmaError, id: str | None = None) -> bytes:
        """An error, as a frame. With `id` it ends that request; without, it is the session's (idle, too many, shutdown).

        Whether the session is closed after it follows from the code (`AFTER_ERROR`) and from what else runs.
        """
        raise NotImplementedError

    def fail_query(self, query: MetricsQuery | HealthQuery, error: UmaError) -> bytes:
        """An error instead of the answer to a query that may have no id."""
        raise NotImplementedError

    def drain(self) -> bytes:
        """No more requests: each new one is refused with `E_RUNTIME_SHUTDOWN`. Closes once nothing runs; now, if so."""
        raise NotImplementedError

    def flushed(self) -> bool:
        """All that was handed out has been written. True: close the socket now."""
        raise NotImplementedError

    @property
    def running(self) -> tuple[str, ...]:
        """The ids that are taken."""
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """Nothing runs: the idle clock ticks."""
        raise NotImplementedError

    @property
    def is_mid_frame(self) -> bool:
        """Half a frame has come: the idle clock ticks for it, whatever runs."""
        raise NotImplementedError

    @property
    def is_closing(self) -> bool:
        """Nothing more is read; close once all is written."""
        raise NotImplementedError

    def state_of(self, id: str) -> State | None:
        """Where a request is; None where none of this id is known (any more)."""
        raise NotImplementedError


class ClientSession:
    """One hello session, seen from the client."""

    info: ServerInfo | None
    """Who answered; None before the hello event."""

    def __init__(self, *, client: str = "", max_frame_bytes: int = 64 * 1024 * 1024) -> None: ...

    def hello(self, *, strict: bool = False) -> bytes:
        """The session's first frame."""
        raise NotImplementedError

    def send(self, message: Generate | Cancel | MetricsQuery | HealthQuery | TokenizeQuery) -> bytes:
        """A message as a frame. Raises `FrameTooLarge` where the server would close the session over its length,
        and `BadRequest` for an id that runs already or a message that is no JSON."""
        raise NotImplementedError

    def receive(self, data: bytes) -> None:
        """Take bytes as they came. Never raises."""

    def next_event(self) -> ServerEvent | None:
        """The next event, or None until more bytes are received. Raises `InvalidJson`, `BadRequest` or `FrameTooLarge`
        for what is no event: the session is of no use after."""
        raise NotImplementedError


_ = (Hello, attrs)
