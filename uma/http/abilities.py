"""Abilities that depend on the engine and the model: one place for each.

Each function takes a field as the request has it and returns what `SamplingParams` need, or refuses it by name where
the source's `Capabilities` lack it. What the fields of a dialect mean is decided here, so that no dialect ignores one.
"""

from __future__ import annotations

from typing import Any

from uma.constraints import show
from uma.errors import BadRequest
from uma.http.problem import Unsupported
from uma.types import MAX_LOGPROBS, Capabilities, Grammar

Names = dict[str, str]
"""The body's names for fields that the engine calls otherwise; see `Exchange.names`."""


def response_format(
    value: Any, field: str, able: Capabilities, names: Names, *, is_flat: bool = False
) -> Grammar | None:
    """OpenAI's `{"type": "text" | "json_object" | "json_schema", …}`; `schema` stands flat or in `json_schema`.

    `is_flat`: where it is asked for when it is missing.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") not in ("text", "json_object", "json_schema"):
        raise BadRequest(f"{field}: expected an object of type text, json_object or json_schema, not {show(value)}")
    if value["type"] == "text":
        return None
    inner = value.get("json_schema", value)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if value["type"] == "json_object" and schema is None:
        return _grammar({"json_object": True}, field, able)
    is_flat = "json_schema" not in value and (is_flat or "schema" in value)
    place = f"{field}.schema" if is_flat else f"{field}.json_schema.schema"
    if not isinstance(schema, dict):
        raise BadRequest(f"{place}: is required (an object)")
    return json_schema(schema, place, able, names)


def json_format(value: Any, field: str, able: Capabilities, names: Names) -> Grammar | None:
    """Ollama's `format`: empty, `"json"`, or a JSON Schema."""
    if value is None or value == "":
        return None
    if value == "json":
        return _grammar({"json_object": True}, field, able)
    return json_schema(value, field, able, names)


def json_schema(value: Any, field: str, able: Capabilities, names: Names) -> Grammar | None:
    """A JSON Schema by itself."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequest(f"{field}: expected a JSON Schema, not {show(value)}")
    names["grammar.json_schema"] = field
    return _grammar({"json_schema": value}, field, able)


def gbnf(value: Any, field: str, able: Capabilities, names: Names) -> Grammar | None:
    """A grammar in llama.cpp's notation."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BadRequest(f"{field}: expected a grammar as a string, not {show(value)}")
    names["grammar.gbnf"] = field
    return _grammar({"gbnf": value}, field, able)


def _grammar(given: dict[str, Any], field: str, able: Capabilities) -> Grammar:
    (form,) = given
    if form not in able.grammars:
        raise Unsupported(f"{field}: this server cannot constrain its output by {form.replace('_', ' ')}; leave it out")
    try:
        return Grammar(**given)
    except ValueError as error:
        raise BadRequest(f"{field}: {error}") from None


def chat_logprobs(wanted: Any, top: Any, able: Capabilities) -> int | None:
    """`logprobs: true` with `top_logprobs`."""
    if not isinstance(wanted, bool | None):
        raise BadRequest(f"logprobs: expected true or false, not {show(wanted)}")
    if not wanted:
        if top:
            raise BadRequest("top_logprobs: needs logprobs to be true")
        return None
    return logprobs(0 if top is None else top, "top_logprobs", able)


def logprobs(value: Any, field: str, able: Capabilities) -> int | None:
    """How many likeliest tokens to tell with each; None: not even the token's own."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LOGPROBS:
        raise BadRequest(f"{field}: expected an integer from 0 to {MAX_LOGPROBS}, not {show(value)}")
    if able.max_logprobs < 0:
        raise Unsupported(f"{field}: this server cannot give log probabilities; leave it out")
    if value > able.max_logprobs:
        raise BadRequest(f"{field}: {value} must be at most {able.max_logprobs}")
    return value


def answers(value: int | None, field: str, able: Capabilities) -> int | None:
    """`n`, `best_of`."""
    if value is not None and value > able.max_answers:
        raise Unsupported(f"{field}: this server gives at most {able.max_answers} per prompt, not {value}")
    return value


def logit_bias(value: Any, able: Capabilities, *, bans_by_false: bool = False) -> dict[str, float] | None:
    """`{"token": bias}`, or a list of pairs; in llama-server's dialect `false` bans. An empty one asks for nothing."""
    field = "logit_bias"
    if value is None or value in ({}, []):
        return None
    if "logit_bias" not in able.sampling_params:
        raise Unsupported(f"{field}: this server cannot bias tokens; leave it out")
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(_is_bias(pair, bans_by_false=bans_by_false) for pair in pairs):
        raise BadRequest(f"{field}: expected token ids and their biases from -100 to 100, not {show(value)}")
    return {str(token): -100.0 if bias is False else float(bias) for token, bias in pairs}


def _is_bias(pair: Any, *, bans_by_false: bool) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or isinstance(pair[0], bool | list | dict | None):
        return False
    bias = pair[1]
    return bans_by_false if bias is False else isinstance(bias, int | float) and bias is not True


def echo(value: bool | None, able: Capabilities) -> bool:
    """`echo`: the prompt in front of the answer."""
    if value and not able.echo:
        raise Unsupported("echo: this server does not repeat the prompt; put it in front of the answer yourself")
    return bool(value)


def suffix(value: Any) -> None:
    """`suffix`: text to be filled in before it."""
    if value:
        raise Unsupported("suffix: this server cannot fill in text before a suffix; leave it out")


def media(kind: str, path: str) -> None:
    """An image, a sound, a file: the engine takes text alone."""
    raise Unsupported(f"{path}: {kind} cannot be read; this server takes text alone")


def generation(able: Capabilities) -> None:
    """Endpoints that generate text."""
    if not able.generate:
        raise Unsupported(
            "this server's model embeds text and does not generate; ask for embeddings, or load another model"
        )


def embeddings(able: Capabilities) -> None:
    """Endpoints that embed texts."""
    if not able.embeddings:
        why = "it ranks documents; ask for /rerank" if able.rerank else "load one that can"
        raise Unsupported(f"this server's model gives no embeddings: {why}")


def rerank(able: Capabilities) -> None:
    """Endpoints that rank documents."""
    if not able.rerank:
        raise Unsupported("this server's model has no classifier to rank documents with; load a reranker")
