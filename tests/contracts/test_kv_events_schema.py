"""KV events: well-formed, named by documented hashes, and enough to know exactly what a worker holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_histories import Subscription, histories

from uma.cli import main
from uma.contracts.blocks import chain, content_hash, fnv1a_block_hash
from uma.contracts.event_log import BlockIndex, EventLog, merged
from uma.contracts.events import (
    BlockRemoved,
    BlockStored,
    KvEvent,
    SequencedEvent,
)
from uma.contracts.schema import contract_schemas
from uma.errors import ContractViolation
from uma.protocol.converter import unstructure

PAGE = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text(encoding="utf-8")
SCHEMA = jsonschema.Draft202012Validator(contract_schemas()["KVCacheEvent"])
SEQUENCED = jsonschema.Draft202012Validator(contract_schemas()["SequencedEvent"])
CATCH_UP = jsonschema.Draft202012Validator(contract_schemas()["CatchUp"])
STORED: dict[str, Any] = {"type": "BlockStored", "block_hashes": [-5, 7], "token_ids": [1, 2, 3, 4], "block_size": 2}


def as_read(event: KvEvent) -> Any:
    return json.loads(json.dumps({"type": event.type, **unstructure(event)}))


# Schemas


@pytest.mark.parametrize(
    "value", [STORED, {"type": "BlockRemoved", "block_hashes": [-5]}, {"type": "AllBlocksCleared"}]
)
def test_each_event_of_the_text_fits_the_schema(value: dict[str, Any]) -> None:
    assert SCHEMA.is_valid(value)


@pytest.mark.parametrize(
    "wrong",
    [
        STORED | {"type": "BlockEaten"},
        STORED | {"block_hashes": []},
        STORED | {"block_hashes": [2**63, 1]},
        STORED | {"block_size": 0},
        STORED | {"token_ids": [1, 2, 3, -4]},
        STORED | {"colour": 1},
        {"type": "BlockRemoved"},
    ],
)
def test_a_wrong_event_does_not_fit_the_schema(wrong: dict[str, Any]) -> None:
    assert not SCHEMA.is_valid(wrong)


# Hashes


def test_the_router_s_hash_has_the_values_that_dynamo_1_6_1_computes() -> None:
    # dynamo.llm.compute_block_hash_for_seq(list(range(1, 33)), 16)
    assert [content_hash(range(1, 17)), content_hash(range(17, 33))] == [16863443419780771464, 2287610619914608821]


def test_fnv1a_has_the_value_that_its_authors_publish() -> None:
    token = int.from_bytes(b"foob", "little")
    assert fnv1a_block_hash([token], None) & (2**64 - 1) == 0xDD120E790C2512AF


def test_the_page_s_test_vectors_are_so() -> None:
    rows = re.findall(r"^\| `(\[.*?\])` \| `(\d+)` \| `(\w+)` \| `(.*?)` \|$", PAGE, re.MULTILINE)
    assert {algorithm for _, _, algorithm, _ in rows} == {"xxh3", "fnv1a"}
    for tokens, size, algorithm, names in rows:
        assert chain(json.loads(tokens), int(size), algorithm) == json.loads(names)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 8), st.sampled_from(["xxh3", "fnv1a"]))
def test_names_are_signed_chained_and_of_whole_blocks_only(tokens: list[int], size: int, algorithm: Any) -> None:
    names = chain(tokens, size, algorithm)
    assert len(names) == len(tokens) // size
    assert all(-(2**63) <= name < 2**63 for name in names)
    for count in range(len(tokens) + 1):
        assert chain(tokens[:count], size, algorithm) == names[: count // size]
    if tokens:
        other = [tokens[0] + 1, *tokens[1:]]
        assert not set(chain(other, size, algorithm)) & set(names)


# The log


@given(histories(), st.integers(1, 8), st.data())
def test_a_subscriber_that_loses_events_or_joins_late_ends_with_what_the_worker_holds(
    history: list[KvEvent], capacity: int, data: st.DataObject
) -> None:
    log, subscriber = EventLog(capacity), Subscription()
    for event in history:
        numbered = log.append(event)
        if data.draw(st.booleans()) and not subscriber.take(numbered):
            subscriber.catch_up(log.catch_up(subscriber.sequence))
            assert subscriber.index.blocks == log.index.blocks
    subscriber.catch_up(log.catch_up(subscriber.sequence))
    assert subscriber.index.blocks == log.index.blocks
    assert subscriber.sequence == log.sequence == len(history)


@settings(max_examples=25)
@given(histories(), st.integers(0, 20))
def test_numbered_events_and_what_was_missed_travel_as_json(history: list[KvEvent], after: int) -> None:
    log = EventLog(capacity=5)
    for event in history:
        numbered = log.append(event)
        assert SEQUENCED.is_valid({"sequence": numbered.sequence, "event": as_read(numbered.event)})
    missed = log.catch_up(min(after, log.sequence))
    events = [as_read(event) for event in missed.events]
    assert CATCH_UP.is_valid({"events": events, "sequence": missed.sequence, "is_snapshot": missed.is_snapshot})


def test_a_number_or_an_event_that_cannot_be_does_not_fit_the_schema() -> None:
    for wrong in ({"sequence": 0, "event": STORED}, {"sequence": 1, "event": STORED | {"block_size": 0}}):
        assert not SEQUENCED.is_valid(wrong)


def test_the_command_prints_the_schemas_of_the_contracts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--contracts"]) == 0
    assert json.loads(capsys.readouterr().out) == contract_schemas()


@given(histories())
def test_a_snapshot_is_taken_by_a_subscriber_that_knows_nothing(history: list[KvEvent]) -> None:
    log = EventLog(capacity=1)
    for event in history:
        log.append(event)
    missed = log.catch_up(-1)
    assert missed.is_snapshot
    subscriber = Subscription()
    subscriber.catch_up(missed)
    assert subscriber.index.blocks == log.index.blocks


@given(histories())
def test_merged_events_are_the_same_changes(history: list[KvEvent]) -> None:
    whole, short = BlockIndex(), BlockIndex()
    fewer = merged(history)
    for event in history:
        whole.apply(event)
    for event in fewer:
        short.apply(event)
    assert whole.blocks == short.blocks
    assert len(fewer) <= len(history)
    for event in fewer:
        assert SCHEMA.is_valid(as_read(event))


def test_an_event_that_came_already_changes_nothing() -> None:
    subscriber = Subscription()
    stored = SequencedEvent(1, BlockStored(block_hashes=(1,), token_ids=(1,), block_size=1))
    assert subscriber.take(stored)
    assert subscriber.take(SequencedEvent(2, BlockRemoved(block_hashes=(1,))))
    assert subscriber.take(stored)
    assert subscriber.index.blocks == {}


def test_what_cannot_be_is_not_applied() -> None:
    with pytest.raises(ContractViolation, match="parent 9 was not stored"):
        BlockIndex().apply(BlockStored(block_hashes=(1,), token_ids=(1,), block_size=1, parent_block_hash=9))
    with pytest.raises(ContractViolation, match="block 9 was not stored"):
        BlockIndex().apply(BlockRemoved(block_hashes=(9,)))
