"""Proofs of claims about embeddings and rankings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from uma.contracts.proofs import PROMPT, Claim, Proof, Question, answered, demand, refused
from uma.types import ServerInfo

LONG_TEXT = 128
"""Tokens of the long text in which one token is exchanged: so many that a mean hardly changes."""
PRESENT = 0.3
"""Minimum ratio of a token's influence in the long text to that in a text of two, where the embedding is that token's
own state. With a mean the ratio is about 2 / `LONG_TEXT`."""

SAME = 0.001
"""Maximum influence, relative to the first token's, that counts as none: texts that share a batch differ by
rounding."""


def about_embeddings(info: ServerInfo) -> Iterator[Claim]:
    """Claims about embeddings, pooling and rankings."""
    capabilities = info.capabilities
    asked = {"type": "embed", "texts": [PROMPT, "Hello"]}
    if capabilities.embeddings:
        width, pooling = capabilities.embedding_dimensions, capabilities.pooling
        yield Claim("embeddings", f"{width} dimensions", partial(_embeds, width))
        too_many = partial(refused, asked | {"dimensions": width + 1}, "dimensions")
        yield Claim(f"embeddings: dimensions = {width + 1}", "no", too_many)
        if capabilities.tokenize:
            is_causal = capabilities.generate
            length = min(LONG_TEXT, info.limits.n_ctx)
            yield Claim("pooling", pooling, partial(_pools, pooling, length, is_causal=is_causal))
    else:
        yield Claim("embeddings", "no", partial(refused, asked, "t"))
    ranking = {"type": "rerank", "query": "fox", "documents": [PROMPT, "Hello"]}
    if capabilities.rerank:
        yield Claim("rerank", "yes", partial(_reranks, ranking))
        yield Claim("pooling", capabilities.pooling, partial(_scores, capabilities.pooling, ranking))
    else:
        yield Claim("rerank", "no", partial(refused, ranking, "rank"))


def _embeds(width: int) -> Proof:
    both = answered((yield Question({"type": "embed", "texts": [PROMPT, "Hello"]}))).last["embeddings"]
    cut = answered((yield Question({"type": "embed", "texts": ["Hello"], "dimensions": 1}))).last["embeddings"]
    demand(
        [len(vector) for vector in both] == [width] * 2, f"{[len(vector) for vector in both]} figures, not {width} each"
    )
    lengths = [sum(figure * figure for figure in vector) for vector in (*both, *cut)]
    demand(all(abs(length - 1) < 1e-3 for length in lengths), f"squares of lengths {lengths}: not normalised")
    demand(both[0] != both[1], "two texts have one embedding")
    return f"2 texts, {width} figures each, of length 1; also cut to 1"


def _reranks(ranking: dict[str, Any]) -> Proof:
    results = answered((yield Question(ranking))).last["results"]
    demand(sorted(result["index"] for result in results) == [0, 1], "not each document is ranked once")
    demand(results[0]["score"] >= results[1]["score"], "not the best first")
    return "2 documents, the best first"


def _scores(pooling: str, ranking: dict[str, Any]) -> Proof:
    demand(pooling == "rank", f"documents are ranked, which {pooling} gives no score for")
    scores = {result["score"] for result in answered((yield Question(ranking))).last["results"]}
    demand(len(scores) == 2, "two documents have one score")
    return "a score for each pair of query and document"


def _pools(pooling: str, length: int, *, is_causal: bool) -> Proof:
    """Prove the kind of pooling, by exchanging the first or the last token of a short and of a long text.

    If the embedding is the state of the exchanged token, a long text changes as much as a short one. In a mean the
    token is one of many. If the embedding is the state of the token at the other end, the change is smaller than at
    that end.

    In a causal model every later state can depend on the first token, so a mean depends on it as well. But only the
    last token's own state depends on the last token. So the last token alone decides: exchanging it changes nothing
    with `cls`, little with `mean`, and everything with `last`.
    """
    ids = answered((yield Question({"type": "tokenize", "prompt": PROMPT}))).last["token_ids"]
    one, other, rest, *_ = dict.fromkeys(ids[1:])
    texts = [
        text
        for size in (2, length)
        for vector in (one, other)
        for text in ([vector] + [rest] * (size - 1), [rest] * (size - 1) + [vector])
    ]
    found = answered((yield Question({"type": "embed", "token_ids": texts}))).last["embeddings"]
    first, last, long_first, long_last = (_distance(found[at], found[at + 2]) for at in (0, 1, 4, 5))
    shows_first, shows_last = long_first > PRESENT * first, long_last > PRESENT * last
    if is_causal:
        is_felt = last > SAME * first
        is_so = {"cls": not is_felt, "last": is_felt and shows_last, "mean": is_felt and not shows_last}
    else:
        is_so = {
            "cls": shows_first and long_first > long_last,
            "last": shows_last and long_last > long_first,
            "mean": last > 0 and not shows_first and not shows_last,
        }
    seen = f"of {length} tokens the first moves it by {long_first:.3f}, the last by {long_last:.3f}"
    demand(is_so.get(pooling, False), f"{seen}; of 2 tokens by {first:.3f} and {last:.3f}: not {pooling}")
    return seen


def _distance(one: list[float], other: list[float]) -> float:
    return float(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5)
