"""A sequence's state goes from one layout and attention to another, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import write_model
from uma.llama import state
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model

LENGTH = 150
WAYS = [
    ContextParams(n_ctx=512, n_seq_max=3, kv_unified=True),
    ContextParams(n_ctx=1_024, n_seq_max=3, kv_unified=True, flash_attn="off"),
    ContextParams(n_ctx=1_024, n_seq_max=4, kv_unified=False),
    ContextParams(n_ctx=2_048, n_seq_max=5, kv_unified=False, flash_attn="off"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model.load(write_model(tmp_path_factory.mktemp("state") / "attention.gguf")) as model:
        yield model


def read(context: Context, tokens: list[int], position: int, seq: int) -> np.ndarray:
    batch = Batch(512)
    batch.add(tokens, position, seq, last_logits=True)
    assert context.decode(batch) == 0
    logits: np.ndarray = context.logits(1)[0].copy()
    return logits


def words(count: int) -> list[int]:
    return [5 + 7 * each % 60 for each in range(count)]


@pytest.mark.parametrize("there", WAYS)
@pytest.mark.parametrize("here", WAYS)
def test_a_state_continues_in_any_layout_and_attention_and_comes_back_as_it_was(
    model: Model, here: ContextParams, there: ContextParams
) -> None:
    tokens = words(LENGTH)
    with Context(model, here) as first, Context(model, there) as second:
        read(first, words(20), 0, 0)  # so that its cells are not the first
        read(first, tokens, 0, 1)
        data = first.state_get(1)
        assert second.state_set(2, data)
        assert second.seq_pos_max(2) == LENGTH - 1
        back = second.state_get(2)
        expected, got = read(first, [9], LENGTH, 1), read(second, [9], LENGTH, 2)
        np.testing.assert_allclose(got, expected, atol=0.05 * np.abs(expected).max())
        assert got.argmax() == expected.argmax()
        first.seq_rm(1)
        assert first.state_set(1, back)
        np.testing.assert_array_equal(read(first, [9], LENGTH, 1), expected)


def written(model: Model, params: ContextParams) -> bytes:
    with Context(model, params) as context:
        read(context, words(LENGTH), 0, 1)
        return context.state_get(1)


def test_what_was_turned_twice_is_what_it_was_and_what_needs_no_turn_is_not_copied(model: Model) -> None:
    for params in WAYS:
        data, is_transposed = written(model, params), params.flash_attn == "off"
        assert state.for_attention(data, is_transposed=is_transposed) is data
        turned = state.for_attention(data, is_transposed=not is_transposed)
        assert bytes(turned) != data
        assert bytes(state.for_attention(turned, is_transposed=is_transposed)) == data


@settings(max_examples=300)
@given(data=st.binary(max_size=400), is_transposed=st.booleans())
def test_what_is_no_state_stays_as_it_is(data: bytes, is_transposed: bool) -> None:
    assert state.for_attention(data, is_transposed=is_transposed) == data


@pytest.fixture(scope="module")
def states(model: Model) -> dict[bool, bytes]:
    """One with transposed values, and one without."""
    return {True: written(model, WAYS[1]), False: written(model, WAYS[0])}


@settings(max_examples=200)
@given(end=st.floats(0.0, 1.0), more=st.binary(max_size=20), is_plain=st.booleans())
def test_a_state_that_is_cut_or_has_something_behind_it_stays_as_it_is(
    states: dict[bool, bytes], end: float, more: bytes, is_plain: bool
) -> None:
    whole = states[is_plain]
    cut = whole[: int(end * len(whole))] + more
    if len(cut) != len(whole):
        assert state.for_attention(cut, is_transposed=not is_plain) == cut
