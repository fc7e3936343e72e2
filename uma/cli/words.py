"""Figures in words people read: sizes, counts, a model's card in a line, how fast an answer was."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from uma.config import Loaded, RuntimeConfig
from uma.figures import count, figure, size
from uma.models.names import with_each
from uma.types import MAX_PAUSE_SEC, Finished, Logprobs, MemoryPlan, ModelInfo, ServerInfo

DEMONSTRATION = (
    "This is the small built-in demonstration model; `uma pull OWNER/NAME` gets a real one, --model FILE.gguf names one"
)
NEXT = "that was the small built-in model; `uma chat` talks with it, and `uma pull OWNER/NAME` gets a real one"
BASE = "This model has no chat template: a base model continues texts, and may not answer"
BLIND = "this model does not support image input; one that has a projector beside it (--mmproj) does"

LANES = {1: "interactive", 0: "normal", -1: "background"}
"""Names of a request's priorities."""
MAX_NAMED = 8
"""Maximum of models that one line names."""


def names(models: Sequence[str]) -> str:
    """The first of these, and how many more there are."""
    more = f" and {len(models) - MAX_NAMED:,} more" if len(models) > MAX_NAMED else ""
    return f"{', '.join(models[:MAX_NAMED])}{more}"


def hangs(path: str, sec: float) -> str:
    """That what listens on a socket has not answered for so long, and what ends it."""
    return (
        f"{path}: timeout: no answer within {sec:g} s; what listens there hangs, or has `--protocol newline`: "
        f"`uma stop --now --socket {shlex.quote(path)}` ends it"
    )


def with_adapters(info: ServerInfo) -> list[str]:
    """Names of the model with each of its LoRA adapters."""
    return with_each(info.model.name, info.capabilities.adapters)


def model_line(info: ModelInfo) -> str:
    """`Qwen3 0.6B · 596 M parameters · Q8_0 · 639 MB`."""
    parts = [info.name, f"{count(info.parameters)} parameters", info.quantization, size(info.size_bytes)]
    return " · ".join(filter(None, parts))


def context_line(info: ServerInfo) -> str:
    """`context 2,048 of 4,096 tokens`: what a request can use, of what the model was trained for."""
    trained, usable = info.model.context_length, info.limits.n_ctx
    return f"context {usable:,} tokens" + (f" (trained for {trained:,})" if trained and trained != usable else "")


def memory_line(plan: MemoryPlan) -> str:
    """`KV of 32,768 tokens 33.6 MB · 25 recurrent states 162 MB`: what texts take of memory from the start."""
    parts = []
    if plan.kv_bytes:
        in_windows = f", of {plan.window_cells:,} in layers with a window" if 0 < plan.window_cells < plan.cells else ""
        parts.append(f"KV of {plan.cells:,} tokens {size(plan.kv_bytes)}{in_windows}")
    if plan.states:
        parts.append(f"{plan.states:,} recurrent state{'s' * (plan.states != 1)} {size(plan.state_bytes)}")
    return " · ".join(parts)


def http_lines(config: RuntimeConfig, url: str) -> list[str]:
    """Where the page and programs find HTTP, and that no keys are asked for where `--http-insecure` allows it."""
    lines = [f"http    {url} (the page)", f"        {url}/v1 (for OpenAI's clients)"]
    if config.http_insecure and not config.http_keys:
        lines += ["        any program that reaches this address is a client: no keys are asked for (--http-insecure)"]
    return lines


def demonstration(info: ModelInfo, loaded: Loaded) -> str | None:
    """The one line that says what the built-in model is; None for a model of the user's own, and where these settings
    name one.
    """
    return DEMONSTRATION if info.is_builtin and loaded.origins["model"] == "default" else None


def tokens(number: int, of: str = "") -> str:
    """`1 token`, `2,000 tokens`, `2,000 prompt tokens`."""
    return f"{number:,} {of}token{'s' * (number != 1)}"


def speed(finished: Finished) -> str:
    """`41 tokens/s · first after 35 ms · 180 tokens`."""
    made = finished.usage.completion_tokens
    parts = [tokens(made), f"first after {duration(finished.metrics.ttft_ms)}"]
    if made > 1:
        parts.insert(0, f"{figure(finished.metrics.tokens_per_second)} tokens/s")
    return " · ".join(parts)


def duration(milliseconds: float) -> str:
    """`35 ms`, `2.4 s`, `151 s`."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:.{1 if milliseconds < 99_950 else 0}f} s"


def blocks(percent: int, cells: int) -> str:
    """`███░░░░░░░`, so many cells long."""
    filled = percent * cells // 100
    return "█" * filled + "░" * (cells - filled)


def rows(number: int, name: str = "row") -> str:
    """`1 row`, `2,000 rows`, or as many of another name."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def time_span(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def paused(seconds: float) -> str:
    """`paused for 12 min more`; without a time where it has none of its own."""
    return f"paused for {time_span(seconds)} more" if seconds < MAX_PAUSE_SEC / 2 else "paused"


def logprobs(known: Iterable[Logprobs]) -> Iterator[str]:
    """A line for each token: its log probability, its text, and the likeliest ones with theirs."""
    for logprob in known:
        others = "  ".join(f"{top.text!r} {top.logprob:.3f}" for top in logprob.top)
        yield f"{logprob.chosen.logprob:9.3f}  {logprob.chosen.text!r:<16}  {others}".rstrip()


def cut(finished: Finished, n_ctx: int, *, has_form: bool) -> str | None:
    """That an answer was cut, and by what; None where all are whole. `has_form`: a grammar was asked for."""
    every = finished.every_answer
    short = [answer for answer in every if answer.reason == "length"]
    if not short:
        return None
    what = "the answer was" if len(every) == 1 else f"{len(short):,} of {len(every):,} answers were"
    line = f"{what} cut at {tokens(max(answer.completion_tokens for answer in short))}"
    if has_form:
        return f"{line}, before {'it had' if len(every) == 1 else 'they had'} the form asked for"
    is_full = len(every) == 1 and finished.usage.prompt_tokens + finished.usage.completion_tokens >= n_ctx
    return f"{line}: {'the context is full' if is_full else 'the limit of --max-tokens'}"


def stats(finished: Finished) -> list[tuple[str, str]]:
    """Every figure of one answer, by name."""
    usage, metrics = finished.usage, finished.metrics
    return [
        ("time to first token", duration(metrics.ttft_ms)),
        # One token alone has no speed.
        *([("speed", f"{figure(metrics.tokens_per_second)} tokens/s")] if usage.completion_tokens > 1 else []),
        ("prompt", f"{tokens(usage.prompt_tokens)}, {usage.cached_tokens:,} of them cached"),
        ("output", f"{tokens(usage.completion_tokens)}, {ENDINGS[finished.reason]}"),
        (
            "time",
            f"{duration(metrics.queue_ms)} waiting, {duration(metrics.prefill_ms)} reading the prompt, "
            f"{duration(metrics.decode_ms)} writing",
        ),
        ("seed", str(finished.seed)),
    ]


ENDINGS = {
    "stop": "ended by the model or a stop text",
    "length": "cut at the limit",
    "cancelled": "stopped",
    "error": "ended by an error",
}


def is_json_log(config: RuntimeConfig) -> bool:
    """Whether standard error is a log of JSON objects, among which nothing else must stand."""
    return config.log_format == "json"
