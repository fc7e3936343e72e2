"""What a backend says it can do, in the contract's words, derived from what the server itself declares."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs

from uma.constraints import Length, Range
from uma.types import Capabilities

ModelType = Literal["chat", "completions", "embedding", "tensor"]


@attrs.frozen
class BackendCapabilities:
    """What a frontend can ask of a backend. Each claim can be proven by `uma contract check`."""

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
    """The contract's form of what a server declared in its `hello`."""
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
    """What a frontend can offer with such a backend. A chat needs a template of the model's own."""
    kinds: list[ModelType] = ["chat"] if capabilities.chat else []
    if capabilities.generate:
        kinds.append("completions")
    if capabilities.embeddings:
        kinds.append("embedding")
    return tuple(kinds)
