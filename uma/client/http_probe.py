"""Questions to a server over HTTP, for proofs: each goes to the endpoint that has its fields, and comes back as events.

What the proofs ask is said in the socket's words; here it is put into those of HTTP and back, and nothing else. A
generation goes to llama-server's `/completion`, which tells token ids and seeds, unless only OpenAI's endpoints have
its fields.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

import attrs

from uma.client.http import HttpClient
from uma.contracts.proofs import Question, ServerReply
from uma.errors import ConnectionLost
from uma.protocol.converter import structure
from uma.protocol.messages import HelloEvent
from uma.protocol.versions import SUPPORTED
from uma.types import ServerInfo

Fields = Mapping[str, Any]
Event = dict[str, Any]

GRAMMARS = ("json_schema", "json_object", "gbnf")
"""What HTTP's endpoints have a field for."""
POLL_SEC = 0.05
"""Interval between two looks at `/slots`: a proof ends soon after the request does."""

_NATIVE_NAMES = {"max_tokens": "n_predict", "logprobs": "n_probs"}
"""The socket's names of `/completion`'s fields, where they differ."""
_OTHER_NAMES = (
    ("grammar", "json_schema"),
    ("token_ids", "prompt"),
    ("reasoning", "chat_template_kwargs.enable_thinking"),
)
"""The socket's names of fields that other endpoints have, as their errors name them."""
_RIFF = "UklGR"
"""How base64 of a WAV file begins."""
_ONLY_OPENAI = ("n", "best_of", "echo")
"""Fields for which a prompt goes to `/v1/completions`."""


@attrs.frozen
class HttpProbe:
    """Asks a server, and waits for each answer. Raises as `HttpClient`."""

    server: HttpClient

    def introduce(self) -> ServerInfo:
        """What the server says of itself, less what HTTP has no fields for."""
        with self._call("GET", "/props") as response:
            found = _read_json(response)
        try:
            names = ("model", "capabilities", "limits")
            shown = {
                "version": SUPPORTED[-1],
                "server": found["build_info"],
                **{name: found[name] for name in names},
            }
        except (KeyError, TypeError):
            raise ConnectionLost(f"{self.server.url}/props: what answers there is no UMA server") from None
        info = structure(shown, HelloEvent).info
        offered = tuple(grammar for grammar in info.capabilities.grammars if grammar in GRAMMARS)
        return attrs.evolve(info, capabilities=attrs.evolve(info.capabilities, grammars=offered))

    def ask(self, question: Question) -> ServerReply:
        """All events of the answer."""
        fields = dict(question.fields)
        kind = fields.pop("type", "generate")
        if kind == "generate":
            return ServerReply(tuple(self._generate(fields, question.cancel_after)))
        return ServerReply((self._ask_once(kind, fields),))

    # Generation

    def _generate(self, fields: Event, cancel_after: int | None) -> Iterator[Event]:
        form = _form_of(fields)
        with self._call("POST", form.path, form.body) as response:
            own_names = {theirs: own for own, theirs in _OTHER_NAMES}
            named = filter(None, (response.getheader("X-UMA-Ignored") or "").split(", "))
            ignored = [f"{own_names.get(name, name)}: ignored" for name in named]
            if response.status != 200:
                yield _error(response.status, _read_json(response))
                return
            if not form.body["stream"]:
                yield from form.whole(_read_json(response), ignored)
                return
            tokens = 0
            for event in form.streamed(_lines(response), ignored):
                yield event
                tokens += event["event"] == "token"
                if event["event"] == "token" and tokens == cancel_after:
                    break
            else:
                return
            request = response.getheader("X-Request-Id") or ""
        # The connection is closed: that is HTTP's cancel.
        self._wait_until_gone(request)
        yield {"event": "eos", "reason": "cancelled", "usage": {"completion_tokens": tokens}}

    def _wait_until_gone(self, request: str) -> None:
        """Until the server runs the request no more."""
        end = time.monotonic() + self.server.timeout_sec
        while any(slot.get("request") == request for slot in self._get_json("/slots")):
            if time.monotonic() > end:
                raise ConnectionLost(f"{self.server.url}: still computes a request whose client hung up")
            time.sleep(POLL_SEC)

    # Other questions

    def _ask_once(self, kind: str, fields: Event) -> Event:
        if kind == "metrics":
            return {"event": "metrics", **self._metrics()}
        path, body = _ENDPOINTS[kind](fields) if kind in _ENDPOINTS else (f"/{kind}", fields)
        with self._call("POST", path, body) as response:
            found = _read_json(response)
            if response.status != 200:
                return _error(response.status, found)
        return {"event": kind, **_ANSWERS[kind](found)}

    def _metrics(self) -> dict[str, float]:
        """The samples of `GET /metrics` by their names without prefix: the sums over their labels."""
        with self._call("GET", "/metrics") as response:
            text = response.read().decode()
        found = defaultdict[str, float](float)
        for name, value in re.findall(r"^uma_(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            found[name] += float(value)
        return found

    def _get_json(self, path: str) -> Any:
        with self._call("GET", path) as response:
            return _read_json(response)

    @contextmanager
    def _call(self, method: str, path: str, body: Fields | None = None) -> Iterator[HTTPResponse]:
        with self.server.ask(method, path, body) as response:
            if response.status in (401, 403):
                raise ConnectionLost(f"{self.server.url}: {_message(_read_json(response))}")
            yield response


# Forms of a generation


@attrs.frozen
class Native:
    """Question in the form of llama-server's `/completion`, and its answer as events of the socket."""

    body: Event
    path: str = "/completion"

    def streamed(self, events: Iterator[Event], warnings: list[str]) -> Iterator[Event]:
        """The stream as the socket would tell it."""
        for event in events:
            if "error" in event:
                yield _error(500, event)
            elif event["stop"]:
                yield self._last(event, warnings)
            else:
                found = event.get("completion_probabilities")
                more = {"logprobs": _position(found[0])} if found else {}
                yield {"event": "token", "text": event["content"], "token_id": event["tokens"][0], **more}

    def whole(self, answer: Event, warnings: list[str]) -> Iterator[Event]:
        """The answer in one piece as the socket would tell it."""
        yield {**self._last(answer, warnings), "text": answer["content"], "token_ids": answer["tokens"]}

    def _last(self, event: Event, warnings: list[str]) -> Event:
        counts = {"prompt": "tokens_evaluated", "cached": "tokens_cached", "completion": "tokens_predicted"}
        return {
            "event": "eos",
            "reason": "length" if event["stop_type"] == "limit" else "stop",
            "usage": {f"{name}_tokens": event[key] for name, key in counts.items()},
            "seed": event["seed"],
            "warnings": [*warnings, *event.get("warnings", ())],
        }


@attrs.frozen
class OpenAi:
    """Question in the form of OpenAI's `/v1/completions` and `/v1/chat/completions`, and its answer as events."""

    body: Event
    path: str

    def streamed(self, events: Iterator[Event], warnings: list[str]) -> Iterator[Event]:
        """The stream as the socket would tell it."""
        last: Event = {"event": "eos", "warnings": warnings}
        calls: dict[int, Event] = {}
        for event in events:
            if "error" in event:
                yield _error(500, event)
                return
            last["usage"] = _usage(event["usage"]) if event.get("usage") else last.get("usage", {})
            last["warnings"] = [*last["warnings"], *event.get("warnings", ())]
            for choice in event["choices"]:
                delta = choice.get("delta") or {}
                if thought := delta.get("reasoning_content"):
                    yield {"event": "reasoning", "text": thought}
                if text := choice.get("text") or delta.get("content"):
                    yield {"event": "token", "text": text}
                for part in delta.get("tool_calls", ()):
                    call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                    call["name"] += part["function"].get("name", "")
                    call["arguments"] += part["function"]["arguments"]
                    yield {"event": "tool_call", "call": part["index"], "arguments": part["function"]["arguments"]}
                last["reason"] = choice.get("finish_reason") or last.get("reason")
        found = [calls[index] for index in sorted(calls)]
        if found and last.get("reason") == "length" and not _is_json(found[-1]["arguments"]):
            found.pop()  # cut by max_tokens: the stream has its beginning, and it is no call
        yield {**last, "tool_calls": found}

    def whole(self, answer: Event, warnings: list[str]) -> Iterator[Event]:
        """The answer in one piece as the socket would tell it."""
        texts = [choice.get("text") or choice.get("message", {}).get("content") or "" for choice in answer["choices"]]
        first = answer["choices"][0]
        thought = first.get("message", {}).get("reasoning_content")
        yield {
            "event": "eos",
            "reason": first["finish_reason"],
            **self._prompt_and_text(texts[0], first.get("logprobs")),
            "answers": [{"text": text} for text in texts],
            **({"reasoning": thought} if thought else {}),
            "usage": _usage(answer["usage"]),
            "warnings": [*warnings, *answer.get("warnings", ())],
        }

    def _prompt_and_text(self, text: str, logprobs: Fields | None) -> Event:
        """`echo` puts the prompt and its log probabilities in front of the answer's; the socket tells them apart."""
        prompt = self.body.get("prompt")
        if not self.body.get("echo") or not isinstance(prompt, str) or not text.startswith(prompt):
            return {"text": text}
        shown: Event = {"text": prompt}
        if logprobs is not None:
            before = sum(offset < len(prompt) for offset in logprobs["text_offset"])
            shown["logprobs"] = logprobs["token_logprobs"][:before]
        return {"text": text.removeprefix(prompt), "prompt": shown}


def _form_of(fields: Fields) -> Native | OpenAi:
    """The endpoint that has these fields, and its body."""
    body = {"stream": True, **fields}
    if "messages" in body:
        return OpenAi(_as_openai(body), "/v1/chat/completions")
    if any(name in body for name in _ONLY_OPENAI):
        return OpenAi(_as_openai(body), "/v1/completions")
    prompt = body.pop("token_ids", None)
    if prompt is not None:
        body["prompt"] = prompt
    grammar = body.pop("grammar", None)
    if isinstance(grammar, Mapping):
        body |= _native_grammar(grammar)
    body["return_tokens"] = True
    return Native({_NATIVE_NAMES.get(name, name): value for name, value in body.items()})


def _native_grammar(grammar: Fields) -> Event:
    if "json_schema" in grammar:
        return {"json_schema": grammar["json_schema"]}
    if "json_object" in grammar:
        return {"json_schema": {"type": "object"}}
    return {"grammar": grammar.get("gbnf", grammar)}


def _as_openai(body: Event) -> Event:
    made = {**body, "stream_options": {"include_usage": True}} if body["stream"] else dict(body)
    if "tools" in made:
        made["tools"] = [{"type": "function", "function": tool} for tool in made["tools"]]
    if "messages" in made:
        made["messages"] = [_with_parts(message) for message in made["messages"]]
    if "reasoning" in made:
        made["chat_template_kwargs"] = {"enable_thinking": made.pop("reasoning") != "off"}
    if "prompt_logprobs" in made:
        made["logprobs"] = made.pop("prompt_logprobs")
    if (choice := made.get("tool_choice")) not in (None, "auto", "none", "required"):
        made["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return made


def _with_parts(message: Event) -> Event:
    """A message with its pictures and sounds among its parts."""
    if "media" not in message:
        return message
    parts, before, content = list[Event](), 0, message["content"]
    for media_file in message["media"]:
        at = media_file.get("at", 0)
        parts += [{"type": "text", "text": content[before:at]}] if at > before else []
        before = at
        if media_file.get("data", "").startswith(_RIFF):
            parts.append({"type": "input_audio", "input_audio": {"data": media_file["data"], "format": "wav"}})
        else:
            url = media_file.get("url") or f"data:image/bmp;base64,{media_file['data']}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": message["role"], "content": [*parts, {"type": "text", "text": content[before:]}]}


def _position(found: Fields) -> Event:
    """One of `completion_probabilities` as the socket tells log probabilities."""

    def one(token: Fields) -> Event:
        return {"token_id": token["id"], "text": token["token"], "logprob": token["logprob"]}

    return {"chosen": one(found), "top": [one(other) for other in found["top_logprobs"]]}


def _usage(shown: Fields) -> Event:
    cached = (shown.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    thought = (shown.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    counts = {name: shown[name] for name in ("prompt_tokens", "completion_tokens")}
    return {**counts, "cached_tokens": cached, "reasoning_tokens": thought}


# Other questions, by kind


def _embed_body(fields: Fields) -> tuple[str, Event]:
    body = {name: value for name, value in fields.items() if name not in ("texts", "token_ids")}
    return "/v1/embeddings", {"input": fields.get("texts") or fields.get("token_ids"), **body}


def _tokenize_body(fields: Fields) -> tuple[str, Event]:
    if "messages" in fields:
        return "/apply-template", dict(fields)
    return "/tokenize", {"content": fields["prompt"], "add_special": True}


def _decide_body(fields: Event) -> tuple[str, Event]:
    asked = [
        {
            "type": question["kind"],
            "instructions": question["instructions"],
            "choices": [{"value": option["label"]} for option in question["options"]],
        }
        for question in fields["questions"]
    ]
    return "/v1/decisions", {"input": fields["messages"], "questions": asked}


_ENDPOINTS: dict[str, Callable[[Event], tuple[str, Event]]] = {
    "tokenize": _tokenize_body,
    "embed": _embed_body,
    "rerank": lambda fields: ("/rerank", fields),
    "decide": _decide_body,
    "health": lambda fields: ("/health/check", {"type": "generation", **fields}),
}
_ANSWERS: dict[str, Callable[[Any], Event]] = {
    "tokenize": lambda found: {"text": found["prompt"]} if "prompt" in found else {"token_ids": found["tokens"]},
    "embed": lambda found: {"embeddings": [entry["embedding"] for entry in found["data"]]},
    "rerank": lambda found: {
        "results": [{"index": result["index"], "score": result["relevance_score"]} for result in found["results"]]
    },
    "decide": lambda found: {
        "answers": [
            {"probabilities": [option["probability"] for option in answer["probabilities"]]}
            for answer in found["answers"]
        ]
    },
    "health": lambda found: {**found, "status": "ok" if found["success"] else found["error"]},
}


# Answers


def _lines(response: HTTPResponse) -> Iterator[Event]:
    """The data of server-sent events, up to OpenAI's closing word. Raises `ConnectionLost` for data of another kind."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            try:
                event = json.loads(line.removeprefix(b"data: "))
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise ConnectionLost(f"a stream's event is no JSON object, so no UMA server answers: {line[:60]!r}")
            yield event


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _read_json(response: HTTPResponse) -> Any:
    try:
        return json.loads(response.read())
    except ValueError:
        return {"error": {"message": f"HTTP {response.status}"}}


def _message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error)


def _error(status: int, answer: Any) -> Event:
    """An error with the code that the socket has for it, and the socket's names of fields."""
    message = _message(answer)
    for ours, theirs in (*_NATIVE_NAMES.items(), *_OTHER_NAMES):
        if message.startswith((f"{theirs}:", f"{theirs}[")):
            message = f"{ours}: {message}"
    is_refusal = status in (400, 404)
    return {"event": "error", "code": "E_PROTO_BAD_REQUEST" if is_refusal else f"HTTP {status}", "message": message}
