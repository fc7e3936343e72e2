"""The part of a sequence's memory that cannot be cut: with it others go on from the middle of a sequence, to the last
bit as if they had read it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from engine_world import tokens_for
from hybrids import Hybrid, write_hybrid

from models import Kind, write_model
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

WRITERS: dict[str, Callable[[Path], Path]] = {
    **{kind: partial(write_model, kind=kind) for kind in get_args(Kind) if kind != "attention"},
    **{kind: partial(write_hybrid, kind=kind) for kind in get_args(Hybrid)},
}
LENGTH, BORDERS = 90, (30, 61, 90)


@pytest.fixture(scope="module", params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model of each kind of memory that cannot be cut anywhere."""
    path = WRITERS[request.param](tmp_path_factory.mktemp("parts") / f"{request.param}.gguf")
    return Model.load(path, n_gpu_layers=0)


def context_of(model: Model, *, kv_unified: bool, swa_full: bool) -> Context:
    params = ContextParams(
        n_ctx=1_024, n_seq_max=4, n_batch=64, n_ubatch=64, n_threads=1, n_threads_batch=1, kv_unified=kv_unified,
        flash_attn="on", swa_full=swa_full,
    )  # fmt: skip
    return Context(model, params)


def read(context: Context, tokens: Sequence[int], first: int, seq: int) -> npt.NDArray[np.float32]:
    """The logits of the last token, read in one batch."""
    batch = Batch(64)
    batch.add(list(tokens), first, seq, last_logits=True)
    assert context.decode(batch) == DONE
    return np.array(context.logits(1)[0])


def read_all(context: Context, tokens: Sequence[int], seq: int, at_border: Callable[[int], object] = bool) -> None:
    """Read in batches that end at the borders."""
    for start, end in zip((0, *BORDERS), BORDERS, strict=False):
        if end <= len(tokens):
            read(context, tokens[start:end], start, seq)
            at_border(end)


@pytest.mark.parametrize("swa_full", [True, False], ids=["full", "small"])
@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "split"])
def test_another_sequence_goes_on_from_the_middle_of_one(model: Model, kv_unified: bool, swa_full: bool) -> None:
    if model.memory == "sliding-window" and not kv_unified:
        pytest.skip("the part would lie in cells that llama.cpp copies with the next batch")
    if model.memory != "sliding-window" and not swa_full:
        pytest.skip("it has no window")
    tokens, parts = tokens_for(1, LENGTH), dict[int, bytes]()
    with context_of(model, kv_unified=kv_unified, swa_full=swa_full) as context:
        read_all(context, tokens, 0, lambda border: parts.setdefault(border, context.part_get(0)))
        read(context, tokens_for(2, 40), LENGTH, 0)  # the sequence goes on, and its state is another now
        for border in BORDERS:
            for seq in (1, 2):  # two that begin there before anything is computed
                if kv_unified:
                    context.seq_cp(0, seq, 0, border)
                    assert context.part_set(seq, parts[border])
                else:
                    context.seq_cp(0, seq)
                    assert context.part_set(seq, parts[border])
                    assert context.seq_rm(seq, border, -1)
            for seq in (1, 2):
                tail = tokens_for(seq + border, 11)
                found = read(context, tail, border, seq)
                with context_of(model, kv_unified=kv_unified, swa_full=swa_full) as other:
                    read_all(other, tokens[:border], 3)
                    expected = read(other, tail, border, 3)
                assert float(np.abs(found - expected).max()) == 0.0
            assert context.seq_rm(1) and context.seq_rm(2)


def test_a_part_has_nothing_of_cells_that_can_be_cut(model: Model) -> None:
    with context_of(model, kv_unified=True, swa_full=True) as context:
        sizes = list[int]()
        read_all(context, tokens_for(1, LENGTH), 0, lambda _: sizes.append(context.part_size(0)))
        assert len(set(sizes)) == 1
        assert sizes[-1] < context.state_size(0) or model.memory == "recurrent"
