"""LoRA adapters: files with pairs of small matrices that are added to a model's weights.

llama.cpp's loader checks two dimensions of each pair, and trusts the rest: a pair with a wrong number of experts is
read out of bounds, and other errors end the process by an assertion, in the loader or in the graph. So a file is first
checked against the tensors of the model's own files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import attrs
import llama_cpp.llama_cpp as lib
import xxhash

from uma.constraints import show
from uma.errors import ModelError
from uma.gguf import FLOAT32, STRING, HeaderReader, Tensor
from uma.llama import header
from uma.llama.log import LOG

TYPES = ("f32", "f16", "bf16", "q8_0")
"""Types that an adapter's matrices can have: those that llama.cpp's converter writes."""
ALPHA = "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_KINDS = {"general.type": STRING, "general.architecture": STRING, "adapter.type": STRING, ALPHA: FLOAT32}
"""`gguf_type` of each key that llama.cpp reads, and asserts the type of."""


@attrs.frozen
class Adapter:
    """A LoRA adapter of a loaded model. Freed with the model."""

    name: str
    path: Path
    scale: float
    """Scale of requests that name none."""
    pointer: Any
    """llama.cpp's pointer."""
    digest: str
    """Hash of its file, for keys of caches."""
    pairs: int
    """Number of the model's matrices that it changes."""
    invocation: tuple[int, ...] = ()
    """Tokens of a prompt from which on it is active (aLoRA); empty: from the first token on."""


def load(model: int, parts: Iterable[Path], path: Path, name: str, scale: float) -> Adapter:
    """Check an adapter's file, and load it for the model with this handle and these files. Must come before any context
    of the model: contexts count the nodes of their graphs when they are made. Raises `ModelError`.
    """
    pairs = check(path, parts)
    mark = LOG.mark
    # Freed with the model.
    pointer = lib.llama_adapter_lora_init(model, os.fsencode(path))
    if not pointer:
        raise ModelError(f"{path}: the LoRA adapter cannot be loaded{header.quoted(mark)}")
    with path.open("rb") as file:
        digest = xxhash.xxh3_128()
        while block := file.read(2**20):
            digest.update(block)
    invocation = tuple(map(int, header.whole_header(path).numbers.get(INVOCATION, ())))
    return Adapter(name, path, scale, pointer, digest.hexdigest(), pairs, invocation)


def check(path: Path, parts: Iterable[Path]) -> int:
    """Number of the model's matrices that the adapter in this file changes. Raises `ModelError`, naming the file and
    the reason, where it is not an adapter of the model with these files.
    """
    header.read(path)
    reader, models = header.whole_header(path), [header.whole_header(part) for part in parts]
    weights = {tensor.name: tensor for model in models for tensor in model.tensors}
    if problem := _key_problem(reader, models[0].metadata.get("general.architecture")):
        _refuse(path, problem)
    pairs: dict[str, dict[str, Tensor]] = {}
    for tensor in reader.tensors:
        weight, _, side = tensor.name.rpartition(".")
        if side in ("lora_a", "lora_b"):
            pairs.setdefault(weight, {})[side] = tensor
        elif not tensor.name.endswith("_norm.weight"):  # llama.cpp ignores these
            _refuse(path, f"tensor {show(tensor.name)} is neither .lora_a nor .lora_b")
    if not pairs:
        _refuse(path, "it has no pair of .lora_a and .lora_b")
    for weight, pair in pairs.items():
        if problem := _problem(weight, pair, weights):
            _refuse(path, f"{show(weight)}: {problem}")
    return len(pairs)


def _key_problem(reader: HeaderReader, architecture: object) -> str:
    """What is wrong with an adapter's keys, for a model of this architecture; empty: nothing."""
    metadata = reader.metadata
    for key, kind in _KINDS.items():
        if reader.kinds.get(key, kind) != kind:
            return f"{key} has a wrong type"
    for key, wanted in {"general.type": "adapter", "adapter.type": "lora"}.items():
        if metadata.get(key) != wanted:
            return f"{key} is {show(metadata.get(key))} instead of {show(wanted)}"
    if (own := metadata.get("general.architecture")) != architecture:
        return f"it is for {show(own)}, and the model is {show(architecture)}"
    if not math.isfinite(metadata.get(ALPHA, 0.0)):
        return f"{ALPHA} is not finite"
    if INVOCATION in metadata and not reader.numbers.get(INVOCATION):
        return f"{INVOCATION} is no list of tokens"
    return ""


def _problem(name: str, pair: dict[str, Tensor], weights: dict[str, Tensor]) -> str:
    """What is wrong with the pair for one weight; empty: nothing."""
    weight = weights.get(name)
    if weight is None:
        return "the model has no such tensor"
    if len(pair) < 2:
        return f"there is only .{next(iter(pair))}"
    if len(weight.shape) < 2 or header.type_name(weight.kind) == "nvfp4":
        return "an adapter of this tensor is unsupported"
    for side, tensor in pair.items():
        if (kind := header.type_name(tensor.kind)) not in TYPES:
            return f".{side} has type {kind}; it can be {', '.join(TYPES)}"
    columns, rows, *experts = weight.shape
    a, b = (_four(pair[side].shape) for side in ("lora_a", "lora_b"))
    if name.endswith(EMBEDDING):
        # Where it is also the output matrix, llama.cpp's graph uses the pair for both, and an assertion fails.
        if name != EMBEDDING or OUTPUT not in weights:
            return "an adapter of this tensor is unsupported"
        rank = a[0]
        wanted = _four((rank, rows)), _four((rank, columns))
    else:
        rank = a[1]
        wanted = _four((columns, rank, *experts)), _four((rank, rows, *experts))
    if rank < 1 or (a, b) != wanted:
        return f"its matrices are {list(a)} and {list(b)} instead of {list(wanted[0])} and {list(wanted[1])}"
    return ""


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, *[1] * (4 - len(shape)))


def _refuse(path: Path, why: str) -> NoReturn:
    raise ModelError(f"{path}: is no LoRA adapter of this model: {why}")
