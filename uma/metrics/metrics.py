"""The engine's counters. The decode thread writes, any thread reads: every field has exactly one writer."""

from __future__ import annotations

from typing import Any

import attrs

from uma.metrics.histogram import MS_BOUNDS, SIZE_BOUNDS, Histogram

EWMA_WEIGHT = 0.1
"""Weight of the newest tick in `decode_ms_ewma`."""


def is_counter(name: str) -> bool:
    """Whether a figure of a snapshot only grows. Histograms are told apart by their own names."""
    ends = ("_total", "_hits", "_misses", "_evictions", "_preemptions", "_drops")
    return (name.endswith(ends) or name.startswith("requests_")) and name != "kv_cells_total"


@attrs.define
class CacheMetrics:
    """The prefix cache: what is in KV cells, and the second tier in host memory. Sizes are tokens."""

    hits: int = 0
    """Requests that found a part of their prompt."""
    misses: int = 0
    evictable_size: int = 0
    protected_size: int = 0
    """Tokens in cells that a running sequence uses."""
    total_cached: int = 0
    total_capacity: int = 0
    evictions: int = 0
    node_count: int = 0
    ram_bytes: int = 0
    ram_snapshots: int = 0
    ram_hits: int = 0
    ram_evictions: int = 0
    disk_drops: int = 0
    """Snapshots that were not written since the disk was too slow, or they were too large for it."""

    def snapshot(self) -> dict[str, Any]:
        """`cache_…`, with `cache_hit_rate` from 0 to 1."""
        flat = {f"cache_{name}": value for name, value in attrs.asdict(self).items()}
        return {"cache_hit_rate": round(self.hits / max(1, self.hits + self.misses), 4), **flat}


@attrs.define
class EngineMetrics:
    """Counters since start, gauges of now, histograms. Times are milliseconds, sizes are tokens or KV cells."""

    tokens_generated_total: int = 0
    """The sum of `usage.completion_tokens` and `tokens_dropped_total`."""
    tokens_dropped_total: int = 0
    """Tokens computed ahead of their time for readers that cancelled before it came. Their KV stays as cache."""
    tokens_late_total: int = 0
    """Tokens that were given to their stream later after the one before than a quarter over its `target_tbt_ms`."""
    lead_ms: float = 0.0
    """Time for which every reader could go on without another token when the last piece of a prompt was planned."""
    prompt_tokens_total: int = 0
    """Prompt tokens of all requests that were started."""
    cached_tokens_total: int = 0
    """The part of them that was in the cache."""
    reread_tokens_total: int = 0
    """Tokens of it that were computed again, so that a cached prompt ends in the same batches as one that is not."""
    prefill_tokens_total: int = 0
    """Prompt tokens computed, those computed again included: after a preemption, or `reread_tokens_total`."""
    embed_requests_total: int = 0
    """Requests for embeddings or a ranking that were taken."""
    embed_texts_total: int = 0
    """Texts, or pairs of query and document, that were computed."""
    embed_tokens_total: int = 0
    """Their tokens."""
    batch_calls_total: int = 0
    last_batch_size: int = 0
    decode_ms_last: float = 0.0
    decode_ms_ewma: float = 0.0
    outside_decode_ms_total: float = 0.0
    """Time the decode thread spent on everything but `llama_decode` while it had work, waiting for a core included."""
    service_ms_ewma: float = 0.0
    """Usual time from a request's begin to its end."""
    draft_tokens_total: int = 0
    """Tokens that were guessed and verified; in no other counter."""
    draft_accepted_total: int = 0
    """Drafted tokens that held. They are generated tokens like any other."""
    draft_saved_ms_total: float = 0.0
    """Time that readers were spared by drafts, all requests added up; what drafts cost in vain is taken off."""
    draft_model_ms_total: float = 0.0
    """Time in `llama_decode` of the draft model; in no other figure."""
    preemptions_total: int = 0
    kv_retries_total: int = 0
    """Batches for which `llama_decode` found no room and that were made smaller."""
    health_probes_total: int = 0
    """One-token probes; their tokens are in no other counter."""
    requests_total: int = 0
    requests_stop: int = 0
    requests_length: int = 0
    requests_cancelled: int = 0
    requests_withdrawn: int = 0
    """Requests of them that were cancelled while their prompt was still prepared, before they were queued."""
    requests_error: int = 0
    requests_rejected: int = 0
    """Refused before they were queued: bad, too large, or overloaded."""
    requests_overloaded: int = 0
    """Requests of them that were refused for overload."""
    active_sequences: int = 0
    queued_requests: int = 0
    kv_cells_used: int = 0
    kv_cells_total: int = 0
    kv_cells_share: int = 0
    """Maximum cells of one sequence: all of them in one buffer for all, else those of its own."""
    sequence_ids_used: int = 0
    compute_threads: int = 0
    """Threads that compute now: fewer than there are cores while other programs use them."""
    neighbour_load: float = 0.0
    """Threads of other programs that wanted to run beside them of late."""
    stolen_share: float = 0.0
    """Part of a busy core's time that the host of this virtual machine took of late."""
    stalls_total: int = 0
    """Batches broken off and computed again with fewer threads, because other programs took their threads' cores."""
    mixed_batches_total: int = 0
    """Batches of a decode step and pieces of prompts together."""
    ttft_ms: Histogram = attrs.field(factory=lambda: Histogram(MS_BOUNDS))
    inter_token_ms: Histogram = attrs.field(factory=lambda: Histogram(MS_BOUNDS))
    decode_ms: Histogram = attrs.field(factory=lambda: Histogram(MS_BOUNDS))
    piece_lead_ms: Histogram = attrs.field(factory=lambda: Histogram(MS_BOUNDS))
    """`lead_ms` at each piece of a prompt that was planned beside decoding rows."""
    batch_size: Histogram = attrs.field(factory=lambda: Histogram(SIZE_BOUNDS))
    cache: CacheMetrics = attrs.field(factory=CacheMetrics)

    def tick(self, batch_tokens: int, decode_ms: float) -> None:
        """Count one `llama_decode` call."""
        self.batch_calls_total += 1
        self.last_batch_size = batch_tokens
        self.decode_ms_last = decode_ms
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
