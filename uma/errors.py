"""All errors of UMA, each with the one code that names it on the wire.

Programs act on codes; messages are for people, and say what was wrong, where, and what to do. A client raises the same
class as the server: see `from_code`.

    UmaError
    ├── ConfigError            a setting
    ├── ModelError             a model's file
    │   ├── UnknownModel       also a BadRequest
    │   └── ModelUnusable
    ├── ConnectionLost         the session's connection
    ├── TimedOut               also a TimeoutError
    ├── WrongPlace             also a ValueError and a RuntimeError
    ├── what a client sent
    │   ├── FrameTooLarge, InvalidJson, VersionMismatch, Busy
    │   ├── BadRequest
    │   │   ├── WrongValues    what a program passes, also a ValueError
    │   │   └── WrongKind      what a program passes, also a TypeError
    │   └── TemplateError      messages that a chat template refuses, or a broken template
    ├── limits
    │   ├── PromptTooLarge, TooManySessions, IdleTimeout
    │   └── Overloaded         try again later
    │       └── Loading
    └── what the server could not do
        ├── DecodeFailed, InternalError, ContractViolation
        └── Ended, ShuttingDown

(Lines in lower case are groups, not classes.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from uma.wrong import Wrong, renamed


class UmaError(Exception):
    """Base of all errors UMA raises on purpose. `str(error)` is the message.

    `code` is the wire's code. `retry_after_ms` is set where trying the same again later can help. With a `field` the
    message is about that field; `lines` has a `Wrong` for each field that is.
    """

    code: ClassVar[str] = "E_RUNTIME"

    def __init__(self, *lines: str, field: str = "", retry_after_ms: int | None = None) -> None:
        self.lines: tuple[str, ...] = (Wrong(field, *lines),) if field else lines
        self.message = "\n".join(self.lines)
        super().__init__(self.message)
        self.retry_after_ms = retry_after_ms

    @classmethod
    def at(cls, field: str, why: str, **more: Any) -> Self:
        """An error about a field. `more` are further arguments of the class."""
        return cls(why, field=field, **more)

    def retell(self, lines: Iterable[str]) -> None:
        """Replace the lines of the message."""
        self.lines = tuple(lines)
        self.message = "\n".join(self.lines)
        self.args = (self.message,)


class ConfigError(UmaError):
    """A setting is unknown, of a wrong type or out of range. Names the setting and where it came from."""

    code = "E_CONFIG"


class ModelError(UmaError):
    """A model file cannot be loaded. Names the file and the reason."""

    code = "E_MODEL"


class WrongPlace(UmaError, ValueError, RuntimeError):
    """A call where nothing can answer it: an `LLM` that is closed or another process's, or no Trio runs."""

    code = "E_PLACE"


class TimedOut(UmaError, TimeoutError):
    """A call of `LLM` took longer than its `timeout`. What it had asked is cancelled."""

    code = "E_TIMEOUT"


class TemplateError(UmaError):
    """A model's chat template is broken or refuses these messages."""

    code = "E_PROTO_TEMPLATE"


class ConnectionLost(UmaError):
    """The server ended the connection, or none listens. Its requests of this session are cancelled."""

    code = "E_CONNECTION"


class FrameTooLarge(UmaError):
    """A frame's length, which its header states, is 0 or over the cap."""

    code = "E_PROTO_FRAME_TOO_LARGE"


class InvalidJson(UmaError):
    """A frame is not UTF-8, not JSON, or not an object."""

    code = "E_PROTO_INVALID_JSON"


class BadRequest(UmaError):
    """A field is missing, of a wrong type or out of range. The message has a line for each wrong field."""

    code = "E_PROTO_BAD_REQUEST"


class WrongValues(BadRequest, ValueError):
    """Fields of a class that people construct by hand are wrong, or an argument's value is. To a peer it is a
    `BadRequest`: both have one code.
    """


class WrongKind(BadRequest, TypeError):
    """An argument is of another kind, or a keyword is unknown. To a peer it is a `BadRequest`: both have one code."""


class UnknownModel(BadRequest, ModelError):
    """There is no model of this name. The message names those that are near."""

    code = "E_PROTO_UNKNOWN_MODEL"


class Busy(UmaError):
    """A second request on a plain session while one runs."""

    code = "E_PROTO_BUSY"


class VersionMismatch(UmaError):
    """No protocol version with a common major."""

    code = "E_PROTO_VERSION"


class PromptTooLarge(UmaError):
    """The prompt is over `max_prompt_bytes`, or can never fit the context."""

    code = "E_LIMIT_PROMPT_TOO_LARGE"

    def __init__(
        self,
        *lines: str,
        field: str = "",
        retry_after_ms: int | None = None,
        prompt_tokens: int | None = None,
        n_ctx: int | None = None,
    ) -> None:
        super().__init__(*lines, field=field, retry_after_ms=retry_after_ms)
        self.prompt_tokens = prompt_tokens
        """Minimum length of the prompt that does not fit the context; None where tokens were not counted."""
        self.n_ctx = n_ctx
        """Tokens of that context, prompt and output together."""

    def of_prompt(self, field: str) -> PromptTooLarge:
        """A copy about the prompt at `field`, which is one of several."""
        return PromptTooLarge.at(field, self.message, prompt_tokens=self.prompt_tokens, n_ctx=self.n_ctx)


class TooManySessions(UmaError):
    """The server has `max_sessions` sessions open."""

    code = "E_LIMIT_SESSIONS"


class Overloaded(UmaError):
    """The queue is full, or the request's SLO cannot be met. Carries `retry_after_ms`."""

    code = "E_LIMIT_OVERLOADED"


class Loading(Overloaded):
    """The model is still being loaded, and the same request works later. Carries `retry_after_ms`.

    On the wire there is none: requests wait there.
    """


class IdleTimeout(UmaError):
    """No frame, or half a frame, for `idle_timeout_sec`."""

    code = "E_TIMEOUT_IDLE"


class DecodeFailed(UmaError):
    """`llama_decode` failed for this request."""

    code = "E_RUNTIME_DECODE"


class InternalError(UmaError):
    """A fault in UMA itself ended this request. The server's log has the traceback; other requests go on."""

    code = "E_RUNTIME_INTERNAL"


class ContractViolation(UmaError):
    """An answer of this side, or a message to it, breaks a contract. Names each broken rule."""

    code = "E_RUNTIME_CONTRACT"


class ModelUnusable(ModelError):
    """One of several models cannot be loaded: its file is broken, or no memory holds it. Asking again changes nothing,
    unless it carries `retry_after_ms`: others that stay have the memory. The message has the reason.
    """

    code = "E_RUNTIME_MODEL"


class Ended(UmaError):
    """The request's owner, or the server's, has ended it from outside. Trying it again is not wanted."""

    code = "E_RUNTIME_ENDED"


class ShuttingDown(UmaError):
    """The server or engine is stopping."""

    code = "E_RUNTIME_SHUTDOWN"


STOPPING = "the server is stopping; start it again with `uma run`"
"""Message of the `ShuttingDown` with which a stopping server refuses new requests."""
CUT_OFF = "the server is stopping, and waits no longer (drain_timeout_sec is over, or a second signal came)"
"""Message of the `ShuttingDown` with which a stopping server ends running requests."""


WIRE_ERRORS: dict[str, type[UmaError]] = {
    cls.code: cls
    for cls in (
        FrameTooLarge,
        InvalidJson,
        BadRequest,
        UnknownModel,
        TemplateError,
        Busy,
        VersionMismatch,
        PromptTooLarge,
        TooManySessions,
        Overloaded,
        IdleTimeout,
        DecodeFailed,
        InternalError,
        ModelUnusable,
        Ended,
        ShuttingDown,
    )
}
"""Error codes of the protocol, and their classes."""


def from_code(
    code: str,
    message: str,
    retry_after_ms: int | None = None,
    *,
    wrong: Iterable[Wrong] = (),
    prompt_tokens: int | None = None,
    n_ctx: int | None = None,
) -> UmaError:
    """Error that a peer reported, as the class of its code. An unknown code gives a `UmaError` that quotes it.

    `wrong` are the lines of `message`, where the peer tells which fields they are about.
    """
    cls = WIRE_ERRORS.get(code)
    lines = tuple(wrong) or (message,)
    if cls is None:
        return UmaError(f"{code}: {message}", retry_after_ms=retry_after_ms)
    if cls is PromptTooLarge:
        return PromptTooLarge(*lines, retry_after_ms=retry_after_ms, prompt_tokens=prompt_tokens, n_ctx=n_ctx)
    return cls(*lines, retry_after_ms=retry_after_ms)


@contextmanager
def errors_renamed(names: Mapping[str, str]) -> Iterator[None]:
    """A block whose errors use these names for fields."""
    try:
        yield
    except UmaError as error:
        error.retell(renamed(error.lines, names))
        raise


def told(error: BaseException) -> str:
    """The system's message of an error, without its number; the error's class where there is none."""
    return re.sub(r"\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def sole_error(
    group: BaseExceptionGroup[BaseException], *, levels: float = math.inf, or_first: bool = False
) -> BaseException:
    """The only error in nested exception groups, of at most `levels` levels.

    Where a group holds several errors, the result is that group; with `or_first` the first of them, for messages of one
    line.
    """
    error: BaseException = group
    while levels > 0 and isinstance(error, BaseExceptionGroup) and (or_first or len(error.exceptions) == 1):
        error = error.exceptions[0]
        levels -= 1
    return error
