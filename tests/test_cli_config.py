"""`uma config`, `uma models`, `uma schema`: what is in force, what can be loaded, what can be said."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import write_model, write_vocabulary
from uma.cli import describe, main
from uma.cli.config import as_toml
from uma.cli.default_model import with_all
from uma.config import Loaded, RuntimeConfig, load, settings
from uma.errors import ConfigError

PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """This test's machine sets nothing."""
    for name in [name for name in os.environ if name.startswith(("UMA_", "HF_", "OLLAMA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nowhere")


def test_config_tells_each_value_and_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "uma.toml"
    file.write_text('n_batch = 1024\nthreads = 3\nsocket_mode = "660"\n')
    monkeypatch.setenv("UMA_THREADS", "2")
    monkeypatch.setenv("UMA_USE_MLOCK", "yes")
    assert main(["config", "--json", "--config", str(file), "--n-ctx", "4096"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert set(table) == set(settings())
    assert table["n_ctx"] == {"value": 4096, "unit": "tokens", "from": "--n-ctx"}
    assert table["threads"] == {"value": 2, "unit": "threads", "from": "UMA_THREADS"}
    assert table["use_mlock"]["value"] is True
    assert table["n_batch"] == {"value": 1024, "unit": "tokens", "from": f"{file}: n_batch"}
    assert table["n_ubatch"]["from"] == "default"
    assert table["socket_mode"]["value"] == 0o660


def test_the_table_is_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    long = "/a/very/long/path" * 20
    assert main(["config", "--model", long]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(settings()) + 1
    assert long in lines[1]


@given(PATHS, PATHS, st.booleans(), st.integers(0, 0o777))
def test_a_toml_of_any_configuration_gives_the_same_configuration(
    model: str, socket: str, use_mlock: bool, mode: int
) -> None:
    config = RuntimeConfig(model=model, socket=socket, use_mlock=use_mlock, socket_mode=mode, slo_ttft_ms=12.5)
    table = tomllib.loads(as_toml(Loaded(config, dict.fromkeys(settings(), f"{model}\n: x"))))
    assert set(table) == {name for name in settings() if getattr(config, name) is not None}
    assert {name: value for name, value in table.items() if name != "socket_mode"} == {
        name: getattr(config, name) for name in table if name != "socket_mode"
    }
    assert int(table["socket_mode"], 8) == mode


def test_the_model_that_is_taken_where_none_is_named_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["value"], model["from"], model["taken"]) == ("builtin", "default", "tiny")
    assert main(["config"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["model", "tiny"]
    assert main(["config", "--json", "--model", "more/other"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["taken"] == "more/other"


def test_a_file_of_the_settings_serves_the_same_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--toml"]) == 0
    file = folder / "uma.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert (
        with_all(load(environ={})).config.models == with_all(load(environ={}, config_file=file)).config.models == "all"
    )


def test_the_toml_is_a_file_that_config_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--toml", "--n-ctx", "77", "--socket-mode", "640", "--cache-dir", "/tmp/ä\\ö"]) == 0
    file = tmp_path / "uma.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    config = load(environ={}, config_file=file).config
    assert (config.n_ctx, config.socket_mode, config.cache_dir) == (77, 0o640, "/tmp/ä\\ö")


def test_an_error_about_a_setting_names_its_option_and_one_about_a_file_of_that_name_does_not() -> None:
    assert describe(ConfigError.at("n_ctx", "is too large")) == "--n-ctx: is too large"
    assert describe(ConfigError("model: cannot be read")) == "model: cannot be read"


@pytest.mark.parametrize(
    ("variables", "arguments", "line"),
    [
        ({"UMA_THREADS": "-1"}, [], "UMA_THREADS: -1 must be from 0 to 1,024"),
        ({"UMA_USE_MLOCK": "perhaps"}, [], "UMA_USE_MLOCK: expected true or false, not 'perhaps'"),
        ({}, ["--config", "/nowhere/uma.toml"], "/nowhere/uma.toml: cannot be read: No such file or directory"),
        ({"UMA_CONFIG": "/nowhere"}, [], "/nowhere: cannot be read: No such file or directory"),
        ({}, ["--n-batch", "64"], "--n-ubatch: 512 must not be over n_batch, 64"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_answered_in_one_line_and_with_code_2(
    variables: dict[str, str],
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["config", *arguments]) == 2
    assert capsys.readouterr().err == f"uma: error: {line}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A UMA_MODELS folder with two models and a file that is none."""
    write_model(tmp_path / "tiny.gguf", context_length=256)
    (tmp_path / "more").mkdir()
    write_model(tmp_path / "more" / "other.gguf", chat_template=None)
    (tmp_path / "torn.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:1000])
    monkeypatch.setenv("UMA_MODELS", str(tmp_path))
    return tmp_path


def test_models_lists_what_can_be_loaded_and_what_is_wrong_with_the_rest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--json"]) == 0
    models = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert set(models) == {"builtin", "tiny", "more/other", "torn"}
    assert models["builtin"]["problem"] is None
    assert models["builtin"]["size_bytes"] < 6_000_000
    assert (models["tiny"]["context_length"], models["tiny"]["quantization"]) == (256, "F32")
    assert models["tiny"]["size_bytes"] == (folder / "tiny.gguf").stat().st_size
    assert "cut short" in models["torn"]["problem"]


def test_the_table_of_models_names_each_with_its_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    said = capsys.readouterr()
    rows = {line.split()[0]: line for line in said.out.splitlines()[1:]}
    assert set(rows) == {"builtin", "tiny", "more/other", "cannot"}
    assert "F32" in rows["tiny"]
    assert "256" in rows["tiny"]
    assert f"{folder / 'torn.gguf'}: " in rows["cannot"]
    assert str(folder) in said.err


def test_a_folder_of_models_that_is_missing_is_told_wherever_models_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models"]) == 0
    assert "set UMA_MODELS" in capsys.readouterr().err
    monkeypatch.setenv("UMA_MODELS", "/nowhere")
    told = "UMA_MODELS=/nowhere: there is no such folder; make it, or unset UMA_MODELS"
    for command in (["models"], ["run"], ["embed", "a", "--local"]):
        assert main(command) == 2
        assert capsys.readouterr().err.endswith(f"uma: error: {told}\n")
    assert main(["run", "--model", "some"]) == 2
    assert "some: model not found, and no such file; UMA_MODELS=/nowhere: there is" in capsys.readouterr().err


def test_an_unknown_variable_is_told_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--json"]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setenv("UMA_N_CTXX", "1")
    assert main(["config", "--json"]) == 0
    said = capsys.readouterr()
    assert said.out == expected
    warning = "UMA_N_CTXX: no such setting, so it changes nothing; did you mean UMA_N_CTX?"
    assert said.err == f"uma: warning: {warning}\n"
    monkeypatch.delenv("UMA_N_CTXX")
    monkeypatch.setenv("UMA_FOO", "1")
    assert main(["config", "--json"]) == 0
    assert capsys.readouterr().err == "uma: warning: UMA_FOO: no such setting, so it changes nothing\n"


def test_relative_paths_in_a_file_are_meant_from_where_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings" / "models").mkdir(parents=True)
    write_model(tmp_path / "settings" / "models" / "tiny.gguf")
    file = tmp_path / "settings" / "uma.toml"
    monkeypatch.chdir(tmp_path)
    file.write_text(
        'model = "models/tiny.gguf"\nsocket = "s"\ncache_dir = ""\ndraft = "models/tiny.gguf"\nspeculate = "auto"\n'
    )
    for named in (file, Path("settings/uma.toml")):
        config = load(environ={}, config_file=named).config
        assert (config.model, config.socket) == (f"{file.parent}/models/tiny.gguf", f"{file.parent}/s")
        assert (config.cache_dir, config.draft) == ("", config.model)
    file.write_text('model = "a-name"\n')
    assert load(environ={}, config_file=file).config.model == "a-name"


def test_a_model_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "--model", ""])
    assert "uma: error: --model: '' must have 1 or more characters" in capsys.readouterr().err


def test_what_holds_no_weights_is_listed_with_that_problem(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_vocabulary(folder / "vocab.gguf")
    write_model(folder / "lora.gguf", metadata={"general.type": "adapter"})
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert f"cannot be loaded: {folder}/vocab.gguf: holds a vocabulary and no weights" in out
    assert f"cannot be loaded: {folder}/lora.gguf: is a LoRA adapter" in out


def test_schema_prints_all_messages_or_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    every = json.loads(capsys.readouterr().out)
    assert {"generate", "hello"} <= set(every)
    assert main(["schema", "generate"]) == 0
    assert json.loads(capsys.readouterr().out) == every["generate"]
    assert main(["schema", "genrate"]) == 2
    assert capsys.readouterr().err == "uma: error: no such message: genrate; did you mean generate?\n"
