"""Each family's calls on a real vocabulary: whatever a random model is held to by a grammar is parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conversations import ASKED, CALLING, RESULTS, SYSTEM
from engine_world import config_for
from zoo_models import write_zoo_model

from uma import Request, SamplingParams, open_engine
from uma.types import Finished, Grammar, Message, Tool

FAMILIES = {
    "microsoft-Phi-3.5-mini-instruct.jinja": "phi-3",
}
"""Templates of families that are parsed, each with the vocabulary nearest to its own."""
CHOICE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bern"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", "Tells the weather.", CHOICE), Tool("time", "Tells the time.", CHOICE))


@pytest.mark.parametrize("name", FAMILIES)
async def test_calls_that_are_demanded_of_a_random_model_are_parsed(tmp_path: Path, name: str) -> None:
    model = write_zoo_model(tmp_path / "zoo.gguf", FAMILIES[name], name)
    sampling = SamplingParams(max_tokens=200, temperature=1.0, seed=1)
    structured = SamplingParams(max_tokens=200, grammar=Grammar(json_schema=CHOICE))
    asked: dict[str, Any] = {"messages": (SYSTEM, ASKED), "sampling": sampling}
    demanded = {"tools": TOOLS, "reasoning": "off", "parallel_tool_calls": False}
    cells: dict[str, dict[str, Any]] = {
        "required": {**asked, **demanded, "tool_choice": "required"},
        "named": {**asked, **demanded, "tool_choice": "time"},
        "after results": {**asked, **demanded, "tool_choice": "required", "messages": (ASKED, CALLING, *RESULTS)},
        "schema": {**asked, "sampling": structured, "reasoning": "off"},
        "begun": {**asked, "messages": (ASKED, Message("assistant", "Well,")), "reasoning": "on"},
        "auto": {**asked, "tools": TOOLS, "reasoning": "auto"},
        "stop string": {**asked, "sampling": SamplingParams(max_tokens=20, stop=("a", "e"))},
    }
    async with open_engine(config_for(model)) as engine:
        for cell, fields in cells.items():
            async with engine.generate(Request(cell, stream=False, **fields)) as stream:
                (last,) = [event async for event in stream]
            assert isinstance(last, Finished), cell
            if cell in ("required", "named", "after results"):
                (call,) = last.tool_calls
                jsonschema.validate(json.loads(call.arguments), CHOICE)
                assert cell != "named" or call.name == "time"
            if cell == "schema":
                jsonschema.validate(json.loads(last.text or ""), CHOICE)
