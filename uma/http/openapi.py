"""OpenAPI's description of the endpoints, made from the classes that read their bodies: `GET /openapi.json`.

A body is described as it is read: what its class does not name is ignored, so allowed. What several fields have to
fulfil together is told by errors alone.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from uma.contracts.health import HealthCheckPayload
from uma.http import (
    anthropic,
    batches,
    decisions,
    llama_server,
    llama_server_completion,
    llama_server_embeddings,
    ollama,
    ollama_embeddings,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
    openai_transcriptions,
    router,
    running,
    systemone,
    vllm_scores,
)
from uma.http.page.endpoints import AnswerBody
from uma.protocol.schema import object_schema
from uma.version import __version__


@attrs.frozen
class NoBody:
    """None is read."""


@attrs.frozen
class FileForm:
    """A form with a file, for batches."""

    file: Any
    purpose: str


RERANK = llama_server_embeddings.RerankBody
BODIES: Mapping[str, type[Any]] = MappingProxyType(
    {
        "/v1/chat/completions": openai_chat.ChatBody,
        "/v1/chat/completions/input_tokens": openai_chat.Conversation,
        "/v1/chat/completions/control": running.ControlBody,
        "/v1/responses": openai_responses.ResponsesBody,
        "/v1/responses/input_tokens": openai_responses.ResponsesBody,
        "/v1/completions": openai_completions.CompletionBody,
        "/v1/embeddings": openai_embeddings.EmbeddingsBody,
        "/v1/audio/transcriptions": openai_transcriptions.TranscriptionBody,
        "/v1/files": FileForm,
        "/v1/batches": batches.BatchBody,
        "/v1/messages": anthropic.MessagesBody,
        "/v1/messages/count_tokens": anthropic.Conversation,
        "/v1/decisions": decisions.DecisionsBody,
        "/v1/systemone": systemone.SystemOneBody,
        "/api/chat": ollama.ChatBody,
        "/api/generate": ollama.GenerateBody,
        "/api/embed": ollama_embeddings.EmbedBody,
        "/api/embeddings": ollama_embeddings.EmbeddingsBody,
        "/api/pull": ollama_models.PullBody,
        "/api/show": ollama_models.NameBody,
        **dict.fromkeys(("/models/load", "/models/unload"), router.RouterBody),
        **dict.fromkeys(("/completion", "/completions"), llama_server_completion.CompletionBody),
        "/infill": llama_server_completion.InfillBody,
        "/tokenize": llama_server.TokenizeBody,
        "/detokenize": llama_server.DetokenizeBody,
        "/apply-template": openai_chat.Conversation,
        **dict.fromkeys(("/embedding", "/embeddings"), llama_server_embeddings.EmbeddingBody),
        **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), RERANK),
        **dict.fromkeys(("/score", "/v1/score"), vllm_scores.ScoreBody),
        "/health/check": HealthCheckPayload,
        "/ui/api/answers": AnswerBody,
        **dict.fromkeys(("/v1/requests/{id}/answer", "/ui/api/answers/{token}/answer"), NoBody),
        **dict.fromkeys(("/v1/batches/{id}/cancel", "/api/copy"), NoBody),
    }
)
"""Class of the body that is read of a POST to each path."""
_DELETED: Mapping[str, type[Any]] = {"/api/delete": ollama_models.NameBody}
"""Class of the body that is read of a DELETE."""
_FORMS = frozenset((FileForm, openai_transcriptions.TranscriptionBody))
"""Bodies that come as forms."""


def document(endpoints: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """The description of endpoints, each a method, a path as Starlette has it, and a handler."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for method, route, handler in endpoints:
        path = route.replace(":path}", "}")
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, handler, schemas)
    about = {
        "title": "UMA",
        "version": __version__,
        "description": "Answers are as each API's own documents have them.",
    }
    return {
        "openapi": "3.1.0",
        "info": about,
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, handler: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    read: Mapping[str, type[Any]] = {"POST": BODIES, "DELETE": _DELETED}.get(method, {})
    body = read.get(path, read.get(f"/v1{path}", NoBody))  # some are there without /v1 too
    names = re.findall(r"\{(\w+)\}", path)
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "summary": _summary(handler, body) or f"{method} {path}",
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names],
        "responses": {
            "200": {"description": "The answer."},
            "default": {"description": "An error, in this API's form."},
        },
    }
    if body is not NoBody:
        kinds = ["multipart/form-data"] if body in _FORMS else []
        kinds += ["application/json"] if body is not FileForm else []
        content = {kind: {"schema": {"$ref": f"#/components/schemas/{_add(body, schemas)}"}} for kind in kinds}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _summary(handler: Any, body: type) -> str:
    """What a handler says of itself, in a sentence, or the module that reads its body, in a few words; empty where that
    is no more than the path.
    """
    if inspect.isfunction(handler):
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
