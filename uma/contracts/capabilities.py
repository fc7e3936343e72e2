"""A backend's capabilities in the contract's form, derived from those that the server declares."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs

from uma.constraints import Length, Range
from uma.types import Capabilities

ModelType = Literal["chat", "completions", "embedding", "tensor"]


@attrs.frozen
class BackendCapabilities:
    """Features that a frontend can ask of a backend. `uma contract check` can prove each claim."""

    supports_streaming: bool = False
    supports_logprobs: bool = False
    supports_guided_decoding: bool = False
    supports_tool_calls: bool = False
    supports_vision: bool = False
    supports_embeddings: bool = False
    supports_cancel: bool = False
    max_stop_sequences: Annotated[int, Range(0)] = 0
    supported_sampling_params: Annotated[tuple[Annotated[str, Length(1)], ...], Length(0, 256, "names")] = ()


def capabilities_of(capabilities: Capabilities) -> BackendCapabilities:
    """The contract's form of the capabilities in a server's `hello`."""
    return BackendCapabilities(
        supports_streaming=capabilities.streaming,
        supports_logprobs=capabilities.max_logprobs >= 0,
        supports_guided_decoding=bool(capabilities.grammars),
        supports_tool_calls=capabilities.chat and bool(capabilities.tools),
        supports_vision=capabilities.vision,
        supports_embeddings=capabilities.embeddings,
        supports_cancel=capabilities.cancel,
        max_stop_sequences=capabilities.max_stop_sequences,
        supported_sampling_params=tuple(sorted(capabilities.sampling_params)),
    )


def model_types_of(capabilities: Capabilities) -> tuple[ModelType, ...]:
    """Endpoints that a frontend can offer with such a backend. Chats need a chat template in the model's file."""
    kinds: list[ModelType] = ["chat"] if capabilities.chat else []
    if capabilities.generate:
        kinds.append("completions")
    if capabilities.embeddings:
        kinds.append("embedding")
    return tuple(kinds)
