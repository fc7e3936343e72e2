"""The model deployment card: derived, checked with a path for each violation, and the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import attrs
import jsonschema
import pytest
from contract_world import server_info

from uma.contracts.card import CardRuntime, ModelDeploymentCard, canonical_json, card_of, checksum, slug_of
from uma.contracts.parse import parse
from uma.contracts.schema import contract_schemas
from uma.errors import BadRequest

SCHEMA = contract_schemas()["ModelDeploymentCard"]
LEAST: dict[str, Any] = {
    "display_name": "Tiny",
    "slug": "tiny",
    "model_input": "tokens",
    "model_type": ["chat", "completions"],
}


def is_valid(card: dict[str, Any]) -> bool:
    return not list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(card))


def test_the_least_card_of_the_text_is_taken_by_schema_and_parser() -> None:
    assert is_valid(LEAST)
    assert parse(LEAST, ModelDeploymentCard).version == "1.0"


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"version": "2.0"}, "version: "),
        ({"display_name": ""}, "display_name: "),
        ({"slug": "Tiny Model"}, "slug: "),
        ({"model_input": "images"}, "model_input: "),
        ({"model_type": []}, "model_type: "),
        ({"model_type": ["chats"]}, "model_type[0]: "),
        ({"context_length": 0}, "context_length: "),
        ({"runtime_config": {"max_num_seqs": 0}}, "runtime_config.max_num_seqs: "),
        ({"capabilities": {"supports_vision": 1}}, "capabilities.supports_vision: "),
        ({"colour": "blue"}, "colour: is not a field of ModelDeploymentCard"),
    ],
)
def test_a_violation_names_its_place_and_the_schema_sees_it_too(wrong: dict[str, Any], line: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(LEAST | wrong, ModelDeploymentCard)
    assert refused.value.message.startswith(line)
    assert not is_valid(LEAST | wrong)


def test_every_violation_is_told_at_once() -> None:
    with pytest.raises(BadRequest) as refused:
        parse({"slug": 1, "model_input": "x", "context_length": -1, "colour": 0}, ModelDeploymentCard)
    places = {line.partition(":")[0] for line in refused.value.message.splitlines()}
    assert places == {"display_name", "slug", "model_input", "model_type", "context_length", "colour"}


def test_a_server_s_card_comes_from_what_the_server_says_of_itself() -> None:
    info = server_info(max_stop_sequences=5)
    card = card_of(info, block_size=32)
    assert (card.display_name, card.slug) == ("Tiny 1.5 (F32)", "tiny-1-5-f32")
    assert (card.context_length, card.kv_cache_block_size) == (info.limits.n_ctx, 32)
    assert card.capabilities is not None
    assert card.capabilities.max_stop_sequences == 5
    assert set(card.capabilities.supported_sampling_params) == set(info.capabilities.sampling_params)


def test_a_card_comes_back_from_its_canonical_json() -> None:
    card = card_of(server_info(), runtime=CardRuntime(total_kv_blocks=64, max_num_seqs=8))
    fields = json.loads(canonical_json(card))
    assert is_valid(fields)
    assert parse(fields, ModelDeploymentCard) == card


def test_canonical_json_is_sorted_without_white_space_and_has_the_version() -> None:
    text = canonical_json(parse(dict(reversed(LEAST.items())), ModelDeploymentCard)).decode()
    plain = (
        '{"display_name":"Tiny","model_input":"tokens","model_type":["chat","completions"],'
        '"slug":"tiny","version":"1.0"}'
    )
    assert text == plain
    assert checksum(parse(LEAST, ModelDeploymentCard)) == "sha256:" + hashlib.sha256(plain.encode()).hexdigest()


def test_two_machines_of_different_size_have_one_checksum_and_two_models_have_two() -> None:
    small, large = (card_of(server_info(), runtime=CardRuntime(total_kv_blocks=n)) for n in (64, 4096))
    assert canonical_json(small) != canonical_json(large)
    assert checksum(small) == checksum(large)
    for change in ({"context_length": 99}, {"kv_cache_block_size": 8}, {"display_name": "Other"}):
        assert checksum(attrs.evolve(small, **change)) != checksum(small)


@pytest.mark.parametrize(("name", "slug"), [("Qwen 2.5 (Q4_K)", "qwen-2-5-q4-k"), ("狐", "model"), ("-a--b-", "a-b")])
def test_any_name_gives_a_slug_that_the_schema_takes(name: str, slug: str) -> None:
    assert slug_of(name) == slug
    assert is_valid(LEAST | {"slug": slug})
