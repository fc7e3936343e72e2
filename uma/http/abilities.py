"""Abilities that depend on the engine and the model: one place for each.

Each function takes a field as the request has it and returns what `SamplingParams` need, or refuses it by name where
the source's `Capabilities` lack it. What the fields of a dialect mean is decided here, so that no dialect ignores one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from uma.constraints import Range, show
from uma.errors import BadRequest
from uma.http.problem import Unimplemented, Unsupported
from uma.http.reader import Reader
from uma.types import MAX_LOGPROBS, Capabilities, Grammar

_NO_TOKEN = re.compile(r"[+-]\d+|")
"""What is meant as an id and is none, and the text without tokens."""

_OF_FORMAT = ("schema", "name", "description", "strict")
"""Members of a format. A name and a description change nothing, and a schema is always kept to strictly."""


def response_format(value: Any, field: str, reader: Reader, *, is_flat: bool = False) -> Grammar | None:
    """OpenAI's `{"type": "text" | "json_object" | "json_schema", …}`; `schema` stands flat or in `json_schema`.

    `is_flat`: where it is asked for when it is missing. Members that are not known are ignored.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") not in ("text", "json_object", "json_schema"):
        raise BadRequest.at(field, f"expected an object of type text, json_object or json_schema, not {show(value)}")
    reader.ignored.add_unknown(value, (*_OF_FORMAT, "type", "json_schema"), field)
    if value["type"] == "text":
        return None
    inner = value.get("json_schema", value)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if "json_schema" in value and isinstance(inner, dict):
        reader.ignored.add_unknown(inner, _OF_FORMAT, f"{field}.json_schema")
    if value["type"] == "json_object" and schema is None:
        return grammar({"json_object": True}, field, reader)
    is_flat = "json_schema" not in value and (is_flat or "schema" in value)
    place = f"{field}.schema" if is_flat else f"{field}.json_schema.schema"
    if not isinstance(schema, dict):
        raise BadRequest.at(place, "is required (an object)")
    return json_schema(schema, place, reader, field)


def json_format(value: Any, field: str, reader: Reader) -> Grammar | None:
    """Ollama's `format`: empty, `"json"`, or a JSON Schema."""
    if value is None or value == "":
        return None
    if value == "json":
        return grammar({"json_object": True}, field, reader)
    return json_schema(value, field, reader)


def json_schema(value: Any, place: str, reader: Reader, field: str | None = None) -> Grammar | None:
    """A JSON Schema by itself, at `place`. `field` asks for it, where that is another."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequest.at(place, f"expected a JSON Schema, not {show(value)}")
    reader.names["grammar.json_schema"] = place
    return grammar({"json_schema": value}, field or place, reader)


def gbnf(value: Any, field: str, reader: Reader) -> Grammar | None:
    """A grammar in llama.cpp's notation."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BadRequest.at(field, f"expected a grammar as a string, not {show(value)}")
    reader.names["grammar.gbnf"] = field
    return grammar({"gbnf": value}, field, reader)


def grammar(given: dict[str, Any], field: str, reader: Reader) -> Grammar:
    """The grammar that `field` asks for; `given` has the one field of `Grammar` that it is."""
    (form,) = given
    reader.names.setdefault(f"grammar.{form}", field)
    reader.names["grammar"] = field
    if form not in reader.able.grammars:
        raise Unsupported.at(
            field, f"this server cannot constrain its output by {form.replace('_', ' ')}; leave it out"
        )
    try:
        return Grammar(**given)
    except ValueError as error:
        raise BadRequest.at(field, f"{error}") from None


TopLogprobs = Annotated[int, Range(0, MAX_LOGPROBS)] | None
"""How many likeliest tokens to tell with each."""


def chat_logprobs(wanted: bool | None, top: int | None, able: Capabilities) -> int | None:
    """`logprobs: true` with `top_logprobs`."""
    if not wanted:
        if top:
            raise BadRequest.at("top_logprobs", "needs logprobs to be true")
        return None
    return logprobs(0 if top is None else top, "top_logprobs", able)


def logprobs(value: int | None, field: str, able: Capabilities) -> int | None:
    """How many likeliest tokens to tell with each; None: not even the token's own."""
    if value is None:
        return None
    if able.max_logprobs < 0:
        raise Unsupported.at(field, "this server cannot give log probabilities; leave it out")
    if value > able.max_logprobs:
        raise BadRequest.at(field, f"{value} must be at most {able.max_logprobs}")
    return value


def post_sampling_probs(value: bool | None) -> None:
    """llama-server's `post_sampling_probs`: probabilities behind the sampler's cuts."""
    if value:
        raise Unsupported.at(
            "post_sampling_probs", "log probabilities are the model's own here, before the sampler; leave it out"
        )


def answers(value: int | None, field: str, able: Capabilities) -> int | None:
    """`n`, `best_of`."""
    if value is not None and value > able.max_answers:
        raise Unsupported.at(field, f"this server gives at most {able.max_answers} per prompt, not {value}")
    return value


def logit_bias(value: Any, able: Capabilities, *, bans_by_false: bool = False) -> dict[str, float] | None:
    """`{"token": bias}`, or a list of pairs; in llama-server's dialect `false` bans. An empty one asks for nothing.

    A token is an id, or a text: then each of its tokens, as llama-server has it.
    """
    field = "logit_bias"
    if value is None or value in ({}, []):
        return None
    if "logit_bias" not in able.sampling_params:
        raise Unsupported.at(field, "this server cannot bias tokens; leave it out")
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise BadRequest.at(field, f"expected token ids and their biases from -100 to 100, not {show(value)}")
    return dict(_bias(pair, field, bans_by_false=bans_by_false) for pair in pairs)


def _bias(pair: Any, field: str, *, bans_by_false: bool) -> tuple[str, float]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise BadRequest.at(field, f"expected pairs of a token id and its bias, not {show(pair)}")
    token, bias = pair
    is_id = isinstance(token, int) and not isinstance(token, bool) and token >= 0
    if not is_id and (not isinstance(token, str) or _NO_TOKEN.fullmatch(token)):
        raise BadRequest.at(field, f"{show(token)}: expected a token id or a text")
    if bias is False and bans_by_false:
        return str(token), -100.0
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
        raise BadRequest.at(field, f"{show(token)}: expected a bias from -100 to 100, not {show(bias)}")
    return str(token), float(bias)


def echo(value: bool | None, able: Capabilities) -> bool:
    """`echo`: the prompt in front of the answer."""
    if value and not able.echo:
        raise Unsupported.at("echo", "this server does not repeat the prompt; put it in front of the answer yourself")
    return bool(value)


_SEES, _HEARS = "this model does not support image input", "this model does not support audio input"
_UNABLE = {
    **dict.fromkeys(("image_url", "input_image", "image", "images"), _SEES),
    **dict.fromkeys(("input_audio", "audio_url"), _HEARS),
    "multimodal_data": "this model does not support image or audio input",
}


def media(kind: str, path: str) -> None:
    """An image, a sound, a file: what the engine does not take there."""
    if kind in _UNABLE:
        raise Unsupported.at(
            path, f"{_UNABLE[kind]} ({kind}); leave it out, or ask a model with a projector for that (an mmproj file)"
        )
    raise Unsupported.at(path, f"{kind} cannot be read here; leave it out, or send its text")


def generation(able: Capabilities) -> None:
    """Endpoints that generate text."""
    if not able.generate:
        raise Unsupported(
            "this server's model embeds text and does not generate; ask for embeddings, or load another model"
        )


def hearing(able: Capabilities) -> None:
    """Endpoints that take sounds."""
    if not able.audio:
        raise Unsupported("this server's model does not support audio input; load one with such a projector (--mmproj)")


def embeddings(able: Capabilities) -> None:
    """Endpoints that embed texts."""
    if not able.embeddings:
        why = "it ranks documents; ask for /rerank" if able.rerank else "load one that can"
        raise Unsupported(f"this server's model gives no embeddings: {why}")


def decisions(able: Capabilities) -> None:
    """Endpoints that decide."""
    if not able.decisions:
        raise Unimplemented(
            "decisions are not supported by this server's model: it does not generate, or is a decision model with a "
            "head of its own; load a chat model (an instruct GGUF)"
        )


def rerank(able: Capabilities) -> None:
    """Endpoints that rank documents."""
    if not able.rerank:
        raise Unsupported("this server's model has no classifier to rank documents with; load a reranker")
