"""Ollama's embeddings: `POST /api/embed`, and `/api/embeddings`, which it has replaced and which clients still use.

Ollama cuts a text that is too long unless `truncate` is false. Here none is ever cut: it is an error in either case.
Where a text has no token, its embedding is an empty list, which Ollama's own clients can read, and not null.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import attrs

from uma.constraints import Range, Text, show
from uma.errors import BadRequest
from uma.http.ask import Said
from uma.http.embedding import Computes, EmbedAsk, warnings_of
from uma.http.reader import Reader
from uma.net.quota import Lane
from uma.types import Embeddings

_NS_PER_MS = 1_000_000


@attrs.frozen(kw_only=True)
class EmbedOptions:
    """`options`: those of Ollama's are about generating, or about loading a model."""

    priority: Lane | None = None


@attrs.frozen(kw_only=True)
class _OllamaTexts:
    model: str | None = None
    options: EmbedOptions | None = None
    priority: Lane | None = None

    @property
    def lane(self) -> Lane | None:
        """Lane as it stands in `options` or beside them."""
        return self.priority if self.priority is not None or self.options is None else self.options.priority


@attrs.frozen(kw_only=True)
class EmbedBody(_OllamaTexts):
    """`POST /api/embed`."""

    input: Any = None
    truncate: bool | None = None
    """Taken, and without effect: no text is cut."""
    dimensions: Annotated[int, Range(0)] | None = None
    """0: all."""
    fail_on_empty: bool | None = None
    """UMA's own: 400 for a text of no token."""


@attrs.frozen(kw_only=True)
class OllamaEmbeddingsBody(_OllamaTexts):
    """`POST /api/embeddings`."""

    prompt: Annotated[str, Text()] | None = None


def _read(fields: Mapping[str, Any], reader: Reader) -> EmbedAsk | Said:
    began, body = time.monotonic(), reader.body(fields, EmbedBody)
    if not body.input and isinstance(body.input, str | list | None):
        return Said({"model": reader.model, "embeddings": []})
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not (isinstance(texts, list) and all(isinstance(each, str) for each in texts)):
        raise BadRequest.at("input", f"expected a string or a list of strings, not {show(body.input)}")
    return EmbedAsk(
        value=body.input,
        field="input",
        form=partial(_form, reader.model, reader.load_ms, began),
        priority=body.lane,
        dimensions=body.dimensions or None,
        fail_on_empty=body.fail_on_empty,
    )


def _form(model: str, load_ms: float, began: float, vectors: Sequence[Any], found: Embeddings) -> dict[str, Any]:
    return {
        "model": model,
        "embeddings": [[] if each is None else each for each in vectors],
        "total_duration": round((load_ms + 1000 * (time.monotonic() - began)) * _NS_PER_MS),
        "load_duration": round(load_ms * _NS_PER_MS),
        "prompt_eval_count": sum(found.prompt_tokens),
        **warnings_of(found),
    }


def _read_prompt(fields: Mapping[str, Any], reader: Reader) -> EmbedAsk | Said:
    body = reader.body(fields, OllamaEmbeddingsBody)
    if not body.prompt:
        return Said({"embedding": []})
    return EmbedAsk(value=body.prompt, field="prompt", form=_one, priority=body.lane, normalizes=False)


def _one(vectors: Sequence[Any], found: Embeddings) -> dict[str, Any]:
    return {"embedding": [] if vectors[0] is None else vectors[0], **warnings_of(found)}


embed_texts = Computes(_read)
"""`POST /api/embed`. Without texts it only says that the model is loaded."""
embed_prompt = Computes(_read_prompt)
"""`POST /api/embeddings`: one text, whose embedding is not normalised."""
