"""Errors out of the groups that nurseries make of them."""

from __future__ import annotations

import pickle

import pytest

import uma
from harness import ServerProcess
from uma.client import connect
from uma.errors import BadRequest, sole_error
from uma.types import Request, SamplingParams
from uma.wrong import Wrong

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


async def test_a_client_learns_which_field_is_wrong_without_reading_the_message(server: ServerProcess) -> None:
    wanted = Request("a", prompt="x", sampling=SamplingParams(n=1, best_of=2))
    async with connect(server.socket) as client:
        with pytest.raises(BadRequest) as raised:
            async with client.generate(wanted) as stream:
                async for _ in stream:
                    pass
    (line,) = raised.value.lines
    assert isinstance(line, Wrong)
    assert (line.field, str(raised.value)) == ("best_of", f"best_of: {line.why}")
    assert pickle.loads(pickle.dumps(line)).field == "best_of"


def test_a_field_has_another_name_where_it_or_what_holds_it_has_one() -> None:
    names = {"tools[0].parameters": "tools[2].input_schema", "texts": "input", "texts[0]": "text_1"}
    renamed = {
        "tools[0].parameters.type": "tools[2].input_schema.type",
        "texts[0]": "text_1",
        "texts[10]": "input[10]",
        "textsize": "textsize",
    }
    assert {path: Wrong(path, "x").renamed(names).field for path in renamed} == renamed


def test_the_errors_that_callers_catch_are_in_uma_which_shows_public_names_alone() -> None:
    caught = "BadRequest ConfigError ConnectionLost ModelError Overloaded PromptTooLarge TemplateError TimedOut "
    caught += "UnknownModel WrongKind WrongPlace WrongValues"
    assert {*caught.split(), "JobChanged", "UmaError"} <= {*dir(uma)} == {*uma.__all__}
    assert all(issubclass(getattr(uma, name), uma.UmaError) for name in (*caught.split(), "JobChanged"))
