"""What the dialects' embeddings share: the request made of their fields, and vectors written as JSON.

Vectors are large: more than a few are written in another thread, so that streams do not wait for them.
"""

from __future__ import annotations

import re
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import attrs
import orjson
import trio

from uma.errors import BadRequest, PromptTooLarge
from uma.http import abilities
from uma.http.exchange import Exchange
from uma.http.fields import lane_alone
from uma.http.gateway import Gateway
from uma.net.quota import Lane
from uma.protocol.codec import MAX_INLINE_FIGURES
from uma.types import Embeddings, EmbedRequest

Encoding = Literal["float", "base64"]

_PLACE = re.compile(r"^(?:texts|token_ids|documents)(?:\[(\d+)\])?", re.MULTILINE)
"""How the engine names a text."""


@contextmanager
def errors_naming(field: str, *, is_single: bool = False) -> Iterator[None]:
    """A block whose errors name a text as the body does: by its place in `field`, or `field` alone for a single one."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(_renamed(str(error), field, is_single=is_single)) from None
    except PromptTooLarge as error:
        raise error.at(_renamed(error.message, field, is_single=is_single)) from None
    except BadRequest as error:
        raise BadRequest(_renamed(error.message, field, is_single=is_single)) from None


def _renamed(message: str, field: str, *, is_single: bool) -> str:
    return _PLACE.sub(lambda found: field if is_single or found[1] is None else f"{field}[{found[1]}]", message)


def warnings_of(found: Embeddings) -> dict[str, Any]:
    """`warnings`, where there are any."""
    return {"warnings": found.warnings} if found.warnings else {}


@attrs.frozen
class Input:
    """Texts to embed, by the name that the body gives them."""

    field: str
    is_single: bool
    """One text by itself, not in a list."""
    texts: tuple[str, ...] | None
    token_ids: tuple[tuple[int, ...], ...] | None

    @classmethod
    def of(cls, prompts: Sequence[dict[str, Any]], field: str, *, is_single: bool) -> Input:
        """Texts, as `openai_completions.prompts` reads them. Raises `BadRequest` for two kinds in one list."""
        texts = tuple(each["prompt"] for each in prompts if "prompt" in each)
        token_ids = tuple(each["token_ids"] for each in prompts if "token_ids" in each)
        if texts and token_ids:
            raise BadRequest(f"{field}: some are strings and some token ids; send each kind in a request of its own")
        return cls(field, is_single, texts or None, token_ids or None)

    def errors_naming(self) -> AbstractContextManager[None]:
        """See `errors_naming`."""
        return errors_naming(self.field, is_single=self.is_single)


@attrs.frozen
class InputRequest:
    """Texts to embed, and the request for them."""

    given: Input
    request: EmbedRequest


def request_of(
    gateway: Gateway,
    http: Exchange,
    given: Input,
    *,
    priority: Lane | None,
    dimensions: int | None = None,
    normalize: bool = True,
    fail_on_empty: bool | None = None,
) -> InputRequest:
    """The request for the embeddings of `given`. Any thread. Raises `BadRequest` with the body's names."""
    abilities.embeddings(gateway.source.info.capabilities)
    with given.errors_naming():
        request = EmbedRequest(
            http.id,
            texts=given.texts,
            token_ids=given.token_ids,
            dimensions=dimensions,
            normalize=normalize,
            fail_on_empty=bool(fail_on_empty),
            priority=lane_alone(priority, http),
        )
    return InputRequest(given, request)


async def embed(gateway: Gateway, http: Exchange, asked: InputRequest) -> Embeddings:
    """The embeddings asked for. Raises what `Source.embed` does; that and the warnings have the body's names."""
    given = asked.given
    with given.errors_naming():
        found = await gateway.compute(http, asked.request, gateway.source.embed, lambda found: sum(found.prompt_tokens))
    warnings = tuple(_renamed(each, given.field, is_single=given.is_single) for each in found.warnings)
    return attrs.evolve(found, warnings=warnings)


async def answer_vectors(
    gateway: Gateway,
    http: Exchange,
    found: Embeddings,
    form: Callable[[Sequence[Any]], Any],
    encoding: Encoding = "float",
) -> None:
    """Answer with `form` of the vectors, each as numbers or in base64 (32-bit floats, little-endian)."""
    if found.n_figures <= MAX_INLINE_FIGURES:
        data = _written(found.vectors, form, encoding)
    else:
        data = await trio.to_thread.run_sync(
            _written, found.vectors, form, encoding, limiter=gateway.writers, abandon_on_cancel=True
        )
    with gateway.unread.holding(len(data)):
        await http.answer(data)


def _written(vectors: Sequence[array[float] | None], form: Callable[[Sequence[Any]], Any], encoding: Encoding) -> bytes:
    if encoding == "base64":
        return orjson.dumps(form([None if each is None else b64encode(each).decode("ascii") for each in vectors]))
    import numpy as np  # noqa: PLC0415  (a gateway to a socket starts without it)

    rows = [None if each is None else np.frombuffer(each, np.float32) for each in vectors]
    return orjson.dumps(form(rows), option=orjson.OPT_SERIALIZE_NUMPY)
