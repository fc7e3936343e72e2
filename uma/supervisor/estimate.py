"""What a model is expected to take before it was ever loaded: by its header, as its process will plan its memory."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import attrs

from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.errors import UmaError
from uma.llama import header
from uma.llama.footprint import ELEMENT_BYTES, WINDOW_PERIODS, footprint
from uma.llama.header import Header
from uma.llama.model import Memory, Model, Pooling

PROCESS_BYTES = 64 * 2**20
"""What a process takes beside weights and context: Python, llama.cpp, its buffers for computing."""
ROUGH_SHARE = 4
"""Divisor of the weights for the context, where that is not known."""


def rough_bytes(size_bytes: int) -> int:
    """The memory of a process with weights of this size, as long as nothing else is known."""
    return size_bytes + size_bytes // ROUGH_SHARE + PROCESS_BYTES


def planned_bytes(path: Path, config: RuntimeConfig) -> int:
    """The memory of a process with these settings and the model of this file. Any thread."""
    try:
        model = _PlannedModel.of(header.read_parts(path))
        params = sizing.context_params(cast("Model", model), config)
        context_bytes = params.kv_bytes(cast("Model", model)) + params.n_seq_max * model.state_bytes
        return model.size_bytes + context_bytes + PROCESS_BYTES
    except (UmaError, OSError):  # loading it says what is wrong
        return rough_bytes(path.stat().st_size if path.exists() else 0)


@attrs.frozen
class _PlannedModel:
    """As much of a `Model` as `sizing` asks for, of a file that is not loaded."""

    size_bytes: int
    n_ctx_train: int
    is_causal: bool
    memory: Memory
    window_tokens: int
    state_bytes: int
    keys: int
    """Figures kept of a token, as the next three."""
    values: int
    window_keys: int
    window_values: int
    n_tokens: int
    """Of the vocabulary."""
    n_layers: int
    attention_heads: int
    """Over all layers."""
    pooling: Pooling = "none"
    is_mapped: bool = True
    """The weights take memory that is free yet."""

    @classmethod
    def of(cls, parts: list[Header]) -> _PlannedModel:
        """The model of these parts."""
        first = parts[0]

        def number(name: str) -> int:
            value = first.metadata.get(f"{first.architecture}.{name}", 0)
            return int(value) if isinstance(value, (int, float)) else 0

        kept = footprint(parts, number("block_count"))
        has_windows = first.architecture in WINDOW_PERIODS or "attention.sliding_window_pattern" in first.by_layer
        window_tokens = number("attention.sliding_window") if has_windows else 0
        with_states: Memory = "hybrid" if kept.key_values else "recurrent"
        without: Memory = "sliding-window" if window_tokens else "attention"
        return cls(
            size_bytes=sum(part.size_bytes for part in parts),
            n_ctx_train=first.context_length,
            is_causal=first.metadata.get(f"{first.architecture}.attention.causal") is not False,
            memory=with_states if kept.state_bytes else without,
            window_tokens=window_tokens,
            state_bytes=kept.state_bytes,
            keys=kept.key_values,
            values=kept.value_values,
            window_keys=kept.window_key_values,
            window_values=kept.window_value_values,
            n_tokens=int(first.metadata.get("tokenizer.ggml.tokens", 0)),
            n_layers=number("block_count"),
            attention_heads=number("block_count") * number("attention.head_count"),
        )

    @property
    def info(self) -> _PlannedModel:
        """What has its `size_bytes`."""
        return self

    @property
    def vocab(self) -> _PlannedModel:
        """What has its `n_tokens`."""
        return self

    @property
    def has_states(self) -> bool:
        return self.state_bytes > 0

    def kv_bytes_per_token(self, type_k: str, type_v: str) -> int:
        return int(self.keys * ELEMENT_BYTES[type_k] + self.values * ELEMENT_BYTES[type_v])

    def window_bytes_per_token(self, type_k: str, type_v: str) -> int:
        return int(self.window_keys * ELEMENT_BYTES[type_k] + self.window_values * ELEMENT_BYTES[type_v])
