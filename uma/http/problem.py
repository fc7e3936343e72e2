"""What goes wrong over HTTP: the errors that only HTTP has, and the status, kind and code of every error.

A dialect turns a `Problem` into its own body; nothing else decides about statuses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import attrs

from uma import errors
from uma.errors import UmaError
from uma.jobs.store import StoreFault, StoreTaken
from uma.kept import KeptFault
from uma.wrong import Wrong, renamed

Kind = Literal[
    "bad_request",
    "unsupported",
    "context_length",
    "unauthorized",
    "forbidden",
    "not_found",
    "model_not_found",
    "model_unusable",
    "crowded",
    "method",
    "timeout",
    "too_large",
    "encoded",
    "rate",
    "overloaded",
    "busy",
    "loading",
    "stopping",
    "ended",
    "fault",
]
"""What each dialect has its own words for."""


class Unsupported(UmaError):
    """A field asks for something that this server or model cannot do. Names the field."""

    code = "E_HTTP_UNSUPPORTED"


class Unimplemented(UmaError):
    """What is asked for exists, and neither this server nor another model here does it. Names the field."""

    code = "E_HTTP_UNIMPLEMENTED"


class NotFound(UmaError):
    """No such path."""

    code = "E_HTTP_NOT_FOUND"


class WrongMethod(UmaError):
    """The path has other methods."""

    code = "E_HTTP_METHOD"


class BodyTooLarge(UmaError):
    """The body is over `max_frame_bytes`; raised before it is read."""

    code = "E_HTTP_BODY_TOO_LARGE"


class BodiesFull(UmaError):
    """The bodies of all requests take as much memory as they are given. Carries `retry_after_ms`."""

    code = "E_HTTP_BODIES"


class BodyEncoded(UmaError):
    """The body has an unsupported Content-Encoding."""

    code = "E_HTTP_ENCODED"


class BodyTimeout(UmaError):
    """The body did not come within `http_timeout_sec`."""

    code = "E_HTTP_TIMEOUT"


class Unauthorized(UmaError):
    """No key came, or one that is not known."""

    code = "E_HTTP_KEY"


class Forbidden(UmaError):
    """The key, the `Host` or the `Origin` does not allow this."""

    code = "E_HTTP_FORBIDDEN"


class RateLimited(UmaError):
    """The key's own bounds are reached. Carries `retry_after_ms`."""

    code = "E_HTTP_RATE"


_STATUS: dict[type[UmaError], tuple[int, Kind]] = {
    errors.BadRequest: (400, "bad_request"),
    errors.InvalidJson: (400, "bad_request"),
    errors.TemplateError: (400, "bad_request"),
    errors.VersionMismatch: (400, "bad_request"),
    Unsupported: (400, "unsupported"),
    errors.PromptTooLarge: (400, "context_length"),
    Unimplemented: (501, "unsupported"),
    Unauthorized: (401, "unauthorized"),
    Forbidden: (403, "forbidden"),
    NotFound: (404, "not_found"),
    errors.UnknownModel: (404, "model_not_found"),
    WrongMethod: (405, "method"),
    BodyTimeout: (408, "timeout"),
    errors.Ended: (410, "ended"),  # none after which clients try again by themselves
    BodyTooLarge: (413, "too_large"),
    errors.FrameTooLarge: (413, "too_large"),
    BodyEncoded: (415, "encoded"),
    errors.ModelUnusable: (422, "model_unusable"),  # clients try again by themselves after 5xx
    RateLimited: (429, "rate"),
    errors.Overloaded: (429, "overloaded"),
    errors.TooManySessions: (429, "overloaded"),
    BodiesFull: (503, "busy"),
    StoreFault: (503, "busy"),
    KeptFault: (503, "busy"),
    StoreTaken: (503, "busy"),
    errors.Loading: (503, "loading"),
    errors.ShuttingDown: (503, "stopping"),
    errors.ConnectionLost: (503, "stopping"),
}

DEFAULT_RETRY_MS = 1000
"""Default wait for refusals that time alone can mend, where the engine did not say how much."""


@attrs.frozen
class Problem:
    """An error as HTTP tells it."""

    status: int
    kind: Kind
    message: str
    param: str | None = None
    """The field that is wrong, where there is one."""
    retry_after_ms: int | None = None
    prompt_tokens: int | None = None
    """Minimum length of a prompt that does not fit the context."""
    n_ctx: int | None = None
    """That context's."""

    @classmethod
    def of(cls, error: UmaError, names: Mapping[str, str] | None = None) -> Problem:
        """The problem that `error` is. What is no fault of the request is 500.

        `names` has the body's name for a field that the engine calls otherwise.
        """
        status, kind = next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), (500, "fault"))
        if isinstance(error, errors.ModelUnusable) and error.retry_after_ms is not None:
            status, kind = 503, "crowded"
        lines = renamed(error.lines, names or {})
        field = lines[0].field if status in (400, 501) and lines and isinstance(lines[0], Wrong) else None
        retry_after_ms = error.retry_after_ms
        if status in (429, 503) and retry_after_ms is None:
            retry_after_ms = DEFAULT_RETRY_MS
        problem = cls(status, kind, "\n".join(lines), field or None, retry_after_ms)
        if isinstance(error, errors.PromptTooLarge):
            return attrs.evolve(problem, prompt_tokens=error.prompt_tokens, n_ctx=error.n_ctx)
        return problem

    @property
    def size(self) -> dict[str, int]:
        """llama-server's members of an error about a prompt that does not fit; nothing for another one."""
        if self.prompt_tokens is None or self.n_ctx is None:
            return {}
        return {"n_prompt_tokens": self.prompt_tokens, "n_ctx": self.n_ctx}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """`Retry-After` in whole seconds, and `retry-after-ms` as OpenAI's and Anthropic's clients read it."""
        if self.retry_after_ms is None:
            return []
        seconds = max(1, math.ceil(self.retry_after_ms / 1000))
        return [(b"retry-after", str(seconds).encode()), (b"retry-after-ms", str(self.retry_after_ms).encode())]
