"""Where there is a GPU that llama.cpp was built for: what a batch takes is known when it returns, KV is sized by the
GPU's memory, and what is generated is what the CPU generates.
"""

from __future__ import annotations

import time

import llama_cpp.llama_cpp as lib
import pytest
from engine_world import answer, answers, ask

from uma import RuntimeConfig, open_engine
from uma.cli.checks import computing
from uma.engine import sizing
from uma.llama import backend, devices
from uma.llama.batch import Batch
from uma.llama.builtin import builtin_path
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

pytestmark = pytest.mark.skipif(not backend.has_gpu(), reason="needs a GPU, and llama.cpp built for it")

PROMPT = "Tell me a story about a fox"


def test_nothing_is_left_to_compute_when_a_batch_without_logits_has_returned() -> None:
    params = ContextParams(n_ctx=2_048, n_batch=1_024)
    with Model.load(builtin_path()) as model, Context(model, params) as context:
        batch = Batch(1_024)
        for first in (0, 1_024):  # the first makes what the GPU computes with
            batch.clear()
            batch.add([1] * 1_024, first, 0, last_logits=False)
            began_sec = time.perf_counter()
            assert context.decode(batch) == DONE
            returned_sec = time.perf_counter()
            lib.llama_synchronize(context.handle)
        assert time.perf_counter() - returned_sec < (returned_sec - began_sec) / 4


@pytest.mark.parametrize("offload_kqv", [True, False])
def test_kv_is_sized_by_the_memory_where_it_lies(*, offload_kqv: bool) -> None:
    config = RuntimeConfig(offload_kqv=offload_kqv)
    on_gpus = sum(gpu.free_bytes for gpu in devices.gpus())
    here = sizing.free_kv_bytes(config)
    there = on_gpus if offload_kqv else sizing.free_memory_bytes()
    assert abs(here - there) < 0.1 * there


async def test_the_gpu_generates_what_the_cpu_does() -> None:
    found = []
    for n_gpu_layers in (-1, 0):
        async with open_engine(RuntimeConfig(n_gpu_layers=n_gpu_layers)) as engine:
            found.append((await answer(engine, ask(PROMPT, 24))).tokens)
    assert found[0] == found[1]


async def test_all_of_a_crowd_is_answered() -> None:
    async with open_engine(RuntimeConfig()) as engine:
        for _ in range(3):
            asked = [ask(f"{number} {PROMPT}", 100, id=str(number)) for number in range(60)]
            assert all(each.tokens for each in await answers(engine, asked))


def test_doctor_names_the_gpu() -> None:
    gpu = next(check for check in computing(RuntimeConfig()) if check.name == "GPU")
    assert devices.gpus()[0].description in gpu.finding
