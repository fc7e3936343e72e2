"""Errors out of the groups that nurseries make of them."""

from __future__ import annotations

import pytest

from harness import ServerProcess
from uma.client import connect
from uma.errors import sole_error

ONE, OTHER = OSError("one"), ValueError("other")


def test_an_error_comes_out_of_any_number_of_groups() -> None:
    assert sole_error(ExceptionGroup("", [ExceptionGroup("", [ExceptionGroup("", [ONE])])])) is ONE


def test_of_several_errors_none_is_lost_unless_one_is_all_that_can_be_told() -> None:
    both = ExceptionGroup("", [ONE, OTHER])
    assert sole_error(ExceptionGroup("", [both])) is both
    assert sole_error(ExceptionGroup("", [both]), or_first=True) is ONE


def test_a_group_that_no_nursery_made_stays() -> None:
    own = ExceptionGroup("", [ONE])
    assert sole_error(ExceptionGroup("", [own]), levels=1) is own


@pytest.mark.parametrize("error", [ONE, ExceptionGroup("mine", [ONE])])
async def test_what_ends_a_client_s_block_comes_out_of_it(server: ServerProcess, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        async with connect(server.socket):
            raise error
    assert repr(raised.value) == repr(error)
