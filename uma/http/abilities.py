"""Abilities that the engine does not have yet: one place for each, which refuses by name what asks for it.

Each function takes a field as the request has it. Once the engine has the ability, the function returns what the
`Request` needs instead of refusing.
"""

from __future__ import annotations

from typing import Any

from uma.http.problem import Unsupported


def structured_output(value: Any, field: str) -> None:
    """`response_format`, `format`, `grammar`, `json_schema`. A plain text format asks for nothing."""
    if value is None or value in ("", "text") or (isinstance(value, dict) and value.get("type") == "text"):
        return
    raise Unsupported(f"{field}: this server cannot constrain its output to a schema or grammar yet; leave it out")


def tools(value: Any, field: str = "tools") -> None:
    """`tools`, `functions`, `tool_choice`, tool calls and results among messages. An empty list asks for nothing."""
    if not value or value in ("none", "auto") or (isinstance(value, dict) and value.get("type") in ("none", "auto")):
        return
    raise Unsupported(f"{field}: this server cannot call tools yet; leave it out")


def logprobs(value: Any, field: str = "logprobs") -> None:
    """`logprobs`, `top_logprobs`, `n_probs`."""
    if value is None or value is False or value == 0:
        return
    raise Unsupported(f"{field}: this server cannot give log probabilities yet; leave it out")


def logit_bias(value: Any, field: str = "logit_bias") -> None:
    """`logit_bias`. An empty one asks for nothing."""
    if value:
        raise Unsupported(f"{field}: this server cannot bias tokens yet; leave it out")


def echo(value: Any) -> None:
    """`echo`: the prompt in front of the answer."""
    if value:
        raise Unsupported("echo: this server does not repeat the prompt; put it in front of the answer yourself")


def suffix(value: Any) -> None:
    """`suffix`: text to be filled in before it."""
    if value:
        raise Unsupported("suffix: this server cannot fill in text before a suffix; leave it out")


def embeddings() -> None:
    """`/v1/embeddings`, `/api/embed`."""
    raise Unsupported("this server cannot make embeddings yet")


def rerank() -> None:
    """`/rerank`."""
    raise Unsupported("this server cannot rerank yet")


def media(kind: str, path: str) -> None:
    """An image, a sound, a file: the engine takes text alone."""
    raise Unsupported(f"{path}: {kind} cannot be read; this server takes text alone")


def thinking(value: Any, field: str) -> None:
    """A wish for the model to think, or for how much. Asking it not to is no wish."""
    if not value or (isinstance(value, dict) and value.get("type") == "disabled"):
        return
    raise Unsupported(f"{field}: this server cannot steer a model's thinking yet; leave it out")
