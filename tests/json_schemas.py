"""Random JSON Schemas of what structured output serves, for property tests: all have values, most of them short."""

from __future__ import annotations

import re
from datetime import date, datetime, time
from typing import Any
from urllib.parse import urlsplit

import jsonschema
from hypothesis import strategies as st

Schema = dict[str, Any]

CHECKER = jsonschema.FormatChecker()
"""Checks each format that structured output serves; jsonschema's own knows five of them without further packages."""
FORMATS = tuple("date date-time time duration hostname uri email ipv4 ipv6 uuid".split())  # noqa: SIM905
_AMOUNT = "([0-9]+Y)?([0-9]+M)?([0-9]+D)?(T(?=.)([0-9]+H)?([0-9]+M)?([0-9]+S)?)?"


def _leap_year_for_0(value: str) -> str:
    """Python's calendar has no year 0000, which is like 2000."""
    return re.sub("^0000", "2000", value.upper())


def _is_date(value: object) -> bool:
    return isinstance(value, str) and bool(date.fromisoformat(_leap_year_for_0(value)))


def _is_date_time(value: object) -> bool:
    return isinstance(value, str) and datetime.fromisoformat(_leap_year_for_0(value)).tzinfo is not None


def _is_time(value: object) -> bool:
    return isinstance(value, str) and time.fromisoformat(value.upper()).tzinfo is not None


def _is_duration(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(f"P(?=.)([0-9]+W|{_AMOUNT})", value) is not None


def _is_hostname(value: object) -> bool:
    label = "(?!-)[a-zA-Z0-9-]{1,63}(?<!-)"
    return isinstance(value, str) and len(value) <= 253 and bool(re.fullmatch(rf"{label}(\.{label})*", value))


def _is_uri(value: object) -> bool:
    is_spelled = isinstance(value, str) and re.fullmatch(r"[!#$&-;=?-Z_a-z~\[\]%]+", value)
    return bool(is_spelled) and bool(urlsplit(str(value)).scheme)


_CHECKS = {
    "date": _is_date,
    "date-time": _is_date_time,
    "time": _is_time,
    "duration": _is_duration,
    "hostname": _is_hostname,
    "uri": _is_uri,
}
for _name, _check in _CHECKS.items():
    CHECKER.checks(_name, ValueError)(_check)

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8)
values: st.SearchStrategy[Any] = st.one_of(st.none(), st.booleans(), st.integers(-999, 999), names)


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    """Integers and numbers, in ranges whose ends are in or out."""
    kind = draw(st.sampled_from(("integer", "number")))
    low = draw(st.integers(-1000, 1000))
    high = low + draw(st.integers(2, 1000))
    ends = draw(st.sampled_from((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"))))
    return {"type": kind, ends[0]: low, ends[1]: high}


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    """Strings by length, by pattern, or by format."""
    least = draw(st.integers(0, 4))
    return draw(
        st.one_of(
            st.just({"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 6))}),
            st.builds(
                lambda pattern: {"type": "string", "pattern": pattern},
                st.sampled_from((r"^[a-f]{2,4}$", r"^\d{1,3}(\.\d{1,3})?$", "^(yes|no)$", "^[à-ü]{1,3}$", "^x[^y]z$")),
            ),
            st.builds(
                lambda form: {"type": "string", "format": form},
                st.sampled_from(FORMATS),
            ),
        )
    )


leaves = st.one_of(
    numbers(),
    strings(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda value: {"const": value}, values),
    st.builds(lambda items: {"enum": items}, st.lists(values, min_size=1, max_size=4)),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(names, inner, min_size=1, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    schema |= draw(
        st.one_of(
            st.just({"additionalProperties": False}),
            st.just({}),
            st.builds(lambda more: {"additionalProperties": more}, leaves),
            # No name of the strategy begins like this, so that nothing has to be both.
            st.builds(
                lambda more, rest: {"patternProperties": {"^\t": more}, "additionalProperties": rest}, leaves, leaves
            ),
        )
    )
    return schema


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": least + draw(st.integers(0, 2))}


schemas: st.SearchStrategy[Schema] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)
"""Nested schemas with every feature above."""
