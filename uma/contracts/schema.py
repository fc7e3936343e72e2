"""JSON Schemas (2020-12) of the contracts, generated from the classes that parse them."""

from __future__ import annotations

from typing import Any

from uma.contracts.card import ModelDeploymentCard
from uma.contracts.events import KV_EVENTS
from uma.contracts.health import HealthCheckPayload, HealthCheckResult
from uma.contracts.load import CacheStats, EngineStats, KvStats, LoadReport, WorkerStats
from uma.contracts.request import PreprocessedRequest
from uma.contracts.response import BackendOutput
from uma.contracts.versions import CONTRACT_VERSIONS
from uma.protocol.schema import DIALECT, object_schema

CONTRACTS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        ModelDeploymentCard,
        PreprocessedRequest,
        BackendOutput,
        HealthCheckPayload,
        HealthCheckResult,
        WorkerStats,
        KvStats,
        EngineStats,
        CacheStats,
        LoadReport,
    )
}


def contract_schemas() -> dict[str, dict[str, Any]]:
    """Schema of each contract by name; `KVCacheEvent` is one of three."""
    made = {name: _contract(name, cls) for name, cls in CONTRACTS.items()}
    made["KVCacheEvent"] = event = _kv_event()
    one = {"oneOf": event["oneOf"]}
    made["SequencedEvent"] = _of_events("SequencedEvent", event, {"sequence": _FROM_1, "event": one})
    made["CatchUp"] = _of_events(
        "CatchUp",
        event,
        {
            "events": {"type": "array", "items": one},
            "sequence": {"type": "integer", "minimum": 0},
            "is_snapshot": {"type": "boolean"},
        },
    )
    return made


_FROM_1 = {"type": "integer", "minimum": 1}


def _of_events(name: str, event: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with these properties; its events are those of `event`'s definitions."""
    return {
        "$schema": DIALECT,
        "$id": _id(name),
        "title": name,
        **_closed({"type": "object", "properties": properties, "required": list(properties)}),
        "$defs": event["$defs"],
    }


def _contract(name: str, cls: type) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    schema = _closed(object_schema(cls, nested))
    definitions = (
        {"$defs": {nested_schema: _closed(inner) for nested_schema, inner in nested.items()}} if nested else {}
    )
    return {"$schema": DIALECT, "$id": _id(name), "title": name} | schema | definitions


def _kv_event() -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    for name, cls in KV_EVENTS.items():
        definitions[name] = _closed(object_schema(cls, {}))
        definitions[name]["properties"]["type"] = {"const": name}
        definitions[name]["required"].append("type")
    return {
        "$schema": DIALECT,
        "$id": _id("KVCacheEvent"),
        "title": "KVCacheEvent",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in definitions],
        "$defs": definitions,
    }


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"additionalProperties": False}


def _id(name: str) -> str:
    return f"urn:uma:contract:{CONTRACT_VERSIONS[-1]}:{name}"
