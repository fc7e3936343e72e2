"""A trace of an engine: valid, whole, nested, bounded, and over by itself."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_world import answer, answers, ask, config_for, settled, tokens_for

from uma.engine import open_engine
from uma.engine.recorder import MAX_VALUES, Recorder
from uma.errors import BadRequest
from uma.types import Message, Request, SamplingParams


def trace_of(recorder: Recorder) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(b"".join(recorder.written()))
    return trace


def spans_of(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Complete events by their thread's name, in the order of the file."""
    names = {each["tid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "thread_name"}
    found = defaultdict(list)
    for each in trace["traceEvents"]:
        if each["ph"] == "X":
            assert {"name", "ph", "pid", "tid", "ts", "dur"} <= each.keys()
            found[names[each["tid"]]].append(each)
    return found


def ns(span: dict[str, Any]) -> tuple[int, int]:
    return round(span["ts"] * 1000), round((span["ts"] + span["dur"]) * 1000)


def test_spans_and_names_are_bounded_and_a_trace_that_is_full_says_so() -> None:
    recorder = Recorder()
    for _ in range(MAX_VALUES // 1_000 + 5):
        recorder.span("decode", "batch", 1.0, 2.0, ["a"] * 999)
    recorder.close()
    recorder.span("decode", "late", 1.0, 2.0)
    assert len(recorder) == MAX_VALUES // 1_000
    assert trace_of(recorder)["otherData"]["is_cut"] is True


async def test_every_step_is_there_within_its_tick_and_threads_are_named(tiny: Path) -> None:
    requests = [ask(tokens_for(seed, 300), 24, id=f"r{seed}") for seed in range(3)]
    long = Request("long", messages=(Message("user", "word " * 600),), sampling=SamplingParams(max_tokens=2))
    async with open_engine(config_for(tiny, n_ctx=8_192, n_batch=256, n_ubatch=256)) as engine:
        before = engine.snapshot()["batch_calls_total"]
        with engine.recording() as recorder:
            await answers(engine, [*requests, long])
            await settled(engine)
        batches = engine.snapshot()["batch_calls_total"] - before
        steady = await answer(engine, ask(max_tokens=4))
        assert engine.mailbox.recorder is None
    assert len(steady.tokens) == 4
    trace = trace_of(recorder)
    spans = spans_of(trace)
    assert {"decode", "Trio", "render 1"} <= spans.keys()
    steps = [each for each in spans["decode"] if each["name"] in ("batch", "decode", "verify")]
    assert len(steps) == batches
    rows = {row.partition(":")[0] for each in steps for row in each["args"]["rows"]}
    assert rows == {"r0", "r1", "r2", "long"}
    pieces = [row for each in steps if each["name"] == "batch" for row in each["args"]["rows"]]
    assert sum(int(row.split()[1]) for row in pieces if row.startswith("r0:")) >= 300
    assert any(each["name"] == "deliver" for each in spans["Trio"])
    for thread in spans.values():
        open_until: list[int] = []
        for span in thread:
            began, ended = ns(span)
            while open_until and open_until[-1] <= began:
                open_until.pop()
            assert not open_until or ended <= open_until[-1], span
            open_until.append(ended)
        assert all(ns(one)[0] <= ns(other)[0] for one, other in pairwise(thread))
    ticks = [ns(each) for each in spans["decode"] if each["name"] == "tick"]
    assert all(any(began <= ns(step)[0] and ns(step)[1] <= ended for began, ended in ticks) for step in steps)
    assert trace["otherData"]["is_cut"] is False


async def test_one_trace_is_on_at_a_time(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        with engine.recording(), pytest.raises(BadRequest, match="on already"):
            await engine.record(1.0)
        recorder = await engine.record(0.05)
        assert engine.mailbox.recorder is None
        assert recorder.ended_ms - recorder.began_ms >= 50
