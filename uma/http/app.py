"""The ASGI app: which path leads to which endpoint, and which dialect its errors speak."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from difflib import get_close_matches
from functools import cache
from typing import Any

import attrs
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from uma.contracts.health import HealthCheckPayload
from uma.contracts.versions import PROTOCOL_HEADER, negotiate_version
from uma.errors import UmaError, sole_error
from uma.http import (
    anthropic,
    batches,
    decisions,
    files,
    llama_server,
    llama_server_completion,
    llama_server_embeddings,
    many,
    model_list,
    ollama,
    ollama_embeddings,
    ollama_models,
    openai,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
    openai_transcriptions,
    openapi,
    request_history,
    router,
    running,
    stored_responses,
    systemone,
    vllm_scores,
)
from uma.http.access import AccessRules
from uma.http.dialect import Dialect, dumps
from uma.http.exchange import ACCOUNT, ClientGoneError, Exchange, headers_of, id_of
from uma.http.gateway import Gateway
from uma.http.health_check import check_health
from uma.http.ignored import header_value
from uma.http.page.assets import HTML, SECURITY, refusal
from uma.http.page.endpoints import ENDPOINTS as PAGE_ENDPOINTS
from uma.http.page.endpoints import Page, is_file
from uma.http.problem import Forbidden, NotFound, Problem, WrongMethod
from uma.net.client import CLIENT, ORIGIN, OWNER, THIS_MACHINE, TRACEPARENT, client_at, machine_at, origin
from uma.net.logfmt import log
from uma.types import LoadState

logger = logging.getLogger("uma.http")

Handler = Callable[[Gateway, Exchange], Awaitable[None]]

CLIENT_LEFT = 499
"""The log's status of a request whose client left before there was one, as nginx calls it."""
EXCHANGE = "uma.exchange"
"""The scope's entry that holds the request's `Exchange`."""


def build_app(gateway: Gateway) -> ASGIApp:
    """The app, ready to be served."""
    endpoints = (*ENDPOINTS, *_shortened(), *Page(gateway).endpoints())
    routes = [Route(path, _Endpoint(gateway, do), methods=[method]) for method, path, do, _ in endpoints]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _fault})
    access = AccessRules.of(gateway.config)
    gateway.keys, gateway.app = access.keys, _Entrance(gateway, access, inner)
    return gateway.app


async def _show_description(_: Gateway, http: Exchange) -> None:
    """`GET /openapi.json`: what there is, as OpenAPI describes it."""
    await http.answer(await trio.to_thread.run_sync(description))


@cache
def description() -> bytes:
    """The description of all endpoints but the page's files. It takes half a second."""
    of_page = [endpoint for endpoint in PAGE_ENDPOINTS if not is_file(endpoint[1])]
    return dumps(openapi.document([*ENDPOINTS, *_shortened(), *of_page]))


ENDPOINTS: Sequence[openapi.Endpoint] = (
    ("GET", "/v1/models", model_list.list_models, None),
    ("GET", "/v1/models/{id:path}", model_list.show_model, None),
    ("POST", "/v1/chat/completions", openai_chat.chat_completions, openai_chat.ChatBody),
    ("POST", "/v1/chat/completions/input_tokens", openai_chat.count_tokens, openai_chat.Conversation),
    ("POST", "/v1/chat/completions/control", running.control, running.ControlBody),
    ("GET", "/v1/requests", running.list_requests, None),
    ("GET", "/v1/requests/{id}", running.explain, None),
    ("DELETE", "/v1/requests/{id}", running.end, None),
    ("POST", "/v1/requests/{id}/answer", running.answer_now, None),
    ("GET", "/v1/history", request_history.listing, None),
    ("GET", "/v1/history/{number:int}", request_history.show, None),
    ("POST", "/v1/completions", openai_completions.completions, openai_completions.CompletionBody),
    ("POST", "/v1/embeddings", openai_embeddings.embeddings, openai_embeddings.EmbeddingsBody),
    ("POST", "/v1/decisions", decisions.decisions, decisions.DecisionsBody),
    ("POST", "/v1/systemone", systemone.systemone, systemone.SystemOneBody),
    ("POST", "/v1/responses", openai_responses.responses, openai_responses.ResponsesBody),
    ("POST", "/v1/responses/input_tokens", openai_responses.count_tokens, openai_responses.ResponsesBody),
    ("GET", "/v1/responses/resp_{id}", stored_responses.show, None),
    ("DELETE", "/v1/responses/resp_{id}", stored_responses.remove, None),
    ("GET", "/v1/responses/resp_{id}/input_items", stored_responses.input_items, None),
    ("POST", "/v1/audio/transcriptions", openai_transcriptions.transcriptions, openai_transcriptions.TranscriptionBody),
    ("POST", "/v1/messages", anthropic.messages, anthropic.MessagesBody),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens, anthropic.AnthropicConversation),
    ("POST", "/v1/files", files.create, files.FileForm),
    ("GET", "/v1/files", files.listing, None),
    ("GET", "/v1/files/{id}", files.show, None),
    ("DELETE", "/v1/files/{id}", files.remove, None),
    ("GET", "/v1/files/{id}/content", files.content, None),
    ("POST", "/v1/batches", batches.create, batches.BatchBody),
    ("GET", "/v1/batches", batches.listing, None),
    ("GET", "/v1/batches/{id}", batches.show, None),
    ("POST", "/v1/batches/{id}/cancel", batches.cancel, None),
    ("GET", "/api/version", ollama.version, None),
    ("GET", "/api/tags", ollama.tags, None),
    ("GET", "/api/ps", ollama.running, None),
    ("POST", "/api/chat", ollama.chat, ollama.OllamaChatBody),
    ("POST", "/api/generate", ollama.generate, ollama.GenerateBody),
    ("POST", "/api/embed", ollama_embeddings.embed_texts, ollama_embeddings.EmbedBody),
    ("POST", "/api/embeddings", ollama_embeddings.embed_prompt, ollama_embeddings.OllamaEmbeddingsBody),
    ("POST", "/api/show", ollama.show, ollama_models.NameBody),
    ("POST", "/api/pull", ollama_models.pull, ollama_models.PullBody),
    ("DELETE", "/api/delete", ollama_models.delete, ollama_models.NameBody),
    ("POST", "/api/copy", ollama_models.copy, None),
    ("POST", "/models/load", router.load, router.RouterBody),
    ("POST", "/models/unload", router.unload, router.RouterBody),
    ("GET", "/health", llama_server.health, None),
    ("POST", "/health/check", check_health, HealthCheckPayload),
    ("GET", "/props", llama_server.props, None),
    ("GET", "/lora-adapters", llama_server.lora_adapters, None),
    ("POST", "/lora-adapters", llama_server.set_lora_adapters, None),
    ("GET", "/slots", llama_server.slots, None),
    ("GET", "/metrics", llama_server.metrics, None),
    ("POST", "/completion", llama_server_completion.completion, llama_server_completion.LlamaServerBody),
    ("POST", "/completions", llama_server_completion.completion, llama_server_completion.LlamaServerBody),
    ("POST", "/infill", llama_server_completion.infill, llama_server_completion.InfillBody),
    ("POST", "/tokenize", llama_server.tokenize, llama_server.TokenizeBody),
    ("POST", "/detokenize", llama_server.detokenize, llama_server.DetokenizeBody),
    ("POST", "/apply-template", llama_server.apply_template, openai_chat.Conversation),
    ("POST", "/embedding", llama_server_embeddings.embedding, llama_server_embeddings.EmbeddingBody),
    ("POST", "/embeddings", llama_server_embeddings.embedding, llama_server_embeddings.EmbeddingBody),
    ("POST", "/rerank", llama_server_embeddings.rerank, llama_server_embeddings.RerankBody),
    ("POST", "/reranking", llama_server_embeddings.rerank, llama_server_embeddings.RerankBody),
    ("POST", "/v1/rerank", llama_server_embeddings.rerank, llama_server_embeddings.RerankBody),
    ("POST", "/v1/reranking", llama_server_embeddings.rerank, llama_server_embeddings.RerankBody),
    ("POST", "/score", vllm_scores.score, vllm_scores.ScoreBody),
    ("POST", "/v1/score", vllm_scores.score, vllm_scores.ScoreBody),
    ("GET", "/openapi.json", _show_description, None),
)

_MODULES = frozenset(
    each.__name__
    for each in (model_list, running, request_history, files, batches, stored_responses, ollama_models, router)
)
_OF_ALL: frozenset[Handler] = frozenset(
    {
        *(do for _, _, do, _ in ENDPOINTS if do.__module__ in _MODULES),
        *(ollama.version, ollama.tags, ollama.running, ollama.show, ollama.chat, ollama.generate),
        *(llama_server.health, check_health, _show_description),
        *(llama_server.lora_adapters, llama_server.set_lora_adapters),
    }
)
"""Endpoints that are for no one of several models, or look for theirs themselves."""
_UNLESS_NAMED: frozenset[Handler] = frozenset({llama_server.metrics, llama_server.slots, llama_server.props})
"""Handlers that are for all models where the query names none."""
_LEFT_OUT = {
    "/slots/": "no slot is saved or erased: prefixes are found by their tokens, with --cache-dir after a restart too",
    "/models/sse": "GET /models tells which models are loaded, and how far one is that is being loaded",
    "/cors-proxy": "other servers' answers are not fetched for a page",
    "/predict": "each request has a body of its own; ask /v1/chat/completions",
    "/readyz": "/health answers 200 once requests are taken",
    "/livez": "/health answers as long as the server runs",
    "/healthz": "/health answers 200 once requests are taken",
}
"""Beginnings of paths of llama-server's and others' that are not here, and what is."""
LOOKED_AT = ("/health", "/metrics")
"""Paths that probes and Prometheus ask for every few seconds: what succeeds there is logged as `debug`."""
SHORTENED = frozenset(
    f"/v1/{each}"
    for each in (
        "models",
        "chat/completions",
        "responses",
        "chat/completions/input_tokens",
        "responses/input_tokens",
        "audio/transcriptions",
    )
)
"""Paths that are there without `/v1` too, as llama-server has them. The others of OpenAI's are something else there."""


def _shortened() -> list[openapi.Endpoint]:
    return [(method, path.removeprefix("/v1"), do, body) for method, path, do, body in ENDPOINTS if path in SHORTENED]


_OLLAMAS_MODELS = tuple(f"/api/{each}" for each in ("push", "create", "blobs"))
_LLAMA_SERVER = tuple(each.__name__ for each in (llama_server, router))
_GENERIC: frozenset[Handler] = frozenset(
    {
        *(llama_server.apply_template, llama_server_embeddings.embedding, llama_server_embeddings.rerank),
        *(llama_server_completion.completion, llama_server_completion.infill),
    }
)
_NATIVE = frozenset(
    path for _, path, handler, _ in ENDPOINTS if handler.__module__ in _LLAMA_SERVER or handler in _GENERIC
)


def dialect_of(http: Exchange) -> Dialect:
    """The dialect in whose form errors of this request are written."""
    path = http.path
    if path.startswith("/api/"):
        return ollama.OLLAMA
    if path.startswith("/v1/messages") or model_list.is_anthropic(http):
        return anthropic.ANTHROPIC
    return llama_server.LLAMA_SERVER if path in _NATIVE else openai.OPENAI


@attrs.frozen
class _Endpoint:
    """A handler as an ASGI app: its errors become answers."""

    gateway: Gateway
    handle: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http: Exchange = scope[EXCHANGE]
        http.scope = scope  # with the path's parameters
        http.takes_form = self.handle is openai_transcriptions.transcriptions and not http.is_json
        try:
            with self.gateway.ended_by_abort(http) as work:
                async with self._gateway(http) as gateway:
                    await self.handle(gateway, http)
            if work.scope.cancelled_caught:
                raise work.error()
        except UmaError as error:
            await _fail(http, error)
        except ClientGoneError:
            pass
        except BaseExceptionGroup as group:
            sole = sole_error(group)
            if isinstance(sole, UmaError):
                await _fail(http, sole)
            elif not isinstance(sole, ClientGoneError):
                raise

    def _gateway(self, http: Exchange) -> AbstractAsyncContextManager[Gateway]:
        named = self.handle in _UNLESS_NAMED and b"model=" not in http.scope["query_string"]
        if named or self.handle in _OF_ALL or http.path == "/" or http.path.startswith("/ui/"):
            return nullcontext(self.gateway)
        return many.of_model(self.gateway, http, self.handle)


async def _fail(http: Exchange, error: UmaError) -> None:
    problem = http.failed(error)
    if not http.is_started:
        await http.fail(dialect_of(http), problem)
    elif http.streamed is not None:
        await http.write(http.streamed.failed(problem, http.id), is_last=True)


async def _no_route(request: Any, error: Exception) -> Any:
    """Starlette's 404 and 405 in the dialect's form."""
    http: Exchange = request.scope[EXCHANGE]
    status = getattr(error, "status_code", 404)
    if status == 405:
        allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
        http.extra_headers.append((b"allow", header_value(allowed)))
        failure: UmaError = WrongMethod(f"{http.path[:200]} takes {allowed}, not {http.scope['method'][:200]}")
    else:
        failure = NotFound(f"no such path: {http.path[:200]}{_advice(http.path)}")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await _fail(http, failure)

    return answer


async def _fault(request: Any, error: Exception) -> Any:
    """The answer to a request that has met a fault, in place of Starlette's text. `_Entrance` has it in the log."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await _tell_fault(request.scope[EXCHANGE])

    return answer


async def _crashed(http: Exchange, fault: BaseException) -> None:
    http.lines.log(logger, logging.ERROR, "http.crashed", request=http.id, fault=fault)
    await _tell_fault(http)


async def _tell_fault(http: Exchange) -> None:
    if not http.is_started:
        await http.fail(dialect_of(http), Problem(500, "fault", "a fault in the server itself; its log says more"))


def _advice(path: str) -> str:
    """What to ask instead of a path that there is not."""
    if (left_out := next((each for each in _LEFT_OUT if path.startswith(each)), None)) is not None:
        return f"; {_LEFT_OUT[left_out]}"
    if path.startswith(_OLLAMAS_MODELS):
        return "; models are not made here: /api/pull gets one, where the server runs with --models all"
    known = [each for _, each, *_ in ENDPOINTS if "{" not in each]
    near = get_close_matches(path[:200], known, n=3, cutoff=0.7)
    return (
        f"; near it: {', '.join(near)}" if near else "; there are /health, /v1/models, /v1/chat/completions and others"
    )


@attrs.frozen
class _Entrance:
    """The outermost layer: gives each request its id, lets it in or not, and logs how it ended."""

    gateway: Gateway
    access: AccessRules
    inner: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # a lifespan has no effect
        http = self._exchange(scope, receive, send)
        began = trio.current_time()
        try:
            await self._let_in(http)
        except UmaError as error:
            if isinstance(error, Forbidden) and http.path == "/" and "text/html" in (http.header(b"accept") or ""):
                await http.answer(refusal(str(error)), status=403, media_type=HTML, headers=SECURITY)
            else:
                await _fail(http, error)
        except BaseExceptionGroup as group:
            if group.split(trio.Cancelled)[1] is None:
                raise
            await _crashed(http, group)
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this request's alone)
            await _crashed(http, fault)
        finally:
            http.release_body()
            self.gateway.count(http)
            _log_request(http, 1000 * (trio.current_time() - began))

    async def _let_in(self, http: Exchange) -> None:
        self.access.check_place(http)
        if self.access.is_preflight(http):
            await http.start(204, b"text/plain", self.access.preflight_headers(http))
            await http.write(b"", is_last=True)
            return
        http.account = self.access.account(http) if ACCOUNT not in http.scope else http.scope[ACCOUNT]
        peer = http.scope.get("client")
        holder = ("key", http.account.name) if http.account else None
        http.owner = holder or (machine_at(peer[0]) if peer else THIS_MACHINE)
        OWNER.set(holder)
        CLIENT.set(holder or (client_at(*peer) if peer else None))
        key = f"key {http.account.name}" if http.account else None
        ORIGIN.set(origin(_endpoint(http.path), key, _program(http)))
        TRACEPARENT.set(http.header(b"traceparent") or "")
        if (asked := http.header(PROTOCOL_HEADER.lower().encode())) is not None:
            negotiate_version(asked)
        if (progress := self.gateway.progress) is not None and not is_file(http.path):
            http.tell_load(LoadState(progress.percent))
            raise progress.refusal()
        await self.inner(http.scope, http.receive, http.send)

    def _exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        config = self.gateway.config
        id = id_of(scope)
        bounds = config.frame_bytes(takes_media=True), config.http_timeout_sec
        http = Exchange(scope, receive, send, id, *bounds, self.gateway.parsing, self.gateway.bodies)
        http.extra_headers += headers_of(id)
        scope[EXCHANGE] = http
        return http


def _endpoint(path: str) -> str:
    """An endpoint's name for people."""
    return "page" if path.startswith("/ui/api/") else path.removeprefix("/v1").strip("/")


def _program(http: Exchange) -> str:
    """What the client calls itself, without its version's details: `OpenAI/Python 1.99.2` and the like."""
    agent = (http.header(b"user-agent") or "").partition(" (")[0].strip()
    return "browser" if agent.startswith("Mozilla/") else agent


def _log_request(http: Exchange, ms: float) -> None:
    """Log how a request ended. What the engine has computed is always logged, and all else within bounds."""
    write = log if http.has_computed and 200 <= http.status < 400 else http.lines.log
    is_look = http.path in LOOKED_AT and http.status == 200 and http.scope["method"] in ("GET", "HEAD")
    write(
        logger,
        logging.DEBUG if is_look else logging.INFO,
        "http.request",
        request=http.id,
        method=http.scope["method"],
        path=http.path,
        status=http.status or CLIENT_LEFT,
        code=None if http.failure is None else http.failure.code,
        **http.whose,
        prompt=http.tokens.get("prompt"),
        completion=http.tokens.get("completion"),
        tokens_per_second=http.tokens_per_second or None,
        ms=ms,
        client=http.lines.client,
    )
