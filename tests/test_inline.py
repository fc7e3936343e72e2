"""Which JSON texts are read on the Trio thread."""

from __future__ import annotations

import json
from typing import Any

import pytest

from uma.net.inline import PLAIN_BYTES, PLAIN_COMMAS, SMALL_BYTES, is_quick

FILLER = "x" * SMALL_BYTES


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{}] * 1_000},
        {"id": "a", "token_ids": [31_999] * 2_000},
        {"id": "a", "prompt": "x" * (PLAIN_BYTES - 100)},
        {"messages": [{"role": "system", "content": FILLER}, {"role": "user", "content": FILLER}]},
    ],
    ids=["whatever is small", "token ids", "a prompt", "a conversation"],
)
def test_small_texts_and_prompts_are_read_at_once(body: Any) -> None:
    assert is_quick(json.dumps(body, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "body",
    [
        {"id": "a", "prompt": "x" * PLAIN_BYTES},
        {"id": "a", "token_ids": [1] * (PLAIN_COMMAS + 10)},
        {"filler": FILLER, "texts": ["x"] * 100},
        {"filler": FILLER, "messages": [{}] * 20},
        {"filler": FILLER, "lists": [[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]},
    ],
    ids=["long", "many items", "many strings", "many objects", "many lists"],
)
def test_texts_that_take_long_to_read_are_not(body: Any) -> None:
    assert not is_quick(json.dumps(body, separators=(",", ":")).encode())
