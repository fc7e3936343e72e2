"""The engine's figures, each defined once: its name, its help text, its kind, and the sums over several models.

The decode thread writes, any thread reads: every field has exactly one writer. Times are milliseconds, sizes are tokens
or KV cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import attrs

from uma.metrics.histogram import MS_BOUNDS, SIZE_BOUNDS, Histogram

EWMA_WEIGHT = 0.1
"""Weight of the newest tick in `decode_ms_ewma`."""

FigureKind = Literal["counter", "gauge", "level", "histogram"]
"""Counters and histograms grow since the start, gauges and levels are of now. A level, as an average, has no sum over
several models."""


def _figure(kind: FigureKind, text: str, default: Any = 0) -> Any:
    return attrs.field(default=default, metadata={"kind": kind, "help": text})


_counter = partial(_figure, "counter")
_gauge = partial(_figure, "gauge")
_level = partial(_figure, "level", default=0.0)


def _histogram(text: str, bounds: tuple[int, ...] = MS_BOUNDS) -> Any:
    return _figure("histogram", text, attrs.Factory(lambda: Histogram(bounds)))


@attrs.define
class CacheMetrics:
    """The prefix cache: what is in KV cells, and the second tier in host memory."""

    hits: int = _counter("Requests that found a part of their prompt.")
    misses: int = _counter("Requests that found none of it.")
    evictable_size: int = _gauge("Cached tokens in cells that no running sequence uses.")
    protected_size: int = _gauge("Tokens in cells that a running sequence uses.")
    total_cached: int = _gauge("Tokens in cells, used or not.")
    total_capacity: int = _gauge("Tokens that there are cells for.")
    evictions: int = _counter("Prefixes that left their cells.")
    node_count: int = _gauge("Nodes of the prefix tree.")
    ram_bytes: int = _gauge("Bytes of prefixes in host memory.")
    ram_snapshots: int = _gauge("Prefixes in host memory.")
    ram_hits: int = _counter("Prefixes that were taken from host memory.")
    ram_evictions: int = _counter("Prefixes that left host memory.")
    disk_drops: int = _counter("Snapshots not written: the disk was too slow, or they were too large for it.")

    def snapshot(self) -> dict[str, Any]:
        """`cache_…`, with `cache_hit_rate` from 0 to 1."""
        flat = {f"cache_{name}": value for name, value in attrs.asdict(self).items()}
        return {"cache_hit_rate": round(self.hits / max(1, self.hits + self.misses), 4), **flat}


@attrs.define
class EngineMetrics:
    """Figures of one engine."""

    tokens_generated_total: int = _counter("Tokens generated; those that were dropped included.")
    tokens_dropped_total: int = _counter("Tokens computed ahead for readers that cancelled before their time came.")
    tokens_late_total: int = _counter("Tokens that came more than a quarter of their target late.")
    lead_ms: float = _level("Milliseconds of tokens that readers had when the last piece of a prompt was planned.")
    prompt_tokens_total: int = _counter("Prompt tokens of all requests that were started.")
    cached_tokens_total: int = _counter("Prompt tokens that were in the cache.")
    reread_tokens_total: int = _counter(
        "Cached tokens computed again, so that a prompt ends in the same batches each time."
    )
    prefill_tokens_total: int = _counter(
        "Prompt tokens computed, those computed again included: after preemptions, or reread."
    )
    embed_requests_total: int = _counter("Requests for embeddings or a ranking that were taken.")
    embed_texts_total: int = _counter("Texts, or pairs of query and document, that were computed.")
    embed_tokens_total: int = _counter("Tokens of texts for embeddings and rankings that were computed.")
    batch_calls_total: int = _counter("Calls of llama_decode.")
    last_batch_size: int = _level("Tokens of the last llama_decode call.", default=0)
    decode_ms_ewma: float = _level("Milliseconds of recent llama_decode calls, a moving average.")
    outside_decode_ms_total: float = _counter(
        "Milliseconds of the decode thread outside llama_decode while it had work.", 0.0
    )
    service_ms_ewma: float = _level("Usual milliseconds from a request's begin to its end.")
    draft_tokens_total: int = _counter("Tokens that were guessed and verified; in no other counter.")
    draft_accepted_total: int = _counter("Drafted tokens that were accepted. They are generated tokens like any other.")
    draft_saved_ms_total: float = _counter(
        "Milliseconds that drafts saved readers, less the time of drafts that were not verified.", 0.0
    )
    draft_model_ms_total: float = _counter("Milliseconds in llama_decode of the draft model; in no other figure.", 0.0)
    preemptions_total: int = _counter("Sequences whose KV cells went to another.")
    kv_retries_total: int = _counter("Batches made smaller, since llama_decode found no cells for them.")
    health_probes_total: int = _counter("Probes of one token; their tokens are in no other counter.")
    requests_total: int = _counter("Requests that came, refused ones included.")
    requests_stop: int = _counter("Requests that ended by themselves.")
    requests_length: int = _counter("Requests that ended at a limit of tokens.")
    requests_cancelled: int = _counter("Requests cancelled, or whose client went away.")
    requests_withdrawn: int = _counter("Requests among those cancelled that were not queued yet.")
    requests_error: int = _counter("Requests that failed.")
    requests_rejected: int = _counter("Requests refused before they were queued: bad, too large, or overloaded.")
    requests_overloaded: int = _counter("Requests refused for overload.")
    active_sequences: int = _gauge("Requests that have a slot.")
    queued_requests: int = _gauge("Requests that wait for a slot.")
    paused_sec: float = _level("Seconds for which nothing is computed yet, as `uma pause` has asked.")
    gpu_free_bytes: int = _level("Bytes that are free on the fullest GPU; 0 where there is none.", default=0)
    kv_cells_used: int = _gauge("KV cells in use.")
    kv_cells_total: int = _gauge("KV cells there are.")
    kv_cells_share: int = _gauge("KV cells that one request can have.")
    sequence_ids_used: int = _gauge("Sequence ids in use.")
    compute_threads: int = _gauge("Threads that compute now: fewer than cores while other programs use them.")
    neighbour_load: float = _level("Threads of other programs that wanted the compute cores recently.")
    stolen_share: float = _level("Part of a busy core's time that the host of this virtual machine took recently.")
    stalls_total: int = _counter("Batches computed again with fewer threads, because other programs took their cores.")
    mixed_batches_total: int = _counter("Batches of a decode step and pieces of prompts together.")
    ttft_ms: Histogram = _histogram("Milliseconds from a request's arrival to its first token.")
    inter_token_ms: Histogram = _histogram("Milliseconds between a request's tokens.")
    decode_ms: Histogram = _histogram("Milliseconds of one llama_decode call.")
    piece_lead_ms: Histogram = _histogram(
        "Milliseconds of tokens that readers had when a piece of a prompt was planned."
    )
    batch_size: Histogram = _histogram("Tokens of one llama_decode call.", SIZE_BOUNDS)
    cache: CacheMetrics = attrs.field(factory=CacheMetrics)

    def tick(self, batch_tokens: int, decode_ms: float) -> None:
        """Count one `llama_decode` call."""
        self.batch_calls_total += 1
        self.last_batch_size = batch_tokens
        first = self.batch_calls_total == 1
        self.decode_ms_ewma += (decode_ms - self.decode_ms_ewma) * (1.0 if first else EWMA_WEIGHT)
        self.decode_ms.observe(decode_ms)
        self.batch_size.observe(batch_tokens)

    def served(self, service_ms: float) -> None:
        """Count the time a request took from its begin to its end."""
        self.service_ms_ewma += (service_ms - self.service_ms_ewma) * (EWMA_WEIGHT if self.service_ms_ewma else 1.0)

    def finished(self, reason: str) -> None:
        """Count the end of a request that had been admitted."""
        setattr(self, f"requests_{reason}", getattr(self, f"requests_{reason}") + 1)

    def snapshot(self) -> dict[str, Any]:
        """All of it, flat."""
        flat: dict[str, Any] = {}
        for field in attrs.fields(EngineMetrics):
            value = getattr(self, field.name)
            if isinstance(value, Histogram):
                flat |= value.snapshot(field.name)
            elif isinstance(value, CacheMetrics):
                flat |= value.snapshot()
            else:
                flat[field.name] = round(value, 3) if isinstance(value, float) else value
        # Two writers, two fields; a snapshot has their sum.
        flat["requests_cancelled"] += self.requests_withdrawn
        return flat


_OF_SERVER: dict[str, tuple[FigureKind, str]] = {
    "uptime_sec": ("level", "Seconds since the server started."),
    "active_sessions": ("gauge", "Sessions of clients that are open on the socket."),
    "sessions_total": ("counter", "Sessions accepted on the socket."),
    "sessions_refused_total": ("counter", "Sessions refused for their number, or because the server was stopping."),
    "log_lines_lost_total": ("counter", "Lines of the log that could not be written, as to a full disk."),
    "memory_budget_bytes": ("level", "Bytes that all models together can take."),
    **{
        f"{holder}_{name}_total": ("counter", text.format(whose))
        for holder, whose in (("key", "an API key"), ("user", "a user of the socket"))
        for name, text in (
            ("requests", "Requests of {} that were let in."),
            ("refused", "Requests of {} refused for its limits or for overload: 429, or E_LIMIT_OVERLOADED."),
            ("prompt_tokens", "Prompt tokens of {}, cached ones included; of texts for embeddings and rankings too."),
            ("completion_tokens", "Tokens generated for {}."),
        )
    },
}
OF_SEVERAL: Mapping[str, tuple[FigureKind, str]] = {
    "model_state": ("gauge", "1 for the state that the model has, 0 for the others."),
    "model_memory_bytes": ("gauge", "Bytes of the budget that the model has; 0 where it is not loaded."),
    "model_taken_bytes": ("gauge", "Bytes that the model's process took when it was measured last."),
    "model_waiting_requests": ("gauge", "Requests that wait until the model is loaded."),
    "model_loads_total": ("counter", "Loads of the model that succeeded."),
    "model_load_ms_total": ("counter", "Milliseconds that loads of the model took."),
    "model_load_failures_total": ("counter", "Loads of the model that failed or were refused."),
    "model_unloads_total": ("counter", "Times that the model left memory, by reason."),
}
"""Figures of one of several models as such, each with its kind and help text."""
_FIGURES: dict[str, tuple[FigureKind, str]] = {
    field.name if cls is EngineMetrics else f"cache_{field.name}": (field.metadata["kind"], field.metadata["help"])
    for cls in (EngineMetrics, CacheMetrics)
    for field in attrs.fields(cls)
    if field.metadata
} | {"cache_hit_rate": ("level", "Share of requests that found a part of their prompt in the cache, 0 to 1.")}
_FIGURES |= {**_OF_SERVER, **OF_SEVERAL}
_FIGURES |= {
    f"{name}_{part}": ("level", f"{text.removesuffix('.')}: the last.") if part == "last" else (kind, text)
    for name, (kind, text) in _FIGURES.items()
    if kind == "histogram"
    for part in ("buckets", "count", "sum", "last")
}


def kind_of(name: str) -> FigureKind:
    """The kind of a snapshot's figure; one that is not defined here is another version's."""
    return _FIGURES.get(name, ("counter" if name.endswith("_total") else "gauge", ""))[0]


def help_of(name: str) -> str:
    """The help text of a snapshot's figure."""
    return _FIGURES.get(name, ("gauge", name.replace("_", " ")))[1]


def is_of_server(name: str) -> bool:
    """Whether a snapshot's figure is the whole server's, and no model's."""
    return name in _OF_SERVER or name == "paused_sec"


def summed(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of several models' figures. Levels have none, and are left out."""
    total: dict[str, Any] = {}
    for snapshot in snapshots:
        for name, value in snapshot.items():
            if isinstance(value, Mapping):
                known = total.get(name, {})
                total[name] = known | {part: count + known.get(part, 0) for part, count in value.items()}
            elif kind_of(name) != "level":
                total[name] = total.get(name, 0) + value
    return total
