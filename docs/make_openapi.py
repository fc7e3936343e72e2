"""Writes docs/openapi.md, what `GET /openapi.json` describes, for people: `python docs/make_openapi.py`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uma.http.app import description

PAGE = Path(__file__).parent / "openapi.md"
PLACE = "#/components/schemas/"
WORDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "over {}",
    "maximum": "to {}",
    "minLength": "characters: {} or more",
    "maxLength": "characters: at most {}",
    "minItems": "{} or more",
    "maxItems": "at most {}",
}
INTRODUCTION = """\
# Bodies of HTTP requests (OpenAPI)

For authors of clients: what `GET /openapi.json` describes (OpenAPI 3.1), made by `python docs/make_openapi.py` from the
classes that read the bodies. [Fields](fields.md) says what the fields do. A field that is not here is ignored, and
named in the answer's `X-UMA-Ignored`. Answers are as each API's own documents have them.
"""


def page() -> str:
    """The whole page."""
    described = json.loads(description())
    schemas: Mapping[str, Any] = described["components"]["schemas"]
    lines = [INTRODUCTION, "| | | body |", "| --- | --- | --- |"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            bodies = {kind["schema"]["$ref"] for kind in content.values()}
            summary = "" if operation["summary"].startswith(method.upper()) else operation["summary"]
            lines.append(f"| `{method.upper()} {path}` | {summary} | {', '.join(map(link, bodies))} |")
    return "\n".join(lines) + "\n" + "".join(section(name, schemas[name]) for name in sorted(schemas))


def section(name: str, schema: Mapping[str, Any]) -> str:
    """A body, or a part of one: its fields."""
    needed = schema["required"]
    return f"\n## {name}\n\n" + "".join(
        bullet(f"- `{field}` {'required, ' if field in needed else ''}{kind(inner)}", inner.get("description", ""))
        for field, inner in schema["properties"].items()
    )


def bullet(start: str, told: str) -> str:
    """A line of a list, wrapped."""
    text = f"{start}. {told}" if told else start
    return textwrap.fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def link(reference: str) -> str:
    """A link to the section of a schema."""
    name = reference.removeprefix(PLACE)
    return f"[{name}](#{name.lower().replace('.', '')})"


def kind(schema: Mapping[str, Any]) -> str:
    """What a field takes, in words."""
    if "$ref" in schema:
        return link(schema["$ref"])
    if "anyOf" in schema:
        return " or ".join(kind(inner) for inner in schema["anyOf"] if inner != {"type": "null"})
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    of = f" of {kind(schema['items'])}" if "items" in schema else ""
    bounds = ", ".join(text.format(f"{schema[word]:,}") for word, text in WORDS.items() if word in schema)
    return str(schema.get("type", "any")) + of + (f" ({bounds})" if bounds else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: written")
