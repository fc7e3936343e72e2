"""Claims about vocabularies: text to tokens and back, special tokens, threads, and texts of any shape."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import BOS, EOS, IM_END, IM_START, N_VOCAB, SHOWN, write_model
from uma.errors import BadRequest
from uma.llama.model import Model
from uma.llama.vocab import Vocab


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    with Model.load(write_model(tmp_path_factory.mktemp("models") / "tiny.gguf"), vocab_only=True) as model:
        yield model.vocab


def ids(vocab: Vocab, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
    return list(map(int, vocab.tokenize(text, add_special=add_special, parse_special=parse_special)))


def text_of(vocab: Vocab, tokens: list[int]) -> str:
    return b"".join(vocab.piece(token) for token in tokens).decode()


def test_special_tokens_come_from_the_models_own_metadata(vocab: Vocab) -> None:
    assert (vocab.n_tokens, vocab.bos, vocab.eos) == (N_VOCAB, BOS, EOS)
    assert vocab.eog_ids.dtype == np.int32
    assert vocab.eog_ids.tolist() == [EOS, IM_END]
    assert [token for token in range(N_VOCAB) if token in vocab.eog] == [EOS, IM_END]
    assert (vocab.bos_text, vocab.eos_text) == ("<|bos|>", "<|eos|>")


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_beginning_of_text_is_added_where_the_model_wants_it(tmp_path: Path, add_bos: bool) -> None:
    with Model.load(write_model(tmp_path / "tiny.gguf", add_bos=add_bos), vocab_only=True) as model:
        assert ids(model.vocab, "a", add_special=True) == ([BOS, 97] if add_bos else [97])
        assert ids(model.vocab, "", add_special=True) == ([BOS] if add_bos else [])
        assert ids(model.vocab, "a") == [97]


def test_special_tokens_in_a_text_are_read_only_where_asked(vocab: Vocab) -> None:
    text = "<|im_start|>the<|im_end|>"
    assert ids(vocab, text, parse_special=True) == [IM_START, 257, IM_END]
    plain = ids(vocab, text)
    assert not set(plain) & {IM_START, IM_END}
    assert text_of(vocab, plain) == text


def test_control_tokens_are_never_shown_and_user_defined_ones_are(vocab: Vocab) -> None:
    assert [vocab.piece(token) for token in (BOS, EOS, IM_START, IM_END)] == [b""] * 4
    assert vocab.piece(SHOWN) == b"<shown>"
    assert vocab.piece(257) == b"the"


def test_a_piece_may_be_half_a_character(vocab: Vocab) -> None:
    tokens = ids(vocab, "€")
    assert [vocab.piece(token) for token in tokens] == [b"\xe2", b"\x82", b"\xac"]
    assert [vocab.piece(token) for token in tokens] == [b"\xe2", b"\x82", b"\xac"], "and so again from the cache"


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_as_it_was(vocab: Vocab, text: str) -> None:
    assert text_of(vocab, ids(vocab, text)) == text


def test_a_lone_surrogate_is_a_bad_request_that_says_where(vocab: Vocab) -> None:
    with pytest.raises(BadRequest, match="character 2 is half of a surrogate pair"):
        ids(vocab, "ab\ud800c")


def test_a_nul_is_a_character_like_any_other(vocab: Vocab) -> None:
    assert ids(vocab, "a\0b") == [97, 0, 98]


LONG = 64_000
"""Characters: more than twice what overflows a stack of 8 MB where nothing is done about it."""


@pytest.mark.parametrize("pre_tokenizer", ["gpt-2", "gpt-4o", "tekken", "deepseek-v3", "falcon", "default"])
@pytest.mark.parametrize("unit", ["a", "Aa", " ", "\n", "!", "7", "漢", "é ", "<|im_end|>"])
def test_a_text_of_any_shape_and_length_is_tokenized_whole(tmp_path: Path, pre_tokenizer: str, unit: str) -> None:
    text = unit * (LONG // len(unit))
    path = write_model(tmp_path / "tiny.gguf", pre_tokenizer=pre_tokenizer)
    with Model.load(path, vocab_only=True) as model:
        tokens = ids(model.vocab, text, add_special=True)
        assert tokens[0] == BOS and BOS not in tokens[1:]
        assert text_of(model.vocab, tokens) == text


@pytest.mark.parametrize("parse_special", [True, False])
def test_of_a_long_text_with_special_tokens_each_part_is_tokenized_as_alone(vocab: Vocab, parse_special: bool) -> None:
    read = r"(<\|im_start\|>|<\|im_end\|>|<shown>)" if parse_special else "(<shown>)"
    units = ["<|im_start|>", "<|im_end|>", "<shown>", "the", "\n", "a b", "<|im_", "|>"]
    text = "".join(random.Random(0).choices(units, k=LONG))
    alone = {part: ids(vocab, part, parse_special=parse_special) for part in set(re.split(read, text))}
    expected = [token for part in re.split(read, text) for token in alone[part]]
    assert ids(vocab, text, parse_special=parse_special) == expected


def test_long_ordinary_text_is_cut_nowhere(tmp_path: Path) -> None:
    text = "The quick brown fox says: „Füchse mögen 漢字“ and 12345.\n" * 500
    with Model.load(write_model(tmp_path / "one.gguf", pre_tokenizer="gpt-4o"), vocab_only=True) as model:
        assert ids(model.vocab, text) == [token for line in text.splitlines(True) for token in ids(model.vocab, line)]


def test_several_threads_tokenize_at_once(vocab: Vocab) -> None:
    text = "the rain in the plain, and then another; " * 2_000
    expected = vocab.tokenize(text, add_special=True, parse_special=True)
    results: list[bool] = []

    def tokenize() -> None:
        tokens = vocab.tokenize(text, add_special=True, parse_special=True)
        results.append(np.array_equal(tokens, expected))

    threads = [threading.Thread(target=tokenize) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_a_model_closed_during_tokenizing_waits_for_it(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "tiny.gguf"), vocab_only=True)
    text = "the rain in the plain; " * 5_000
    expected = len(model.vocab.tokenize(text, add_special=False, parse_special=False))
    lengths: list[int] = []
    closed = threading.Event()

    def tokenize_until_closed() -> None:
        while not closed.is_set():
            try:
                lengths.append(len(model.vocab.tokenize(text, add_special=False, parse_special=False)))
            except ValueError:
                return

    threads = [threading.Thread(target=tokenize_until_closed) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not lengths:
        pass
    model.close()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert set(lengths) == {expected}
