"""Metrics as Prometheus reads them: every counter, gauge and histogram of the source's snapshot, and HTTP's own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from uma.http.gateway import Gateway
from uma.metrics import help_of, kind_of

PREFIX = "uma_"
LLAMA_SERVERS = "llamacpp:"
"""Before the names that dashboards and autoscalers for llama-server read."""


def exposition(snapshot: Mapping[str, Any], gateway: Gateway) -> str:
    """The text of `/metrics`, each family with its HELP and TYPE."""
    own = {"uptime_sec": round(time.monotonic() - gateway.began_sec, 3)}
    snapshot = own | dict(snapshot)  # a server's that is behind a gateway is the server's
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
            kind = "counter" if kind_of(name) == "counter" else "gauge"
            yield from _family(name, kind, help_of(name), [("", value)])
    for name in histograms:
        buckets = [(f'_bucket{{le="{_bound(bound)}"}}', count) for bound, count in snapshot[f"{name}_buckets"].items()]
        ends = [("_sum", snapshot[f"{name}_sum"]), ("_count", snapshot[f"{name}_count"])]
        yield from _family(name, "histogram", help_of(name), [*buckets, *ends])


def _family(name: str, kind: str, text: str, samples: list[tuple[str, Any]], prefix: str = PREFIX) -> Iterator[str]:
    full = prefix + name
    yield f"# HELP {full} {text}"
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
