"""Metrics as Prometheus reads them: every counter, gauge and histogram of the source's snapshot, and HTTP's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from uma.http.gateway import Gateway
from uma.metrics import is_counter

PREFIX = "uma_"
LLAMA_SERVERS = "llamacpp:"
"""Before the names that dashboards and autoscalers for llama-server read."""

HELP = {
    "tokens_generated_total": "Tokens generated; those that were dropped included.",
    "prompt_tokens_total": "Prompt tokens of all requests that were started.",
    "cached_tokens_total": "Prompt tokens that were in the cache.",
    "reread_tokens_total": "Cached tokens computed again, so that a prompt ends in the same batches each time.",
    "prefill_tokens_total": "Prompt tokens computed, those computed again included: after preemptions, or reread.",
    "batch_calls_total": "Calls of llama_decode.",
    "embed_requests_total": "Requests for embeddings or a ranking that were taken.",
    "embed_texts_total": "Texts, or pairs of query and document, that were computed.",
    "embed_tokens_total": "Tokens of these.",
    "outside_decode_ms_total": "Milliseconds of the decode thread outside llama_decode while it had work.",
    "preemptions_total": "Sequences whose KV cells went to another.",
    "requests_total": "Requests that came, refused ones included.",
    "requests_rejected": "Requests refused before they were queued.",
    "requests_overloaded": "Requests refused for overload.",
    "requests_cancelled": "Requests cancelled, or whose client went away.",
    "active_sequences": "Requests that are being computed.",
    "queued_requests": "Requests that wait for a slot.",
    "kv_cells_used": "KV cells in use.",
    "kv_cells_total": "KV cells there are.",
    "kv_cells_share": "KV cells that one request can have.",
    "cache_hit_rate": "Share of requests that found a part of their prompt in the cache, 0 to 1.",
    "ttft_ms": "Milliseconds from a request's arrival to its first token.",
    "inter_token_ms": "Milliseconds between a request's tokens.",
    "decode_ms": "Milliseconds of one llama_decode call.",
    "tokens_late_total": "Tokens that came later after the one before than a quarter over their target.",
    "tokens_dropped_total": "Tokens computed ahead for readers that cancelled before their time came.",
    "piece_lead_ms": "Milliseconds that readers could go on for when a piece of a prompt was planned.",
    "batch_size": "Tokens of one llama_decode call.",
}
"""Help texts of the figures that people watch; the names of the others say enough."""


def exposition(snapshot: Mapping[str, Any], gateway: Gateway) -> str:
    """The text of `/metrics`, each family with its HELP and TYPE."""
    return "\n".join([*_families(snapshot), *_http(gateway), *_llama_servers(snapshot)]) + "\n"


def _llama_servers(snapshot: Mapping[str, Any]) -> Iterator[str]:
    """Figures of llama-server's that are the same here: what it has besides is left out."""
    figures = {name: snapshot.get(name, 0) for names in _OF_LLAMA_SERVER.values() for name in names}
    computed = figures["prompt_tokens_total"] - figures["cached_tokens_total"] + figures["embed_tokens_total"]
    values = {
        "prompt_tokens_total": computed,
        "tokens_predicted_seconds_total": figures["inter_token_ms_sum"] / 1000,
    }
    for name, (own, *_) in _OF_LLAMA_SERVER.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        text = f"llama-server's; see {PREFIX}{own}."
        yield from _family(name, kind, text, [("", values.get(name, figures[own]))], prefix=LLAMA_SERVERS)


_OF_LLAMA_SERVER: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens_total": ("prompt_tokens_total", "cached_tokens_total", "embed_tokens_total"),
    "prompt_tokens_cached_total": ("cached_tokens_total",),
    "tokens_predicted_total": ("tokens_generated_total",),
    "tokens_predicted_seconds_total": ("inter_token_ms_sum",),
    "n_decode_total": ("batch_calls_total",),
    "requests_processing": ("active_sequences",),
    "requests_deferred": ("queued_requests",),
}
"""Figures that each of llama-server's is made of, by its name."""


def _families(snapshot: Mapping[str, Any]) -> Iterator[str]:
    histograms = [name.removesuffix("_buckets") for name in snapshot if name.endswith("_buckets")]
    parts = {f"{name}_{part}" for name in histograms for part in ("buckets", "count", "sum")}
    for name, value in snapshot.items():
        if name not in parts and isinstance(value, int | float) and not isinstance(value, bool):
            kind = "counter" if is_counter(name) else "gauge"
            yield from _family(name, kind, HELP.get(name, ""), [("", value)])
    for name in histograms:
        buckets = [(f'_bucket{{le="{_bound(bound)}"}}', count) for bound, count in snapshot[f"{name}_buckets"].items()]
        ends = [("_sum", snapshot[f"{name}_sum"]), ("_count", snapshot[f"{name}_count"])]
        yield from _family(name, "histogram", HELP.get(name, ""), [*buckets, *ends])


def _family(name: str, kind: str, text: str, samples: list[tuple[str, Any]], prefix: str = PREFIX) -> Iterator[str]:
    full = prefix + name
    yield f"# HELP {full} {text or name.replace('_', ' ')}"
    yield f"# TYPE {full} {kind}"
    yield from (f"{full}{suffix} {value}" for suffix, value in samples)


def _bound(bound: str) -> str:
    return "+Inf" if bound == "inf" else bound


def _http(gateway: Gateway) -> Iterator[str]:
    answers = [(f'{{status="{status}"}}', count) for status, count in sorted(gateway.answers.items())]
    yield from _family("http_requests_total", "counter", "HTTP requests by status; 0: the client left first.", answers)
    opened, refused = gateway.connections_total, gateway.connections_refused_total
    yield from _family("http_connections_total", "counter", "HTTP connections accepted.", [("", opened)])
    yield from _family("http_connections_refused_total", "counter", "Refused for their number.", [("", refused)])
