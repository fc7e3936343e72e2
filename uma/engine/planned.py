"""What texts take of memory: of a server that runs, and of a model that is not loaded, by its header.

Both are planned by the same functions of `sizing`, so what is told before a start is what the start takes, as long as
as much memory is free.
"""

from __future__ import annotations

from typing import cast

import attrs

from uma.config import RuntimeConfig
from uma.engine import sizing
from uma.llama.context import ContextParams
from uma.llama.footprint import ELEMENT_BYTES, WINDOW_PERIODS, footprint
from uma.llama.header import Header
from uma.llama.model import COPIED_WHOLE, Memory, Model, Pooling
from uma.types import MemoryPlan


def memory_plan(model: Model, params: ContextParams) -> MemoryPlan:
    """What a context with these parameters takes of memory for texts, from its start."""
    kv_bytes = params.kv_bytes(model)
    states = params.n_seq_max * (1 + params.rolled_back) if model.state_bytes else 0
    return MemoryPlan(
        kind=model.memory,
        cells=params.cells,
        kv_bytes=kv_bytes,
        window_cells=params.window_cells(model.window_tokens) if model.memory == "sliding-window" else 0,
        states=states,
        state_bytes=sizing.context_bytes(model, params) - kv_bytes,
    )


def planned(parts: list[Header], config: RuntimeConfig) -> MemoryPlan | None:
    """Plan of a model of these parts, if it were loaded now; None for an encoder, which keeps nothing of a text.
    Raises `ConfigError` where there is no memory for it. Any thread.
    """
    model = cast("Model", _PlannedModel.of(parts))  # as much of one as is asked for
    return memory_plan(model, sizing.context_params(model, config)) if model.is_causal else None


@attrs.frozen
class _PlannedModel:
    """Stand-in for a `Model` whose file is not loaded, with what `sizing` asks for."""

    architecture: str
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
    """Tokens of the vocabulary."""
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
            return int(value) if isinstance(value, int) else 0

        kept = footprint(parts, first.n_layers)
        has_windows = first.architecture in WINDOW_PERIODS or "attention.sliding_window_pattern" in first.by_layer
        window_tokens = number("attention.sliding_window") if has_windows else 0
        has_states = kept.state_bytes > 0 or first.architecture == COPIED_WHOLE
        with_states: Memory = "hybrid" if kept.key_values else "recurrent"
        without: Memory = "sliding-window" if window_tokens else "attention"
        return cls(
            architecture=first.architecture,
            size_bytes=sum(part.size_bytes for part in parts),
            n_ctx_train=first.context_length,
            is_causal=first.metadata.get(f"{first.architecture}.attention.causal") is not False,
            memory=with_states if has_states else without,
            window_tokens=window_tokens,
            state_bytes=kept.state_bytes,
            keys=kept.key_values,
            values=kept.value_values,
            window_keys=kept.window_key_values,
            window_values=kept.window_value_values,
            n_tokens=int(first.metadata.get("tokenizer.ggml.tokens", 0)),
            n_layers=first.n_layers,
            attention_heads=first.n_layers * number("attention.head_count"),
        )

    @property
    def info(self) -> _PlannedModel:
        """What has its `size_bytes` and `architecture`."""
        return self

    @property
    def vocab(self) -> _PlannedModel:
        """What has its `n_tokens`."""
        return self

    @property
    def has_states(self) -> bool:
        return self.memory in ("recurrent", "hybrid")

    def kv_bytes_per_token(self, type_k: str, type_v: str) -> int:
        return int(self.keys * ELEMENT_BYTES[type_k] + self.values * ELEMENT_BYTES[type_v])

    def window_bytes_per_token(self, type_k: str, type_v: str) -> int:
        if self.memory != "sliding-window":
            return 0
        return int(self.window_keys * ELEMENT_BYTES[type_k] + self.window_values * ELEMENT_BYTES[type_v])
