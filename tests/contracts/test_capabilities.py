"""Capabilities are derived from what a server declares, never typed in."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract_world import server_info
from engine_world import config_for

from uma.contracts.capabilities import capabilities_of, model_types_of
from uma.contracts.card import card_of
from uma.engine import open_engine
from uma.protocol.converter import unstructure


@pytest.mark.parametrize(
    ("declared", "claim"),
    [
        ({"streaming": False}, {"supports_streaming": False}),
        ({"cancel": False}, {"supports_cancel": False}),
        ({"max_stop_sequences": 3}, {"max_stop_sequences": 3}),
        ({"tools": ("auto", "none")}, {"supports_tool_calls": True}),
        ({"tools": ("auto", "none"), "chat": False}, {"supports_tool_calls": False}),
        ({"sampling_params": ("top_k", "min_p")}, {"supported_sampling_params": ("min_p", "top_k")}),
    ],
)
def test_a_claim_follows_what_is_declared(declared: dict[str, object], claim: dict[str, object]) -> None:
    made = capabilities_of(server_info(**declared).capabilities)
    for name, value in claim.items():
        assert getattr(made, name) == value


def test_what_a_server_does_not_declare_is_not_claimed() -> None:
    made = capabilities_of(server_info().capabilities)
    assert not made.supports_vision
    assert not made.supports_logprobs
    assert not made.supports_guided_decoding


def test_a_model_without_a_template_of_its_own_is_offered_for_completions_only() -> None:
    assert model_types_of(server_info(chat=False).capabilities) == ("completions",)
    assert "chat" in model_types_of(server_info().capabilities)


def test_a_model_that_does_not_generate_is_offered_for_no_text() -> None:
    assert model_types_of(server_info(chat=False, generate=False, embeddings=True).capabilities) == ("embedding",)


async def test_the_engine_s_own_card_agrees_with_itself() -> None:
    async with open_engine(config_for(Path("builtin"))) as engine:
        card = card_of(engine.info)
    fields = unstructure(card)
    fields["model_type"] = list(card.model_type)
    assert card.capabilities is not None
    assert set(card.capabilities.supported_sampling_params) == set(engine.info.capabilities.sampling_params)
