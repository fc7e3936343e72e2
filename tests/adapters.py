"""Random LoRA adapters of models: small matrices in a GGUF file, for any file whose tensors can be listed.

path = write_adapter(tmp_path / "a.gguf", model, seed=1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from models import add, finish
from uma.llama import header
from uma.llama.adapters import EMBEDDING, INVOCATION

RANK = 4


def write_adapter(
    path: Path,
    model: Path,
    *,
    seed: int = 0,
    strength: float = 0.3,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    invocation: Sequence[int] = (),
) -> Path:
    """Write an adapter of every matrix of a model, and return its path. `shapes` replaces those of single tensors, and
    `metadata` adds keys; with an `invocation` it is an aLoRA.
    """
    read, rng = header.whole_header(model), np.random.default_rng(seed)
    architecture = read.metadata["general.architecture"]
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": float(RANK), **(metadata or {})}
    writer = gguf.GGUFWriter(path, str(keys.pop("general.architecture", architecture)))
    for key, value in keys.items():
        add(writer, key, value)
    if invocation:
        kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32
        writer.add_key_value(INVOCATION, list(invocation), kinds[0], sub_type=kinds[1])
    sizes = dict[str, tuple[int, ...]]()
    for tensor in read.tensors:
        if len(tensor.shape) > 1 and not tensor.name.endswith(EMBEDDING):
            columns, rows, *experts = tensor.shape
            sizes[f"{tensor.name}.lora_a"] = (columns, RANK, *experts)
            sizes[f"{tensor.name}.lora_b"] = (RANK, rows, *experts)
    for name, shape in (sizes | dict(shapes or {})).items():
        gain = strength if name.endswith("_b") else shape[0] ** -0.5
        writer.add_tensor(name, (gain * rng.standard_normal(shape[::-1])).astype(np.float32))
    finish(writer)
    return path
