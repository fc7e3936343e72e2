"""No contract lets a value of a wrong type through, whatever the peer sends."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.contracts.parse import parse
from uma.contracts.schema import CONTRACTS, contract_schemas
from uma.errors import BadRequest
from uma.protocol.converter import unstructure
from uma.protocol.schema import DIALECT

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("aé{\0", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("aé{\0", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", contract_schemas())
def test_each_schema_is_a_schema(name: str) -> None:
    schema = contract_schemas()[name]
    assert schema["$schema"] == DIALECT
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", CONTRACTS)
@given(value=ANYTHING)
def test_whatever_comes_is_either_an_instance_or_a_refusal_with_places(name: str, value: Any) -> None:
    cls = CONTRACTS[name]
    try:
        made: Any = parse(value, cls)
    except BadRequest as refused:
        assert all(": " in line for line in refused.message.splitlines())
    else:
        assert isinstance(made, cls)


@pytest.mark.parametrize("name", CONTRACTS)
@given(data=st.data())
def test_one_field_of_any_type_is_taken_only_where_the_schema_takes_it(name: str, data: st.DataObject) -> None:
    cls, schema = CONTRACTS[name], contract_schemas()[name]
    field = data.draw(st.sampled_from(sorted(schema["properties"])))
    value = {field: data.draw(ANYTHING)}
    lines: list[str] = []
    try:
        parse(value, cls)
    except BadRequest as refused:
        lines = [
            line for line in refused.message.splitlines() if line.startswith((f"{field}:", f"{field}.", f"{field}["))
        ]
    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    is_refused_by_schema = any(error.absolute_path and error.absolute_path[0] == field for error in errors)
    assert lines or not is_refused_by_schema


def test_true_is_no_number_and_a_number_no_string() -> None:
    stats: dict[str, Any] = {"request_active_slots": True, "request_total_slots": "8"}
    with pytest.raises(BadRequest) as refused:
        parse(stats, CONTRACTS["WorkerStats"])
    assert len(refused.value.message.splitlines()) == 2


def test_an_instance_comes_back_from_its_json() -> None:
    stats = CONTRACTS["WorkerStats"](3, 8, 1)
    assert parse(unstructure(stats), CONTRACTS["WorkerStats"]) == stats
