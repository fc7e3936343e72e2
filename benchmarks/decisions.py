"""Decisions: tokens that are read, their time, a stream beside them, and how often small models are right.

    python -m benchmarks.reference                # fetches the models
    python -m benchmarks.decisions tokens         # of 40 questions about 1,000 tokens, with each kind of memory
    python -m benchmarks.decisions time           # the same beside plain prefill of as many tokens
    python -m benchmarks.decisions stream         # the worst gap of streams beside 400 questions, for some minutes
    python -m benchmarks.decisions questions      # 60 questions with known answers: right ones, calibration

Each part prints a table and, where there is one, the bar; the exit code is 1 where a bar is missed. All run in this
process, through the engine that every server has. Of times on a machine that does other things only the ratio counts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, cast, get_args

import attrs
import trio
from rich.console import Console
from rich.table import Table

from benchmarks.conversations import words
from benchmarks.decision_questions import QUESTIONS, Known
from benchmarks.kinds import KINDS, kind_model
from benchmarks.reference import RealModel, fetch_model
from uma import Request, RuntimeConfig, SamplingParams, open_engine
from uma.engine import Engine
from uma.engine.intake.decision_prompt import question_text
from uma.types import Decision, DecisionQuestion, DecisionRequest, Finished, Grammar, Message, Token

STATE_TOKENS, COUNT, MANY = 1_000, 40, 400
MAX_READ = 1.1
"""Tokens that are read, of the state's and each question's once."""
MAX_TIME = 1.3
"""Time, of plain prefill of as many tokens."""
MAX_GAP_MS = 110.0
MAX_STREAM_SEC = 900.0
"""Time after which the questions beside streams are left."""
STREAM_TOKENS = 1_000
"""Tokens of a stream, behind which another begins: each is slower the longer it is, whatever runs beside it."""
BINS = 10
"""Bins of the expected calibration error."""
WAYS: dict[str, dict[str, Any]] = {
    "letters": {"labels": "codes", "orders": "one"},
    "letters, two orders": {"labels": "codes", "orders": "two"},
    "letters, all orders": {"labels": "codes", "orders": "all"},
    "names": {"labels": "names", "orders": "one"},
    "names, two orders": {"labels": "names", "orders": "two"},
    "default": {},
}
GENERATED = "generated with a schema"


@asynccontextmanager
async def _engine(path: Path, threads: int | None) -> AsyncIterator[Engine]:
    config = RuntimeConfig(model=str(path), n_ctx=16_384)
    if threads:
        config = attrs.evolve(config, threads=threads)
    async with open_engine(config) as engine:
        yield engine


def _path(name: str) -> Path:
    return next((kind_model(kind) for kind in KINDS if kind == name), None) or fetch_model(cast("RealModel", name))


def _questions(rng: Random, count: int) -> list[DecisionQuestion]:
    """Predicates, choices of four names of a word or two, and scores of three, in turn."""
    found = []
    for at in range(count):
        asked = f"{words(rng, 16).strip().capitalize()}?"
        names = list({words(rng, rng.randint(1, 2)).strip(): None for _ in range(4 - at % 3)})
        makes = (DecisionQuestion.choice, DecisionQuestion.score)
        found.append(makes[at % 3](asked, names) if at % 3 < 2 else DecisionQuestion.predicate(asked))
    return found


def _asked(state: str, questions: Sequence[DecisionQuestion]) -> DecisionRequest:
    return DecisionRequest("decide", [Message("user", state)], questions)


def _chat(text: str, max_tokens: int = 1, **sampling: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, **sampling)
    return Request(id="chat", messages=(Message("user", text),), sampling=params, reasoning="off")


async def _end(engine: Engine, request: Request) -> tuple[str, Finished]:
    text = ""
    async with engine.generate(request) as events:
        async for event in events:
            if isinstance(event, Token):
                text += event.text
            elif isinstance(event, Finished):
                return text, event
    raise AssertionError("a request ends with Finished")


async def tokens(rng: Random, models: Sequence[str], threads: int | None) -> tuple[Table, bool]:
    """Tokens read, and those of a later chat, by kind of memory."""
    shown = Table("model", "bound", "read", "of the bound", "a later chat reads", title=f"{COUNT} questions, cold")
    holds = True
    for name in models:
        async with _engine(_path(name), threads) as engine:
            state, asked = words(rng, STATE_TOKENS).strip(), _questions(rng, COUNT)
            found = await engine.decide(_asked(state, asked))
            known = len((await engine.tokenize(_chat(state))).token_ids)
            bound = known
            for each in asked:
                text = f"{state}\n\n{question_text(each, range(len(each.options) or 2), ())}"
                bound += len((await engine.tokenize(_chat(text))).token_ids) - known
            later = (await _end(engine, _chat(f"{state}\n\nWhat now?")))[1].usage
            again = later.prompt_tokens - later.cached_tokens
            print(f"{name}: {found.read_tokens:,} of {bound:,}, later {again}", file=sys.stderr, flush=True)
            shown.add_row(name, f"{bound:,}", f"{found.read_tokens:,}", f"{found.read_tokens / bound:.2f}", str(again))
            holds &= found.read_tokens <= MAX_READ * bound and later.cached_tokens >= 0.98 * known
    return shown, holds


async def times(rng: Random, model: str, threads: int | None, rounds: int) -> tuple[Table, bool]:
    """Time of questions, and of one prompt of as many tokens, in turn."""
    ratios = []
    shown = Table("round", "tokens read", "questions, s", "plain prefill, s", "ratio", title="Time of 40 questions")
    async with _engine(_path(model), threads) as engine:
        vocabulary = range(1_000, 40_000)
        for number in range(1, rounds + 1):
            request = _asked(words(rng, STATE_TOKENS).strip(), _questions(rng, COUNT))
            began = time.perf_counter()
            read = (await engine.decide(request)).read_tokens
            decided = time.perf_counter()
            ids = tuple(rng.choices(vocabulary, k=read))
            await _end(engine, Request(id="plain", token_ids=ids, sampling=SamplingParams(max_tokens=1)))
            plain = time.perf_counter() - decided
            ratios.append((decided - began) / plain)
            shown.add_row(str(number), f"{read:,}", f"{decided - began:.2f}", f"{plain:.2f}", f"{ratios[-1]:.2f}")
    shown.add_row("median", "", "", "", f"{median(ratios):.2f}")
    return shown, median(ratios) <= MAX_TIME


async def stream(rng: Random, model: str, threads: int | None) -> tuple[Table, bool]:
    """Gaps of streams, one after the other: alone, and beside 400 questions."""
    gaps, is_under_way = list[tuple[float, float]](), trio.Event()
    async with _engine(_path(model), threads) as engine, trio.open_nursery() as nursery:
        request = _chat("Tell me a long story.", STREAM_TOKENS, ignore_eos=True)

        async def follow() -> None:
            while True:
                at = list[float]()
                async with engine.generate(request) as events:
                    async for event in events:
                        if isinstance(event, Token):
                            at.append(time.perf_counter())
                            gaps.extend((later, 1_000 * (later - earlier)) for earlier, later in pairwise(at[-2:]))
                            if len(at) == 100:
                                is_under_way.set()

        nursery.start_soon(follow)
        await is_under_way.wait()
        asked = _asked(words(rng, STATE_TOKENS).strip(), _questions(rng, MANY))
        before = engine.snapshot()["prefill_tokens_total"]
        began = time.perf_counter()
        with trio.move_on_after(MAX_STREAM_SEC):
            await engine.decide(asked)
        ended, read = time.perf_counter(), engine.snapshot()["prefill_tokens_total"] - before
        nursery.cancel_scope.cancel()
    alone, beside = ([gap for when, gap in gaps if (when > began) is late] for late in (False, True))
    shown = Table("", "median gap, ms", "worst, ms", title=f"Streams beside {MANY} questions: {ended - began:.1f} s")
    for name, found_gaps in (("alone", alone), (f"beside {read:,} tokens", beside)):
        shown.add_row(name, f"{median(found_gaps):.1f}", f"{max(found_gaps):.1f}")
    return shown, max(beside) <= MAX_GAP_MS


@attrs.frozen
class Answer:
    """The answer to a question, and how sure it is."""

    known: Known
    best: int
    share: float
    logprob: float
    """Logarithm of the right option's probability."""

    @property
    def is_right(self) -> bool:
        """Whether it is the known one."""
        return self.best == self.known.right


def calibration_error(answers: Sequence[Answer]) -> float:
    """Expected calibration error: how far shares of right answers are from what they promise, in bins."""
    bins = [[one for one in answers if min(BINS - 1, int(one.share * BINS)) == at] for at in range(BINS)]
    return sum(abs(sum(one.is_right for one in each) - math.fsum(one.share for one in each)) for each in bins) / len(
        answers
    )


async def questions(model: str, threads: int | None) -> tuple[Table, bool]:
    """Right answers by way and kind."""
    kinds = list(dict.fromkeys(known.kind for known in QUESTIONS))
    shown = Table("way", "right", *kinds, "ECE", "NLL", title=f"{len(QUESTIONS)} questions, {model}")
    right: dict[str, int] = {}
    async with _engine(_path(model), threads) as engine:
        for way in (*WAYS, GENERATED):
            answers = [await _answered(engine, known, way) for known in QUESTIONS]
            right[way] = sum(one.is_right for one in answers)
            by_kind = [str(sum(one.is_right for one in answers if one.known.kind == kind)) for kind in kinds]
            nll = "" if way == GENERATED else f"{-sum(one.logprob for one in answers) / len(answers):.2f}"
            shown.add_row(way, str(right[way]), *by_kind, f"{calibration_error(answers):.2f}", nll)
            print(f"{way}: {right[way]} of {len(answers)}", file=sys.stderr, flush=True)
    return shown, right["default"] >= right[GENERATED]


async def _answered(engine: Engine, known: Known, way: str) -> Answer:
    if way != GENERATED:
        request = attrs.evolve(_asked(known.state, [known.question]), **WAYS[way])
        (found,) = (await engine.decide(request)).answers
        return _of(known, found)
    labels = [option.label for option in known.question.options] or ["yes", "no"]
    text = f"{known.state}\n\nQuestion: {known.question.instructions}\nOptions: {', '.join(labels)}"
    told, _ = await _end(engine, _chat(text, 32, grammar=Grammar(json_schema={"enum": labels})))
    return Answer(known, labels.index(told.strip().strip('"')), 1.0, 0.0)


def _of(known: Known, found: Decision) -> Answer:
    return Answer(known, found.best, max(found.probabilities), math.log(found.probabilities[known.right] or 1e-9))


def main() -> int:
    """Measure one part, and print its table. Exit code 1: a bar is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decisions", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("part", choices=("tokens", "time", "stream", "questions"))
    models = (*get_args(RealModel), *KINDS)
    parser.add_argument("--model", choices=models, help="(smollm2; of questions qwen2.5-coder; of tokens all kinds)")
    parser.add_argument("--rounds", type=int, default=5, help="of time")
    parser.add_argument("--threads", type=int, help="threads that compute (default: UMA chooses)")
    args = parser.parse_args()
    rng = Random("decisions")
    parts = {
        "tokens": partial(tokens, rng, [args.model] if args.model else (*KINDS, "smollm2"), args.threads),
        "time": partial(times, rng, args.model or "smollm2", args.threads, args.rounds),
        "stream": partial(stream, rng, args.model or "smollm2", args.threads),
        "questions": partial(questions, args.model or "qwen2.5-coder", args.threads),
    }
    table, holds = trio.run(parts[args.part])
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
