"""What a request has used and how fast it was served, in the words of OpenAI and of llama-server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from uma.types import Finished


@attrs.frozen
class Total:
    """The sum over prompts and choices. A prompt with several choices counts once; its choices all count."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, results: Sequence[Finished], choices: int = 1) -> Total:
        """`results` in the order of requests, `choices` of them for each prompt."""
        firsts = [results[index] for index in range(0, len(results), choices)]
        return cls(
            sum(each.usage.prompt_tokens for each in firsts),
            sum(each.usage.cached_tokens for each in firsts),
            sum(each.usage.completion_tokens for each in results),
        )

    def openai(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


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
        "predicted_ms": metrics.decode_ms,
        "predicted_per_token_ms": _over(metrics.decode_ms, usage.completion_tokens),
        "predicted_per_second": _over(1000.0 * usage.completion_tokens, metrics.decode_ms),
        "queue_ms": metrics.queue_ms,
        "ttft_ms": metrics.ttft_ms,
    }


def _over(amount: float, by: float) -> float:
    return round(amount / by, 3) if by else 0.0


def finish_reason(result: Finished) -> str:
    """`stop` or `length`, as OpenAI has it."""
    return "length" if result.reason == "length" else "stop"
