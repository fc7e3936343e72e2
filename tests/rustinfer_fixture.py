"""RustInfer's server as its own structs say it: what serde would write for each message, and a client that does.

Written from the structs of RustInfer's `infer-protocol` 1.0 alone; nothing of UMA's code is used.
"""

from __future__ import annotations

import json
from typing import Any

import msgpack
import zmq

REQUEST_FIELDS = (
    "request_id", "prompt", "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream", "priority",
)  # fmt: skip
METRICS_FIELDS = ("prefill_ms", "decode_ms", "queue_ms", "batch_size", "tokens_per_second", "decode_iterations")
RESPONSE_FIELDS = ("request_id", "status", "text", "tokens", "num_tokens", "error", "metrics")
CHUNK_FIELDS = ("request_id", "chunk_type", "token", "token_id", "finish_reason", "metrics")
ENGINE_FIELDS = (
    "total_requests", "completed_requests", "failed_requests", "total_tokens_generated", "avg_queue_time_ms",
    "avg_prefill_time_ms", "avg_decode_time_ms", "queue_size", "queue_capacity", "concurrent_requests",
)  # fmt: skip
CACHE_FIELDS = (
    "hit_rate", "hits", "misses", "evictable_size", "protected_size", "total_cached", "total_capacity", "evictions",
    "node_count",
)  # fmt: skip

PATIENCE_MS = 60_000


def inference(**fields: Any) -> dict[str, Any]:
    """An `InferenceRequest` with `fields` in place of its own."""
    plain = {
        "request_id": "550e8400-e29b-41d4-a716-446655440000",
        "prompt": "Once upon a time",
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop_sequences": [],
        "stream": False,
        "priority": 0,
    }
    return plain | fields


def json_bytes(value: Any) -> bytes:
    """As `serde_json::to_vec`."""
    return json.dumps(value, separators=(",", ":")).encode()


def named_bytes(value: Any) -> bytes:
    """As `rmp_serde::to_vec_named`."""
    packed: bytes = msgpack.packb(value)
    return packed


def compact_bytes(request: dict[str, Any]) -> bytes:
    """As `rmp_serde::to_vec` of `EngineRequest::Inference`: structs are lists."""
    packed: bytes = msgpack.packb({"Inference": [request[name] for name in REQUEST_FIELDS]})
    return packed


def from_compact(data: bytes) -> Any:
    """What such bytes are with field names, as a Rust peer would read them."""
    value = msgpack.unpackb(data)
    if isinstance(value, list):
        return _struct(value, CHUNK_FIELDS)
    ((variant, body),) = value.items()
    if variant == "Metrics":
        return {"Metrics": {"engine": _struct(body[0], ENGINE_FIELDS), "cache": _struct(body[1], CACHE_FIELDS)}}
    return {variant: _struct(body, RESPONSE_FIELDS)}


def _struct(values: list[Any], names: tuple[str, ...]) -> dict[str, Any]:
    made = dict(zip(names, values, strict=True))
    if isinstance(made.get("metrics"), list):
        made["metrics"] = dict(zip(METRICS_FIELDS, made["metrics"], strict=True))
    return made


class Peer:
    """A DEALER (or REQ) socket, blocking, as RustInfer's server has it."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, kind: int = zmq.DEALER) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self.socket.connect(endpoint)

    def send(self, data: bytes) -> None:
        """Send one message."""
        self.socket.send(data)

    def ask(self, request: dict[str, Any]) -> None:
        """Send an inference request as JSON."""
        self.send(json_bytes({"Inference": request}))

    def receive(self) -> Any:
        """The next JSON answer."""
        return json.loads(self.socket.recv())

    def close(self) -> None:
        """Hang up."""
        self.socket.close()
