"""Relaxes a tool's schema to one that a grammar can express, for calls that the model is free not to make.

Keywords that a grammar cannot express are left out, and reported by their places. The model is still shown the whole
schema. The relaxed schema allows at least all that the whole one allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLMatcher

from uma.chat.schema import Schema
from uma.json_schema import COMPACT, SCHEMA_LISTS, SCHEMAS_BY_NAME, for_llguidance, place_of, problem, problems_of

MAX_PROBES = 256
"""Maximum grammars compiled to find the keywords that prevent one: each takes about a millisecond."""
_NEVER = frozenset(
    """
    not if then else contains minContains maxContains propertyNames dependentRequired dependentSchemas dependencies
    unevaluatedItems unevaluatedProperties $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor
    """.split()  # noqa: SIM905  (a word a line would be a page)
)
"""Keywords that no grammar can express."""
_PARTS = ("items", "additionalItems", "additionalProperties")
_CLOSING = ("additionalProperties", "additionalItems")
"""Keywords that concern what other keywords do not name. They are left out together with these."""
_FIRST = ("$schema", "$id", "x-guidance", "format", "pattern", "oneOf", "allOf", "anyOf", "$ref", "$anchor")
"""Keywords that are left out first, because they prevent a grammar most often."""
_LAST = ("items", "prefixItems", "patternProperties", "properties", "required", "type", "$defs", "definitions")
"""Keywords that are left out last, because little is left without them."""
_SHARED = ("$defs", "definitions")

Fits = Callable[[Schema], bool]
"""Whether a grammar can be made for a schema."""


def relaxed_schema(schema: Schema, fits: Fits) -> tuple[Schema, list[str]]:
    """The schema without keywords that prevent a grammar, and the places of these, such as `.properties.x.not`.

    `fits` says whether the model's form of calls can express an object's schema.
    """
    found = _Relaxation(fits)
    return found.root(schema), found.places


class _Relaxation:
    def __init__(self, fits: Fits) -> None:
        self._fits_form = fits
        self._probes = 0
        self.places: list[str] = []

    def root(self, schema: Schema) -> Schema:
        made = self._plain(schema, "")
        shared = {word: made[word] for word in _SHARED if word in made}
        if not _is_json(made):
            made = self._node(made, "", shared)
        made = {**made, "type": "object"}
        if self._fits_form(made):
            return made
        return self._by_property(made)

    def _plain(self, schema: Any, place: str) -> Any:
        """The schema without keywords that no grammar can express, at any place."""
        if not isinstance(schema, dict):
            return schema
        made: Schema = {}
        for word, value in schema.items():
            here = place + place_of(word)
            if word in _NEVER or (word == "uniqueItems" and value is not False):
                self.places.append(here)
            elif word in SCHEMAS_BY_NAME and isinstance(value, dict):
                made[word] = {name: self._plain(member, here + place_of(name)) for name, member in value.items()}
            elif word in SCHEMA_LISTS and isinstance(value, list | tuple):
                made[word] = [self._plain(item, f"{here}[{at}]") for at, item in enumerate(value)]
            elif word in _PARTS:
                made[word] = self._plain(value, here)
            else:
                made[word] = value
        for word in problems_of(made):
            self.places.append(place + place_of(word))
            made.pop(word, None)
        return made

    def _node(self, schema: Schema, place: str, shared: Schema) -> Schema:
        """Relax a schema that does not fit: its parts first, then its own keywords."""
        made = dict(schema)
        for word, value in schema.items():
            here = place + place_of(word)
            if word in SCHEMAS_BY_NAME and isinstance(value, dict):
                parts = {name: self._part(member, here + place_of(name), shared) for name, member in value.items()}
                made[word] = parts
                if word in _SHARED and not place:
                    shared[word] = parts
            elif word in SCHEMA_LISTS and isinstance(value, list | tuple):
                made[word] = [self._part(item, f"{here}[{at}]", shared) for at, item in enumerate(value)]
            elif word in _PARTS:
                made[word] = self._part(value, here, shared)
        if self._is_json(made, shared):
            return made
        for word in _in_order(made):
            tried = _without(made, word)
            if self._is_json(tried, shared):
                self.places.append(place + place_of(word))
                return tried
        for word in _in_order(made):
            self.places.append(place + place_of(word))
            made = _without(made, word)
            if self._is_json(made, shared):
                break
        return made

    def _part(self, schema: Any, place: str, shared: Schema) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.places.append(place)
            return {}
        return schema if self._is_json(schema, shared) else self._node(schema, place, shared)

    def _is_json(self, schema: Schema, shared: Schema) -> bool:
        self._probes += 1
        return self._probes <= MAX_PROBES and _is_json({**shared, **schema})

    def _by_property(self, schema: Schema) -> Schema:
        """Schema for forms of calls without JSON: each argument with as much of its schema as the form can express."""
        made: Schema = {"type": "object"} | {word: schema[word] for word in _SHARED if word in schema}
        given = schema.get("properties", {})
        needed = [name for name in schema.get("required", ()) if isinstance(name, str)]
        properties: Schema = {}
        for name, inner in (given if isinstance(given, dict) else {}).items():
            here = f".properties{place_of(name)}"
            for tried, left_out in _looser(inner):
                if self._fits_form({**made, "properties": {name: tried}}):
                    properties[name] = tried
                    self.places += [here] if left_out else []
                    break
            else:
                self.places.append(here)
        known = {word: schema[word] for word in ("properties", "required", "additionalProperties") if word in schema}
        self.places += [place_of(word) for word in schema if word not in {*known, *made}]
        made |= {"properties": properties, "required": [name for name in needed if name in properties]}
        if self._fits_form(made):
            return made
        self.places = [""]
        return {"type": "object"}


def _looser(schema: Any) -> Iterator[tuple[Any, bool]]:
    """A schema, and ever less of it, each with whether something was left out."""
    yield schema, False
    if isinstance(schema, dict) and "type" in schema:
        yield {"type": schema["type"]}, True
    yield {}, True
    yield {"type": "string"}, True


def _without(schema: Schema, word: str) -> Schema:
    """A schema without a keyword, and without those that would then forbid what the keyword names."""
    made = {member: value for member, value in schema.items() if member != word}
    if word == "oneOf" and "anyOf" not in schema:
        made["anyOf"] = schema[word]
    if word in ("properties", "patternProperties", "items", "prefixItems", "$ref", "allOf", "anyOf"):
        for closing in _CLOSING:
            made.pop(closing, None)
    return made


def _in_order(schema: Schema) -> list[str]:
    words = [word for word in schema if word not in _FIRST and word not in _LAST]
    first, last = ([word for word in order if word in schema] for order in (_FIRST, _LAST))
    return [*first, *words, *last]


def _is_json(schema: Schema) -> bool:
    """Whether a grammar can be made for JSON of this schema."""
    if problem(schema) is not None:
        return False
    source = LLMatcher.grammar_from_json_schema(for_llguidance(schema, COMPACT))
    return not LLMatcher.validate_grammar(source)
