"""Embedding beside streams: a batch keeps to the streams' budget of time, and requests share batches fairly by lane."""

from __future__ import annotations

from array import array
from itertools import combinations
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from policy_world import make_row

from uma.engine.policy import Targets
from uma.engine.policy.cost import SIZES, CostModel
from uma.engine.policy.scheduler import EMBED_MIN_SHARE, EmbedDemand, EmbedTurns
from uma.engine.worker.embedding import WEIGHTS, Embedder, EmbedJob
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context
from uma.metrics import EngineMetrics

BUDGET_MS = 80.0
TARGETS = Targets(BUDGET_MS, batch_tokens=4_096, start_tokens=64)


@given(
    fixed_ms=st.floats(0.1, 20),
    token_ms=st.floats(0.01, 1),
    target_ms=st.floats(20, 200),
    step_ms=st.floats(1, 300),
    demands=st.lists(st.tuples(st.integers(1, 4_096), st.integers(0, 64)), min_size=20, max_size=40),
)
def test_a_batch_of_texts_takes_what_a_step_leaves_of_the_target(
    fixed_ms: float, token_ms: float, target_ms: float, step_ms: float, demands: list[tuple[int, int]]
) -> None:
    turns = EmbedTurns(TARGETS, CostModel())
    for size in SIZES:
        turns.cost.observe_prefill(size, 0.0, fixed_ms + token_ms * size)
    streams = [make_row(1, target_tbt_ms=target_ms), make_row(2, lane=-1, target_tbt_ms=1.0)]
    longest_ms = max(min(BUDGET_MS, target_ms) - step_ms, EMBED_MIN_SHARE * step_ms)
    for tokens, least_tokens in demands:
        demand = EmbedDemand(tokens, min(least_tokens, tokens), lane=0, position=0.0)
        given_tokens = turns.tokens(demand, streams, step_ms, now_ms=0.0)
        least = max(demand.least_tokens, min(SIZES[0], tokens))
        assert least <= given_tokens <= tokens
        assert given_tokens == least or turns.cost.prefill_ms(given_tokens, 0.0) <= longest_ms


def test_the_first_batch_of_texts_is_judged_by_what_prompts_take() -> None:
    prompts = CostModel()
    turns = EmbedTurns(TARGETS, prompts)
    stream, demand = make_row(1, target_tbt_ms=80.0), EmbedDemand(1_000, 0, lane=1, position=0.0)
    assert turns.tokens(demand, [stream], 10.0, now_ms=0.0) == TARGETS.start_tokens
    for size in SIZES:
        prompts.observe_prefill(size, 0.0, 10.0 + 2.0 * size)
    assert turns.tokens(demand, [stream], 10.0, now_ms=0.0) == 16  # 42 ms of the 70 that a step leaves; 32 take 74


def test_no_text_is_embedded_while_a_stream_is_late() -> None:
    turns = EmbedTurns(TARGETS, CostModel())
    demand = EmbedDemand(1_000, 0, lane=1, position=0.0)
    late = make_row(1, target_tbt_ms=80.0, last_token_ms=0.0)
    assert turns.tokens(demand, [late], 10.0, now_ms=80.0) > 0
    assert turns.tokens(demand, [late], 10.0, now_ms=130.0) == 0
    assert turns.tokens(demand, [make_row(2, lane=-1, last_token_ms=0.0)], 10.0, now_ms=130.0) > 0


class NoContext:
    """A context of an encoder that computes nothing."""

    n_batch, n_seq_max = 512, 1
    model, params = SimpleNamespace(is_causal=False), SimpleNamespace(pooling="mean")

    def set_threads(self, threads: int) -> None:
        pass

    def seq_rm(self, seq: int) -> None:
        pass

    def decode(self, batch: Batch) -> int:
        return DONE

    def embedding(self, seq: int) -> npt.NDArray[np.float32]:
        return np.zeros(1, np.float32)


@given(
    requests=st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), st.integers(0, 40)), min_size=2, max_size=6),
    sizes=st.lists(st.integers(1, 512), min_size=60, max_size=60),
)
def test_requests_that_wait_together_are_served_by_the_weights_of_their_lanes(
    requests: list[tuple[int, int]], sizes: list[int]
) -> None:
    """The bound of start-time fair queueing: two differ by the largest piece of each, over its weight."""
    embedder = Embedder(EmbedTurns(TARGETS, CostModel()), lambda: 1, EngineMetrics())
    embedder.attach(cast(Context, NoContext()))
    texts = [array("i", [1]) * size for size in sizes]
    jobs = [EmbedJob(key, lane, list(texts), lambda: None) for key, (lane, _) in enumerate(requests)]
    served = [[0] for _ in requests]
    for tick in range(len(sizes)):
        for job, (_, joins) in zip(jobs, requests, strict=True):
            if joins == tick:
                embedder.add(job)
        embedder.run(1)
        for job, tokens in zip(jobs, served, strict=True):
            tokens.append(sum(sizes[: job.next_text]))
    for (one, (lane, joins)), (other, (other_lane, other_joins)) in combinations(enumerate(requests), 2):
        weight, other_weight = WEIGHTS[lane], WEIGHTS[other_lane]
        for begin in range(max(joins, other_joins), len(sizes)):
            share = (served[one][-1] - served[one][begin]) / weight
            other_share = (served[other][-1] - served[other][begin]) / other_weight
            assert abs(share - other_share) <= max(sizes) * (1 / weight + 1 / other_weight) + 1e-6
