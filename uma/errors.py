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
    """Base class of all errors that UMA raises on purpose. `str(error)` is the message.

    `code` names the error in logs and on the socket. If the same call can succeed later, `retry_after_ms` is the time
    to wait. With a `field` the message is about that field; `lines` has a `Wrong` for each wrong field.
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
    """A setting is unknown, of a wrong type or out of range. The message names the setting and where it is set."""

    code = "E_CONFIG"


class ModelError(UmaError):
    """A model's file cannot be loaded. The message names the file and the reason."""

    code = "E_MODEL"


class WrongPlace(UmaError, ValueError, RuntimeError):
    """The `LLM` is closed or belongs to another process, or the call needs Trio and Trio does not run."""

    code = "E_PLACE"


class TimedOut(UmaError, TimeoutError):
    """A call of `LLM` took longer than its `timeout`. Its requests are cancelled."""

    code = "E_TIMEOUT"


class TemplateError(UmaError):
    """The model's chat template is broken or refuses these messages."""

    code = "E_PROTO_TEMPLATE"


class ConnectionLost(UmaError):
    """No server listens on the socket, or the connection to it ended. The requests of this session are cancelled."""

    code = "E_CONNECTION"


class FrameTooLarge(UmaError):
    """The length in a frame's header is 0 or over the limit, `max_frame_bytes`."""

    code = "E_PROTO_FRAME_TOO_LARGE"


class InvalidJson(UmaError):
    """A frame or body is not UTF-8, not JSON, or not a JSON object."""

    code = "E_PROTO_INVALID_JSON"


class BadRequest(UmaError):
    """A field of a request is missing, of a wrong type or out of range. The message has a line for each wrong field."""

    code = "E_PROTO_BAD_REQUEST"


class WrongValues(BadRequest, ValueError):
    """A value in `SamplingParams`, `Message` or another class of requests is wrong, or the value of an argument is. A
    client on the socket gets it as a `BadRequest`: both have one code.
    """


class WrongKind(BadRequest, TypeError):
    """An argument has a wrong type, or a keyword is unknown. A client on the socket gets it as a `BadRequest`."""


class UnknownModel(BadRequest, ModelError):
    """No model has this name. The message lists similar names."""

    code = "E_PROTO_UNKNOWN_MODEL"


class Busy(UmaError):
    """A session without multiplexing got a second request while one runs."""

    code = "E_PROTO_BUSY"


class VersionMismatch(UmaError):
    """Client and server have no major version of the protocol in common."""

    code = "E_PROTO_VERSION"


class PromptTooLarge(UmaError):
    """The prompt is longer than the context, or has more than `max_prompt_bytes`."""

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
    """The server has `max_sessions` open sessions, which is its limit."""

    code = "E_LIMIT_SESSIONS"


class Overloaded(UmaError):
    """The queue is full, or the request's latency target cannot be met. `retry_after_ms` is set."""

    code = "E_LIMIT_OVERLOADED"


class Loading(Overloaded):
    """The model is still being loaded, so the same request works later. `retry_after_ms` is set.

    It does not occur on the socket, where requests wait instead.
    """


class IdleTimeout(UmaError):
    """The client sent no frame, or only a part of one, for `idle_timeout_sec`."""

    code = "E_TIMEOUT_IDLE"


class DecodeFailed(UmaError):
    """llama.cpp failed to compute this request (`llama_decode`)."""

    code = "E_RUNTIME_DECODE"


class InternalError(UmaError):
    """A fault in UMA ended this request. The server's log has the traceback; other requests continue."""

    code = "E_RUNTIME_INTERNAL"


class ContractViolation(UmaError):
    """A message from or to `uma worker` or `uma engine-zmq` breaks a contract. The message names each broken rule."""

    code = "E_RUNTIME_CONTRACT"


class ModelUnusable(ModelError):
    """One of several models cannot be loaded. Its file is broken, or it does not fit into memory; the message has the
    reason. If `retry_after_ms` is set, other models use the memory now, and the same request can work later.
    """

    code = "E_RUNTIME_MODEL"


class Ended(UmaError):
    """The request was ended from outside, by its owner or the server's owner. Do not try it again."""

    code = "E_RUNTIME_ENDED"


class ShuttingDown(UmaError):
    """The server or engine is stopping."""

    code = "E_RUNTIME_SHUTDOWN"


STOPPING = "the server is stopping; try again in some seconds, or start it again with `uma run`"
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
