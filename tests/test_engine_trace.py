"""What the scheduler says of its decisions when everything is logged, and that each can be traced to its request."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from engine_world import answers, ask, config_for, tokens_for

from uma import open_engine

SCHEDULER = "uma.engine.scheduler"


def decoded(lines: list[str], id: str) -> int:
    """The batches of decode rows after a plan to decode for this request, until the next plan."""
    count, is_in = 0, False
    for line in lines:
        if line.startswith("plan "):
            is_in = repr(id) in line.split(" prefill=")[0]
        count += is_in and line.startswith("batch decode=")
    return count


async def test_every_decision_names_the_requests_it_is_about(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, SCHEDULER)
    requests = [ask(tokens_for(seed, 40), 4, id=f"story {seed}") for seed in range(2)]
    async with open_engine(config_for(tiny)) as engine:
        await answers(engine, requests)
    lines = [record.getMessage() for record in caplog.records if record.name == SCHEDULER]
    for request in requests:
        mine = [line for line in lines if repr(request.id) in line]
        for word in ("queue", "start", "end"):
            assert sum(line.startswith(f"{word} key=") for line in mine) == 1
        plans = [line for line in mine if line.startswith("plan ")]
        assert any(f"{request.id!r}:" in line for line in plans), "never prefilled"
        assert decoded(lines, request.id) == 3, "decoded after the first token"
    assert all(
        word in line
        for line in lines
        if line.startswith("plan ")
        for word in ("steps=", "held=", "preempted=", "budget_ms=")
    )


async def test_a_request_s_life_is_told_in_its_order(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, SCHEDULER)
    async with open_engine(config_for(tiny)) as engine:
        await answers(engine, [ask(max_tokens=3)])
    words = [record.getMessage().split()[0] for record in caplog.records if record.name == SCHEDULER]
    # A prompt that is read alone ends with a batch of its own.
    assert words == ["queue", "start", "plan", "batch", *["batch", "plan"] * 2, "batch", "end"]


async def test_a_sequence_that_gives_way_is_named(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, SCHEDULER)
    requests = [ask(tokens_for(seed, 100), 300, id=f"long {seed}") for seed in range(3)]
    async with open_engine(config_for(tiny, n_ctx=512)) as engine:
        await answers(engine, requests)
        assert engine.snapshot()["preemptions_total"] > 0
    lines = [record.getMessage() for record in caplog.records if record.name == SCHEDULER]
    assert any(line.startswith("preempt key=") and "request='long " in line for line in lines)


async def test_without_debugging_nothing_is_said(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, SCHEDULER)
    async with open_engine(config_for(tiny)) as engine:
        await answers(engine, [ask()])
    assert not [record for record in caplog.records if record.name == SCHEDULER]


async def test_what_a_step_takes_is_known_once_one_ran(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, SCHEDULER)
    async with open_engine(config_for(tiny)) as engine:
        await answers(engine, [ask(max_tokens=3)])
    plans = [line for record in caplog.records if (line := record.getMessage()).startswith("plan decode=[1=")]
    expected_ms = [float(line.split("expected_ms=")[1].split()[0]) for line in plans]
    assert expected_ms[0] == 0.0 < expected_ms[1]
