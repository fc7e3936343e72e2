"""JSON Schemas of Python classes, as `SamplingParams(json_schema=…)` takes them."""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import date, datetime
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import attrs
import pydantic
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from uma import LLM
from uma.schema_of import schema_of
from uma.types import Grammar, SamplingParams


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@attrs.define
class Wheel:
    inches: Annotated[int, "size"]


@dataclasses.dataclass
class Car:
    name: str
    colour: Colour
    wheels: list[Wheel]
    kind: Literal["big", 2]
    prices: dict[str, float]
    owner: str | None = None
    notes: tuple[str, ...] = dataclasses.field(default_factory=tuple)


@attrs.define
class Tree:
    children: list[Tree]


@attrs.define
class Odd:
    when: complex


class Told:
    """What pydantic's classes look like from here."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "title": "Told"}


def test_a_class_s_schema_takes_what_its_fields_take_and_nothing_else() -> None:
    schema = schema_of(Car)
    assert schema is not None
    car = {"name": "a", "colour": "red", "wheels": [{"inches": 17}], "kind": 2, "prices": {"new": 1.5}}
    check = Draft202012Validator(schema).is_valid
    assert check(car) and check({**car, "owner": None, "notes": ["x"]})
    for wrong in ({"colour": "green"}, {"wheels": [{"inches": "x"}]}, {"kind": "small"}, {"more": 1}, {"owner": 3}):
        assert not check({**car, **wrong})
    assert not check({"name": "a"})


class Point(pydantic.BaseModel):
    x: int
    properties: dict[str, int] = {}


class Loose(pydantic.BaseModel, extra="allow"):
    at: Point


class Shape(pydantic.BaseModel):
    points: list[Point]
    other: Loose | None = None


def test_a_class_of_pydantic_s_takes_no_members_that_it_has_not_unless_it_says_so() -> None:
    check = Draft202012Validator(schema_of(Shape) or {}).is_valid
    point = {"x": 1, "properties": {"y": 2}}
    assert check({"points": [point], "other": {"at": point, "more": 1}})
    for wrong in ({"more": 1}, {"points": [{**point, "more": 1}]}, {"other": {"at": {**point, "more": 1}}}):
        assert not check({"points": [point], **wrong})


class Bounded(pydantic.BaseModel):
    free: int | None
    year: Annotated[int, pydantic.Field(ge=0)]
    day: Annotated[int, pydantic.Field(gt=0, lt=32)]


def test_an_integer_of_a_class_has_bounds_where_it_says_none_and_of_a_dict_it_has_not() -> None:
    most = 2**53 - 1
    check = Draft202012Validator(schema_of(Bounded) or {}).is_valid
    fine = {"free": -most, "year": most, "day": 31}
    assert check(fine) and check({**fine, "free": None})
    for wrong in ({"free": most + 1}, {"free": -most - 1}, {"year": most + 1}, {"year": -1}, {"day": 32}, {"day": 0}):
        assert not check({**fine, **wrong}), wrong
    whole = Draft202012Validator(schema_of(Wheel) or {}).is_valid
    assert whole({"inches": most}) and not whole({"inches": most + 1})
    for kind in (Bounded, Wheel):
        assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema_of(kind))))
    plain = {"type": "integer"}
    assert SamplingParams(json_schema=plain).grammar == Grammar(json_schema=plain)


def test_a_sampling_parameter_takes_classes_and_dicts_as_schema() -> None:
    assert SamplingParams(json_schema=Told).grammar == Grammar(json_schema={"type": "object", "title": "Told"})
    assert SamplingParams(json_schema=Wheel).grammar == Grammar(json_schema=schema_of(Wheel))
    assert SamplingParams(json_schema={"type": "object"}).grammar == Grammar(json_schema={"type": "object"})
    with pytest.raises(ValueError, match="json_schema: expected a class of pydantic"):
        SamplingParams(json_schema=int)


@pytest.mark.parametrize(
    ("kind", "told"), [(Tree, "Tree has a field of its own type"), (Odd, "Odd.when: JSON has no type for .*complex")]
)
def test_what_json_has_no_type_for_is_told_by_its_field(kind: type, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        schema_of(kind)


def test_dates_times_and_ids_of_a_tool_are_strings_in_their_formats() -> None:
    def book(day: date, at: datetime, id: UUID) -> None: ...

    with LLM() as llm:
        (out,) = llm.chat("Book it.", SamplingParams(max_tokens=500), tools=[book], tool_choice="required")
    call = out.outputs[0].tool_calls[0]
    given = json.loads(call.arguments)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", given["day"])
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", given["at"])
    assert str(UUID(given["id"])) == given["id"].lower()
