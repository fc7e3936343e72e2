"""What OpenAI's endpoints share: the form of errors, message contents, and the list of models."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import attrs

from uma.constraints import Text, show
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.dialect import Body
from uma.http.exchange import MAX_NAMED
from uma.http.gateway import Gateway
from uma.http.problem import Problem
from uma.protocol.converter import structure, unknown_fields
from uma.types import SamplerSettings

T = TypeVar("T")

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
"""Of a message. A template takes any, and with it whatever it spells."""

_TYPES = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "rate": "rate_limit_error",
    "overloaded": "rate_limit_error",
    "busy": "server_error",
    "loading": "server_error",
    "stopping": "server_error",
    "fault": "server_error",
}
_CODES = {
    "unsupported": "unsupported_parameter",
    "context_length": "context_length_exceeded",
    "unauthorized": "invalid_api_key",
    "model_not_found": "model_not_found",
    "rate": "rate_limit_exceeded",
    "overloaded": "rate_limit_exceeded",
    "busy": "rate_limit_exceeded",
    "loading": "service_unavailable",
    "stopping": "service_unavailable",
    "too_large": "request_too_large",
}


OVERFLOW = "This model's maximum context length is exceeded: "
"""Programs know an overflow by OpenAI's words for it, some by these alone."""


class OpenAiErrors:
    """`{"error": {"message", "type", "param", "code"}}`."""

    def error(self, problem: Problem, request_id: str) -> Body:
        """See `Dialect`."""
        return {
            "error": {
                "message": OVERFLOW + problem.message if problem.kind == "context_length" else problem.message,
                "type": _TYPES.get(problem.kind, "invalid_request_error"),
                "param": problem.param,
                "code": _CODES.get(problem.kind),
            }
        }


ERRORS = OpenAiErrors()

DEFAULTS = SamplerSettings(temperature=1.0)
"""As OpenAI's documents have them."""


@attrs.frozen(kw_only=True)
class StreamOptions:
    """`stream_options`."""

    include_usage: bool | None = None


@attrs.frozen(kw_only=True)
class _TextPart:
    type: str
    text: Annotated[str, Text()]
    annotations: Any = None
    """As in a message that was an answer; so are the next two."""
    logprobs: Any = None
    citations: Any = None


def read_part(part: Any, cls: type[T], path: str, ignored: list[str]) -> T:
    """A part of a body as a `cls`; fields that it does not have are added to `ignored`. Raises `BadRequest`."""
    try:
        found = structure(part, cls)
    except BadRequest as error:
        raise BadRequest(f"{path}.{error.message}") from None
    ignored += islice(unknown_fields(part, cls, f"{path}."), max(0, MAX_NAMED - len(ignored)))
    return found


def text_of(content: Any, path: str, ignored: list[str]) -> str:
    """A message's content, a string or a list of text parts, as one string; parts are lines.

    Fields of a part that are not known are added to `ignored`. Raises `BadRequest` for another type, and `Unsupported`
    for images, audio and files.
    """
    if isinstance(content, str):
        return checked_text(content, path)
    if content is None:
        return ""
    if not isinstance(content, list):
        raise BadRequest(f"{path}: expected a string or a list of parts, not {show(content)}")
    return "\n".join(part_text(part, f"{path}[{index}]", ignored) for index, part in enumerate(content))


def checked_text(text: str, path: str) -> str:
    """`text`. Raises `BadRequest` where it cannot be tokenized."""
    if (problem := Text().problem(text)) is not None:
        raise BadRequest(f"{path}: {problem}")
    return text


def part_text(part: Any, path: str, ignored: list[str]) -> str:
    """The text of one part; see `text_of`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text"):
        return read_part(part, _TextPart, path, ignored).text
    if kind in _MEDIA:
        abilities.media(str(kind), path)
    raise BadRequest(f"{path}: expected a part with type text, not {show(part)}")


_MEDIA = ("image_url", "input_image", "input_audio", "file", "input_file", "image", "document", "video_url")


def model(gateway: Gateway, name: str) -> dict[str, Any]:
    """The loaded model under one of its names, as lists of models have it."""
    info = gateway.source.info
    return {
        "id": name,
        "object": "model",
        "created": gateway.names.loaded_at,
        "owned_by": "uma",
        "max_model_len": info.limits.n_ctx,
        "meta": {
            "n_vocab": info.model.vocab_size,
            "n_ctx_train": info.model.context_length,
            "n_params": info.model.parameters,
            "size": info.model.size_bytes,
            "architecture": info.model.architecture,
            "quantization": info.model.quantization,
        },
    }
