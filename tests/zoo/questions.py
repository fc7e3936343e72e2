"""Questions to real models at temperature 0, and llama-server's answers to them."""

from __future__ import annotations

from typing import Any, get_args

import attrs
import httpx

from benchmarks.reference import RealModel
from uma.types import Message, Request, SamplingParams

MODELS = get_args(RealModel)
MAX_TOKENS = 16
CLEAR = 0.5
"""Minimum difference of the two best tokens' log probabilities at which the choice is no matter of rounding: quantized
weights are multiplied with other roundings in batches of other sizes, and on other CPUs.
"""
SAME_ARITHMETIC = ("-c", "1024", "-np", "1", "-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--jinja")
"""Flags of llama-server for what `engine_world.config_for` has UMA do."""

QUESTIONS = (
    "What is the capital of France?",
    "What is 12 + 30?",
    "What is the first letter of the alphabet?",
    "List the days of the week.",
    "What is the opposite of hot?",
    "How many days are in a week?",
    "List the months of the year.",
    "What do bees make?",
    "Which planet is the largest?",
    "What language is spoken in Brazil?",
    "What is the chemical symbol of gold?",
    "Count from one to ten.",
    "Who was the first president of the United States?",
    "Is the Earth flat?",
    "Why is the sky blue?",
)


@attrs.frozen
class Reply:
    """An answer of llama-server's."""

    text: str
    clear: str
    """Its beginning, up to the first token that another one nearly was."""


def asked(model: RealModel, question: str) -> dict[str, Any]:
    """A question's fields in a `Request`: Gemma here is a base model, which goes on with a text."""
    if model == "gemma3":
        return {"prompt": _text(question)}
    return {"messages": (Message("user", question),)}


def request(model: RealModel, question: str) -> Request:
    """A question to UMA."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    return Request("a", sampling=sampling, cache_prompt=False, **asked(model, question))


def replied(client: httpx.Client, model: RealModel, question: str) -> Reply:
    """llama-server's answer."""
    how = {"temperature": 0, "cache_prompt": False}
    if model == "gemma3":
        body = client.post(
            "/v1/completions",
            json={"prompt": _text(question), "max_tokens": MAX_TOKENS, "logprobs": 2, **how},
        )
        choice = body.raise_for_status().json()["choices"][0]
        text = choice["text"]
    else:
        said = {"messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS}
        body = client.post("/v1/chat/completions", json={**said, "logprobs": True, "top_logprobs": 2, **how})
        choice = body.raise_for_status().json()["choices"][0]
        text = choice["message"]["content"]
    clear = b""
    for token in choice["logprobs"]["content"]:
        best, second = (each["logprob"] for each in token["top_logprobs"][:2])
        if best - second < CLEAR:
            break
        clear += bytes(token["bytes"])
    return Reply(text, clear.decode("utf-8", "ignore"))


def _text(question: str) -> str:
    return f"Question: {question}\nAnswer:"
