"""Claims about loading: what a model says of itself, what unusable files are refused with, what is left behind."""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import psutil
import pytest
from every_kind import write_named

import models
from models import TOKENIZER_NONE, Kind, write_encoder, write_model, write_split_model
from uma.errors import ModelError
from uma.llama import trial
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model
from uma.models import catalog


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def refusal(path: Path) -> str:
    """What loading this file is refused with; every refusal begins with the file's name."""
    with pytest.raises(ModelError) as caught:
        Model.load(path)
    assert caught.value.message.startswith(f"{path}: ") or "of a split model" in caught.value.message
    return caught.value.message.removeprefix(f"{path}: ")


def damaged(path: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def test_a_models_card_comes_from_its_file(tiny: Path) -> None:
    with Model.load(tiny, is_builtin=True) as model:
        info = model.info
    assert (info.name, info.title, info.architecture, info.license) == ("builtin", "Tiny test model", "llama", "MIT")
    assert info.description == "Random weights, for tests."
    assert (info.quantization, info.context_length, info.vocab_size) == ("F32", 512, 266)
    assert info.size_bytes == tiny.stat().st_size
    assert 90_000 < info.parameters < info.size_bytes / 4
    assert info.has_chat_template and info.is_builtin
    assert info.path == str(tiny)


def test_a_file_that_says_little_still_has_a_name(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "quiet.gguf", chat_template=None, metadata={"general.name": "", "general.license": ""}
    )
    with Model.load(path) as model:
        assert (model.info.name, model.info.title, model.info.license) == ("quiet", "", None)
        assert not model.info.has_chat_template


@pytest.mark.parametrize("kind", ["attention", "sliding-window", "recurrent", "hybrid"])
def test_the_kind_of_memory_is_known_from_the_model(tmp_path: Path, kind: Kind) -> None:
    with Model.load(write_model(tmp_path / "tiny.gguf", kind=kind)) as model:
        assert model.shape.memory == kind


@pytest.mark.parametrize(("file_type", "name"), [(1, "F16"), (7, "Q8_0"), (15, "Q4_K_M"), (30, "IQ4_XS"), (999, "F32")])
def test_the_quantization_has_the_name_people_use(tmp_path: Path, file_type: int, name: str) -> None:
    with Model.load(write_model(tmp_path / "tiny.gguf", metadata={"general.file_type": file_type})) as model:
        assert model.info.quantization == name


def test_a_path_without_a_file_of_a_model_says_why(tmp_path: Path, tiny: Path) -> None:
    assert refusal(tmp_path / "no.gguf") == "no such file"
    assert refusal(tmp_path).startswith(
        f"is a directory; name a file in it, such as {tiny}; with UMA_MODELS={tmp_path} "
    )
    (tmp_path / "sub").mkdir()
    assert refusal(tmp_path / "sub") == "is a directory; there is no .gguf file in it"
    os.mkfifo(tmp_path / "pipe.gguf")
    assert refusal(tmp_path / "pipe.gguf") == "is not a regular file"
    (tmp_path / "empty.gguf").touch()
    assert refusal(tmp_path / "empty.gguf") == "is empty (0 bytes)"
    assert refusal(tmp_path / ("x" * 300)).startswith("cannot be opened: File name too long")
    assert refusal(tmp_path / "a\0b").startswith("cannot be opened: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tiny: Path) -> None:
    tiny.chmod(stat.S_IWUSR)
    assert refusal(tiny) == "cannot be read: permission denied"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello, world, this is no model", "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "is not a GGUF file; it looks like a PyTorch checkpoint"),
        (b"\x80\x00\x00\x00\x00\x00\x00\x00{" + bytes(60), "is not a GGUF file; it looks like a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a GGUF file; it looks like a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>", "is not a GGUF file; it looks like a web page"),
        (b"tjgg" + bytes(60), "is not a GGUF file; it looks like a GGML file of before 2023"),
        (b"GG", "is cut short: it has 2 bytes"),
        (b"GGUF\x03\0\0\0", "is cut short: it has 8 bytes"),
        (b"GGUF\x03\0\0\0" + bytes(10), "is cut short: it has 18 bytes"),
        (b"GGUF\x01\0\0\0" + bytes(60), "has GGUF version 1; this llama.cpp reads versions 2 and 3"),
        (b"GGUF\x63\0\0\0" + bytes(60), "has GGUF version 99; this llama.cpp reads versions 2 and 3"),
        (b"GGUF\0\0\0\x03" + bytes(60), "is a big-endian GGUF file"),
    ],
)
def test_what_is_no_gguf_file_is_said_to_be_what_it_looks_like(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert refusal(path).startswith(reason)


def test_a_file_cut_short_anywhere_is_refused_as_such(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    for length in (24, 100, 3_000, 10_000, len(data) // 2, len(data) - 1):
        path = tmp_path / f"cut-{length}.gguf"
        path.write_bytes(data[:length])
        assert "cut short" in refusal(path)
    assert f"it has {len(data) - 1:,} of at least {len(data):,} bytes" in refusal(
        tmp_path / f"cut-{len(data) - 1}.gguf"
    )


def test_a_damaged_header_is_refused_with_the_reason(tiny: Path) -> None:
    def type_of_first_value(data: bytearray) -> None:
        key = data.index(b"general.architecture") + len(b"general.architecture")
        data[key : key + 4] = (77).to_bytes(4, "little")

    reason = refusal(damaged(tiny, type_of_first_value))
    assert reason.startswith("its header is cut short or damaged: ")
    assert "invalid GGUF type 77" in reason


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("llama.block_count", 0, "0, and it can be 1 to 512"),
        ("llama.block_count", 2**31, "2,147,483,648, and it can be 1 to 512"),
        ("llama.block_count", "two", "'two', and it can be 1 to 512"),
        ("llama.nextn_predict_layers", 3, "3, and it can be 0 to 2"),
        ("llama.context_length", 2**31, "2,147,483,648, and it can be 0 to 2,147,483,647"),
        ("llama.context_length", math.nan, "nan, and it can be 0 to 2,147,483,647"),
        ("llama.embedding_length", True, "true, and it can be 0 to 2,147,483,647"),
        ("llama.attention.head_count", 2**32 - 1, "4,294,967,295, and it can be 0 to 2,147,483,647"),
        ("llama.attention.head_count_kv", [0.5, 0.5], "0.5, and it can be 0 to 2,147,483,647"),
        ("llama.expert_count", 1_025, "1,025, and it can be 0 to 1,024"),
        ("llama.expert_count", "many", "'many', and it can be 0 to 1,024"),
        ("llama.expert_used_count", 2, "2, and it can be 0 to 1"),
        ("split.count", 2**31, "2,147,483,648, and it can be 0 to 65,535"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "-1.0, and it can be a number from 0"),
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "nan, and it can be a number from 0"),
        ("llama.rope.scaling.type", "wide", "'wide', and it can be none, linear, yarn, longrope"),
    ],
)
def test_a_figure_that_no_model_has_is_refused_before_llama_ends_the_process(
    tmp_path: Path, name: str, value: object, told: str
) -> None:
    path = write_model(tmp_path / "wrong.gguf", metadata={name: value})
    assert refusal(path) == f"its header is damaged, so download it again: {name} is {told}"


@pytest.mark.parametrize(
    ("name", "value"), [("block_count", 2**31), ("context_length", "long"), ("expert_count", 2_000)]
)
@pytest.mark.parametrize("is_thorough", [True, False])
def test_a_file_with_such_a_figure_is_listed_with_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, is_thorough: bool
) -> None:
    path = write_model(tmp_path / "wrong.gguf", metadata={f"llama.{name}": value})
    monkeypatch.setattr(catalog, "WHOLE_TOKENS", -1)
    listed = {each.path: each for each in catalog.available({"UMA_MODELS": str(tmp_path)}, is_thorough=is_thorough)}
    assert f"llama.{name} is " in (listed[path].problem or "")


@pytest.mark.parametrize(
    ("kind", "name", "value", "told"),
    [
        ("lfm2", "rope.dimension_count", 0, "0, and it can be an even number from 2 to 32"),
        ("lfm2", "rope.dimension_count", 3, "3, and it can be an even number from 2 to 32"),
        ("qwen35", "rope.dimension_count", 34, "34, and it can be an even number from 2 to 32"),
        ("granitehybrid", "embedding_length", 32, "32, and token_embd.weight has 64"),
        ("qwen35", "ssm.inner_size", 64, "64, and blk.0.ssm_out.weight has 32"),
        ("qwen3moe", "rope.dimension_count", 32, "32, and it can be 64"),
        ("gpt-oss", "attention.key_length", 0, "0, and gpt-oss.attention.value_length is 64"),
        ("gpt-oss", "attention.key_length", 32, "32, and gpt-oss.attention.value_length is 64"),
        ("gpt-oss", "rope.dimension_count", 32, "32, and it can be 64"),
        ("qwen35", "full_attention_interval", 0, "0, and it can be 1 to 2,147,483,647"),
    ],
)
def test_a_figure_that_others_contradict_is_refused_before_llama_ends_the_process(
    tmp_path: Path, kind: str, name: str, value: int, told: str
) -> None:
    path, key = write_named(tmp_path, kind), f"{kind}.{name}".encode()
    data = bytearray(path.read_bytes())
    at = data.index(key) + len(key) + 4  # behind the value's type
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    assert refusal(path) == f"its header is damaged, so download it again: {kind}.{name} is {told}"


def test_heads_of_two_sizes_that_only_llama_can_judge_end_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        name: tensor[: len(tensor) // 2] if "attn_v" in name else tensor
        for name, tensor in models.random_tensors("sliding-window", np.random.default_rng(0), models.FF).items()
    }
    monkeypatch.setattr(models, "random_tensors", lambda *_: tensors)
    metadata = {"gemma2.attention.value_length": models.HEAD // 2}
    path = write_model(tmp_path / "uneven.gguf", kind="sliding-window", metadata=metadata)
    assert "llama.cpp would end the process over its figures" in refusal(path)
    monkeypatch.undo()
    trial.check_model(write_model(tmp_path / "even.gguf", kind="sliding-window"), predicts=False)


def test_sections_of_a_rotation_that_do_not_fit_a_head_are_refused(tmp_path: Path) -> None:
    path, key = write_named(tmp_path, "qwen35"), b"qwen35.rope.dimension_sections"
    data = bytearray(path.read_bytes())
    at = data.index(key) + len(key) + 4 + 4 + 8  # behind the types of the array and its values, and their number
    data[at : at + 4] = (1_530).to_bytes(4, "little")
    path.write_bytes(data)
    assert re.search(r"dimension_sections are 1,5\d\d together, and can be 0 to 32$", refusal(path))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"metadata": {"llama.expert_count": 8, "llama.expert_used_count": 0}},
            ".*expert_used_count is 0, and it can be 1 to 8",
        ),
        ({"architecture": "tomorrow"}, "its architecture, tomorrow, is unknown to this llama.cpp"),
        (
            {"tokenizer": TOKENIZER_NONE, "metadata": {"llama.vocab_size": 266}},
            "has no tokenizer, so text cannot be turned into tokens$",
        ),
        ({"tokenizer": "martian"}, "has no tokenizer that llama.cpp knows.*martian"),
        ({"metadata": {"llama.block_count": 3}}, r"cannot be loaded. llama.cpp says: .*blk\.2"),
    ],
)
def test_a_model_that_llama_cannot_compute_is_refused_with_the_reason(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    assert re.match(reason, refusal(write_model(tmp_path / "odd.gguf", **fields)), re.DOTALL)


def test_a_vocabulary_that_has_a_token_twice_is_refused_before_llama_ends_the_process(tmp_path: Path) -> None:
    reason = refusal(write_encoder(tmp_path / "twice.gguf", words=("x",)))
    assert re.match(r"its vocabulary has 'x' twice, as token \d+ and as token \d+", reason)


def test_a_model_that_embeds_and_does_not_generate_is_known_as_one(tmp_path: Path) -> None:
    metadata = {"llama.attention.causal": False, "llama.pooling_type": 2}
    with Model.load(write_model(tmp_path / "embed.gguf", metadata=metadata)) as model:
        assert (model.is_causal, model.shape.pooling, model.n_embedding) == (False, "cls", 64)


def test_a_split_model_loads_by_its_first_part(tmp_path: Path, tiny: Path) -> None:
    parts = write_split_model(tmp_path / "big", count=3)
    with Model.load(parts[0]) as model, Model.load(tiny) as whole:
        assert model.info.size_bytes == sum(part.stat().st_size for part in parts)
        assert model.info.parameters == whole.info.parameters
        logits = []
        for each in (model, whole):
            with Context(each, ContextParams(n_ctx=256)) as context:
                batch = Batch(3)
                batch.add([1, 2, 3], 0, 0, last_logits=True)
                assert context.decode(batch) == DONE
                logits.append(context.logits(1).tolist())
        assert logits[0] == logits[1]


def test_a_part_that_is_damaged_wrong_missing_or_not_the_first_is_named(tmp_path: Path) -> None:
    parts = write_split_model(tmp_path / "big", count=3)
    assert refusal(parts[1]) == f"is part 2 of 3 of a split model; load it by its first part, {parts[0]}"
    whole = parts[2].read_bytes()
    parts[2].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=f"^{parts[2]}: is cut short"):
        Model.load(parts[0])
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelError, match=f"^{parts[2]}: is not part 3 of 3 of {parts[0]}"):
        Model.load(parts[0])
    parts[2].unlink()
    assert refusal(parts[0]) == f"its part 3 of 3 is missing: there is no {parts[2]}"


def test_a_hash_tells_models_apart_and_copies_not(tmp_path: Path, tiny: Path) -> None:
    def hash_of(path: Path) -> str:
        with Model.load(path, vocab_only=True) as model:
            return model.model_hash

    shutil.copy(tiny, tmp_path / "copy.gguf")
    others = [
        write_model(tmp_path / "seed.gguf", seed=1),
        write_model(tmp_path / "named.gguf", metadata={"general.name": "Another"}),
        write_model(tmp_path / "window.gguf", kind="sliding-window"),
    ]
    assert hash_of(tmp_path / "copy.gguf") == hash_of(tiny)
    assert len({hash_of(path) for path in (tiny, *others)}) == 4


@pytest.mark.parametrize("map_above_bytes", [0, math.inf])
@pytest.mark.parametrize("use_mlock", [True, False])
def test_a_model_loads_in_every_mode(tiny: Path, map_above_bytes: float, use_mlock: bool) -> None:
    with Model.load(tiny, map_above_bytes=map_above_bytes, use_mlock=use_mlock) as model:
        assert model.vocab.n_tokens == 266


def test_a_closed_model_is_told_from_an_open_one(tiny: Path) -> None:
    model = Model.load(tiny)
    model.close()
    model.close()
    with pytest.raises(ValueError, match=r"tiny\.gguf: the model is closed"):
        _ = model.handle
    with pytest.raises(ValueError, match="model is closed"):
        model.vocab.tokenize("text", add_special=True, parse_special=False)


@pytest.mark.parametrize("error", [RuntimeError, UnicodeDecodeError("utf-8", b"", 0, 1, "bad"), KeyboardInterrupt])
@pytest.mark.parametrize(
    "where",
    [
        "model._check_serves_text",
        "model.Vocab",
        "model._memory_of",
        "model.ChatTemplate",
        "template.ChatTemplate.start",
    ],
)
def test_weights_are_freed_wherever_and_however_loading_fails(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException | type[BaseException]
) -> None:
    loaded, freed = [], []
    load, free = lib.llama_model_load_from_file, lib.llama_model_free

    def count_load(*args: object) -> object:
        loaded.append(load(*args))
        return loaded[-1]

    def count_free(handle: object) -> None:
        freed.append(handle)
        free(handle)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(lib, "llama_model_load_from_file", count_load)
    monkeypatch.setattr(lib, "llama_model_free", count_free)
    monkeypatch.setattr(f"uma.llama.{where}", fail)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        Model.load(tiny)
    assert freed == loaded
    assert len(loaded) == 1


def test_loading_and_closing_leaves_nothing_behind(tiny: Path, tmp_path: Path) -> None:
    process = psutil.Process()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes()[:-9])

    def open_and_close() -> None:
        with Model.load(tiny) as model, Context(model, ContextParams(n_ctx=2048, n_seq_max=4)) as context:
            batch = Batch(64)
            batch.add(range(64), 0, 0, last_logits=True)
            assert context.decode(batch) == DONE
            model.vocab.tokenize("some text", add_special=True, parse_special=True)
        with pytest.raises(ModelError):
            Model.load(broken)

    def held() -> tuple[int, int, int]:
        gc.collect()
        return process.memory_info().rss, process.num_fds(), threading.active_count()

    for _ in range(10):
        open_and_close()
    rss, fds, threads = held()
    for _ in range(50):
        open_and_close()
    rss_after, fds_after, threads_after = held()
    assert fds_after == fds
    assert threads_after <= threads  # one that another test left behind may end meanwhile
    # A context of this size is some 2 MB and a model 0.4: a leak of either would be 20 MB and more by now.
    assert rss_after - rss < 6 * 2**20
