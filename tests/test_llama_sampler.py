"""Claims about sampling, on logits made by hand where a claim needs certain ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt
import pytest

from models import N_VOCAB, write_model
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model
from uma.llama.sampler import Sampler
from uma.types import MAX_SEED, SamplingParams

Row = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    """A context that has computed one batch: two sequences, the logits of batch indices 2 and 4."""
    path = write_model(tmp_path_factory.mktemp("models") / "tiny.gguf")
    with Model.load(path) as model, Context(model, ContextParams(n_ctx=256, n_seq_max=2)) as made:
        batch = Batch(8)
        batch.add([1, 2, 3], 0, 0, last_logits=True)
        batch.add([4, 5], 0, 1, last_logits=True)
        assert made.decode(batch) == DONE
        yield made


@pytest.fixture
def row(context: Context) -> Iterator[Row]:
    """The first row of logits, to be written to, and put back afterwards."""
    logits: Row = context.logits(2)[0]
    before = logits.copy()
    yield logits
    logits[:] = before


def draws(context: Context, params: SamplingParams, count: int, seed: int = 1, tail: tuple[int, ...] = ()) -> list[int]:
    with Sampler(context.model.vocab, params, seed, tail) as sampler:
        return [sampler.sample(context, 2) for _ in range(count)]


def probabilities(row: Row, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    scaled = np.exp((row.astype(np.float64) - row.max()) / temperature)
    scaled /= scaled.sum()
    return np.asarray(scaled, np.float64)


EVERYTHING: dict[str, Any] = {
    **{"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "dry_multiplier": 0.8},
    **{"xtc_probability": 0.5, "typical_p": 0.9, "top_n_sigma": 1.0, "dynatemp_range": 0.2},
}
DEFAULT_CHAIN = "penalties dry top-n-sigma top-k typical top-p min-p xtc temp-ext dist".split()  # noqa: SIM905
"""llama.cpp's default chain, by the names that its samplers give themselves (`samplers` in its common/common.h)."""


@pytest.mark.parametrize(
    ("mirostat", "chain"),
    [
        (0, DEFAULT_CHAIN),
        (1, ["penalties", "dry", "temp-ext", "mirostat"]),
        (2, ["penalties", "dry", "temp-ext", "mirostat-v2"]),
    ],
)
def test_the_steps_stand_in_the_order_of_llama_cpps_default_chain(
    context: Context, mirostat: Literal[0, 1, 2], chain: list[str]
) -> None:
    with Sampler(context.model.vocab, SamplingParams(**EVERYTHING, mirostat=mirostat), 1, ()) as sampler:
        count = lib.llama_sampler_chain_n(sampler._handle)
        steps = [lib.llama_sampler_chain_get(sampler._handle, at) for at in range(count)]
        names = [lib.llama_sampler_name(step).decode() for step in steps]
    # What has no probability is dropped before the steps that cannot take it, by a min-p of its own.
    guarded = {"typical", "xtc", "temp-ext" if mirostat else ""}
    assert names == [name for each in chain for name in (["min-p", each] if each in guarded else [each])]


def test_greedy_takes_the_likeliest(context: Context, row: Row) -> None:
    assert draws(context, SamplingParams(temperature=0), 3) == [int(row.argmax())] * 3
    with Sampler(context.model.vocab, SamplingParams(), 1, ()) as sampler:
        assert sampler.sample(context, 4) == int(context.logits(2)[1].argmax())


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(context: Context) -> None:
    params = SamplingParams(temperature=1.5, top_k=100, top_p=0.99, min_p=0.001, presence_penalty=0.1)
    for seed in (0, 1, 12_345, MAX_SEED - 1, MAX_SEED):
        assert draws(context, params, 50, seed) == draws(context, params, 50, seed)
    more: list[dict[str, Any]] = [{"xtc_probability": 0.5}, {"mirostat": 1}, {"mirostat": 2}, {"dry_multiplier": 1.0}]
    for each in more:
        stepped = SamplingParams(temperature=1.5, **each)
        assert draws(context, stepped, 60, 5) == draws(context, stepped, 60, 5), each
    assert len({tuple(draws(context, params, 50, seed)) for seed in range(5)}) == 5


def test_draws_follow_the_models_probabilities(context: Context, row: Row) -> None:
    for temperature in (0.5, 1.0, 2.0):
        counts = Counter(draws(context, SamplingParams(temperature=temperature), 4000))
        expected = probabilities(row, temperature)
        for token in expected.argsort()[-3:]:
            # Four standard deviations of a binomial count.
            margin = 4 * (expected[token] * (1 - expected[token]) * 4000) ** 0.5
            assert abs(counts[int(token)] - 4000 * expected[token]) < margin


def test_top_k_keeps_the_k_likeliest(context: Context, row: Row) -> None:
    likeliest = set(row.argsort()[-5:].tolist())
    assert set(draws(context, SamplingParams(temperature=2, top_k=5), 500)) == likeliest
    assert len(set(draws(context, SamplingParams(temperature=2, top_k=-1), 500))) > 5


@pytest.mark.parametrize("k", [N_VOCAB, 2**31, 2**32 + 1, 2**40 + 2])
def test_a_top_k_of_the_whole_vocabulary_or_more_keeps_all(context: Context, k: int) -> None:
    whole = draws(context, SamplingParams(temperature=2), 200)
    assert draws(context, SamplingParams(temperature=2, top_k=k), 200) == whole
    assert len(set(whole)) > 2


@pytest.mark.parametrize("tiny", [1e-20, 1e-38, 1e-300])
def test_a_temperature_near_zero_takes_the_likeliest_and_such_a_repetition_penalty_what_was_said(
    context: Context, row: Row, tiny: float
) -> None:
    row[:] = np.linspace(1, 30, len(row))
    assert draws(context, SamplingParams(temperature=1, repetition_penalty=tiny), 3, tail=(7,)) == [7] * 3
    row[:] = np.linspace(-30, 30, len(row))
    for temperature in (1e-5, tiny, 1e-45):
        assert draws(context, SamplingParams(temperature=temperature), 20) == [len(row) - 1] * 20


def test_top_p_keeps_the_fewest_that_make_up_p_and_min_p_what_is_likely_beside_the_likeliest(
    context: Context, row: Row
) -> None:
    row[:] = -50
    row[[10, 20, 30, 40]] = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(draws(context, SamplingParams(temperature=1, top_p=0.75), 300)) == {10, 20}
    assert set(draws(context, SamplingParams(temperature=1, top_p=0.9), 300)) == {10, 20, 30}
    assert set(draws(context, SamplingParams(temperature=2, top_p=0.0), 300)) == {10}
    assert set(draws(context, SamplingParams(temperature=1, min_p=0.5), 300)) == {10, 20}
    assert set(draws(context, SamplingParams(temperature=2, min_p=1.0), 300)) == {10}
    row[[10, 20, 30, 40]] = [*np.log([0.9, 0.06, 0.04]), -50]
    assert set(draws(context, SamplingParams(temperature=2, top_p=0.85), 300)) == {10}, "it cuts before the temperature"


def test_penalties_look_at_the_prompts_end_and_at_what_was_said(context: Context, row: Row) -> None:
    row[:] = -5
    row[[10, 20, 30]] = [3.0, 2.9, 2.8]
    assert draws(context, SamplingParams(presence_penalty=1), 4) == [10, 20, 30, 10]
    assert draws(context, SamplingParams(presence_penalty=1), 1, tail=(10, 20)) == [30]
    assert draws(context, SamplingParams(frequency_penalty=0.06), 4) == [10, 10, 20, 10]
    assert draws(context, SamplingParams(repetition_penalty=1.5), 3) == [10, 20, 30]
    assert draws(context, SamplingParams(presence_penalty=-1), 3, tail=(30,)) == [30, 30, 30]


def test_a_token_that_was_ruled_out_is_never_drawn(context: Context, row: Row) -> None:
    row[int(row.argmax())] = -np.inf
    banned = int(np.flatnonzero(np.isneginf(row))[0])
    for params in (SamplingParams(repetition_penalty=1.2), SamplingParams(temperature=2), SamplingParams(min_p=0.1)):
        assert banned not in draws(context, params, 200)


def test_an_index_without_logits_is_an_error_and_not_the_end_of_the_process(context: Context) -> None:
    with Sampler(context.model.vocab, SamplingParams(temperature=1), 1, ()) as sampler:
        for index in (0, 3, 5, 10_000):
            with pytest.raises(ValueError, match=f"no logits were asked for at {index}"):
                sampler.sample(context, index)


def test_closing_twice_is_harmless(context: Context) -> None:
    sampler = Sampler(context.model.vocab, SamplingParams(temperature=1), 1, ())
    sampler.close()
    sampler.close()
    with pytest.raises(ValueError, match="sampler is closed"):
        sampler.sample(context, 2)


# Steps that are off by default


def flat(row: Row, likely: dict[int, float]) -> None:
    """Give these tokens these probabilities, and nothing to the others."""
    row[:] = -np.inf
    for token, probability in likely.items():
        row[token] = np.log(probability)


def test_top_n_sigma_keeps_what_is_near_the_highest_logit(context: Context, row: Row) -> None:
    row[:] = np.random.default_rng(1).normal(0, 1, len(row))
    row[[3, 4]] = 9.0, 8.9
    assert set(draws(context, SamplingParams(temperature=2, top_n_sigma=1), 200)) == {3, 4}


def test_typical_p_leaves_out_what_is_too_likely_to_be_typical(context: Context, row: Row) -> None:
    flat(row, {1: 0.5} | dict.fromkeys(range(10, 30), 0.5 / 20))
    assert 1 not in draws(context, SamplingParams(temperature=1, typical_p=0.4), 200)


def test_xtc_drops_all_but_the_least_likely_of_the_likely_tokens(context: Context, row: Row) -> None:
    flat(row, {1: 0.5, 2: 0.3, 3: 0.15, 4: 0.05})
    sure = SamplingParams(temperature=1, xtc_probability=1, xtc_threshold=0.1)
    assert set(draws(context, sure, 300)) == {3, 4}
    never = SamplingParams(temperature=1, xtc_probability=1, xtc_threshold=0.5)
    assert set(draws(context, never, 300)) == {1, 2, 3, 4}


def test_the_dynamic_temperature_is_low_where_the_model_is_sure(context: Context, row: Row) -> None:
    moving = SamplingParams(temperature=1, dynatemp_range=1)
    flat(row, {1: 0.9, 2: 0.1})
    row[row < -20] = -20  # among the whole vocabulary this is next to no entropy
    fixed, sure = (Counter(draws(context, each, 2000)) for each in (SamplingParams(temperature=1), moving))
    assert fixed[2] > 100 > sure[2]


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_surprise_near_its_aim(context: Context, row: Row, version: Any) -> None:
    row[:] = np.random.default_rng(1).normal(0, 2, len(row))
    likelihoods = probabilities(row)
    found = {}
    for tau in (1.0, 4.0):
        tokens = draws(context, SamplingParams(temperature=1, mirostat=version, mirostat_tau=tau), 1000)
        found[tau] = float(np.mean(-np.log2(likelihoods[tokens[200:]])))
    assert found[1.0] + 1 < found[4.0]


def test_dry_stops_a_passage_from_going_on(context: Context, row: Row) -> None:
    row[:] = 0.0
    row[ord("d")] = 1.0
    tail = tuple(b"xabcdyabc")
    assert draws(context, SamplingParams(), 1, tail=tail) == [ord("d")]
    assert draws(context, SamplingParams(dry_multiplier=4), 1, tail=tail) != [ord("d")]
    assert draws(context, SamplingParams(dry_multiplier=4, dry_allowed_length=4), 1, tail=tail) == [ord("d")]
    assert draws(context, SamplingParams(dry_multiplier=4, dry_window=4), 1, tail=tail) == [ord("d")]
    assert draws(context, SamplingParams(dry_multiplier=4, dry_sequence_breakers="b"), 1, tail=tail) == [ord("d")]


def test_penalties_look_back_as_far_as_their_window(context: Context, row: Row) -> None:
    row[:] = 0.0
    row[7] = 1.0
    tail = (7, *([8] * 50))
    near = SamplingParams(presence_penalty=2, penalty_window=20)
    assert draws(context, near, 1, tail=tail) == [7]
    assert draws(context, SamplingParams(presence_penalty=2), 1, tail=tail) != [7]
    far = SamplingParams(presence_penalty=2, penalty_window=200)
    assert draws(context, far, 1, tail=(7, *([8] * 150))) != [7]
    by_default = SamplingParams(temperature=0, presence_penalty=2)
    assert draws(context, by_default, 1, tail=(7, *([8] * 63))) != [7]
    assert draws(context, by_default, 1, tail=(*[7] * 500, *([8] * 64))) == [7], "64 tokens"


@pytest.mark.parametrize(
    "more",
    [{"typical_p": 0.5}, {"mirostat": 1}, {"mirostat": 2}, {"dynatemp_range": 0.5}, {"top_n_sigma": 1},
     {"xtc_probability": 1.0, "xtc_threshold": 0.0}, {"dry_multiplier": 2.0}, {"min_p": 0.1}],
    ids=str,
)  # fmt: skip
def test_no_step_ever_takes_a_token_that_is_excluded(context: Context, row: Row, more: dict[str, Any]) -> None:
    for allowed in ({9}, {5, 6}, set(range(20, 40))):
        before = row.copy()
        row[[token for token in range(N_VOCAB) if token not in allowed]] = -np.inf
        assert set(draws(context, SamplingParams(temperature=1.5, **more), 100)) <= allowed
        row[:] = before


@pytest.mark.parametrize("dry", [0.0, 0.8])
def test_penalties_can_count_the_output_alone(context: Context, row: Row, dry: float) -> None:
    row[:] = 0
    row[[5, 6]] = 3.0, 2.0
    params = SamplingParams(temperature=0, presence_penalty=2, dry_multiplier=dry)
    assert draws(context, params, 2, tail=(5,)) == [6, 5]
    of_output = attrs.evolve(params, penalize_prompt=False)
    assert draws(context, of_output, 3, tail=(5,)) == [5, 6, 5]
