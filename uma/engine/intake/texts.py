"""Tokens of texts to embed, or of pairs to rank. Belongs to the Trio thread."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from uma.engine.intake.prompt import PromptReader
from uma.errors import BadRequest, PromptTooLarge
from uma.llama.model import Model

MAX_PAIRED_CHARS = 8 * 2**20
"""Maximum text that one ranking reads, the query counted with each document: its tokens take about as many bytes."""


_PLACES = re.compile(r"\{query\}|\{document\}")


class TextReader:
    """Prepares texts for one model, in the lanes, threads and limits of its prompts."""

    def __init__(self, model: Model, prompts: PromptReader) -> None:
        self._model = model
        self._prompts = prompts

    async def read(self, texts: Sequence[str], max_tokens: int, *, lane: int, takes_empty: bool) -> list[array[int]]:
        """Tokens of each text, with those that the model needs around it. Spellings of special tokens are these tokens.

        Raises `PromptTooLarge` for a text of more than `max_tokens`, `BadRequest` for one without tokens unless it
        `takes_empty`, and `Overloaded`.
        """
        for index, text in enumerate(texts):
            self._prompts.check_bytes_of(text, where=f"texts[{index}]")

        def tokenize(index: int) -> array[int]:
            _check_bound(self._model, texts[index], max_tokens, f"texts[{index}]")
            tokens = self._tokens(texts[index])
            return tokens if takes_empty and not tokens else _checked(tokens, max_tokens, f"texts[{index}]")

        return await self._prompts.prepare_texts(tokenize, list(map(len, texts)), lane)

    async def check_ids(self, lists: Sequence[Sequence[int]], max_tokens: int, *, lane: int) -> list[array[int]]:
        """Check texts that came as token ids. Raises what `read` does."""
        limit = self._model.vocab.n_tokens

        def checked(index: int) -> array[int]:
            ids = lists[index]
            if max(ids) >= limit:
                raise BadRequest.at(f"token_ids[{index}]", f"{max(ids)} is not in the vocabulary of {limit:,} tokens")
            return _checked(array("i", ids), max_tokens, f"token_ids[{index}]")

        return await self._prompts.prepare_texts(checked, list(map(len, lists)), lane)

    async def read_pairs(self, query: str, documents: Sequence[str], max_tokens: int, *, lane: int) -> list[array[int]]:
        """Tokens of the query with each document, in the model's form for ranking. Raises what `read` does."""
        self._prompts.check_bytes_of(query, where="query")
        for index, document in enumerate(documents):
            self._prompts.check_bytes_of(document, where=f"documents[{index}]")
        sizes = [len(query) + len(document) for document in documents]
        if sum(sizes) > MAX_PAIRED_CHARS:
            raise PromptTooLarge.at(
                "documents",
                f"prompt too large: {sum(sizes):,} characters, the query counted with each of "
                f"{len(documents):,} documents; {MAX_PAIRED_CHARS:,} are read for one request; send fewer at once",
            )
        form = self._model.rerank_template

        def tokenize(index: int) -> array[int]:
            document = documents[index]
            _check_bound(self._model, document, max_tokens, f"documents[{index}]")
            if form is None:
                tokens = self._pair(query, document)
            else:
                tokens = self._tokens(_filled(form, query, document), special=False)
            return _checked(tokens, max_tokens, f"documents[{index}]")

        return await self._prompts.prepare_texts(tokenize, sizes, lane)

    def _tokens(self, text: str, *, special: bool = True, parse_special: bool = True) -> array[int]:
        ids = self._model.vocab.tokenize(text, add_special=special, parse_special=parse_special)
        return array("i", ids.tolist())

    def _pair(self, query: str, document: str) -> array[int]:
        """Query and document between the model's marks, as in llama.cpp's server."""
        vocab = self._model.vocab
        end = vocab.eos if vocab.eos >= 0 else vocab.sep
        ends = [end] if vocab.adds_eos else []
        begins = [vocab.bos] if vocab.adds_bos else []
        between = [vocab.sep] if vocab.adds_sep else []
        first, second = (self._tokens(text, special=False, parse_special=False) for text in (query, document))
        return array("i", [*begins, *first, *ends, *between, *second, *ends])


def _filled(form: str, query: str, document: str) -> str:
    """The template filled with a pair; placeholders within query or document are left as they are."""
    return _PLACES.sub(lambda place: query if place[0] == "{query}" else document, form)


def _check_bound(model: Model, text: str, max_tokens: int, where: str) -> None:
    """Refuse a text that must have too many tokens, before it is tokenized."""
    least = model.vocab.least_tokens(text) if len(text) > max_tokens else 0
    if least > max_tokens:
        raise _too_large(where, f"{len(text):,} characters, {least:,} tokens at least,", max_tokens)


def _checked(tokens: array[int], max_tokens: int, where: str) -> array[int]:
    if not tokens:
        raise BadRequest.at(where, "gives no token at all, so there is nothing to compute")
    if len(tokens) > max_tokens:
        raise _too_large(where, f"{len(tokens):,} tokens", max_tokens)
    return tokens


def _too_large(where: str, size: str, max_tokens: int) -> PromptTooLarge:
    return PromptTooLarge.at(
        where,
        f"prompt too large: {size} do not fit the context of {max_tokens:,} tokens for texts, and "
        "none is cut; split the text, and embed its parts",
    )
