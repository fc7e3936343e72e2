"""What OpenAI's endpoints share: the form of errors, roles, and the list of models."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from uma.http.dialect import Body, Dialect
from uma.http.gateway import Gateway
from uma.http.problem import Problem
from uma.types import Capabilities, ListedModel, Tokenized

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
"""Role of a message. A template takes any, and with it whatever it spells."""

_TYPES = {
    "context_length": "exceed_context_size_error",  # llama-server's; OpenAI's clients go by the code
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "rate": "rate_limit_error",
    "overloaded": "rate_limit_error",
    "busy": "server_error",
    "crowded": "server_error",
    "loading": "server_error",
    "stopping": "server_error",
    "fault": "server_error",
}
_CODES = {
    "unsupported": "unsupported_parameter",
    "context_length": "context_length_exceeded",
    "unauthorized": "invalid_api_key",
    "model_not_found": "model_not_found",
    "model_unusable": "model_unusable",
    "crowded": "model_unusable",
    "rate": "rate_limit_exceeded",
    "overloaded": "rate_limit_exceeded",
    "busy": "service_unavailable",
    "loading": "service_unavailable",
    "stopping": "service_unavailable",
    "too_large": "request_too_large",
    "fault": "server_error",
}


OVERFLOW = "This model's maximum context length is exceeded: "
"""Programs know an overflow by OpenAI's words for it, some by these alone."""


def error(problem: Problem, request_id: str) -> Body:
    """`{"error": {"message", "type", "param", "code"}}`, and of a prompt that does not fit llama-server's two sizes."""
    return {
        "error": {
            "message": OVERFLOW + problem.message if problem.kind == "context_length" else problem.message,
            "type": _TYPES.get(problem.kind, "invalid_request_error"),
            "param": problem.param,
            "code": _CODES.get(problem.kind),
            **problem.size,
        }
    }


OPENAI = Dialect(error)


def input_tokens(found: Tokenized) -> Body:
    """The number of a prompt's tokens."""
    return {"object": "response.input_tokens", "input_tokens": len(found.token_ids)}


@attrs.frozen(kw_only=True)
class StreamOptions:
    """`stream_options`."""

    include_usage: bool | None = None


def model(gateway: Gateway, name: str) -> dict[str, Any]:
    """The loaded model under one of its names, as lists of models have it."""
    info = gateway.info
    return {
        "id": name,
        "object": "model",
        "created": gateway.names.loaded_at,
        "owned_by": "uma",
        "max_model_len": info.limits.n_ctx,
        "meta": {
            "n_vocab": info.model.vocab_size,
            "n_ctx": info.limits.n_ctx,
            "n_ctx_train": info.model.context_length,
            "n_params": info.model.parameters,
            "size": info.model.size_bytes,
            "architecture": info.model.architecture,
            "quantization": info.model.quantization,
        },
    }


def listed(gateway: Gateway, model: ListedModel) -> dict[str, Any]:
    """One of several models, as `model`, with what llama-server's router says of it."""
    info = model.info
    return {
        "id": model.name,
        "object": "model",
        "created": gateway.names.loaded_at,
        "owned_by": "uma",
        "aliases": model.aliases,
        "status": _status(model),
        "architecture": {
            "input_modalities": ["text", *(_media(info.capabilities) if info is not None else ())],
            "output_modalities": ["text"],
        },
        **({} if info is None else {"max_model_len": info.limits.n_ctx}),
        "meta": {
            "n_ctx_train": model.context_length,
            "size": model.size_bytes,
            "architecture": model.architecture,
            "quantization": model.quantization,
            "kind": model.kind,
            "fits": model.fits,
            "has_tools": model.has_tools,
        },
    }


def _media(able: Capabilities) -> list[str]:
    return [name for name, is_taken in (("image", able.vision), ("audio", able.audio)) if is_taken]


def _status(model: ListedModel) -> dict[str, Any]:
    """Status as llama-server's router has it; a model that leaves takes no more requests."""
    status: dict[str, Any] = {"value": "unloaded" if model.state == "leaving" else model.state}
    if model.loading_percent is not None:
        status |= {"progress": model.loading_percent / 100, "doing": model.load.words}
    if model.failure:
        status |= {"failed": True, "message": model.failure}
    return status
