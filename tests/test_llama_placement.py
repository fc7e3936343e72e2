"""Where a GPU's memory does not hold all of a model: the plan, by its figures, with memory that is only
pretended; and the weights that stay with the CPU by it compute what they computed before.
"""

from __future__ import annotations

import re
from array import array
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.kinds import PLANS, write_kind
from models import write_model
from uma import RuntimeConfig, open_engine
from uma.engine import sizing
from uma.llama import devices
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.devices import Device
from uma.llama.header import Header, read_parts
from uma.llama.log import LOG
from uma.llama.model import Model
from uma.llama.placement import ALL_LAYERS, RESERVED_BYTES, Placement, place

LAYERS = len(PLANS["qwen3moe"])
KV_BYTES = LAYERS * 1_000_000


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    folder = tmp_path_factory.mktemp("placement")
    write_kind(folder / "mixture.gguf", "qwen3moe", write_model(folder / "vocabulary.gguf"))
    return folder / "mixture.gguf"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without experts, whose first matrix is its last too."""
    return write_model(tmp_path_factory.mktemp("placement") / "dense.gguf")


def needed(parts: list[Header], placement: Placement, kv_bytes: int) -> int:
    """What a placement takes on the GPUs, counted tensor by tensor."""
    n_layers = parts[0].n_layers
    on_gpu = n_layers + 1 if placement.gpu_layers == ALL_LAYERS else placement.gpu_layers
    first = n_layers + 1 - on_gpu
    found = max(0, n_layers - first) * (kv_bytes // n_layers)
    sizes = parts[0].tensor_bytes
    for name, size in sizes.items():
        layer = re.match(r"blk\.(\d+)\.", name)
        if layer is None:
            is_last = not name.startswith("token_embd") or "output.weight" not in sizes
            found += size if is_last and on_gpu else 0
        elif int(layer[1]) >= first and not ("exps" in name and int(layer[1]) < placement.cpu_experts):
            found += size
    return found


def test_what_does_not_fit_is_left_to_the_cpu_experts_first_and_then_layers(mixture: Path) -> None:
    parts = read_parts(mixture)
    expected = [Placement(ALL_LAYERS, count) for count in range(LAYERS + 1)]
    expected += [Placement(count, LAYERS) for count in range(LAYERS, 0, -1)]
    for placement, next_one in zip(expected, [*expected[1:], Placement(0)], strict=True):
        least = needed(parts, placement, KV_BYTES) + RESERVED_BYTES
        assert place(parts, [least], KV_BYTES) == placement
        assert place(parts, [least - 1], KV_BYTES) == next_one
        assert placement.weights_bytes(parts) == needed(parts, placement, 0)
    assert place(parts, [0], KV_BYTES) == Placement(0)
    assert Placement(0, LAYERS).weights_bytes(parts) == 0
    assert place(parts, [2**40], KV_BYTES) == Placement(ALL_LAYERS)


def test_a_model_without_experts_has_fewer_layers_there(dense: Path) -> None:
    parts = read_parts(dense)
    for count in range(parts[0].n_layers, 0, -1):
        least = needed(parts, Placement(count), 4_000) + RESERVED_BYTES
        assert place(parts, [least], 4_000) == Placement(count)


def test_of_two_gpus_neither_is_given_a_layer_that_only_both_together_hold(mixture: Path) -> None:
    parts = read_parts(mixture)
    whole = needed(parts, Placement(ALL_LAYERS), KV_BYTES)
    half = whole // 2 + RESERVED_BYTES
    assert place(parts, [half, half], KV_BYTES).cpu_experts > 0
    assert place(parts, [half + whole // LAYERS, half], KV_BYTES) == Placement(ALL_LAYERS)


def logits(path: Path, cpu_experts: int) -> npt.NDArray[np.float32]:
    """Of a prompt's last token; llama.cpp says that it puts just the experts of so many layers where they are to be."""
    params = ContextParams(n_ctx=256, n_batch=32, n_ubatch=32, n_threads=1)
    mark = LOG.mark
    with Model.load(path, cpu_experts=cpu_experts) as model:
        told = [line.text.split()[1] for line in LOG.since(mark) if "buffer type overridden" in line.text]
        assert sorted(told) == sorted(
            f"blk.{layer}.ffn_{name}_exps.weight" for layer in range(cpu_experts) for name in ("gate", "up", "down")
        )
        with Context(model, params) as context:
            batch = Batch(32)
            batch.add(array("i", range(5, 25)), 0, 0, last_logits=True)
            assert context.decode(batch) == DONE
            return np.array(context.logits(1)[0])


def test_experts_that_are_named_for_the_cpu_compute_the_same(mixture: Path) -> None:
    expected = logits(mixture, 0)
    for count in (1, LAYERS):
        assert np.abs(logits(mixture, count) - expected).max() < 1e-2


async def test_an_engine_takes_what_the_plan_says_and_what_is_named_before_it(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = read_parts(mixture)
    config = RuntimeConfig(model=str(mixture), n_ctx=512)
    kv_bytes = 512 * LAYERS * 2 * 2 * 64 * 2  # keys and values of two heads of 64, in two bytes each
    free = needed(parts, Placement(ALL_LAYERS, 3), kv_bytes) + RESERVED_BYTES
    gpus = (Device("GPU0", "pretended", free),)
    monkeypatch.setattr(devices, "gpus", lambda: gpus)
    async with open_engine(config) as engine:
        assert (engine.config.n_gpu_layers, engine.config.n_cpu_moe) == (ALL_LAYERS, 3)
    for layers, experts in ((2, -1), (0, -1), (-1, 1), (5, 0)):
        placed = sizing.placed(attrs.evolve(config, n_gpu_layers=layers, n_cpu_moe=experts), parts, gpus, 0)
        assert (placed.n_gpu_layers, placed.n_cpu_moe) == (layers, max(0, experts))
    assert sizing.placed(config, parts, (), 0) == attrs.evolve(config, n_cpu_moe=0)
