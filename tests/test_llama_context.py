"""Claims about contexts and batches, each on a real model of each kind of memory."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from harness import PATIENCE_SEC
from models import Kind, write_model
from uma.errors import ConfigError, ModelError
from uma.llama.batch import Batch
from uma.llama.context import ABORTED, DONE, INVALID_BATCH, NO_ROOM, Context, ContextParams
from uma.llama.model import Model

KINDS: tuple[Kind, ...] = ("attention", "sliding-window", "recurrent", "hybrid")
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Kind, Model]]:
    folder = tmp_path_factory.mktemp("models")
    loaded = {kind: Model.load(write_model(folder / f"{kind}.gguf", kind=kind)) for kind in KINDS}
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, models: dict[Kind, Model]) -> Model:
    return models[request.param]


@pytest.fixture
def llama(models: dict[Kind, Model]) -> Model:
    return models["attention"]


def tokens_for(index: int, count: int) -> list[int]:
    """Some sequence of its own for each index."""
    return [(7 * index + 13 * place + place * place) % 256 for place in range(count)]


def prefill(context: Context, tokens: list[int], seq_id: int = 0, first_pos: int = 0) -> Logits:
    """Compute tokens of one sequence and return the logits after the last, as a copy."""
    batch = Batch(len(tokens))
    batch.add(tokens, first_pos, seq_id, last_logits=True)
    assert context.decode(batch) == DONE
    logits: Logits = context.logits(1)[0]
    return logits.copy()


def alone(model: Model, tokens: list[int]) -> Logits:
    """The logits after these tokens, computed with nothing else around."""
    with Context(model, ContextParams(n_ctx=256)) as context:
        return prefill(context, tokens)


def same(one: Logits, other: Logits) -> bool:
    # Values are some 3 apart from token to token. Cached keys and values are rounded to half precision, and grouped
    # otherwise where a batch has another shape, which these models' sharp attention makes a few hundredths of.
    return bool(np.allclose(one, other, atol=0.15))


@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "split"])
@pytest.mark.parametrize("n_ubatch", [512, 8], ids=["one-ubatch", "many-ubatches"])
def test_logits_rows_come_in_the_order_of_the_batch(model: Model, kv_unified: bool, n_ubatch: int) -> None:
    params = ContextParams(n_ctx=2048, n_batch=64, n_ubatch=n_ubatch, n_seq_max=5, kv_unified=kv_unified)
    prompts = {seq_id: tokens_for(seq_id, count) for seq_id, count in {3: 9, 0: 1, 4: 17, 1: 5, 2: 12}.items()}
    with Context(model, params) as context:
        batch = Batch(64)
        for seq_id, tokens in prompts.items():
            batch.add(tokens, 0, seq_id, last_logits=True)
        assert context.decode(batch) == DONE
        rows = context.logits(batch.n_outputs)
        for row, tokens in zip(rows, prompts.values(), strict=True):
            assert same(row, alone(model, tokens))


@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "split"])
def test_sequences_decoded_together_say_what_they_would_say_alone(model: Model, kv_unified: bool) -> None:
    params = ContextParams(n_ctx=2048, n_seq_max=4, kv_unified=kv_unified)
    texts = {seq_id: tokens_for(seq_id, 6 + seq_id) for seq_id in (2, 0, 3)}
    with Context(model, params) as context:
        batch = Batch(64)
        for seq_id, tokens in texts.items():
            prefill(context, tokens[:-1], seq_id)
        for _ in range(3):
            batch.clear()
            batch.add_decode(
                [tokens[-1] for tokens in texts.values()], [len(tokens) - 1 for tokens in texts.values()], list(texts)
            )
            assert context.decode(batch) == DONE
            for row, tokens in zip(context.logits(batch.n_outputs), texts.values(), strict=True):
                assert same(row, alone(model, tokens))
                tokens.append(int(row.argmax()))


def test_only_marked_tokens_have_logits(llama: Model) -> None:
    with Context(llama, ContextParams(n_ctx=256, n_seq_max=2)) as context:
        batch = Batch(16)
        batch.add([1, 2, 3], 0, 0, last_logits=False)
        assert batch.n_outputs == 0
        assert batch.add([4, 5, 6], 0, 1, last_logits=True) == 5
        assert batch.n_outputs == 1
        assert context.decode(batch) == DONE
        assert same(context.logits(1)[0], alone(llama, [4, 5, 6]))


def test_a_prompt_read_in_chunks_gives_the_same_logits(model: Model) -> None:
    tokens = tokens_for(1, 40)
    with Context(model, ContextParams(n_ctx=256)) as context:
        for start in range(0, 40, 7):
            logits = prefill(context, tokens[start : start + 7], first_pos=start)
        assert same(logits, alone(model, tokens))


def test_too_few_cells_change_nothing(llama: Model) -> None:
    with Context(llama, ContextParams(n_ctx=256, n_seq_max=2)) as context:
        tokens = tokens_for(0, 200)
        prefill(context, tokens)
        batch = Batch(100)
        batch.add(tokens_for(1, 100), 0, 1, last_logits=True)
        assert context.decode(batch) == NO_ROOM
        assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (199, -1)
        assert same(prefill(context, [9], first_pos=200), alone(llama, [*tokens, 9]))


def test_a_batch_that_cannot_be_is_refused_and_changes_nothing(llama: Model) -> None:
    with Context(llama, ContextParams(n_ctx=256)) as context:
        prefill(context, [1, 2, 3])
        for token, pos in ((5, 7), (llama.vocab.n_tokens, 3), (-1, 3)):
            batch = Batch(1)
            batch.add([token], pos, 0, last_logits=True)
            assert context.decode(batch) == INVALID_BATCH
        batch = Batch(1)
        batch.add([5], 3, 1, last_logits=True)
        assert context.decode(batch) == INVALID_BATCH
        batch = Batch(1)
        assert context.decode(batch) == INVALID_BATCH
        assert same(prefill(context, [4], first_pos=3), alone(llama, [1, 2, 3, 4]))


def test_a_shared_prefix_is_the_same_cells(models: dict[Kind, Model]) -> None:
    model = models["attention"]
    common = tokens_for(0, 60)
    with Context(model, ContextParams(n_ctx=256, n_seq_max=4)) as context:
        prefill(context, [*common, 1, 2, 3])
        for seq_id in (1, 2, 3):
            context.seq_cp(0, seq_id, 0, 60)
        # Three copies of 60 cells would not fit beside the first; shared cells do.
        context.seq_rm(0)
        for seq_id in (1, 2, 3):
            own = tokens_for(seq_id, 40)
            assert context.seq_pos_max(seq_id) == 59
            assert same(prefill(context, own, seq_id, first_pos=60), alone(model, [*common, *own]))


def test_a_partial_removal_works_or_says_that_it_did_not(model: Model) -> None:
    tokens = tokens_for(0, 30)
    with Context(model, ContextParams(n_ctx=256)) as context:
        prefill(context, tokens)
        if context.seq_rm(0, 10):
            assert model.shape.memory in ("attention", "sliding-window")
            assert context.seq_pos_max(0) == 9
        else:
            assert model.shape.memory in ("recurrent", "hybrid")
            assert context.seq_rm(0)
            prefill(context, tokens[:10])
        assert same(prefill(context, [3, 4], first_pos=10), alone(model, [*tokens[:10], 3, 4]))


@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "split"])
def test_a_sequence_saved_and_restored_goes_on_as_if_nothing_had_been(model: Model, kv_unified: bool) -> None:
    params = ContextParams(n_ctx=1024, n_seq_max=3, kv_unified=kv_unified)
    tokens = tokens_for(0, 50)
    with Context(model, params) as context:
        prefill(context, tokens)
        saved = context.state_get(0)
        assert isinstance(saved, bytes) and len(saved) == context.state_size(0)
        assert context.seq_rm(0)
        prefill(context, tokens_for(1, 20), 1)
        assert context.state_set(2, saved)
        assert context.seq_pos_max(2) == 49
        assert same(prefill(context, [3], 2, first_pos=50), alone(model, [*tokens, 3]))
    with Context(model, params) as another:
        assert another.state_set(0, memoryview(saved))
        assert same(prefill(another, [3], first_pos=50), alone(model, [*tokens, 3]))


def test_a_snapshot_without_room_or_cut_short_is_refused(llama: Model) -> None:
    with Context(llama, ContextParams(n_ctx=256, n_seq_max=2)) as context:
        prefill(context, tokens_for(0, 200))
        saved = context.state_get(0)
        assert not context.state_set(1, saved)
        assert not context.state_set(1, saved[: len(saved) // 2])
        assert not context.state_set(1, b"")
        assert context.seq_pos_max(0) == 199


def test_a_whole_sequence_can_be_copied_without_a_unified_buffer(llama: Model) -> None:
    tokens = tokens_for(0, 20)
    with Context(llama, ContextParams(n_ctx=1024, n_seq_max=3, kv_unified=False)) as context:
        prefill(context, tokens)
        context.seq_cp(0, 2)
        with pytest.raises(ValueError, match="only a whole sequence"):
            context.seq_cp(0, 1, 0, 10)
        assert same(prefill(context, [3], 2, first_pos=20), alone(llama, [*tokens, 3]))


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_state_is_copied_whole_and_goes_its_own_way(models: dict[Kind, Model], kind: Kind) -> None:
    model, tokens = models[kind], tokens_for(0, 20)
    with Context(model, ContextParams(n_ctx=256, n_seq_max=3)) as context:
        prefill(context, tokens)
        context.seq_cp(0, 2)
        assert same(prefill(context, [3], 2, first_pos=20), alone(model, [*tokens, 3]))
        assert same(prefill(context, [4], 0, first_pos=20), alone(model, [*tokens, 4]))


def test_sequence_ids_out_of_range_are_errors_and_not_the_end_of_the_process(llama: Model) -> None:
    with Context(llama, ContextParams(n_ctx=256, n_seq_max=2)) as context:
        for bad in (-1, 2, 10**6):
            for call in (context.seq_rm, context.seq_pos_max, context.state_get):
                with pytest.raises(ValueError, match="from 0 to 1"):
                    call(bad)
            with pytest.raises(ValueError, match="from 0 to 1"):
                context.seq_cp(0, bad)
            with pytest.raises(ValueError, match="from 0 to 1"):
                context.seq_cp(bad, 0)
            with pytest.raises(ValueError, match="from 0 to 1"):
                context.state_set(bad, b"abcd")


def test_sizes_are_what_llama_made_of_them(llama: Model) -> None:
    with Context(llama, ContextParams(n_ctx=1000, n_seq_max=4, kv_unified=True)) as context:
        assert (context.n_ctx, context.n_ctx_seq) == (1024, 1024)
    with Context(llama, ContextParams(n_ctx=1024, n_seq_max=4, kv_unified=False)) as context:
        assert (context.n_ctx, context.n_ctx_seq) == (1024, 256)
    with Context(llama, ContextParams(n_ctx=0)) as context:
        assert context.n_ctx == llama.n_ctx_train


def test_clear_forgets_every_sequence(model: Model) -> None:
    with Context(model, ContextParams(n_ctx=256, n_seq_max=2)) as context:
        prefill(context, tokens_for(0, 20), 0)
        prefill(context, tokens_for(1, 20), 1)
        context.clear()
        assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (-1, -1)
        assert same(prefill(context, [5, 6]), alone(model, [5, 6]))


def test_an_abort_from_another_thread_ends_a_running_decode(llama: Model) -> None:
    params = ContextParams(n_ctx=16_384, n_batch=16_384, n_ubatch=64)
    with Context(llama, params) as context:
        batch = Batch(16_384)
        batch.add([1] * 16_384, 0, 0, last_logits=True)
        results: list[int] = []
        thread = threading.Thread(target=lambda: results.append(context.decode(batch)))
        thread.start()
        context.request_abort()
        thread.join()
        assert results == [ABORTED]
        assert context.seq_pos_max(0) < 16_383
        context.clear()
        assert context.decode(batch) == ABORTED, "an abort is for good"


def test_how_far_a_running_decode_is_can_be_seen_from_another_thread(llama: Model) -> None:
    with Context(llama, ContextParams(n_ctx=2_048, n_batch=2_048, n_ubatch=32)) as context:
        batch = Batch(2_048)
        batch.add([1] * 2_048, 0, 0, last_logits=True)
        assert context.decode(batch) == DONE
        assert context.progress == 0
        context.clear()
        thread = threading.Thread(target=context.decode, args=(batch,))
        thread.start()
        seen = []
        while thread.is_alive():
            seen.append(context.progress)
        begun = seen[: max(at for at, share in enumerate(seen) if share) + 1]
        assert begun == sorted(begun)
        assert len(set(begun)) > 10
        assert context.progress == 0


def test_an_abort_while_none_runs_and_one_that_is_taken_back_are_as_good(llama: Model) -> None:
    with Context(llama, ContextParams(n_ctx=256)) as context:
        batch = Batch(64)
        batch.add([1] * 64, 0, 0, last_logits=True)
        context.request_retry()
        assert context.decode(batch) == ABORTED
        assert context.decode(batch) == ABORTED
        context.resume()
        context.clear()
        assert context.decode(batch) == DONE
        context.clear()
        context.request_abort()
        context.resume()
        assert context.decode(batch) == ABORTED, "an abort is for good"


@pytest.mark.parametrize("flash_attn", ["auto", "on", "off"])
def test_flash_attention_changes_speed_and_not_results(llama: Model, flash_attn: str) -> None:
    tokens = tokens_for(0, 50)
    with Context(llama, ContextParams(n_ctx=256, flash_attn=flash_attn)) as context:  # type: ignore[arg-type]
        assert same(prefill(context, tokens), alone(llama, tokens))


def test_cache_types_have_their_names(llama: Model) -> None:
    tokens = tokens_for(0, 50)
    sizes = {}
    for name in ("f32", "f16", "bf16", "q8_0", "q4_0"):
        with Context(llama, ContextParams(n_ctx=256, cache_type_k=name, cache_type_v=name)) as context:
            prefill(context, tokens)
            sizes[name] = context.state_size(0)
    assert sizes["f32"] > sizes["f16"] == sizes["bf16"] > sizes["q8_0"] > sizes["q4_0"]


def test_settings_that_cannot_be_name_themselves(llama: Model) -> None:
    with pytest.raises(ConfigError, match="cache_type_v: q8_0 needs flash attention"):
        Context(llama, ContextParams(n_ctx=256, cache_type_v="q8_0", flash_attn="off"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux refuses memory on request")
def test_no_context_is_an_error_with_llamas_reason(tmp_path: Path) -> None:
    pages_in_use = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with Model.load(write_model(tmp_path / "tiny.gguf")) as model:
        resource.setrlimit(resource.RLIMIT_AS, (pages_in_use * resource.getpagesize() + 2**29, hard))
        try:
            with pytest.raises(ModelError, match=r"tiny\.gguf: no context of 268,435,456 cells.*llama\.cpp says: .+"):
                Context(model, ContextParams(n_ctx=2**28))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        with Context(model, ContextParams(n_ctx=256)) as context:
            prefill(context, [1, 2])


def test_a_model_loaded_for_its_vocabulary_knows_its_context_and_cannot_compute(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", context_length=384)
    with Model.load(path, vocab_only=True) as model:
        assert (model.n_ctx_train, model.info.context_length) == (384, 384)
        assert model.vocab.tokenize("the", add_special=False, parse_special=False).tolist() == [257]
        with pytest.raises(ValueError, match="vocab_only"):
            Context(model, ContextParams(n_ctx=256))


def test_closing_twice_and_out_of_order_is_harmless(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "tiny.gguf"))
    context = Context(model, ContextParams(n_ctx=256))
    model.close()
    assert same(prefill(context, [1, 2]), prefill(context, [1, 2], first_pos=2)) is False
    context.close()
    context.close()
    model.close()
    with pytest.raises(ValueError, match="context is closed"):
        context.seq_rm(0)
    with pytest.raises(ValueError, match="context is closed"):
        context.decode(Batch(1))
    with pytest.raises(ValueError, match="model is closed"):
        Context(model, ContextParams(n_ctx=256))


def test_one_engine_computes_while_others_open_and_close(tmp_path: Path, llama: Model) -> None:
    path = write_model(tmp_path / "other.gguf", seed=1)
    tokens = tokens_for(0, 10)
    expected = alone(llama, tokens)
    begun, stop = threading.Event(), threading.Event()
    wrong: list[Logits] = []

    def compute() -> None:
        with Context(llama, ContextParams(n_ctx=256, n_threads=1)) as context:
            while not stop.is_set():
                context.clear()
                logits = prefill(context, tokens)
                if not same(logits, expected):
                    wrong.append(logits)
                begun.set()

    thread = threading.Thread(target=compute)
    thread.start()
    assert begun.wait(PATIENCE_SEC)
    for _ in range(10):
        with Model.load(path) as model, Context(model, ContextParams(n_ctx=256)) as context:
            prefill(context, tokens)
    stop.set()
    thread.join()
    assert not wrong


def test_a_batch_takes_what_fits_and_refuses_the_rest_whole() -> None:
    batch = Batch(4)
    batch.add([1, 2, 3], 0, 0, last_logits=True)
    with pytest.raises(ValueError, match="2 do not fit; 1 of 4 places are free"):
        batch.add([1, 2], 3, 0, last_logits=True)
    with pytest.raises(ValueError, match="2 do not fit; 1 of 4 places are free"):
        batch.add_decode([1, 2], [3, 0], [0, 1])
    with pytest.raises(ValueError, match="0 do not fit"):
        batch.add([], 3, 0, last_logits=True)
    assert (batch.n_tokens, batch.n_outputs) == (3, 1)
    assert batch.add_decode([4], [3], [0]) == 3
    assert batch.output.tolist() == [0, 0, 1, 1]
    batch.clear()
    assert batch.add(np.array([9, 9, 9], np.int32), 7, 2, last_logits=False) == 2
    assert batch.pos[:3].tolist() == [7, 8, 9]
    assert batch.output[:3].tolist() == [0, 0, 0]


def test_a_batch_of_decode_rows_advances_each_by_its_next_token() -> None:
    batch = Batch(4)
    batch.add_decode([5, 6, 7], [10, 3, 20], [0, 2, 1])
    batch.advance([8, 9, 4])
    assert (batch.n_tokens, batch.n_outputs) == (3, 3)
    assert batch.token[:3].tolist() == [8, 9, 4]
    assert batch.pos[:3].tolist() == [11, 4, 21]
    assert batch.seq_id[:3].tolist() == [0, 2, 1]
    assert batch.output[:3].tolist() == [1, 1, 1]


def test_a_sliding_window_keeps_what_it_attends_to_where_a_batch_is_one_ubatch_and_only_there(
    models: dict[Kind, Model],
) -> None:
    """llama.cpp finds cells for all ubatches before it computes the first. What a later one is given of a sequence's
    window is lost to an earlier one: the engine gives such models batches of one ubatch. Where the last claim fails,
    llama.cpp has mended that.
    """
    tokens, other = tokens_for(1, 64), tokens_for(2, 100)
    expected = _end_of_window(models["sliding-window"], tokens, [], n_ubatch=48)
    assert np.abs(_end_of_window(models["sliding-window"], tokens, other, n_ubatch=48) - expected).max() < 1e-3
    assert np.abs(_end_of_window(models["sliding-window"], tokens, other, n_ubatch=32) - expected).max() > 0.1


def _end_of_window(model: Model, tokens: list[int], other: list[int], *, n_ubatch: int) -> Logits:
    """The logits after `tokens`, whose last 16 share a batch with others. The window's last cell lies before the rest
    of it, and cells that are found first are those of other sequences, now free.
    """
    params = ContextParams(
        n_ctx=256,
        n_batch=48,
        n_ubatch=n_ubatch,
        n_seq_max=8,
        n_threads=1,
        flash_attn="off",
        cache_type_k="f32",
        cache_type_v="f32",
    )
    with Context(model, params) as context:
        batch = Batch(48)

        def compute(*runs: tuple[int, list[int], int]) -> None:
            batch.clear()
            for seq, run, position in runs:
                batch.add(run, position, seq, last_logits=seq == 0 and position == 48)
            assert context.decode(batch) == DONE

        if other:
            compute((1, other[:1], 0))
        compute((0, tokens[:33], 0))
        for start in range(0, len(other), 32):
            compute((2, other[start : start + 32], start))
        compute((0, tokens[33:47], 33))
        context.seq_rm(2)
        compute((0, tokens[47:48], 47))
        context.seq_rm(1)
        compute((0, tokens[48:], 48), *([(3, other[:32], 0)] if other else []))
        return np.array(context.logits(1)[0])


@pytest.mark.parametrize(("n_gpu_layers", "returns_early"), [(-1, True), (2, True), (0, False)])
def test_a_batch_can_be_left_to_a_gpu_only_where_the_gpu_has_layers(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, *, n_gpu_layers: int, returns_early: bool
) -> None:
    monkeypatch.setattr("uma.llama.backend.has_gpu", lambda: True)
    with Model.load(tiny, n_gpu_layers=n_gpu_layers) as model, Context(model, ContextParams(n_ctx=256)) as context:
        assert context.returns_early == returns_early


def test_no_batch_is_left_to_a_gpu_where_there_is_none(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uma.llama.backend.has_gpu", lambda: False)
    with Model.load(tiny) as model, Context(model, ContextParams(n_ctx=256)) as context:
        assert not context.returns_early
