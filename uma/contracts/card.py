"""Model deployment card: which model a worker serves, with which limits and capabilities.

Two workers whose cards have the same checksum can take each other's requests. The checksum covers the canonical JSON of
everything except `runtime_config`, which describes the capacity of one machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Literal

import attrs

from uma.constraints import Length, Pattern, Range
from uma.contracts.capabilities import BackendCapabilities, ModelType, capabilities_of, model_types_of
from uma.protocol.converter import unstructure
from uma.types import ServerInfo

CARD_VERSION: Literal["1.0"] = "1.0"
DEFAULT_BLOCK_SIZE = 16
"""Tokens in a KV block, in events and cards."""


@attrs.frozen
class CardRuntime:
    """Capacity of one worker."""

    total_kv_blocks: Annotated[int, Range(0)] | None = None
    max_num_seqs: Annotated[int, Range(1)] | None = None
    max_num_batched_tokens: Annotated[int, Range(1)] | None = None


@attrs.frozen(kw_only=True)
class ModelDeploymentCard:
    """A model as a frontend lists it and routes to it."""

    version: Literal["1.0"] = CARD_VERSION
    display_name: Annotated[str, Length(1)]
    slug: Annotated[str, Pattern("[a-z0-9-]+", "lower-case letters, digits and hyphens")]
    """`display_name` as a key: lower-case letters, digits and hyphens."""
    model_input: Literal["tokens", "text"]
    model_type: Annotated[tuple[ModelType, ...], Length(1, 4, "types")]
    context_length: Annotated[int, Range(1)] | None = None
    """Maximum tokens of one request, prompt and output together."""
    kv_cache_block_size: Annotated[int, Range(1)] | None = None
    """Tokens in a block of KV events."""
    runtime_config: CardRuntime | None = None
    capabilities: BackendCapabilities | None = None


def slug_of(name: str) -> str:
    """Key of a model's name: `Qwen 2.5 (Q4_K)` gives `qwen-2-5-q4-k`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"


def card_of(
    info: ServerInfo,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    context_length: int | None = None,
    runtime: CardRuntime | None = None,
) -> ModelDeploymentCard:
    """Card of a running server, derived from its model file and its context.

    `context_length` replaces the context's own length where every worker of a model must state the same one, however
    much memory it has.
    """
    return ModelDeploymentCard(
        display_name=info.model.title or info.model.name,
        slug=slug_of(info.model.title or info.model.name),
        model_input="tokens" if info.capabilities.token_ids_input else "text",
        model_type=model_types_of(info.capabilities),
        context_length=context_length or info.limits.n_ctx,
        kv_cache_block_size=block_size,
        runtime_config=runtime,
        capabilities=capabilities_of(info.capabilities),
    )


def canonical_json(card: ModelDeploymentCard) -> bytes:
    """The card by RFC 8785 (JSON Canonicalization Scheme): UTF-8, keys sorted, no white space, defaults left out.

    A card has only strings, integers and booleans, so all machines write the same bytes.
    """
    fields = {"version": card.version, **unstructure(card)}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def checksum(card: ModelDeploymentCard) -> str:
    """`sha256:` and the hex digest of the canonical JSON without `runtime_config`."""
    return "sha256:" + hashlib.sha256(canonical_json(attrs.evolve(card, runtime_config=None))).hexdigest()
