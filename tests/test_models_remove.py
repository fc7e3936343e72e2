"""Claims about `uma rm`: it takes what it was told, frees the disk, and leaves what is another program's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model_places import MAIN, OTHER, in_cache, in_ollama
from projectors import write_projector
from pty_screen import Terminal

from harness import RunInProcessText, clean_environ, uma_command
from models import write_encoder, write_model, write_split_model
from uma.figures import size
from uma.models.catalog import available

REPOSITORY = "someone/Tiny-GGUF"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, with no variable that leads elsewhere."""
    for name in [name for name in os.environ if name.startswith(("HF_", "OLLAMA_", "XDG_CACHE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def names(environ: dict[str, str]) -> list[str]:
    """What is listed, without the built-in model."""
    return [model.name for model in available(environ)][1:]


def test_a_model_of_the_cache_goes_with_all_its_names_and_nothing_else_does(
    home: Path, tmp_path: Path, uma_told: RunInProcessText
) -> None:
    one, other = write_model(tmp_path / "1.gguf"), write_model(tmp_path / "2.gguf", seed=2)
    in_cache(home, REPOSITORY, one, "Tiny-Q4_K_M.gguf")
    in_cache(home, REPOSITORY, one, "Tiny-Q4_K_M.gguf", OTHER, "v1")
    kept = in_cache(home, REPOSITORY, other, "Tiny-Q8_0.gguf")
    done = uma_told("rm", "tiny-q4", "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("removed someone/Tiny-GGUF/Tiny-Q4_K_M: ")
    repository = home / ".cache" / "huggingface" / "hub" / "models--someone--Tiny-GGUF"
    left = {each.relative_to(repository).as_posix() for each in repository.rglob("*") if not each.is_dir()}
    blob = kept.resolve().relative_to(repository.resolve()).as_posix()
    assert left == {blob, f"snapshots/{MAIN}/Tiny-Q8_0.gguf", "refs/main"}
    assert kept.read_bytes() == other.read_bytes()
    assert uma_told("rm", "tiny", "--yes").returncode == 0
    assert not repository.exists()


def test_all_parts_of_a_split_model_go(home: Path, tmp_path: Path, uma_told: RunInProcessText) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_split_model(folder / "big", count=3)
    write_model(folder / "big-too.gguf")
    freed = sum(each.stat().st_size for each in folder.glob("big-0*"))
    done = uma_told("rm", "big", "--yes", UMA_MODELS=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"removed big: {size(freed)} are free\n"
    assert names({"UMA_MODELS": str(folder)}) == ["big-too"]


def test_a_projector_goes_with_the_last_model_that_has_it(
    home: Path, tmp_path: Path, uma_told: RunInProcessText
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for seed, name in enumerate(("seeing-a", "seeing-b")):
        write_model(folder / f"{name}.gguf", seed=seed)
    write_encoder(folder / "embedding.gguf")
    projector = write_projector(folder / "mmproj-seeing.gguf")
    environ = {"UMA_MODELS": str(folder)}
    assert names(environ) == ["embedding", "seeing-a", "seeing-b"]
    assert uma_told("rm", "seeing-a", "--yes", **environ).returncode == 0
    assert projector.exists()
    assert "and its projector" in uma_told("rm", "seeing-b", "--yes", **environ).stdout
    assert not projector.exists()


def test_of_a_link_in_the_folder_only_the_link_goes(home: Path, tmp_path: Path, uma_told: RunInProcessText) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    file = write_model(tmp_path / "elsewhere.gguf")
    (folder / "link.gguf").symlink_to(file)
    asked = uma_told("rm", "link", UMA_MODELS=str(folder)).stderr
    assert f"a link: {file}, to which it points, stays?" in " ".join(asked.split())
    done = uma_told("rm", "link", "--yes", UMA_MODELS=str(folder))
    assert done.stdout == f"removed link: it was a link, and {file}, to which it pointed, stays\n"
    assert file.exists() and not names({"UMA_MODELS": str(folder)})


def test_what_is_another_program_s_is_refused(home: Path, tmp_path: Path, uma_told: RunInProcessText) -> None:
    file = write_model(tmp_path / "1.gguf")
    blob = in_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/llama3.2/1b", file)
    studio = home / ".lmstudio" / "models" / "a" / "b" / "gemma.gguf"
    studio.parent.mkdir(parents=True)
    studio.write_bytes(file.read_bytes())
    for name, told in (("llama3.2", "`ollama rm`"), ("gemma", "LM Studio's"), ("builtin", "cannot be removed")):
        done = uma_told("rm", name, "--yes")
        assert done.returncode == 2
        assert told in done.stderr
    assert blob.exists() and studio.exists()
    assert uma_told("rm", "nothing", "--yes").returncode == 2
    assert uma_told("rm", str(studio), "--yes").returncode == 2


def test_without_a_terminal_and_without_yes_nothing_goes(
    home: Path, tmp_path: Path, uma_told: RunInProcessText
) -> None:
    write_model(tmp_path / "tiny.gguf")
    done = uma_told("rm", "tiny", stdin=b"y\n", UMA_MODELS=str(tmp_path))
    assert done.returncode == 2
    assert "say --yes" in done.stderr
    assert (tmp_path / "tiny.gguf").exists()


@pytest.mark.parametrize(("answer", "goes"), [("n", False), ("y", True)])
def test_on_a_terminal_it_asks(home: Path, tmp_path: Path, answer: str, goes: bool) -> None:
    file = write_model(tmp_path / "tiny.gguf")
    with Terminal(uma_command("rm", "tiny"), environ=clean_environ(UMA_MODELS=str(tmp_path))) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type(f"{answer}\r")
        assert terminal.wait() == (0 if goes else 1)
    assert file.exists() != goes


def test_ctrl_d_is_no_and_what_is_said_then_has_a_line_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf")
    with Terminal(uma_command("rm", "tiny"), environ=clean_environ(UMA_MODELS=str(tmp_path))) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type("\x04")
        assert terminal.wait() == 1
        assert "uma: nothing was removed" in terminal.screen
