"""Whoever begins in the middle of a sequence computes what it would have computed had it read everything itself, to the
last bit, in equal batches: by shared cells, by the part of memory that cannot be cut, and by a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from engine_world import tokens_for
from every_kind import OTHERS, is_all, write_named
from hybrids import Hybrid
from reference import real_model

from models import WINDOW, Kind
from uma.engine.kv.memory_kinds import Attention, memory_kind
from uma.engine.kv.prefix_tree import Prefix
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

GEMMA = "gemma-3-270m"
"""The real one; with `TEST_KINDS=all`."""
NAMES = (*get_args(Kind), *get_args(Hybrid), *OTHERS, *((GEMMA,) if is_all() else ()))
Way = Literal["cells", "checkpoint", "snapshot"]
BORDERS, FURTHER, OWN = (40, 71, 90), 40, 11
"""Tokens at which batches end and others begin; those with which the sequence goes on; and those of each other."""
SEQUENCES, BATCH = 8, 64
"""So many that small windows have cells in which each sequence lies in order: another order changes the last bits."""


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model of each kind of memory."""
    name = request.param
    path = real_model("gemma3") if name == GEMMA else write_named(tmp_path_factory.mktemp("parts"), name)
    with Model.load(path, n_gpu_layers=0) as loaded:
        yield loaded


@attrs.frozen
class World:
    """A context, and what sequences in it hold."""

    context: Context
    cells: Attention
    scale: int
    """So many times as long is everything, for windows that are so many times as long."""

    def read(self, tokens: Sequence[int], first: int, seq: int) -> npt.NDArray[np.float32]:
        """The logits of the last token, read in one batch."""
        batch = Batch(BATCH * self.scale)
        batch.add(list(tokens), first, seq, last_logits=True)
        assert self.context.decode(batch) == DONE
        self.cells.grown(seq, first + len(tokens))
        return np.array(self.context.logits(1)[0])

    def read_all(self, tokens: Sequence[int], seq: int, at_border: Callable[[int], object] = bool) -> None:
        """Read in batches that end at the borders."""
        for start, end in zip((0, *self.borders), self.borders, strict=False):
            if end <= len(tokens):
                self.read(tokens[start:end], start, seq)
                at_border(end)

    @property
    def borders(self) -> tuple[int, ...]:
        return tuple(border * self.scale for border in BORDERS)

    @property
    def text(self) -> tuple[int, ...]:
        return tokens_for(1, self.borders[-1])


def world(model: Model, *, kv_unified: bool = True, swa_full: bool = True, has_guards: bool = False) -> World:
    """An empty context."""
    scale = max(1, model.shape.window_tokens // (4 * WINDOW))
    params = ContextParams(
        n_ctx=SEQUENCES * (BORDERS[-1] + FURTHER + 6) * scale, n_seq_max=SEQUENCES * (1 + has_guards),
        n_batch=BATCH * scale, n_ubatch=BATCH * scale,
        n_threads=1, kv_unified=kv_unified, flash_attn="on", swa_full=swa_full,
        guards_window=has_guards,
    )  # fmt: skip
    context = Context(model, params)
    return World(context, memory_kind(context), scale)


def worlds(model: Model, way: Way) -> Iterator[Callable[[], World]]:
    """Contexts of each layout in which others begin so."""
    has_windows = model.shape.memory == "sliding-window"
    if way == "cells":
        if not model.shape.has_states:
            yield partial(world, model, has_guards=has_windows)
        if model.shape.memory == "attention":
            yield partial(world, model, kv_unified=False)
        return
    if way == "snapshot" or model.shape.memory != "attention":
        yield partial(world, model)
        if has_windows:
            yield partial(world, model, swa_full=False)
        yield partial(world, model, kv_unified=False)
    if way == "snapshot" and has_windows:
        yield partial(world, model, has_guards=True)


@pytest.mark.parametrize("way", get_args(Way))
def test_another_sequence_goes_on_from_the_middle_of_one(model: Model, way: Way) -> None:
    for new_world in worlds(model, way):
        here = new_world()
        with here.context:
            check_others(here, way, new_world)


def test_parts_for_which_no_id_is_left_since_they_were_asked_for_do_not_fit(tiny: Path) -> None:
    """Others have begun meanwhile; each step comes between two ticks."""
    with Model.load(tiny, n_gpu_layers=0) as model:
        here = world(model, kv_unified=False)
        with here.context:
            parts = (b"a state", b"and its end")
            assert here.cells.can_load(parts)
            steps = here.cells.load(here.cells.take_id(), parts)
            while here.cells.lowest_free_id is not None:
                here.cells.take_id()
            assert list(steps) == [0]


def check_others(here: World, way: Way, new_world: Callable[[], World]) -> None:
    """Others begin at each border of a sequence that has gone on."""
    kept = dict[int, tuple[bytes, ...]]()

    def keep(border: int) -> None:
        kept[border] = tuple(here.cells.states(first)) if way == "snapshot" else (here.cells.checkpoint(first),)

    first = here.cells.take_id()
    here.read_all(here.text, first, keep)
    here.read(tokens_for(2, FURTHER * here.scale), here.borders[-1], first)  # its end is another now
    for border in here.borders:
        others = here.cells.take_id(), here.cells.take_id()  # both begin before anything is computed
        for seq in others:
            if way == "snapshot":
                assert all(here.cells.load(seq, kept[border]))
            else:
                checkpoint = kept[border][0] if way == "checkpoint" else None
                assert here.cells.copy(first, seq, Prefix(border, border, checkpoint))
        own, there = tokens_for(border, OWN), new_world()
        with there.context:
            there.read_all(here.text[:border], 0)
            expected = there.read(own, border, 0)
        for seq in others:
            off = float(np.abs(here.read(own, border, seq) - expected).max())
            assert off == 0.0, (border, here.context.params)
        for seq in others:
            here.cells.free(seq)


def test_a_part_has_nothing_of_cells_that_can_be_cut(model: Model) -> None:
    if model.shape.memory == "attention":
        return  # all can be cut
    here, sizes = world(model), list[int]()
    with here.context:
        here.read_all(here.text, 0, lambda _: sizes.append(here.cells.checkpoint_size(0)))
        whole = {size for border, size in zip(here.borders, sizes, strict=True) if border >= model.shape.window_tokens}
        assert len(whole) == 1
        assert sizes[-1] < here.context.state_size(0) or model.shape.memory == "recurrent"
