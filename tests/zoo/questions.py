"""Questions to real models at temperature 0, and llama-server's answers to them."""

from __future__ import annotations

import math
from typing import Any

import attrs
import httpx

from benchmarks.reference import RealModel
from uma.types import Message, Request, SamplingParams

MODELS: tuple[RealModel, ...] = ("smollm2", "gemma3")
"""Those whose answers of llama-server are recorded."""
MAX_TOKENS = 48
LINE_END = "\n"
"""Ends a base model's answer: it goes on with a question of its own."""
CLEAR = 0.5
"""Minimum difference of the two best tokens' log probabilities, at each token of an answer and at its end. Where it is
less, the choice can be a matter of rounding: quantized weights are multiplied with other roundings in batches of other
sizes and on other CPUs, and attention adds in another order where cells lie elsewhere.
"""
SAME_ARITHMETIC = ("-c", "1024", "-np", "1", "-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--jinja")
"""Flags of llama-server for what `engine_world.config_for` has UMA do."""

QUESTIONS: dict[RealModel, tuple[str, ...]] = {
    "smollm2": (
        "What is the capital of Japan?",
        "What is the capital of Kenya?",
        "What is the capital of Russia?",
        "What is the capital of Cuba?",
        "What is the capital of Poland?",
        "What is the plural of mouse?",
        "What is the plural of foot?",
        "What is the plural of woman?",
        "What is the plural of leaf?",
        "What is the plural of child?",
        "What is the opposite of early?",
        "What is the opposite of north?",
        "What is the opposite of high?",
        "What is the chemical symbol of oxygen?",
        "Count from 1 to 10.",
    ),
    "gemma3": (
        "What is the capital of Japan?",
        "What is the capital of Kenya?",
        "What is the capital of Austria?",
        "What is the capital of Germany?",
        "What is the capital of Greece?",
        "What is the capital of Poland?",
        "What is the capital of Spain?",
        "What is the capital of Sweden?",
        "What language is spoken in Japan?",
        "What is the opposite of big?",
        "What is the opposite of day?",
        "What color is the sky?",
        "What color is grass?",
        "What do bees make?",
        "What is 5 + 5?",
    ),
}
"""Of some 240 plain questions, and 60 to Gemma, 15 for each model whose answers are clear from beginning to end."""
BEFORE = "Question: What is the capital of France?\nAnswer: The capital of France is Paris.\n"
"""An example, from which a base model takes how it is to answer."""


@attrs.frozen
class Reply:
    """An answer of llama-server's."""

    text: str
    clear: float
    """The least that a token of it, or its end, was likelier than any other."""


def asked(model: RealModel, question: str) -> dict[str, Any]:
    """A question's fields in a `Request`: Gemma here is a base model, which goes on with a text."""
    if model == "gemma3":
        return {"prompt": _text(question)}
    return {"messages": (Message("user", question),)}


def request(model: RealModel, question: str, **fields: Any) -> Request:
    """A question to UMA."""
    stop = (LINE_END,) if model == "gemma3" else ()
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, stop=stop)
    return Request("a", sampling=sampling, **asked(model, question), **fields)


def replied(client: httpx.Client, model: RealModel, question: str) -> Reply:
    """llama-server's answer."""
    how: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS, "cache_prompt": False}
    if model == "gemma3":
        body = client.post("/v1/completions", json={**how, "prompt": _text(question), "logprobs": 2})
        choice = body.raise_for_status().json()["choices"][0]
        text = choice["text"].partition(LINE_END)[0]
    else:
        how |= {"messages": [{"role": "user", "content": question}], "logprobs": True, "top_logprobs": 2}
        choice = client.post("/v1/chat/completions", json=how).raise_for_status().json()["choices"][0]
        text = choice["message"]["content"]
    clear = math.inf
    for token in choice["logprobs"]["content"]:
        best, second = (each["logprob"] for each in token["top_logprobs"][:2])
        clear = min(clear, best - second)
        if LINE_END in token["token"] and model == "gemma3":
            break
    return Reply(text, clear)


def _text(question: str) -> str:
    return f"{BEFORE}Question: {question}{LINE_END}Answer:"
