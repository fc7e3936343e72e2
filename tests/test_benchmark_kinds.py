"""The benchmark of kinds of models: llama.cpp computes each kind that is written, and claims are about the worst."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from benchmarks.decision_questions import QUESTIONS
from benchmarks.decisions import Answer, calibration_error
from benchmarks.kinds import KINDS, Kind, write_kind
from benchmarks.scenario import Row, Summary
from benchmarks.scenarios.kinds import GEMMA, checks
from benchmarks.targets.contenders import OURS
from models import write_model
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

MEMORY: dict[Kind, str] = {
    "llama": "attention",
    "qwen3moe": "attention",
    "gemma3": "sliding-window",
    "gpt-oss": "sliding-window",
}
"""Of the kinds that are no hybrids."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vocabulary") / "model.gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_llama_computes_each_kind_that_is_written(tmp_path: Path, vocabulary: Path, kind: Kind) -> None:
    path = tmp_path / "model.gguf"
    write_kind(path, kind, vocabulary)
    with Model.load(path) as model, Context(model, ContextParams(n_ctx=256, n_batch=32, n_ubatch=32)) as context:
        batch = Batch(32)
        batch.add(array("i", [5, 6, 7]), 0, 0, last_logits=True)
        assert context.decode(batch) == DONE
        assert model.shape.memory == MEMORY.get(kind, "hybrid")
        assert model.info.has_chat_template


def test_a_claim_is_about_the_kind_that_is_furthest_from_it_and_tells_what_the_peer_has_there() -> None:
    rows = [
        Row("llama", OURS, {"think": 900, "chain_percent": 98}),
        Row(GEMMA, OURS, {"think": 1_000, "chain_percent": 97.5, "start_rss_mb": 500}),
        Row(GEMMA, "llama-server split", {"think": 890, "chain_percent": 60}),
        Row(GEMMA, "llama-server unified", {"think": 880, "chain_percent": 70}),
    ]
    found = {check.claim: check for check in checks(Summary.of([rows]))}
    thinking = found["six turns that think: tokens read"]
    assert (thinking.value, thinking.holds, thinking.beside) == (1_000, False, f"{GEMMA}, where llama-server has 880")
    chain = found["agent's chain: prompt tokens from cache"]
    assert (chain.value, chain.holds, chain.beside) == (97.5, True, f"{GEMMA}, where llama-server has 70")
    assert found[f"{GEMMA}: memory at start"].holds
    assert not found["the same prompt again: tokens read"].is_known


def test_calibration_is_off_by_what_shares_promise_beyond_what_is_right() -> None:
    known = QUESTIONS[0]

    def one(share: float, *, is_right: bool) -> Answer:
        return Answer(known, known.right if is_right else known.right + 1, share, 0.0)

    honest = [one(0.75, is_right=at < 3) for at in range(4)]
    assert calibration_error(honest) == pytest.approx(0)
    assert calibration_error([one(1.0, is_right=at < 3) for at in range(4)]) == pytest.approx(0.25)
    assert calibration_error([*honest, *(one(0.95, is_right=False) for _ in range(4))]) == pytest.approx(0.475)
