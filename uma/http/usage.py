"""What a request has used and how fast it was served, in the words of OpenAI and of llama-server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from uma.types import Answer, CutCall, Finished, ToolCall


def openai_usage(results: Sequence[Finished]) -> dict[str, Any]:
    """OpenAI's `usage` of all prompts of one HTTP request, each with all its answers."""
    used = [result.usage for result in results]
    prompt, completion = sum(each.prompt_tokens for each in used), sum(each.completion_tokens for each in used)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in used)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.reasoning_tokens for each in used)},
        **of_truncation(results),
    }


def calls_of(ended: Finished | Answer) -> tuple[ToolCall | CutCall, ...]:
    """The calls of an answer. The last one's arguments are cut off where the output ended inside it, as OpenAI and
    Anthropic have it: the reason is `length` then (at Anthropic's a stop string has its own).
    """
    return ended.tool_calls if ended.cut_call is None else (*ended.tool_calls, ended.cut_call)


def answer_parts(ended: Finished | Answer) -> Iterator[str | ToolCall | CutCall]:
    """The text and the calls of a whole answer in their order, without texts that are empty."""
    text, begin, calls = ended.text or "", 0, calls_of(ended)
    ends = ended.call_offsets or (len(text),) * len(calls)  # a server of before tells no offsets
    for call, end in zip(calls, ends, strict=True):
        if text[begin:end]:
            yield text[begin:end]
        yield call
        begin = end
    if text[begin:]:
        yield text[begin:]


def numbered(results: Sequence[Finished]) -> Iterator[tuple[int, Finished, Answer]]:
    """Every answer of every request, by its place among an OpenAI answer's choices."""
    every = ((result, answer) for result in results for answer in result.every_answer)
    return ((place, result, answer) for place, (result, answer) in enumerate(every))


def timings(result: Finished) -> dict[str, Any]:
    """llama-server's `timings` of one request: `prompt_n` counts the tokens that were computed."""
    usage, metrics = result.usage, result.metrics
    computed = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": metrics.prefill_ms,
        "prompt_per_token_ms": _over(metrics.prefill_ms, computed),
        "prompt_per_second": _over(1000.0 * computed, metrics.prefill_ms),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": decoded_ms(result),
        "predicted_per_token_ms": _over(1000.0, metrics.tokens_per_second),
        "predicted_per_second": metrics.tokens_per_second,
        "queue_ms": metrics.queue_ms,
        "ttft_ms": metrics.ttft_ms,
    }


def decoded_ms(result: Finished) -> float:
    """What all tokens of an answer take at the rate at which they came: clients divide their number by it.

    The first comes of the prompt's batch, so that the time from the first to the last is that of one token less.
    """
    return _over(1000.0 * result.usage.completion_tokens, result.metrics.tokens_per_second)


def _over(amount: float, by: float) -> float:
    return round(amount / by, 3) if by else 0.0


def finish_reason(ended: Finished | Answer) -> str:
    """`stop`, `length` or `tool_calls`, as OpenAI has it."""
    if ended.reason == "length" or ended.cut_call is not None:
        return "length"
    return "tool_calls" if ended.tool_calls else "stop"


def stop_reason(ended: Finished | Answer) -> dict[str, Any]:
    """vLLM's `stop_reason` of an OpenAI choice: the stop string that ended it; nothing where none did."""
    return {} if ended.stop_string is None else {"stop_reason": ended.stop_string}


def warnings(results: Sequence[Finished], *, is_unbounded: bool, before: Sequence[str]) -> dict[str, Any]:
    """See `Writer.warnings`; `before` are further ones."""
    every = (line for each in results for line in each.warnings)
    kept = (line for line in every if not (is_unbounded and line.startswith("max_tokens: ")))
    lines = list(dict.fromkeys([*before, *kept]))
    dropped = dropped_messages(results)
    return ({"warnings": lines} if lines else {}) | ({"dropped_messages": dropped} if dropped else {})


def of_truncation(results: Sequence[Finished]) -> dict[str, int]:
    """Members of `usage` about turns that were left out of a conversation; nothing where none were."""
    summary_tokens = sum(each.usage.summary_tokens for each in results)
    counts = {"dropped_messages": dropped_messages(results), "summary_tokens": summary_tokens}
    return {name: count for name, count in counts.items() if count}


def dropped_messages(results: Sequence[Finished]) -> int:
    """How many messages of the conversation were left out of its prompt."""
    return max((each.dropped_messages for each in results), default=0)
