"""Fields for structured output that OpenAI does not have, in chat and completions: llama-server's `grammar` and
`json_schema`, vLLM's `structured_outputs` and, before it, `guided_*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import orjson

from uma.constraints import show
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.abilities import Names
from uma.http.fields import Common
from uma.types import Capabilities, Grammar


@attrs.frozen(kw_only=True)
class StructuredOutputs:
    """`structured_outputs`."""

    json: Any = None
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: bool | None = None


@attrs.frozen(kw_only=True)
class StructuredBody(Common):
    """The fields, for the bodies that have them."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None


def grammar_of(
    body: StructuredBody, others: Sequence[tuple[str, Grammar | None]], able: Capabilities, names: Names
) -> Grammar | None:
    """What the output must look like: by one of the fields, or one of `others`, which have been read.

    Raises `BadRequest` where there are two, or one is wrong.
    """
    found = [(field, grammar) for field, grammar in others if grammar is not None]
    for field, kind, value in _asked(body):
        found.append((field, _grammar(kind, value, field, able, names)))
    if len(found) > 1:
        raise BadRequest(f"{found[1][0]}: is given beside {found[0][0]}; give one of them")
    return found[0][1] if found else None


def own_grammars(
    body: StructuredBody, response_format: Grammar | None, able: Capabilities, names: Names
) -> list[tuple[str, Grammar | None]]:
    """OpenAI's field, which has been read, and llama-server's: for `grammar_of`."""
    return [
        ("response_format", response_format),
        ("grammar", abilities.gbnf(body.grammar, "grammar", able, names)),
        ("json_schema", abilities.json_schema(body.json_schema, "json_schema", able, names)),
    ]


def _asked(body: StructuredBody) -> list[tuple[str, str, Any]]:
    """The fields that there are: each one's name, the kind of grammar that it is, and its value."""
    given = [
        (f"guided_{kind}", kind, getattr(body, f"guided_{kind}")) for kind in ("json", "regex", "choice", "grammar")
    ]
    if (inner := body.structured_outputs) is not None:
        kinds = [field.name for field in attrs.fields(StructuredOutputs)]
        given += [(f"structured_outputs.{kind}", kind, getattr(inner, kind)) for kind in kinds]
    return [each for each in given if each[2] is not None and each[2] is not False]


def _grammar(kind: str, value: Any, field: str, able: Capabilities, names: Names) -> Grammar:
    if kind == "json":
        return abilities.grammar({"json_schema": _schema(value, field)}, field, able, names)
    if kind == "json_object":
        return abilities.grammar({"json_object": True}, field, able, names)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise BadRequest(f"{field}: expected a list of strings, not {show(value)}")
        return abilities.grammar({"choice": tuple(value)}, field, able, names)
    if not isinstance(value, str):
        raise BadRequest(f"{field}: expected a string, not {show(value)}")
    if kind == "grammar":  # vLLM takes either notation
        kind = "gbnf" if "::=" in value else "lark"
    return abilities.grammar({kind: value}, field, able, names)


def _schema(value: Any, field: str) -> dict[str, Any]:
    """A JSON Schema, which can come as text. Raises `BadRequest`."""
    schema = value
    if isinstance(value, str):
        try:
            schema = orjson.loads(value)
        except orjson.JSONDecodeError:
            schema = None
    if not isinstance(schema, dict):
        raise BadRequest(f"{field}: expected a JSON Schema, not {show(value)}")
    return schema
