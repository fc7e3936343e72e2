"""Placement of a model's weights on GPUs whose memory does not hold all of them.

llama.cpp puts the last layers on the GPUs, as many as it is told, each with its KV; the output matrix counts as one
more. In a mixture of experts, a token reads a few experts of each layer: they are most of the weights, and the least
read. So the experts of the first layers are the first weights to be computed by the CPU. This is the order of
llama-server's `--fit`, which is not part of llama.cpp's library.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import llama_cpp.llama_cpp as lib

from uma.llama.header import Header

ALL_LAYERS = -1
"""llama.cpp's number for all layers and the output matrix."""
RESERVED_BYTES = 2**30
"""Memory left free on each GPU, for compute buffers and other programs: as llama-server's `--fit-target`."""

_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")


@attrs.frozen
class Placement:
    """Weights on the GPUs."""

    gpu_layers: int
    """Number of layers, from the last, with the output matrix counted as one; `ALL_LAYERS`; or 0: none."""
    cpu_experts: int = 0
    """Number of layers, from the model's first, whose experts are not on the GPUs."""

    def weights_bytes(self, parts: Iterable[Header]) -> int:
        """Bytes of weights on the GPUs."""
        parts = list(parts)
        sizes = {name: size for part in parts for name, size in part.tensor_bytes.items()}
        behind = parts[0].n_layers + 1
        first = behind - (behind if self.gpu_layers == ALL_LAYERS else min(behind, self.gpu_layers))

        def is_there(name: str) -> bool:
            if (match := _LAYER.match(name)) is None:
                return self.gpu_layers != 0 and not _is_cpus(name, sizes)
            return int(match[1]) >= first and not (int(match[1]) < self.cpu_experts and _EXPERTS.search(name))

        return sum(size for name, size in sizes.items() if is_there(name))


def place(parts: Iterable[Header], free_bytes: Sequence[int], kv_bytes: int) -> Placement:
    """Placement of as much of a model as GPUs with so many free bytes each can hold, with `kv_bytes` of KV for all
    layers together.
    """
    parts = list(parts)
    sizes = {name: size for part in parts for name, size in part.tensor_bytes.items()}
    n_layers = parts[0].n_layers
    dense: dict[int, int] = {}
    experts: dict[int, int] = {}
    behind = 0
    for name, size in sizes.items():
        if (match := _LAYER.match(name)) is None:
            behind += 0 if _is_cpus(name, sizes) else size
        elif int(match[1]) < n_layers:
            found = experts if _EXPERTS.search(name) else dense
            found[int(match[1])] = found.get(int(match[1]), 0) + size
    layers = sorted({*dense, *experts})
    kv_of_layer = kv_bytes // max(1, len(layers))
    without_experts = {layer: dense.get(layer, 0) + kv_of_layer for layer in layers}
    largest = max((without_experts[layer] + experts.get(layer, 0) for layer in layers), default=0)
    # A layer is on one GPU, so each GPU but one can have up to a layer's size left over.
    usable = sum(max(0, free - RESERVED_BYTES) for free in free_bytes) - (len(free_bytes) - 1) * largest
    left = usable - behind - sum(without_experts.values())
    if left >= 0:
        needed = sum(experts.values())
        for count, layer in enumerate(layers):
            if needed <= left:
                return Placement(ALL_LAYERS, count)
            needed -= experts.get(layer, 0)
        return Placement(ALL_LAYERS, len(layers) if experts else 0)
    cpu_experts = len(layers) if experts else 0
    for count, layer in enumerate(layers, 1):
        left += without_experts[layer]
        if left >= 0:
            return Placement(len(layers) - count + 1, cpu_experts)
    return Placement(0)


def _is_cpus(name: str, sizes: Mapping[str, int]) -> bool:
    """Whether the CPU alone reads a tensor outside of the layers: the embedding matrix, unless it is also the output
    matrix, of which the GPU has a copy.
    """
    return name.startswith("token_embd.") and "output.weight" in sizes


class _Override(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def overrides(cpu_experts: int) -> Any:
    """Value of `tensor_buft_overrides` that keeps the experts of the first `cpu_experts` layers in the CPU's memory.
    Must be referenced until the model is loaded.
    """
    buffer_type = ctypes.CFUNCTYPE(ctypes.c_void_p)(("ggml_backend_cpu_buffer_type", lib._lib))
    layers = "|".join(map(str, range(cpu_experts)))
    pattern = rf"^blk\.({layers}){_EXPERTS.pattern}".encode()
    return (_Override * 2)(_Override(pattern, buffer_type()), _Override(None, None))
