"""Random JSON Schemas of what structured output serves, for property tests: all have values, most of them short."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

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
                st.sampled_from(("uuid", "ipv4", "ipv6", "email")),
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
