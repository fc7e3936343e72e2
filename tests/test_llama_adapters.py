"""LoRA adapters: one that fits changes what is computed, one that does not is refused, and no file ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from adapters import RANK, write_adapter
from hybrids import EXPERTS, write_hybrid

from models import EMBED, FF, write_model
from uma.errors import ModelError
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model

GATE = "blk.0.ffn_gate.weight"
MUTATIONS = """
import random, sys
from pathlib import Path
from uma.errors import ModelError
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model

model, adapter = map(Path, sys.argv[1:])
sound, rng, path, used = adapter.read_bytes(), random.Random(7), adapter.with_name("mutated.gguf"), 0
loaded = Model.load(model)
for index in range(100):
    data = bytearray(sound)
    size = sound.index(b"lora_b") + 3_000 if rng.random() < 0.9 else len(sound)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(min(size, len(data)))] = rng.choice((0, 1, 2, 5, 8, 64, 255, rng.randrange(256)))
    path.write_bytes(data[: rng.randrange(len(data))] if index % 10 == 0 else data)
    try:
        found = loaded.load_adapter(path, "mutated")
    except ModelError as error:
        assert str(error).startswith(f"{path}: "), error
        continue
    used += 1
    with Context(loaded, ContextParams(n_ctx=64)) as context:
        context.set_threads(1)
        context.use_adapters([(found, 1.0)])
        batch = Batch(8)
        batch.add([1, 2, 3], 0, 0, last_logits=True)
        assert context.decode(batch) == 0
print(used)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("adapters") / "model.gguf")


def test_an_adapter_changes_the_logits_as_long_as_it_is_used(model: Path, tmp_path: Path) -> None:
    with Model.load(model) as loaded:
        found = loaded.load_adapter(write_adapter(tmp_path / "a.gguf", model), "a")
        with Context(loaded, ContextParams(n_ctx=64)) as context:
            batch, rows = Batch(8), list[Any]()
            batch.add([1, 2, 3], 0, 0, last_logits=True)
            for used in ([], [(found, 1.0)], [(found, 0.5)], [(found, 0.0)], []):
                context.use_adapters(used)
                assert context.decode(batch) == 0
                rows.append(context.logits(1).tolist())
                context.clear()
    assert rows[0] == rows[3] == rows[4]
    assert len(set(map(str, rows))) == 3


@pytest.mark.parametrize(
    ("shapes", "metadata", "problem"),
    [
        ({f"{GATE}.lora_b": (RANK, FF - 1)}, {}, "its matrices are"),
        ({f"{GATE}.lora_a": (EMBED, RANK + 1)}, {}, "its matrices are"),
        ({f"{GATE}.lora_a": (EMBED, RANK, 2), f"{GATE}.lora_b": (RANK, FF, 2)}, {}, "its matrices are"),
        ({}, {"adapter.lora.alpha": float("nan")}, "adapter.lora.alpha is not finite"),
        ({}, {"adapter.lora.alpha": 4}, "adapter.lora.alpha has a wrong type"),
        ({}, {"adapter.type": "control_vector"}, "adapter.type is 'control_vector'"),
        ({}, {"general.type": "model"}, "general.type is 'model'"),
        ({}, {"general.architecture": "qwen2"}, "it is for 'qwen2', and the model is 'llama'"),
        ({}, {"adapter.alora.invocation_tokens": "call"}, "adapter.alora.invocation_tokens is no list of tokens"),
        ({"blk.9.ffn_up.weight.lora_a": (EMBED, RANK)}, {}, "'blk.9.ffn_up.weight': the model has no such tensor"),
        ({"token_embd.weight.lora_a": (EMBED, RANK)}, {}, "there is only .lora_a"),
        ({"blk.0.attn_norm.weight.lora_a": (EMBED, 1), "blk.0.attn_norm.weight.lora_b": (1, 1)}, {}, "is unsupported"),
        ({"output.bias": (EMBED, 1)}, {}, "is neither .lora_a nor .lora_b"),
    ],
)
def test_an_adapter_of_another_shape_or_kind_is_refused(
    model: Path, tmp_path: Path, shapes: dict[str, tuple[int, ...]], metadata: dict[str, Any], problem: str
) -> None:
    path = write_adapter(tmp_path / "a.gguf", model, shapes=shapes, metadata=metadata)
    with Model.load(model) as loaded, pytest.raises(ModelError) as error:
        loaded.load_adapter(path, "a")
    assert str(error.value).startswith(f"{path}: is no LoRA adapter of this model: ")
    assert problem in str(error.value)


def test_an_adapter_of_fewer_experts_is_refused(tmp_path: Path) -> None:
    """llama.cpp would load it, and read beyond its end."""
    model = write_hybrid(tmp_path / "model.gguf", "qwen3next")
    whole = write_adapter(tmp_path / "a.gguf", model)
    up = "blk.0.ffn_up_exps.weight"
    fewer = {f"{up}.lora_a": (EMBED, RANK, EXPERTS - 1), f"{up}.lora_b": (RANK, 32, EXPERTS - 1)}
    with Model.load(model) as loaded:
        assert loaded.load_adapter(whole, "whole").pairs > 8
        with pytest.raises(ModelError, match="its matrices are"):
            loaded.load_adapter(write_adapter(tmp_path / "b.gguf", model, shapes=fewer), "fewer")


@pytest.mark.parametrize("has_experts", [False, True])
def test_a_mutated_adapter_ends_no_process(model: Path, tmp_path: Path, *, has_experts: bool) -> None:
    model = write_hybrid(tmp_path / "model.gguf", "qwen3next") if has_experts else model
    adapter = write_adapter(tmp_path / "a.gguf", model, invocation=(1, 2, 3))
    command = [sys.executable, "-c", MUTATIONS, str(model), str(adapter)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 100, "all were refused, or none"
