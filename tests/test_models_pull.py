"""Claims about `uma pull`: what is cut goes on, what is wrong is refused, and nothing half loaded is a model."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
from hub_server import COMMIT, TOKEN, Hub, running_hub
from huggingface_hub import close_session
from projectors import write_projector
from pty_screen import Terminal

from harness import PATIENCE_SEC, RunInProcessText, clean_environ, run_to_end, uma_command
from models import write_model, write_split_model
from uma.errors import ModelError
from uma.models.catalog import available
from uma.models.hub import Listing, Offer, Reference, RemoteFile, parse
from uma.models.hub import listing as hub_listing
from uma.models.places import HUGGING_FACE, quantization_of
from uma.models.pull import RETRY_SEC, Pull

REPOSITORY, SEEING = "someone/Tiny-8B-GGUF", "someone/Tiny-VL-GGUF"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with a repository of two quantizations and a split model, and one of a model that sees."""
    folder = tmp_path_factory.mktemp("hub")
    one = write_model(folder / "a.gguf", feed_forward=1_000).read_bytes()
    parts = write_split_model(folder / "big", count=3)
    files = {
        "README.md": b"# Tiny",
        "Tiny-8B-Q4_K_M.gguf": one,
        "Tiny-8B-Q8_0.gguf": write_model(folder / "b.gguf", seed=1).read_bytes(),
        "../../../outside-Q4_0.gguf": b"GGUF, elsewhere",
        **{f"F32/Tiny-8B-F32-{at:05}-of-00003.gguf": part.read_bytes() for at, part in enumerate(parts, 1)},
        "half-F16-00002-of-00002.gguf": b"GGUF",
    }
    repositories = {REPOSITORY: files, SEEING: _seeing(folder), "someone/gated": files, "someone/private": files}
    with running_hub({**repositories, "someone/none": {"README.md": b""}}) as hub:
        hub.gated, hub.private = frozenset({"someone/gated"}), frozenset({"someone/private"})
        yield hub
        close_session()


def _seeing(folder: Path) -> dict[str, bytes]:
    """A repository as those of models that see are: projectors of several precisions, and a model below them."""
    model = write_model(folder / "seeing.gguf", feed_forward=1_000)
    bits = {"F32": 0, "BF16": 1, "F16": 2}
    projectors = {name: write_projector(folder / f"{name}.gguf", seed=seed) for name, seed in bits.items()}
    return {
        "Tiny-VL-Q4_K_M.gguf": model.read_bytes(),
        "BF16/Tiny-VL-BF16.gguf": write_model(folder / "below.gguf", seed=5).read_bytes(),
        "other/mmproj-Tiny-VL-Q8_0.gguf": b"GGUF, of a model elsewhere",
        **{f"mmproj-{name}.gguf": path.read_bytes() for name, path in projectors.items()},
    }


@pytest.fixture(autouse=True)
def as_new(hub: Hub) -> None:
    """The hub fails in no way and has been asked nothing."""
    hub.cuts, hub.ranges, hub.asked, hub.sent = [], [], [], 0
    hub.spoiled, hub.ignores_range, hub.claims, hub.failing, hub.is_terse = False, False, None, None, False


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the cache is."""
    return tmp_path / "hf"


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def uma(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch, uma_told: RunInProcessText) -> Run:
    """Runs `uma`, whose hub is the one here and whose cache is below `home`. It gives up without a wait."""
    for name in [name for name in os.environ if name.startswith(("HF_", "OLLAMA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("uma.models.pull.RETRY_SEC", (0.0,) * len(RETRY_SEC))
    return partial(uma_told, **{"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HOME": str(home)})


def models(home: Path) -> dict[str, Path]:
    """What is seen in the cache, by name."""
    found = available({"HF_HOME": str(home)})
    assert not [each for each in found if each.problem]
    return {each.name: each.path for each in found if each.place == HUGGING_FACE}


def left(home: Path) -> list[Path]:
    """Everything in the cache but its locks."""
    return [each for each in (home / "hub").rglob("*") if each.is_file() and ".locks" not in each.parts]


def test_a_model_comes_into_the_cache_as_others_see_it_and_is_loaded_by_its_name(
    uma: Run, hub: Hub, home: Path
) -> None:
    done = uma("pull", REPOSITORY)
    assert done.returncode == 0, done.stderr
    data = hub.repositories[REPOSITORY]["Tiny-8B-Q4_K_M.gguf"]
    folder = home / "hub" / "models--someone--Tiny-8B-GGUF"
    path = folder / "snapshots" / COMMIT / "Tiny-8B-Q4_K_M.gguf"
    assert done.stdout == f"{path}\n"
    assert "uma chat Tiny-8B-Q4_K_M" in done.stderr
    assert "100 %" in done.stderr and "\x1b" not in done.stderr
    assert path.read_bytes() == data
    assert path.resolve() == folder / "blobs" / sha256(data).hexdigest()
    assert (folder / "refs" / "main").read_text() == COMMIT
    assert hub.sent == len(data)
    assert not [path for path in hub.asked if "agent" in path], "huggingface_hub asks for names of agents, too"
    script = f"import huggingface_hub as h; print(h.try_to_load_from_cache({REPOSITORY!r}, {path.name!r}))"
    environ = {**os.environ, "HF_HOME": str(home)}
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True)
    assert asked.stdout.strip() == str(path)
    again = uma("pull", f"{REPOSITORY}:q4_k_m")
    assert (again.returncode, again.stdout, hub.sent) == (0, done.stdout, len(data))
    assert "are already here" in again.stderr and "already" not in done.stderr
    answer = uma("generate", "--local", "-m", "tiny-8b", "--raw", "--max-tokens", "2", "a")
    assert answer.returncode == 0, answer.stderr


def test_a_model_that_sees_comes_with_its_projector_and_leaves_with_it(uma: Run, hub: Hub, home: Path) -> None:
    files = hub.repositories[SEEING]
    size = len(files["Tiny-VL-Q4_K_M.gguf"])
    alone = uma("pull", SEEING, "--no-mmproj")
    assert (alone.returncode, hub.sent) == (0, size), alone.stderr
    assert not available({"HF_HOME": str(home)})[1].vision
    done = uma("pull", SEEING)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone.stdout
    assert "with its projector for pictures or sound, mmproj-F16.gguf" in done.stderr
    assert hub.sent == size + len(files["mmproj-F16.gguf"])
    (model,) = available({"HF_HOME": str(home)})[1:]
    assert model.vision and model.projector is not None
    assert model.projector.read_bytes() == files["mmproj-F16.gguf"]
    assert uma("pull", f"{SEEING}:BF16").returncode == 0  # in a folder below its projector
    listed = {each["name"]: each["vision"] for each in json.loads(uma("models", "--json").stdout)}
    assert listed == {"builtin": False, "Tiny-VL-Q4_K_M": True, "Tiny-VL-BF16": True}
    assert "sees" in uma("models").stdout
    first = uma("rm", "tiny-vl-q4", "--yes")
    assert (first.returncode, "projector" in first.stdout) == (0, False), first.stderr
    assert available({"HF_HOME": str(home)})[1].vision  # the other one's, too
    last = uma("rm", "tiny-vl", "--yes")
    assert "Tiny-VL-BF16 and its projector: " in last.stdout, last.stderr
    assert not left(home)


def test_a_projector_that_was_cut_is_gone_on_with_and_its_model_is_there_once_it_is(
    uma: Run, hub: Hub, home: Path
) -> None:
    size, part = len(hub.repositories[SEEING]["Tiny-VL-Q4_K_M.gguf"]), 1_000
    hub.cuts = [size, part, *[0] * len(RETRY_SEC)]
    assert uma("pull", SEEING).returncode == 1
    assert not models(home)
    assert uma("pull", SEEING).returncode == 0
    assert hub.ranges[-1] == part
    assert available({"HF_HOME": str(home)})[1].vision


def test_a_download_that_is_cut_three_times_goes_on_where_it_was(uma: Run, hub: Hub, home: Path) -> None:
    size = len(hub.repositories[REPOSITORY]["Tiny-8B-Q4_K_M.gguf"])
    hub.cuts = [size // 2, 1_000, 7]
    done = uma("pull", REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert hub.ranges == [0, size // 2, size // 2 + 1_000, size // 2 + 1_007]
    assert hub.sent == size, "bytes were sent twice"
    assert list(models(home)) == ["Tiny-8B-Q4_K_M"]


def test_a_command_that_gave_up_goes_on_in_the_next_one(uma: Run, hub: Hub, home: Path) -> None:
    size = len(hub.repositories[REPOSITORY]["Tiny-8B-Q4_K_M.gguf"])
    hub.cuts = [size // 3, *[0] * len(RETRY_SEC)]
    done = uma("pull", REPOSITORY)
    assert done.returncode == 1
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("uma: error: ")]
    assert "cannot be reached" in line and "is kept" in line
    assert not models(home)
    assert [each.stat().st_size for each in left(home)] == [size // 3]
    assert uma("pull", REPOSITORY).returncode == 0
    assert hub.sent == size, "bytes were sent twice"
    assert list(models(home)) == ["Tiny-8B-Q4_K_M"]


def test_a_mirror_that_tells_what_is_needed_alone_is_enough(uma: Run, hub: Hub, home: Path) -> None:
    hub.is_terse = True
    assert uma("pull", REPOSITORY).returncode == 0
    assert list(models(home)) == ["Tiny-8B-Q4_K_M"]


def test_what_came_before_is_checked_with_progress_and_can_be_cancelled(
    uma: Run, hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(hub.repositories[REPOSITORY]["Tiny-8B-Q4_K_M.gguf"])
    hub.cuts = [size - 1, *[0] * len(RETRY_SEC)]
    assert uma("pull", REPOSITORY).returncode == 1
    monkeypatch.setattr("uma.models.pull.READ_BYTES", size // 4)
    listing = hub_listing(Reference(REPOSITORY), hub.url)
    seen: list[int] = []

    class CancelledError(Exception):
        pass

    def note(n_bytes: int) -> None:
        seen.append(n_bytes)
        if len(seen) == 3:
            raise CancelledError

    with pytest.raises(CancelledError):
        Pull(listing, listing.choose(), home / "hub", hub.url, note).run()
    assert seen == [0, size // 4, size // 4 * 2]
    assert uma("pull", REPOSITORY).returncode == 0
    assert hub.sent == size, "bytes were sent twice"


def test_a_server_that_begins_again_is_taken_from_the_beginning(uma: Run, hub: Hub, home: Path) -> None:
    hub.ignores_range, hub.cuts = True, [5_000]
    assert uma("pull", REPOSITORY).returncode == 0
    assert list(models(home)) == ["Tiny-8B-Q4_K_M"]


def test_a_split_model_is_there_once_all_its_parts_are(uma: Run, hub: Hub, home: Path) -> None:
    first, *rest = (len(data) for name, data in hub.repositories[REPOSITORY].items() if "-of-00003" in name)
    hub.cuts = [first, rest[0], *[0] * len(RETRY_SEC)]
    assert uma("pull", f"{REPOSITORY}:F32").returncode == 1
    assert not models(home)
    assert uma("pull", f"{REPOSITORY}:F32").returncode == 0
    assert hub.sent == first + sum(rest)
    assert list(models(home)) == ["Tiny-8B-F32"]


def test_a_wrong_checksum_is_refused_and_nothing_of_it_is_left(uma: Run, hub: Hub, home: Path) -> None:
    hub.spoiled = True
    done = uma("pull", REPOSITORY)
    assert done.returncode == 1
    assert "came with a wrong checksum" in done.stderr and "pull it again" in done.stderr
    assert not left(home)
    hub.spoiled = False
    assert uma("pull", REPOSITORY).returncode == 0


def test_on_a_full_disk_one_sentence_says_so_and_what_came_is_kept(uma: Run, hub: Hub, home: Path) -> None:
    size = len(hub.repositories[REPOSITORY]["Tiny-8B-Q4_K_M.gguf"])
    # A process in which no file can be larger: what a full disk is to a program.
    limit = (size // 2, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    environ = clean_environ(HF_ENDPOINT=hub.url, HF_HOME=str(home), HOME=str(home), PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run(
        uma_command("pull", REPOSITORY),
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SEC,
        check=False,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 1, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("uma: error: ")] or [done.stderr]
    assert "has no room for Tiny-8B-Q4_K_M" in line and "Make room, or set HF_HOME" in line
    assert not models(home)
    sent = hub.sent
    assert uma("pull", REPOSITORY).returncode == 0
    assert hub.ranges[-1] == size // 2, sent


def test_what_can_never_fit_on_the_disk_is_not_begun(uma: Run, hub: Hub, home: Path) -> None:
    hub.claims = 10**16
    done = uma("pull", REPOSITORY)
    assert done.returncode == 1
    assert "10,000,000,000,000,000 bytes are to be loaded" in done.stderr
    assert not hub.ranges and not left(home)


@pytest.mark.parametrize(
    ("asked", "more", "code", "told"),
    [
        ("someone/gated", {}, 1, "is gated; accept its terms at http"),
        ("someone/gated", {"HF_TOKEN": "hf_wrong"}, 1, "is gated; accept its terms at http"),
        ("someone/private", {}, 2, "or it is private; look at the name, or set HF_TOKEN"),
        ("someone/missing", {}, 2, "someone/missing: there is none at http"),
        (f"{REPOSITORY}@v9", {}, 2, "has no revision v9"),
        (f"{REPOSITORY}:Q4_K_S", {}, 2, "has no Q4_K_S; did you mean Q4_K_M?"),
        ("someone/none", {}, 2, "has no GGUF file of a model"),
        ("qwen3-8b", {}, 2, "qwen3-8b: is no repository of the hub; name it as OWNER/NAME, such as "),
        ("https://example.com/a/b.gguf", {}, 2, "is no repository of the hub"),
        (REPOSITORY, {"HF_ENDPOINT": "http://127.0.0.1:1"}, 1, "http://127.0.0.1:1: cannot be reached"),
    ],
)
def test_each_reason_is_one_sentence_with_what_to_do(
    uma: Run, home: Path, asked: str, more: dict[str, str], code: int, told: str
) -> None:
    done = uma("pull", asked, **more)
    assert "is kept" not in done.stderr, "nothing was loaded"
    assert (done.returncode, done.stdout) == (code, "")
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("uma: error: ")]
    assert told in line
    assert "Traceback" not in done.stderr
    assert not models(home)


def test_offline_nothing_is_asked_of_the_hub(hub: Hub, home: Path) -> None:
    environ = clean_environ(HF_ENDPOINT=hub.url, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    done = run_to_end("env", *uma_command("pull", REPOSITORY), environ=environ)
    assert (done.returncode, done.stderr) == (1, f"uma: error: {REPOSITORY}: HF_HUB_OFFLINE is set; unset it to pull\n")
    assert hub.asked == []


def test_a_token_opens_what_is_gated(uma: Run) -> None:
    assert uma("pull", "someone/gated:Q8_0", HF_TOKEN=TOKEN).returncode == 0


def test_the_list_shows_each_model_with_its_size_and_nothing_else(uma: Run, hub: Hub, home: Path) -> None:
    done = uma("pull", REPOSITORY, "--list")
    assert done.returncode == 0, done.stderr
    assert rows_of(done.stdout) == OFFERS
    assert "* comes where none is named: Q4_K_M" in done.stderr
    assert not left(home)
    seeing = uma("pull", SEEING, "--list")
    assert "projector: mmproj-F16.gguf" in seeing.stdout + seeing.stderr


OFFERS = {
    "Q4_K_M": ["*", "yes", "1", "Tiny-8B-Q4_K_M"],
    "Q8_0": ["yes", "1", "Tiny-8B-Q8_0"],
    "F32": ["yes", "3", "F32/Tiny-8B-F32"],
}
"""By quantization: whether it is the one that is taken, whether it fits, its files, and its name."""


def rows_of(text: str) -> dict[str, list[str]]:
    """What a table of a repository's models says of each, but for its size."""
    found = {}
    for line in text.splitlines():
        cells = line.split()
        mark = cells[: cells[:1].count("*")]
        if len(cells) == len(mark) + 6 and cells[-3] in ("yes", "no"):
            found[cells[len(mark)]] = [*mark, *cells[-3:]]
    return found


def test_without_a_quantization_all_are_shown_with_the_one_that_is_taken_and_why(
    uma: Run, hub: Hub, home: Path
) -> None:
    done = uma("pull", REPOSITORY)
    assert rows_of(done.stderr) == OFFERS
    assert f"which most take: small, with little loss; for another: uma pull {REPOSITORY}:QUANT" in done.stderr
    assert rows_of(uma("pull", f"{REPOSITORY}:Q8_0").stderr) == {}
    environ = clean_environ(HF_ENDPOINT=hub.url, HF_HOME=str(home), HOME=str(home))
    with Terminal(uma_command("pull", REPOSITORY), environ, columns=100) as terminal:
        terminal.wait_for("Tiny-8B-Q4_K_M.gguf")  # the path, which comes last
        assert rows_of(terminal.text) == OFFERS
        assert f"{'█' * 20} 100 % of " in terminal.raw.decode()


@pytest.mark.parametrize(
    ("free", "told"),
    [(10_000, "it may not fit\n"), (1_200_000, "it may not fit; F32 does\n")],
)
def test_what_does_not_fit_is_told_with_what_does(
    uma: Run, monkeypatch: pytest.MonkeyPatch, free: int, told: str
) -> None:
    monkeypatch.setattr("uma.cli.pull.memory_bytes", lambda: free)
    done = uma("pull", REPOSITORY)
    assert done.returncode == 0 and told in done.stderr
    assert rows_of(done.stderr)["Q4_K_M"] == ["*", "no", "1", "Tiny-8B-Q4_K_M"]
    assert done.stdout.endswith("Tiny-8B-Q4_K_M.gguf\n")


def test_a_url_of_a_file_and_another_revision_are_taken(uma: Run, hub: Hub, home: Path) -> None:
    done = uma("pull", f"{hub.url}/{REPOSITORY}/resolve/v1/Tiny-8B-Q8_0.gguf?download=true")
    assert done.returncode == 0, done.stderr
    assert list(models(home)) == ["Tiny-8B-Q8_0"]
    assert (home / "hub" / "models--someone--Tiny-8B-GGUF" / "refs" / "v1").read_text() == COMMIT


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bartowski/Qwen3-8B-GGUF", Reference("bartowski/Qwen3-8B-GGUF")),
        ("hf.co/bartowski/Qwen3-8B-GGUF:Q4_K_M", Reference("bartowski/Qwen3-8B-GGUF", "Q4_K_M")),
        ("a/b@v1:Q8_0", Reference("a/b", "Q8_0", "v1")),
        ("a/b:Q8_0@refs/pr/1", Reference("a/b", "Q8_0", "refs/pr/1")),
        ("https://huggingface.co/a/b", Reference("a/b")),
        ("https://huggingface.co/a/b/tree/v1", Reference("a/b", "", "v1")),
        ("https://hf.co/a/b/blob/main/x/y-Q4_0.gguf", Reference("a/b", "x/y-Q4_0.gguf")),
        ("a/b@../../x", None),
        ("a/../b", None),
        ("../b", None),
        ("/etc/passwd", None),
        ("a/b:", None),
        ("", None),
        ("a/\x1b[2J", None),
    ],
)
def test_references_are_read_as_people_write_them(text: str, found: Reference | None) -> None:
    if found is None:
        with pytest.raises(ModelError, match=r"is no repository .* by a URL of https://huggingface\.co$"):
            parse(text, {})
    else:
        assert parse(text, {}) == found


def test_the_quantization_is_read_from_the_names_that_files_have() -> None:
    names = {
        "Qwen3-8B-Q4_K_M": "Q4_K_M",
        "model.Q4_0": "Q4_0",
        "ggml-model-q8_0": "Q8_0",
        "Qwen3-8B-UD-Q4_K_XL": "UD-Q4_K_XL",
        "gpt-oss-20b-mxfp4": "MXFP4",
        "Llama-IQ2_XXS": "IQ2_XXS",
        "gemma-3-bf16": "BF16",
        "Qwen3-8B": "",
        "tiny": "",
    }
    assert {name: quantization_of(name) for name in names} == names


@pytest.mark.parametrize(
    ("names", "asked", "chosen"),
    [
        (["a-Q8_0", "a-Q4_K_M", "a-F16"], "", "a-Q4_K_M"),
        (["a-Q8_0", "a-F16"], "", "a-Q8_0"),
        (["a-Q2_K", "a-Q5_K_M"], "", "a-Q5_K_M"),
        (["something"], "", "something"),
        (["a-Q4_K_M", "b-Q4_K_M"], "b-q4_k_m.gguf", "b-Q4_K_M"),
        (["a-Q4_K_M", "b-Q4_K_M"], "", "2 models of it are as good: a-Q4_K_M, b-Q4_K_M; name one of them"),
        (["a-Q4_K_M", "b-Q4_K_M"], "Q4_K_M", "2 models of it are Q4_K_M: a-Q4_K_M, b-Q4_K_M; name one of them"),
        (["a-Q4_K_M", "a-Q8_0"], "F32", "has no F32; it has Q4_K_M, Q8_0"),
    ],
)
def test_a_sensible_quantization_is_chosen_and_a_doubtful_one_is_told(
    names: list[str], asked: str, chosen: str
) -> None:
    offers = tuple(Offer(name, (RemoteFile(f"{name}.gguf", 1, "a" * 64),)) for name in names)
    listing = Listing(Reference("a/b", asked), COMMIT, offers)
    if chosen in names:
        assert listing.choose().name == chosen
    else:
        with pytest.raises(ModelError, match=chosen):
            listing.choose()
