"""What a model keeps in memory of each token and of each sequence, by its header, as llama.cpp lays it out.

llama.cpp makes a tensor of keys and one of values for each layer that attends, and two tensors of states for each that
is recurrent. Which layers these are, and how large, it takes from the header; its own interface tells of the first
layer alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

from uma.llama.header import Header

STATE_TENSORS = ("ssm_conv1d", "shortconv.", "time_mix_")
"""Beginnings of the names of tensors that only a recurrent layer has: Mamba's and the delta nets', LFM2's, RWKV's."""
KEY_TENSORS = ("attn_k.", "attn_kv_a_mqa.")
"""Names of tensors that only a layer has whose keys are kept. Delta nets have an `attn_qkv`."""
LAYER_TENSOR = re.compile(r"blk\.\d+\.")
STATE_BYTES = 4
"""Bytes of a state's figure: llama.cpp keeps them in F32."""
TOKEN_SHIFTS = 2
"""Token shifts of an RWKV whose header does not say, as llama.cpp takes it."""
ELEMENT_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""ggml's block sizes: bytes of a block over its elements."""
WINDOW_PERIODS = {
    "afmoe": 4,
    "cohere2": 4,
    "cohere2moe": -4,
    "exaone-moe": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "laguna": -4,
    "llama4": 4,
    "mellum": 4,
    "muse-glimmer": 4,
    "olmo2": 4,
    "plamo3": 8,
    "smallthinker": -4,
}
"""Period of layers by architecture: of so many the last attends to everything, and the others have a window, where the
header does not say; with a minus the first does. As llama.cpp has them (`load_swa_pattern` in its `models/`)."""


@attrs.frozen
class Footprint:
    """Figures kept, over all layers."""

    key_values: int
    """Figures of a token's keys."""
    value_values: int
    """Figures of a token's values."""
    state_bytes: int
    """Bytes of a sequence's states, whatever its length; 0 without recurrent layers."""
    window_key_values: int
    """Figures of a token's keys in layers with a sliding window."""
    window_value_values: int
    """Figures of a token's values in layers with a sliding window."""

    def bytes_per_token(self, type_k: str, type_v: str) -> int:
        """KV bytes of a token, with these cache types."""
        return int(self.key_values * ELEMENT_BYTES[type_k] + self.value_values * ELEMENT_BYTES[type_v])


def footprint(parts: Iterable[Header], n_layers: int) -> Footprint:
    """What a model of these parts keeps. `n_layers` leaves out those that only guess further tokens."""
    parts = list(parts)
    figures = _Figures(parts[0])
    names = frozenset().union(*(part.tensor_bytes for part in parts))
    total_layers = figures.number("block_count", n_layers)
    # Of the last layers, those that read the keys and values of others.
    with_keys = total_layers - figures.number("attention.shared_kv_layers")
    keys = values = states = window_keys = window_values = 0
    tensors: dict[str, list[str]] = {}
    for _, layer_number, name in (name.split(".", 2) for name in names if LAYER_TENSOR.match(name)):
        tensors.setdefault(layer_number, []).append(name)
    for layer in range(n_layers):
        own = tensors.get(str(layer), ())
        is_recurrent = any(name.startswith(STATE_TENSORS) for name in own)
        states += is_recurrent
        if layer < with_keys and (not is_recurrent or any(name.startswith(KEY_TENSORS) for name in own)):
            keys += figures.key_values(layer)
            values += figures.value_values(layer)
            if figures.has_window(layer):
                window_keys += figures.key_values(layer)
                window_values += figures.value_values(layer)
    return Footprint(keys, values, states * figures.state_values * STATE_BYTES, window_keys, window_values)


class _Figures:
    """Figures of a header, by llama.cpp's rules for what it leaves out."""

    def __init__(self, first: Header) -> None:
        self._first = first

    def number(self, name: str, otherwise: int = 0, layer: int = 0) -> int:
        """A figure of one layer, where layers differ, or of all."""
        by_layer = self._first.by_layer.get(name, ())
        stated = self._first.metadata.get(f"{self._first.architecture}.{name}") if not by_layer else None
        figure = by_layer[layer] if layer < len(by_layer) else stated
        return int(figure) if isinstance(figure, int) else otherwise

    def key_values(self, layer: int) -> int:
        """Figures of a token's keys and values, in a layer that attends."""
        return self._kv_heads(layer) * self._head_size("key", layer)

    def value_values(self, layer: int) -> int:
        """The same. Of latent attention only a key is kept."""
        return 0 if self.number("attention.key_length_mla") else self._kv_heads(layer) * self._head_size("value", layer)

    def has_window(self, layer: int) -> bool:
        """Whether a layer that attends has a sliding window, in a model with such layers."""
        name = "attention.sliding_window_pattern"
        if name in self._first.by_layer:
            return bool(self.number(name, layer=layer))
        default = WINDOW_PERIODS.get(self._first.architecture, 1)
        period = self.number(name, abs(default))
        return period == 0 or layer % period != (0 if default < 0 else period - 1)

    @property
    def state_values(self) -> int:
        """Figures of a sequence's state in a recurrent layer: of its convolution, and of what it has read."""
        embed, heads = self.number("embedding_length"), self.number("attention.head_count")
        if wkv := self.number("wkv.head_size"):
            return embed * (self.number("token_shift_count", TOKEN_SHIFTS) + wkv)
        if length := self.number("shortconv.l_cache"):
            return embed * (length - 1)
        kernel = self.number("ssm.conv_kernel")
        if head := self.number("kda.head_dim"):
            return heads * head * (3 * (kernel - 1 if kernel else 3) + head)
        inner, size = self.number("ssm.inner_size"), self.number("ssm.state_size")
        return max(0, kernel - 1) * (inner + 2 * self.number("ssm.group_count") * size) + inner * size

    def _kv_heads(self, layer: int) -> int:
        return self.number("attention.head_count_kv", self.number("attention.head_count", layer=layer), layer)

    def _head_size(self, which: str, layer: int) -> int:
        heads = self.number("attention.head_count")
        size = self.number(f"attention.{which}_length", self.number("embedding_length") // heads if heads else 0)
        is_stated_by_layer = "attention.sliding_window_pattern" in self._first.by_layer
        has_own_size = is_stated_by_layer and self.has_window(layer)
        return self.number(f"attention.{which}_length_swa", size) if has_own_size else size
