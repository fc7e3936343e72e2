"""Memory that a model takes for each token and each sequence, by its header, as llama.cpp allocates it.

llama.cpp makes a tensor of keys and one of values for each attention layer, and two tensors of states for each
recurrent layer. It reads from the header which layers these are and how large; its own interface only tells of the
first layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import attrs

from uma.llama.header import Header

Memory = Literal["attention", "sliding-window", "recurrent", "hybrid"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]
POOLINGS: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")
"""Poolings in the order of llama.cpp's numbers."""

COPIED_WHOLE = "deepseek4"
"""Architecture that keeps keys and values of groups of tokens, so that llama.cpp can only copy whole sequences."""
STATE_TENSORS = ("ssm_conv1d", "shortconv.", "time_mix_")
"""Prefixes of tensor names that only recurrent layers have: Mamba's and delta nets', LFM2's, RWKV's."""
KEY_TENSORS = ("attn_k.", "attn_kv_a_mqa.")
"""Tensor names that only layers with kept keys have. Delta nets have an `attn_qkv`."""
LAYER_TENSOR = re.compile(r"blk\.\d+\.")
STATE_BYTES = 4
"""Bytes of a number in a state: llama.cpp keeps them in F32."""
TOKEN_SHIFTS = 2
"""llama.cpp's default number of token shifts in an RWKV."""
ELEMENT_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes of an element in each type: ggml's bytes of a block over its elements."""
CHAINED = "step35"
"""Architecture with several prediction heads: the first drafts a token, the next one the token after it."""
PREDICTING = ("qwen35", "qwen35moe", CHAINED)
"""Architectures whose prediction heads were tested, of those that llama.cpp has a graph for. All but `CHAINED` have one
head."""
PREDICTING_TENSORS = ("eh_proj", "enorm", "hnorm")
"""Tensors without which llama.cpp ends the process when a head computes."""
ASSISTANT = "gemma4-assistant"
"""Architecture of models that draft tokens from another model's cells."""
ASSISTED = "gemma4"
"""Architecture of those other models."""
WINDOW_PERIODS = {
    "afmoe": 4, "cohere2": 4, "cohere2moe": -4, "exaone-moe": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5,
    "gpt-oss": 2, "laguna": -4, "llama4": 4, "mellum": 4, "muse-glimmer": 4, "olmo2": 4, "plamo3": 8,
    "smallthinker": -4,
}  # fmt: skip
"""Default period of layers by architecture: the last layer of a period attends to everything, the others have a window;
with a minus it is the first layer of a period. As in llama.cpp (`load_swa_pattern` in its `models/`)."""


@attrs.frozen(kw_only=True)
class Shape:
    """Figures of a model for planning memory, from its header, or from llama.cpp for a loaded model."""

    architecture: str
    size_bytes: int
    """Bytes of the weights."""
    n_ctx_train: int
    """Tokens that the model was trained for; 0 where the file does not state it."""
    is_causal: bool
    """Whether a token's state does not depend on later tokens. Only such a model generates, or reads a text in
    pieces."""
    memory: Memory
    """Kind of memory of a sequence."""
    window_tokens: int
    """Positions that layers with a sliding window attend to, the token's own included; 0: there are none."""
    state_bytes: int
    """Bytes of a sequence's recurrent states, independent of its length; 0 without recurrent layers."""
    keys: int
    """Elements of a token's keys, over all layers."""
    values: int
    """Elements of a token's values, over all layers."""
    window_keys: int
    """Elements of a token's keys in layers with a sliding window."""
    window_values: int
    """Elements of a token's values in layers with a sliding window."""
    heads: int
    """Number of usable prediction heads."""
    predicting_keys: int
    """Elements of a token's keys in the layers of these heads."""
    predicting_values: int
    """Elements of a token's values in the layers of these heads."""
    n_tokens: int
    """Tokens of the vocabulary."""
    n_heads: int
    """Attention heads of a layer."""
    pooling: Pooling
    """Pooling of embeddings that the file states; `none` where it states none."""
    is_mapped: bool = True
    """Whether the weights are mapped from their file, so that their memory counts as free."""

    @classmethod
    def of(cls, parts: list[Header]) -> Shape:
        """Shape of a model of these parts, by its headers."""
        first, figures = parts[0], _Figures(parts[0])
        kept, heads = _LayerTotals.of(parts, figures), _prediction_heads(parts)
        predicting = range(first.n_layers, first.n_layers + heads)
        has_windows = first.architecture in WINDOW_PERIODS or "attention.sliding_window_pattern" in first.by_layer
        window_tokens = figures.number("attention.sliding_window") if has_windows else 0
        memory: Memory = "sliding-window" if window_tokens else "attention"
        if kept.states or first.architecture == COPIED_WHOLE:
            memory = "hybrid" if kept.keys else "recurrent"
        return cls(
            architecture=first.architecture,
            size_bytes=sum(part.size_bytes for part in parts),
            n_ctx_train=first.context_length,
            is_causal=first.metadata.get(f"{first.architecture}.attention.causal") is not False,
            memory=memory,
            window_tokens=window_tokens,
            state_bytes=kept.states * figures.state_values * STATE_BYTES,
            keys=kept.keys,
            values=kept.values,
            window_keys=kept.window_keys,
            window_values=kept.window_values,
            heads=heads,
            predicting_keys=sum(map(figures.keys, predicting)),
            predicting_values=sum(map(figures.values, predicting)),
            n_tokens=first.vocab_size,
            n_heads=figures.number("attention.head_count"),
            pooling=_pooling_of(parts),
        )

    @property
    def has_states(self) -> bool:
        """Whether a sequence has a recurrent state, which only exists for its end."""
        return self.memory in ("recurrent", "hybrid")

    @property
    def of_prediction_heads(self) -> Shape:
        """Shape of the prediction heads' layers, in a context of their own."""
        return attrs.evolve(
            self,
            memory="attention",
            window_tokens=0,
            state_bytes=0,
            keys=self.predicting_keys,
            values=self.predicting_values,
            window_keys=0,
            window_values=0,
        )

    def bytes_per_token(self, type_k: str, type_v: str) -> int:
        """Bytes of one KV cell with these cache types, over all layers; 0 for a model without attention."""
        return int(self.keys * ELEMENT_BYTES[type_k] + self.values * ELEMENT_BYTES[type_v])

    def window_bytes_per_token(self, type_k: str, type_v: str) -> int:
        """The part of these bytes in layers with a sliding window, which need not keep more than the window."""
        if self.memory != "sliding-window":
            return 0
        return int(self.window_keys * ELEMENT_BYTES[type_k] + self.window_values * ELEMENT_BYTES[type_v])


@attrs.define
class _LayerTotals:
    """Number of recurrent layers, and elements of a token that the other layers keep."""

    states: int = 0
    keys: int = 0
    values: int = 0
    window_keys: int = 0
    window_values: int = 0

    @classmethod
    def of(cls, parts: Iterable[Header], figures: _Figures) -> _LayerTotals:
        kept, tensors = cls(), dict[str, list[str]]()
        for name in (name for part in parts for name in part.tensor_bytes if LAYER_TENSOR.match(name)):
            _, layer_number, own_name = name.split(".", 2)
            tensors.setdefault(layer_number, []).append(own_name)
        n_layers = figures.first.n_layers  # without prediction layers
        # The last layers can use the keys and values of others.
        with_keys = figures.number("block_count", n_layers) - figures.number("attention.shared_kv_layers")
        for layer in range(n_layers):
            own = tensors.get(str(layer), ())
            is_recurrent = any(name.startswith(STATE_TENSORS) for name in own)
            kept.states += is_recurrent
            if layer < with_keys and (not is_recurrent or any(name.startswith(KEY_TENSORS) for name in own)):
                keys, values = figures.keys(layer), figures.values(layer)
                kept.keys += keys
                kept.values += values
                if figures.has_window(layer):
                    kept.window_keys += keys
                    kept.window_values += values
        return kept


class _Figures:
    """Figures of a header, with llama.cpp's defaults for absent ones."""

    def __init__(self, first: Header) -> None:
        self.first = first

    def number(self, name: str, otherwise: int = 0, layer: int = 0) -> int:
        """A figure of one layer, where layers differ, or of all."""
        by_layer = self.first.by_layer.get(name, ())
        stated = self.first.metadata.get(f"{self.first.architecture}.{name}") if not by_layer else None
        figure = by_layer[layer] if layer < len(by_layer) else stated
        return int(figure) if isinstance(figure, int) else otherwise

    def keys(self, layer: int) -> int:
        """Elements of a token's keys in an attention layer."""
        return self._kv_heads(layer) * self._head_size("key", layer)

    def values(self, layer: int) -> int:
        """Elements of a token's values in an attention layer; 0 with latent attention, which only keeps keys."""
        return 0 if self.number("attention.key_length_mla") else self._kv_heads(layer) * self._head_size("value", layer)

    def has_window(self, layer: int) -> bool:
        """Whether an attention layer has a sliding window, in a model with such layers."""
        name = "attention.sliding_window_pattern"
        if name in self.first.by_layer:
            return bool(self.number(name, layer=layer))
        default = WINDOW_PERIODS.get(self.first.architecture, 1)
        period = self.number(name, abs(default))
        return period == 0 or layer % period != (0 if default < 0 else period - 1)

    @property
    def state_values(self) -> int:
        """Elements of a sequence's state in a recurrent layer: of its convolution, and of its recurrence."""
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
        is_stated_by_layer = "attention.sliding_window_pattern" in self.first.by_layer
        has_own_size = is_stated_by_layer and self.has_window(layer)
        return self.number(f"attention.{which}_length_swa", size) if has_own_size else size


def _prediction_heads(parts: list[Header]) -> int:
    """Number of usable prediction heads; 0 where llama.cpp would not load them."""
    first, tensors = parts[0], {name for part in parts for name in part.tensor_bytes}
    count = first.metadata.get(f"{first.architecture}.nextn_predict_layers")
    if (
        first.architecture not in PREDICTING
        or not isinstance(count, int)
        or (count > 1 and first.architecture != CHAINED)
    ):
        return 0
    layers = range(first.n_layers, first.n_layers + count)
    is_whole = all(f"blk.{layer}.nextn.{name}.weight" in tensors for layer in layers for name in PREDICTING_TENSORS)
    return count if is_whole else 0


def why_no_assistant(own: Header, target: Header) -> str | None:
    """Why the model of this header cannot read another model's cells; None where it can. llama.cpp does not check this:
    a layer reads those of the target's last layer of its kind, as if they had its own dimensions.
    """
    if target.architecture != ASSISTED:
        return f"it reads the cells of {ASSISTED} models, and this one is {target.architecture}"
    mine, theirs, last = _Figures(own), _Figures(target), target.n_layers - 1
    if last < 1 or theirs.has_window(last) or not theirs.has_window(last - 1):
        return "the model's last layer has a window, or the one before it has none"
    width = theirs.number("embedding_length")
    if mine.number("embedding_length_out") != width:
        return f"it is for embeddings of {mine.number('embedding_length_out'):,} figures, and the model has {width:,}"
    for layer in range(mine.number("block_count")):
        read = last - mine.has_window(layer)
        own_keys, keys = mine.keys(layer), theirs.keys(read)
        if (own_keys, mine.values(layer)) != (keys, theirs.values(read)):
            return f"its layer {layer} is for keys of {own_keys:,} figures, and the model has {keys:,}"
    return None


def _pooling_of(parts: list[Header]) -> Pooling:
    number = parts[0].metadata.get(f"{parts[0].architecture}.pooling_type")
    stated = POOLINGS[number] if isinstance(number, int) and 0 <= number < len(POOLINGS) else "none"
    # Without a classifier llama.cpp's "scores" are the first elements of the text's state.
    return "none" if stated == "rank" and not any(part.has_classifier for part in parts) else stated
