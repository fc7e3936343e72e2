"""Claims about which models can be found, by which names, and what is told of them without loading."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from models import write_model, write_split_model
from uma.errors import ModelError, UnknownModel
from uma.llama.builtin import builtin_path
from uma.llama.model import Model
from uma.models.catalog import available, resolve
from uma.models.names import one_meant


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of models: two good ones (one of them split, one below), one cut short, one that is no model."""
    folder = tmp_path / "models"
    (folder / "more").mkdir(parents=True)
    write_model(folder / "tiny.gguf", metadata={"general.file_type": 7})
    write_split_model(folder / "more" / "big", count=3)
    (folder / "cut.gguf").write_bytes((folder / "tiny.gguf").read_bytes()[:-100])
    (folder / "fake.gguf").write_text("not a model")
    (folder / "notes.txt").write_text("nothing to see")
    return folder


def test_the_built_in_model_is_a_file_of_the_package_and_loads() -> None:
    resolved = resolve("builtin", {})
    assert resolved.is_builtin
    assert resolved.path == builtin_path()
    with Model.load(resolved.path, is_builtin=True) as model:
        assert model.info.is_builtin and model.info.has_chat_template
        assert model.info.license and model.info.description
        assert model.info.size_bytes <= 6_000_000


def test_a_path_stands_for_itself(folder: Path) -> None:
    path = folder / "tiny.gguf"
    assert resolve(str(path), {}).path == path
    assert not resolve(str(path), {}).is_builtin


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file systems refuse such names")
def test_a_file_whose_name_is_no_utf_8_is_left_out_of_lists_and_refused_by_its_path(folder: Path) -> None:
    path = folder / os.fsdecode(b"caf\xe9.gguf")
    write_model(path)
    listed = [file.name for file in available({"UMA_MODELS": str(folder)})]
    assert "tiny" in listed
    assert not [name for name in listed if name.startswith("caf")]
    with pytest.raises(ModelError, match=r"^'.*caf\\udce9.gguf': the path is no UTF-8; rename the file"):
        resolve(str(path), {})


@pytest.mark.parametrize("name", ["tiny", "tiny.gguf"])
def test_a_name_is_looked_up_in_the_folder_of_models(folder: Path, name: str) -> None:
    assert resolve(name, {"UMA_MODELS": str(folder)}).path == folder / "tiny.gguf"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("TINY", "tiny.gguf"),
        ("Tin", "tiny.gguf"),
        ("MORE/big", "more/big-00001-of-00003.gguf"),
        ("Big", None),
        ("b", None),
    ],
)
def test_capitals_do_not_matter_and_a_beginning_is_taken(folder: Path, name: str, path: str | None) -> None:
    assert resolve(name, {"UMA_MODELS": str(folder)}).path == folder / (path or "more/big-00001-of-00003.gguf")


def test_a_beginning_of_several_names_is_refused_with_all_of_them(folder: Path) -> None:
    (folder / "tiny-2.gguf").touch()
    try:
        with pytest.raises(ModelError, match=r"^ti: 2 models have this name or begin so: tiny, tiny-2$"):
            resolve("ti", {"UMA_MODELS": str(folder)})
        assert resolve("Tiny", {"UMA_MODELS": str(folder)}).path == folder / "tiny.gguf"
    finally:
        (folder / "tiny-2.gguf").unlink()


def test_a_split_model_has_one_name(folder: Path) -> None:
    names = [model.name for model in available({"UMA_MODELS": str(folder)})]
    assert names == ["builtin", "cut", "fake", "more/big", "tiny"]
    path = resolve("more/big", {"UMA_MODELS": str(folder)}).path
    assert path == folder / "more" / "big-00001-of-00003.gguf"
    with Model.load(path):
        pass


def test_an_unknown_name_is_answered_with_the_nearest(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"^tinny: model not found, and no such file; did you mean tiny\?"):
        resolve("tinny", {"UMA_MODELS": str(folder)})
    with pytest.raises(ModelError, match=r"did you mean builtin\?"):
        resolve("bultin", {})
    with pytest.raises(ModelError, match=r"^tiny: model not found, .* `uma models` tells what is here"):
        resolve("tiny", {})
    with pytest.raises(ModelError, match=r"^tiny: model not found, .*; UMA_MODELS=/nowhere: there is no such folder"):
        resolve("tiny", {"UMA_MODELS": "/nowhere"})


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("bultin", "; did you mean builtin?"),
        ("smolm2", "; did you mean SmolLM2-135M-Instruct.Q4_1?"),
        ("QWNE3-8b", "; did you mean bartowski/Qwen3-8B-Q4_K_M?"),
        ("bartowsky/qwen3", "; did you mean bartowski/Qwen3-8B-Q4_K_M?"),
        ("omega", "; there are builtin, SmolLM2-135M-Instruct.Q4_1, bartowski/Qwen3-8B-Q4_K_M"),
    ],
)
def test_a_server_s_models_are_near_by_their_beginnings_too(asked: str, near: str) -> None:
    names = ("builtin", "SmolLM2-135M-Instruct.Q4_1", "bartowski/Qwen3-8B-Q4_K_M")
    with pytest.raises(UnknownModel) as told:
        one_meant(asked, {each: [each] for each in names})
    assert told.value.message == f"model: {asked!r}: model not found{near}"


def test_each_model_is_described_from_its_header(folder: Path) -> None:
    models = {model.name: model for model in available({"UMA_MODELS": str(folder)})}
    tiny = models["tiny"]
    assert (tiny.quantization, tiny.context_length, tiny.architecture) == ("Q8_0", 512, "llama")
    assert (tiny.size_bytes, tiny.problem) == ((folder / "tiny.gguf").stat().st_size, None)
    big = models["more/big"]
    assert big.size_bytes == sum(part.stat().st_size for part in (folder / "more").iterdir())
    with Model.load(tiny.path) as loaded:
        assert tiny.parameters == big.parameters == loaded.info.parameters


def test_a_file_that_cannot_be_loaded_is_listed_with_its_problem(folder: Path) -> None:
    (folder / "more" / "big-00003-of-00003.gguf").unlink()
    models = {model.name: model for model in available({"UMA_MODELS": str(folder)})}
    assert "is cut short" in str(models["cut"].problem)
    assert "is not a GGUF file" in str(models["fake"].problem)
    assert "its part 3 of 3 is missing" in str(models["more/big"].problem)
    assert models["tiny"].problem is None


def test_without_a_folder_there_is_the_built_in_model() -> None:
    (model,) = available({})
    assert (model.name, model.problem) == ("builtin", None)
    assert available({"UMA_MODELS": "/nowhere"}) == [model]
