"""Fields for structured output that every dialect has beside its own: llama-server's `grammar` and `json_schema`,
vLLM's `structured_outputs` and, before it, `guided_*`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from uma import json_text
from uma.constraints import show
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.reader import Reader
from uma.types import Grammar


@attrs.frozen(kw_only=True)
class StructuredOutputs:
    """`structured_outputs`."""

    json: Any = None
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: bool | None = None


@attrs.frozen(kw_only=True, slots=False)  # beside another base with slots
class StructuredFields:
    """The fields, for the bodies of what generates."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None


def grammar_of(
    body: StructuredFields,
    reader: Reader,
    own: tuple[str, Grammar | None] = ("", None),
    tool_choice: str = "auto",
) -> Grammar | None:
    """What the answer must look like: by one of the fields, or by the dialect's `own`, whose name and value these are.

    Where `tool_choice` demands a call, no answer has a form: the field is named among the ignored ones. Raises
    `BadRequest` where there are two, or one is wrong.
    """
    given = (
        own,
        ("grammar", abilities.gbnf(body.grammar, "grammar", reader)),
        ("json_schema", abilities.json_schema(body.json_schema, "json_schema", reader)),
        *((field, _grammar(kind, value, field, reader)) for field, kind, value in _asked(body)),
    )
    found = [(field, grammar) for field, grammar in given if grammar is not None]
    if len(found) > 1:
        raise BadRequest.at(found[1][0], f"is given beside {found[0][0]}; give one of them")
    if not found or tool_choice in ("auto", "none"):
        return found[0][1] if found else None
    reader.ignored.add(found[0][0])
    return None


def _asked(body: StructuredFields) -> Iterator[tuple[str, str, Any]]:
    """vLLM's fields that there are: each one's name, the kind of grammar that it is, and its value."""
    for kind in ("json", "regex", "choice", "grammar", "json_object"):
        for field, value in (
            (f"guided_{kind}", getattr(body, f"guided_{kind}", None)),
            (f"structured_outputs.{kind}", getattr(body.structured_outputs, kind, None)),
        ):
            if value is not None and value is not False:
                yield field, kind, value


def _grammar(kind: str, value: Any, field: str, reader: Reader) -> Grammar:
    if kind == "json":
        return abilities.grammar({"json_schema": _schema(value, field)}, field, reader)
    if kind == "json_object":
        return abilities.grammar({"json_object": True}, field, reader)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise BadRequest.at(field, f"expected a list of strings, not {show(value)}")
        return abilities.grammar({"choice": tuple(value)}, field, reader)
    if not isinstance(value, str):
        raise BadRequest.at(field, f"expected a string, not {show(value)}")
    if kind == "grammar":  # vLLM takes either notation
        kind = "gbnf" if "::=" in value else "lark"
    return abilities.grammar({kind: value}, field, reader)


def _schema(value: Any, field: str) -> dict[str, Any]:
    """A JSON Schema, which can come as text. Raises `BadRequest`."""
    schema = value
    if isinstance(value, str):
        try:
            schema = json_text.loads(value)
        except (ValueError, RecursionError):
            schema = None
    if not isinstance(schema, dict):
        raise BadRequest.at(field, f"expected a JSON Schema, not {show(value)}")
    return schema
