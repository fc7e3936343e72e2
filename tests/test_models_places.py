"""Claims about models that other programs have brought: where they are found, by which names, what is told of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from model_places import MAIN, OTHER, in_cache, in_ollama
from projectors import write_projector
from reference import vocabulary

from harness import RunInProcessText
from models import write_encoder, write_model
from uma.errors import ModelError
from uma.gguf import BLOCK_BYTES, glance
from uma.llama.header import read
from uma.models import catalog
from uma.models.catalog import available, broken, named, resolve
from uma.models.places import HUGGING_FACE, LM_STUDIO, OLLAMA, find
from uma.models.projectors import beside, best


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with one model in each program's place."""
    home = tmp_path / "home"
    models = [write_model(tmp_path / f"{seed}.gguf", seed=seed) for seed in range(6)]
    in_cache(home, "bartowski/Qwen3-8B-GGUF", models[0], "Qwen3-8B-Q4_K_M.gguf")
    in_cache(home, "bartowski/Qwen3-8B-GGUF", models[1], "Qwen3-8B-Q8_0.gguf")
    in_cache(home, "bartowski/Qwen3-8B-GGUF", models[1], "mmproj-Qwen3-8B-F16.gguf")
    studio = home / ".lmstudio" / "models" / "lmstudio-community" / "gemma-3-4b-it-GGUF"
    studio.mkdir(parents=True)
    (studio / "gemma-3-4b-it-Q4_K_M.gguf").write_bytes(models[2].read_bytes())
    in_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/llama3.2/latest", models[3])
    in_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/llama3.2/1b", models[4])
    in_ollama(home / ".ollama" / "models", "hf.co/someone/Phi-GGUF/Q4_0", models[5])
    return home


def test_each_program_s_models_are_found_and_told_with_where_they_are_from(home: Path) -> None:
    found = {model.name: model for model in available({"HOME": str(home)})}
    assert {name: model.place for name, model in found.items() if name != "builtin"} == {
        "Qwen3-8B-Q4_K_M": HUGGING_FACE,
        "Qwen3-8B-Q8_0": HUGGING_FACE,
        "gemma-3-4b-it-Q4_K_M": LM_STUDIO,
        "llama3.2:latest": OLLAMA,
        "llama3.2:1b": OLLAMA,
        "hf.co/someone/Phi-GGUF:Q4_0": OLLAMA,
    }
    assert not [model for model in found.values() if model.problem]
    assert found["llama3.2:1b"].size_bytes == found["llama3.2:1b"].path.stat().st_size


@pytest.mark.parametrize(
    ("variable", "below", "name"),
    [
        ("HF_HUB_CACHE", ".cache/huggingface/hub", "Qwen3-8B-Q8_0"),
        ("HF_HOME", ".cache/huggingface", "Qwen3-8B-Q8_0"),
        ("XDG_CACHE_HOME", ".cache", "Qwen3-8B-Q8_0"),
        ("OLLAMA_MODELS", ".ollama/models", "llama3.2:1b"),
    ],
)
def test_the_programs_own_variables_say_where(home: Path, variable: str, below: str, name: str) -> None:
    assert name in {model.name for model in available({variable: str(home / below)})}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("qwen3-8b-q8_0", "Qwen3-8B-Q8_0.gguf"),
        ("bartowski/Qwen3-8B-GGUF:Q8_0", "Qwen3-8B-Q8_0.gguf"),
        ("qwen3-8b-gguf:q4", "Qwen3-8B-Q4_K_M.gguf"),
        ("Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M.gguf"),
        ("gemma-3", "gemma-3-4b-it-Q4_K_M.gguf"),
        ("lmstudio-community/gemma", "gemma-3-4b-it-Q4_K_M.gguf"),
    ],
)
def test_a_short_name_is_enough_where_it_is_clear(home: Path, name: str, file: str) -> None:
    assert resolve(name, {"HOME": str(home)}).path.name == file


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("llama3.2", "llama3.2:latest"),
        ("llama3.2:1b", "llama3.2:1b"),
        ("LLAMA3.2-1B", "llama3.2:1b"),
        ("phi", "hf.co/someone/Phi-GGUF:Q4_0"),
    ],
)
def test_ollama_s_names_are_as_ollama_takes_them(home: Path, name: str, full: str) -> None:
    assert named(name, {"HOME": str(home)}).name == full


def test_one_download_in_two_places_is_one_model(home: Path, tmp_path: Path) -> None:
    file = write_model(tmp_path / "again.gguf", seed=2)
    in_cache(home, "lmstudio-community/gemma-3-4b-it-GGUF", file, "gemma-3-4b-it-Q4_K_M.gguf")
    assert named("gemma-3", {"HOME": str(home)}).place == HUGGING_FACE


def test_another_revision_is_told_by_its_name_and_a_file_it_shares_is_listed_once(home: Path, tmp_path: Path) -> None:
    repository = "bartowski/Qwen3-8B-GGUF"
    in_cache(home, repository, tmp_path / "1.gguf", "Qwen3-8B-Q8_0.gguf", OTHER, "v1")
    in_cache(home, repository, tmp_path / "5.gguf", "Qwen3-8B-Q4_K_M.gguf", OTHER, "v1")
    names = [model.name for model in available({"HOME": str(home)}) if model.place == HUGGING_FACE]
    assert names == ["Qwen3-8B-Q4_K_M", "Qwen3-8B-Q8_0", "Qwen3-8B-Q4_K_M@v1"]
    old = named(f"{repository}:Q4_K_M@v1", {"HOME": str(home)})
    assert old.path.read_bytes() == (tmp_path / "5.gguf").read_bytes()


def test_what_is_half_loaded_is_no_model(home: Path) -> None:
    cache = home / ".cache" / "huggingface" / "hub" / "models--bartowski--Qwen3-8B-GGUF"
    (cache / "blobs" / f"{'c' * 64}.incomplete").write_bytes(b"GGUF")
    (cache / "snapshots" / MAIN / "Qwen3-8B-F16.gguf").symlink_to(cache / "blobs" / ("d" * 64))
    assert not [model for model in available({"HOME": str(home)}) if "F16" in model.name]


def test_a_place_that_cannot_be_looked_at_has_no_models(tmp_path: Path, uma_told: RunInProcessText) -> None:
    homes = [tmp_path / ("h" * 300), tmp_path / "loop", tmp_path / "closed" / "home"]
    homes[1].symlink_to("loop")
    in_cache(homes[2], "someone/Some-GGUF", write_model(tmp_path / "0.gguf"), "Some-Q4_0.gguf")
    assert find({"HOME": str(homes[2])})
    for each in ("blobs/sha256-0", "manifests/registry.ollama.ai/library/a/b"):
        (homes[2] / ".ollama" / "models" / each).parent.mkdir(parents=True)
    homes[2].parent.chmod(0)
    with as_stranger():
        assert [find({"HOME": str(home), "UMA_MODELS": str(home)}) for home in homes] == [[]] * 3
    none = {"HF_HOME": "", "HF_HUB_CACHE": "", "XDG_CACHE_HOME": "", "OLLAMA_MODELS": ""}
    for home in homes[:2]:
        done = uma_told("models", HOME=str(home), **none)
        assert (done.returncode, "builtin" in done.stdout) == (0, True), done.stderr
    named = uma_told("models", HOME=str(tmp_path), UMA_MODELS=str(homes[1]), **none)
    assert (named.returncode, "cannot be read: Too many levels of symbolic links" in named.stderr) == (2, True)
    with pytest.raises(ModelError, match="model not found, and no such file"):
        resolve("n" * 300, {"HOME": str(tmp_path)})
    homes[2].parent.chmod(0o700)


@contextmanager
def as_stranger() -> Iterator[None]:
    """A block of a user without rights, for tests that run as root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_links_to_folders_are_followed_once_each_and_what_is_no_file_is_no_model(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "models", tmp_path / "disk" / "deep"
    (folder / "own").mkdir(parents=True)
    elsewhere.mkdir(parents=True)
    write_model(elsewhere / "far.gguf")
    write_model(folder / "own" / "near.gguf")
    (folder / "a-link").symlink_to(elsewhere.parent)
    (folder / "b-link").symlink_to(elsewhere)
    (folder / "again").symlink_to(folder / "own")
    (elsewhere / "back").symlink_to(folder)
    os.mkfifo(folder / "pipe.gguf")
    os.mkfifo(folder / "mmproj-near.gguf")
    listed = available({"UMA_MODELS": str(folder)})
    assert [each.name for each in listed] == ["builtin", "a-link/deep/far", "own/near"]
    assert not [each.problem for each in listed if each.problem]
    assert beside(folder / "near.gguf") is None
    with pytest.raises(ModelError, match="is not a regular file"):
        read(folder / "pipe.gguf")


def test_a_link_that_leads_nowhere_is_listed_as_broken_with_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "elsewhere" / "far.gguf")
    listed = available({"UMA_MODELS": str(tmp_path)})
    assert [each.name for each in listed] == ["builtin", "gone"]
    (told,) = broken(listed)
    assert told == f"{tmp_path}/gone.gguf: no such file; it is a link to {tmp_path}/elsewhere/far.gguf"


def test_a_manifest_that_names_a_file_elsewhere_or_is_none_is_passed_over(home: Path, tmp_path: Path) -> None:
    folder = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "evil"
    folder.mkdir()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"../../../../../{tmp_path}/0.gguf"}
    texts = [json.dumps({"layers": [layer]}), json.dumps({"layers": 3}), json.dumps([]), "{", "", '{"layers": [[]]}']
    for at, text in enumerate(texts):
        (folder / str(at)).write_text(text)
    assert not [model for model in available({"HOME": str(home)}) if "evil" in model.name]


def test_the_kind_is_told_of_each_model(tmp_path: Path) -> None:
    write_model(tmp_path / "dense.gguf")
    write_model(tmp_path / "window.gguf", kind="sliding-window")
    write_model(tmp_path / "recurrent.gguf", kind="recurrent")
    write_model(tmp_path / "hybrid.gguf", kind="hybrid")
    write_model(tmp_path / "moe.gguf", metadata={"llama.expert_count": 8, "llama.expert_used_count": 2})
    write_encoder(tmp_path / "bert.gguf", pooling="cls")
    write_encoder(tmp_path / "rank.gguf", pooling="rank")
    kinds = {model.name: model.kind for model in available({"UMA_MODELS": str(tmp_path)})}
    assert kinds == {
        "builtin": "dense",
        "dense": "dense",
        "window": "dense, sliding window",
        "recurrent": "recurrent",
        "hybrid": "hybrid",
        "moe": "MoE",
        "bert": "embeddings",
        "rank": "reranker",
    }


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    text = Path("/proc/self/io").read_text()
    return int(text.partition("rchar: ")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what is read")
def test_of_two_thousand_files_only_the_beginnings_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    header = bytearray(vocabulary("qwen2").read_bytes())
    header[8] = 1  # a tensor, which the listing does not look for
    first = tmp_path / "first.gguf"
    first.write_bytes(header)
    for at in range(2_000):
        (folder / f"{at:04}.gguf").symlink_to(first)
    before = bytes_read()
    models = available({"UMA_MODELS": str(folder)})
    assert bytes_read() - before < 2_100 * BLOCK_BYTES
    assert len(models) == 2_001
    last = models[-1]
    assert (last.quantization, last.context_length, last.architecture, last.problem) == ("F16", 32_768, "qwen2", None)
    assert models[-1].kind == "dense"
    assert not last.parameters, "the whole header was read"


def test_of_many_files_one_that_is_cut_at_its_end_is_found_where_all_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_model(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-100])
    monkeypatch.setattr(catalog, "WHOLE_TOKENS", 0)
    for is_thorough in (False, True):
        found = available({"UMA_MODELS": str(tmp_path)}, is_thorough=is_thorough)
        assert [each.name for each in found if each.problem] == ["cut"] * is_thorough


@pytest.mark.parametrize("kind", ["attention", "sliding-window", "recurrent", "hybrid"])
def test_the_beginning_says_what_the_whole_header_says(tmp_path: Path, kind: str) -> None:
    path = write_model(tmp_path / "a.gguf", kind=kind, metadata={"general.tags": ["a", "b"]})  # type: ignore[arg-type]
    seen, header = glance(path), read(path)
    assert seen is not None
    assert seen.metadata
    assert seen.metadata.items() <= header.metadata.items()
    assert seen.n_tokens == header.metadata["tokenizer.ggml.tokens"]


def test_no_cut_of_a_file_is_taken_for_a_sound_beginning_or_ends_in_an_error(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf").read_bytes()
    end = whole.index(b"tokenizer.ggml.tokens")
    cut = tmp_path / "cut.gguf"
    for size in range(0, end, 7):
        cut.write_bytes(whole[:size])
        assert glance(cut) is None
    for at in range(0, end, 3):
        cut.write_bytes(whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 :])
        glance(cut)


@pytest.mark.parametrize(
    ("model", "projectors", "place", "chosen"),
    [
        ("Mistral-7B-Instruct-v0.3-Q4_K_M", ["mmproj-llava-v1.6-7b-f16"], "models", None),
        ("Qwen2-7B-Instruct-Q4_K_M", ["mmproj-Qwen2-VL-7B-Instruct-f16"], "models", None),
        ("Phi-3-mini-it", ["mmproj-gemma-3-4b-it-f16"], "models", None),
        ("Qwen2.5-VL-7B", ["mmproj-Qwen2-VL-7B-f16"], "models", None),
        ("gemma-3-4b-it-Q4_K_M", ["mmproj-gemma-3-12b-it-Q8_0", "mmproj-gemma-3-4b-it-f32"], "models", 1),
        ("MiniCPM-V-2_6-Q4_0", ["mmproj-MiniCPM-V-4-f16", "mmproj-MiniCPM-V-2_6-f16"], "models", 1),
        ("ggml-model-Q4_K_M", ["mmproj-model-f32", "mmproj-model-f16"], "models", 1),
        ("Llama-3.2-1B", ["mmproj-ultravox-v0_5-llama-3_2-1b-f16"], "models--some--ultravox-v0_5-llama-3_2-1b", 0),
        ("Llama-3.2-1B", ["mmproj-ultravox-v0_5-llama-3_2-1b-f16"], "models", None),
    ],
)
def test_a_projector_is_for_models_of_its_name_and_its_size_and_make_say_nothing_of_that(
    model: str, projectors: list[str], place: str, chosen: int | None
) -> None:
    assert best(model, projectors, place) == (None if chosen is None else projectors[chosen])


def test_a_model_of_ollama_s_has_the_projector_that_its_manifest_names(tmp_path: Path) -> None:
    models = [write_model(tmp_path / f"{seed}.gguf", seed=seed) for seed in range(2)]
    projector = write_projector(tmp_path / "any.gguf")
    folder = tmp_path / "ollama"
    in_ollama(folder, "registry.ollama.ai/library/llava/7b", models[0], projector)
    in_ollama(folder, "registry.ollama.ai/library/llama/7b", models[1])
    found = {each.name: each for each in available({"OLLAMA_MODELS": str(folder)})}
    assert (found["llava:7b"].vision, found["llama:7b"].vision) == (True, False)
    seen = beside(found["llava:7b"].path)
    assert seen is not None and seen.read_bytes() == projector.read_bytes()
    assert beside(found["llama:7b"].path) is None


def test_a_model_that_is_called_like_a_projector_is_none(tmp_path: Path) -> None:
    model = write_model(tmp_path / "seeing.gguf")
    write_model(tmp_path / "mmproj-seeing.gguf")
    assert beside(model) is None
    projector = write_projector(tmp_path / "mmproj-seeing-f16.gguf")
    assert beside(model) == projector


def test_each_model_of_a_folder_has_the_projector_that_fits_it(tmp_path: Path) -> None:
    for name in ("llava-7b", "llava-13b", "text"):
        write_model(tmp_path / f"{name}-Q4_K_M.gguf")
    (tmp_path / "qwen").mkdir()
    write_model(tmp_path / "qwen" / "Qwen2-VL.gguf")
    write_projector(tmp_path / "qwen" / "mmproj-Qwen2-VL-f16.gguf", "qwen2vl", embed=4_096)
    for name in ("7b-f16", "13b-f32", "13b-f16"):
        write_projector(tmp_path / f"llava-{name}-mmproj.gguf")
    found = {each.name: each.projector for each in available({"UMA_MODELS": str(tmp_path)})}
    assert found.keys() == {"builtin", "llava-7b-Q4_K_M", "llava-13b-Q4_K_M", "text-Q4_K_M", "qwen/Qwen2-VL"}
    assert found["llava-7b-Q4_K_M"] == tmp_path / "llava-7b-f16-mmproj.gguf"
    assert found["llava-13b-Q4_K_M"] == tmp_path / "llava-13b-f16-mmproj.gguf"
    assert found["text-Q4_K_M"] is None  # they are named for others
    assert found["qwen/Qwen2-VL"] is None  # it is for a wider model


def test_commands_and_the_library_take_such_names(home: Path, uma_told: RunInProcessText) -> None:
    environ = {"HOME": str(home), "HF_HOME": "", "HF_HUB_CACHE": "", "XDG_CACHE_HOME": "", "OLLAMA_MODELS": ""}
    listed = {each["name"]: each for each in json.loads(uma_told("models", "--json", **environ).stdout)}
    assert (listed["gemma-3-4b-it-Q4_K_M"]["place"], listed["gemma-3-4b-it-Q4_K_M"]["fits"]) == (LM_STUDIO, True)
    told = uma_told("models", **environ).stdout
    assert "dense" in told and "LM Studio" in told
    for name in ("gemma-3", "llama3.2:1b", "qwen3-8b-q4"):
        done = uma_told("generate", "--local", "-m", name, "--raw", "--max-tokens", "2", "a", **environ)
        assert done.returncode == 0, done.stderr
    done = uma_told("generate", "--local", "-m", "qwen3-8b", "a", **environ)
    assert done.returncode == 2
    assert "Qwen3-8B-Q4_K_M, Qwen3-8B-Q8_0" in done.stderr


def test_a_model_of_ollama_s_has_one_name_in_lists_and_on_its_card(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from uma import LLM

    monkeypatch.setenv("HOME", str(home))
    listed = available(os.environ)
    for asked in ("llama3.2:1b", next(str(each.path) for each in listed if each.name == "llama3.2:1b")):
        with LLM(asked) as llm:
            assert llm.info.model.name == "llama3.2:1b"


def test_a_folder_of_models_that_holds_none_is_told(uma_told: RunInProcessText, tmp_path: Path) -> None:
    done = uma_told("models", UMA_MODELS=str(tmp_path), HOME=str(tmp_path))
    assert (done.returncode, f"UMA_MODELS is {tmp_path}, which holds no GGUF file" in done.stderr) == (0, True)
