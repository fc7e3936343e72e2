"""OpenAPI's description of the endpoints, made from the classes that read their bodies: `GET /openapi.json`.

A body is described as it is read: what its class does not name is ignored, so allowed. What several fields have to
fulfil together is told by errors alone.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from uma.http import files, openai_transcriptions
from uma.http.exchange import Exchange
from uma.protocol.schema import object_schema
from uma.version import __version__

Endpoint = tuple[str, str, Callable[[Any, Exchange], Awaitable[None]], type[Any] | None]
"""Method, path as Starlette has it, handler, and the class that reads the body; None: there is none."""

_FORMS = frozenset((files.FileForm, openai_transcriptions.TranscriptionBody))
"""Bodies that come as forms."""


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The description of these endpoints."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for method, route, handler, body in endpoints:
        path = re.sub(r":\w+}", "}", route)
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, _summary(handler, body), schemas, body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "UMA",
            "version": __version__,
            "description": "Answers are as each API's documents say.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, summary: str, schemas: dict[str, Any], body: type[Any] | None) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", path)
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "summary": summary or f"{method} {path}",
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names],
        "responses": {"200": {"description": "The answer."}, "default": {"description": "An error in the API's form."}},
    }
    if body is not None:
        kinds = ["multipart/form-data"] if body in _FORMS else []
        kinds += ["application/json"] if body is not files.FileForm else []
        content = {kind: {"schema": {"$ref": f"#/components/schemas/{_add(body, schemas)}"}} for kind in kinds}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _summary(handler: Any, body: type[Any] | None) -> str:
    """What a handler says of itself, in a sentence, or the module that reads its body, in a few words; empty where that
    is no more than the path.
    """
    if inspect.isfunction(handler) or body is None:
        told = inspect.cleandoc(handler.__doc__ or "").partition("\n\n")[0].partition(". ")[0].rstrip(".")
        return re.sub(r"^`[A-Z]+ \S+`(: |, )?", "", told.replace("\n", " "))
    return re.split(r"[:,.]", sys.modules[body.__module__].__doc__ or "")[0]


def _add(body: type, schemas: dict[str, Any]) -> str:
    """The name of a body's schema, which is added together with those that it consists of. Dialects have classes of
    the same name, so each name begins with the dialect's.
    """
    group = body.__module__.rpartition(".")[2]
    nested: dict[str, Any] = {}
    nested[body.__name__] = object_schema(body, nested)
    for name, schema in nested.items():
        places = json.dumps(schema).replace('"#/$defs/', f'"#/components/schemas/{group}.')
        schemas[f"{group}.{name}"] = json.loads(places)
    return f"{group}.{body.__name__}"
