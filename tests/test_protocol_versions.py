"""Version negotiation: the highest minor that both sides know of a common major, or none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.errors import VersionMismatch
from uma.protocol import versions
from uma.protocol.versions import SUPPORTED, negotiate


@pytest.mark.parametrize("client", [["1.2"], ["1.7"], ["0.9", "1.0", "1.2", "2.0"], ["x", "1.3"]])
def test_a_common_major_is_enough(client: list[str]) -> None:
    assert negotiate(client) == "1.2"


def test_a_client_of_an_older_minor_gets_that() -> None:
    assert negotiate(["1.0"]) == "1.0"
    assert negotiate(["1.0", "1.1"]) == "1.1"


@pytest.mark.parametrize("client", [["2.0"], ["0.1"], ["10.0"], ["1"], ["1.0.0"], ["v1.0"], ["1.0 "], ["\u0661.0"], []])
def test_without_a_common_major_both_sides_are_named(client: list[str]) -> None:
    with pytest.raises(VersionMismatch) as caught:
        negotiate(client)
    assert "this server speaks 1.0, 1.1, 1.2" in caught.value.message
    assert all(version in caught.value.message for version in client)


def test_the_highest_of_several_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SUPPORTED", ("1.9", "1.10", "2.0", "2.1"))
    assert negotiate(["1.11"]) == "1.10"
    assert negotiate(["1.10", "1.9"]) == "1.10"
    assert negotiate(["1.9", "2.5"]) == "2.1"
    assert negotiate(["1.0"]) == "1.9"


@given(st.lists(st.text(max_size=32), max_size=64))
def test_any_words_give_a_version_or_the_one_error(client: list[str]) -> None:
    try:
        assert negotiate(client) in SUPPORTED
    except VersionMismatch as error:
        assert len(error.message) < 400
