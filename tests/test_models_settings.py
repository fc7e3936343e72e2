"""Settings for single models, as the configuration's file has them: what is taken, and what is refused by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from adapters import write_adapter

from harness import RunInProcessText
from models import write_encoder, write_large_cells, write_model
from uma.config import ModelSettings, RuntimeConfig, load
from uma.errors import ConfigError, ModelError, ModelUnusable, UnknownModel
from uma.figures import MB
from uma.llama.builtin import builtin_path
from uma.models.shelf import Shelf
from uma.supervisor.child import child_config
from uma.supervisor.estimate import planned_memory

FILE = """
n_ctx = 1024
[models."Qwen3-8B.v2"]
n_ctx = 8192
temperature = 0.5
alias = ["quick"]
pin = true
[models.other]
"""


def test_a_models_table_has_its_settings_and_says_that_it_is_served(tmp_path: Path) -> None:
    file = tmp_path / "uma.toml"
    file.write_text(FILE)
    loaded = load({}, {}, file)
    assert (loaded.config.models, loaded.config.n_ctx) == ("Qwen3-8B.v2,other", 1024)
    assert loaded.models == {
        "Qwen3-8B.v2": ModelSettings(("quick",), {"n_ctx": 8192, "temperature": 0.5}, pin=True),
        "other": ModelSettings(),
    }
    assert load({"models": "all"}, {}, file).config.models == "all"
    file.write_text(FILE + "[models.all]\n")
    assert load({}, {}, file).config.models == "all"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[models."a"]\nn_ctxt = 5', '[models."a"]: n_ctxt: no such setting of a model; did you mean n_ctx?'),
        ('[models."a"]\nn_ctx = "big"', "[models.\"a\"]: n_ctx: expected an integer, not 'big'"),
        ('[models."a"]\nn_ctx = -5', '[models."a"]: n_ctx: -5 must be'),
        ('[models."a"]\nhttp = "127.0.0.1:1"', '[models."a"]: http: is the whole server\'s; move it to the top'),
        ('[models."a"]\nalias = "b"', '[models."a"]: alias: expected'),
        ('[models."a"]\npin = "yes"', '[models."a"]: pin: expected'),
        ("[models.qwen3.5]\nn_ctx = 5", '[models."qwen3"]: 5: is a table; quote the whole name: [models."qwen3.5"]'),
        ("[models]\na = 5", 'models: a: expected a table of settings, [models."a"]'),
        ("[models.all]\nn_ctx = 5", '[models."all"]: what all models have stands at the top of the file'),
        ('[models."a,b"]', '[models."a,b"]: no model has such a name'),
        ("n_batch = 600\n[models.a]\nn_ubatch = 700", '[models."a"]: n_ubatch: '),
    ],
)
def test_what_is_wrong_in_a_models_table_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "uma.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load({}, {}, file)


def test_the_configuration_that_is_told_is_the_same_again(tmp_path: Path, uma_told: RunInProcessText) -> None:
    file, again = tmp_path / "uma.toml", tmp_path / "again.toml"
    file.write_text(FILE + "[models.all]\n")
    again.write_text(uma_told("config", "--toml", "--config", str(file)).stdout)
    first, second = (load({}, {}, each) for each in (file, again))
    assert second.config == first.config
    assert {name: each for name, each in second.models.items() if each.values or each.alias} == {
        "Qwen3-8B.v2": first.models["Qwen3-8B.v2"]
    }
    assert 'models."Qwen3-8B.v2".n_ctx' in uma_told("config", "--config", str(file)).stdout


def test_names_of_tables_are_models_that_are_here_and_an_alias_is_one_models(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        write_model(tmp_path / f"{name}.gguf")
    environ = {"UMA_MODELS": str(tmp_path)}
    with pytest.raises(ModelError, match=r"^uma\.toml: .*: alpa: model not found, .*; did you mean alpha"):
        Shelf("alpha,alpa", environ, tables={"alpa": ModelSettings(where='uma.toml: [models."alpa"]')}).read()
    with pytest.raises(ModelError, match=r"^alpa: model not found, and no such file"):
        Shelf("alpa", environ).read()
    twice = {"alpha": ModelSettings(("quick",)), "beta": ModelSettings(("Quick",))}
    with pytest.raises(ModelError, match=r"^uma\.toml: .*: alpa:"):
        Shelf("all", environ, tables={"alpa": ModelSettings(where='uma.toml: [models."alpa"]')}).read()
    with pytest.raises(ModelError, match="alias: Quick: is given to alpha and to beta"):
        Shelf("all", environ, tables=twice).read()
    with pytest.raises(ConfigError, match="models: expected names with commas between them, or all, not ' , '"):
        RuntimeConfig(models=" , ")
    shelf = Shelf("all", environ, tables={"alpha": ModelSettings(("quick",))})
    shelf.read()
    assert shelf.named("QUICK").name == "alpha"


def test_a_file_that_is_no_lora_adapter_of_its_model_is_told_at_the_start_with_its_table(tmp_path: Path) -> None:
    model, environ = write_model(tmp_path / "alpha.gguf"), {"UMA_MODELS": str(tmp_path)}

    def read(lora: Path) -> None:
        table = ModelSettings(values={"lora": f"fine={lora}"}, where='uma.toml: [models."alpha"]')
        Shelf("all", environ, tables={"alpha": table}).read()

    read(write_adapter(tmp_path / "adapter.gguf", model))
    for wrong, problem in ((model, "adapter"), (tmp_path / "none.gguf", "none.gguf")):
        with pytest.raises(ModelError, match=rf'^uma\.toml: \[models\."alpha"\]: lora: .*{problem}'):
            read(wrong)


def test_a_broken_file_is_no_unknown_name_and_an_ending_in_capitals_is_one_too(tmp_path: Path) -> None:
    write_model(tmp_path / "LOUD.GGUF")
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    shelf = Shelf("all", {"UMA_MODELS": str(tmp_path), "HOME": str(tmp_path)})
    shelf.read()
    assert shelf.named("LOUD").path.name == shelf.named("loud.gguf").path.name == "LOUD.GGUF"
    with pytest.raises(ModelUnusable, match="is not a GGUF file"):
        shelf.named("broken")
    with pytest.raises(UnknownModel):
        shelf.named("brokn")


def test_of_all_models_the_first_that_generates_and_fits_is_the_default(tmp_path: Path) -> None:
    write_encoder(tmp_path / "a-encoder.gguf")
    write_model(tmp_path / "b-large.gguf", feed_forward=20_000)
    write_model(tmp_path / "c-small.gguf")
    shelf = Shelf("all", {"UMA_MODELS": str(tmp_path), "HOME": str(tmp_path)}, most_bytes=builtin_path().stat().st_size)
    shelf.read()
    assert [each.name for each in shelf.files] == ["c-small", "builtin", "b-large", "a-encoder"]


@pytest.mark.parametrize("memory_mb", [200, 300, 700])
def test_a_model_s_context_is_planned_as_large_as_all_models_can_have(
    tmp_path: Path, memory_mb: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_large_cells(tmp_path / "large.gguf", layers=32, kv_heads=8)
    config = child_config(RuntimeConfig(memory=memory_mb), str(path), memory_mb * MB)
    planned_mb = planned_memory(path, config)[0] / MB + config.cache_ram_mb
    assert memory_mb / 2 < planned_mb <= memory_mb
    assert not caplog.records  # the process that makes the context warns of it
