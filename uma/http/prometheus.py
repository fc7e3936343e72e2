"""Metrics as Prometheus reads them: every counter, gauge and histogram of each model, the server's own, and HTTP's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from uma.http.gateway import Gateway
from uma.metrics import help_of, is_of_server, kind_of
from uma.net import quota
from uma.net.quota import ClientAccount

PREFIX = "uma_"
LLAMA_SERVERS = "llamacpp:"
"""Before the names that dashboards and autoscalers for llama-server read."""


def exposition(snapshot: Mapping[str, Any], gateway: Gateway, asker: ClientAccount | None) -> str:
    """The text of `/metrics`, each family with its HELP and TYPE. What is of one model has its name as a label.

    `asker` is the key that asks: one that uses models and does not manage them sees of all keys its own figures.
    """
    uptime_sec = round(time.monotonic() - gateway.began_sec, 3)
    sees_all = asker is None or asker.manages_models or asker.bounds.models == ()
    keys = () if gateway.keys is None else [each for each in gateway.keys.accounts() if sees_all or each is asker]
    own: dict[str, Any] = {"uptime_sec": uptime_sec, **gateway.of_socket(), **quota.figures("key", keys)}
    snapshot = own | dict(snapshot)  # a server's that is behind a gateway is the server's
    own_name = gateway.info.model.name  # not as the query has it
    models: Mapping[str, Mapping[str, Any]] = snapshot.pop("models", {own_name: snapshot})
    if gateway.models is None:
        models = {own_name: models.get(own_name, {})}
        snapshot = {**snapshot, **models[own_name]}
    return "\n".join([*_families(snapshot, models), *_http(gateway), *_llama_servers(snapshot)]) + "\n"


def _llama_servers(snapshot: Mapping[str, Any]) -> Iterator[str]:
    """Figures of llama-server's that are the same here: what it has besides is left out. As there, none has a label:
    those of several models are their sums.
    """
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


def _families(snapshot: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    labels = {f'model="{_escaped(name)}"': figures for name, figures in models.items()}
    for name in dict.fromkeys(name for figures in (snapshot, *models.values()) for name in figures):
        kind = "counter" if kind_of(name) == "counter" else "gauge"
        if is_of_server(name):
            yield from _family(name, kind, help_of(name), list(_samples(name, "", snapshot[name])))
        elif name.endswith("_buckets"):
            family = name.removesuffix("_buckets")
            yield from _family(family, "histogram", help_of(family), list(_histogram(family, labels)))
        elif kind_of(name) != "histogram":
            found = (_samples(name, label, figures.get(name)) for label, figures in labels.items())
            yield from _family(name, kind, help_of(name), list(chain.from_iterable(found)))


def _samples(name: str, label: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, int | float):
        yield f"{{{label}}}" if label else "", value
    elif isinstance(value, Mapping):
        by = {"model_state": "state", "model_unloads_total": "reason"}.get(name) or name.partition("_")[0]
        lead = f"{label}," if label else ""
        yield from ((f'{{{lead}{by}="{_escaped(part)}"}}', count) for part, count in value.items())


def _histogram(family: str, labels: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for label, figures in labels.items():
        if f"{family}_buckets" in figures:
            for bound, count in figures[f"{family}_buckets"].items():
                le = bound.replace("inf", "+Inf")
                yield f'_bucket{{{label},le="{le}"}}', count
            yield from ((f"_{end}{{{label}}}", figures[f"{family}_{end}"]) for end in ("sum", "count"))


def _escaped(name: str) -> str:
    return name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _family(name: str, kind: str, text: str, samples: list[tuple[str, Any]], prefix: str = PREFIX) -> Iterator[str]:
    """A family with its samples. A counter's name ends with `_total`, as OpenMetrics has it."""
    full = prefix + (f"{name}_total" if kind == "counter" and not name.endswith("_total") else name)
    if samples:
        yield f"# HELP {full} {text}"
        yield f"# TYPE {full} {kind}"
        yield from (f"{full}{suffix} {value}" for suffix, value in samples)


def _http(gateway: Gateway) -> Iterator[str]:
    answers = [(f'{{status="{status}"}}', count) for status, count in sorted(gateway.answers.items())]
    yield from _family("http_requests_total", "counter", "HTTP requests by status; 0: the client left first.", answers)
    opened, refused = gateway.connections_total, gateway.connections_refused_total
    yield from _family("http_connections_total", "counter", "HTTP connections accepted.", [("", opened)])
    yield from _family(
        "http_connections_refused_total", "counter", "Connections refused, as too many.", [("", refused)]
    )
