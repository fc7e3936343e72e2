"""The file of API keys, as `uma key` and editors write it, and what a server makes of it while it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import HttpServer, new_key, running_gateway, running_http

from harness import RunInProcessText, ask, short_directory, until
from uma.errors import ConfigError
from uma.http.keys import KeyFile, add, remove


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "  # mine"])
def test_a_key_is_added_to_a_file_whatever_its_last_line_ends_with(tmp_path: Path, end: str) -> None:
    path = tmp_path / "keys.toml"
    first = add(path, "first")
    path.write_text(path.read_text(encoding="utf-8").rstrip() + "\nmax_concurrent = 3" + end, encoding="utf-8")
    second = add(path, "second")
    keys = KeyFile.open(path)
    for name, key, most in (("first", first, 3), ("second", second, None)):
        account = keys.find(key)
        assert account is not None
        assert (account.name, account.bounds.max_concurrent) == (name, most)


HASH = f'sha256 = "{64 * "0"}"\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"# all\n\n[a]\n{HASH}\n# of b\n[b]\n{HASH}", f"# all\n\n# of b\n[b]\n{HASH}"),
        (f"[b]\n{HASH}[ a ]  # gone\n# a's\nmax_concurrent = 1\r\n{HASH}", f"[b]\n{HASH}"),
        (f"['a']\n{HASH}\n\n", ""),
        (f"[b]\r\n{HASH}[a]\r\n{HASH}", f"[b]\r\n{HASH}"),
    ],
)
def test_a_removed_key_takes_its_table_along_and_nothing_else(tmp_path: Path, before: str, after: str) -> None:
    path, link = tmp_path / "keys.toml", tmp_path / "link.toml"
    path.write_bytes(before.encode())
    path.chmod(0o640)
    link.symlink_to(path)
    remove(link, "a")
    assert path.read_bytes().decode() == after
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["keys.toml", "link.toml"]


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (f"[a]\n{HASH}", "b", "there is no key b; there are a"),
        (f'a = {{ sha256 = "{64 * "0"}" }}\n', "a", "a is not written as a table [a] of its own"),
        ("[a\n", "a", "is not TOML"),
    ],
)
def test_a_key_that_cannot_be_removed_leaves_the_file_as_it_is(tmp_path: Path, text: str, name: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        remove(path, name)
    assert path.read_text() == text


def test_a_key_keeps_what_it_has_running_when_its_bounds_change(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = add(path, "me")
    keys = KeyFile.open(path)
    account = keys.find(key)
    assert account is not None
    account.running = 2
    path.write_text(path.read_text() + "max_concurrent = 2\n")
    assert keys.find(key) is account
    assert account.objection(1, 0.0) is not None


def test_keys_are_listed_with_their_bounds_and_without_their_hashes(tmp_path: Path, uma_told: RunInProcessText) -> None:
    path = tmp_path / "keys.toml"
    for name in ("me", "batch"):
        uma_told("key", "new", name, "--keys", str(path))
    path.write_text(path.read_text().rstrip() + "\nmax_concurrent = 3\npriority = -1\n")
    done = uma_told("key", "list", "--keys", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["name   limits", "me", "batch  max_concurrent=3, priority=-1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("new",), "key new: the key's name is missing: uma key new NAME"),
        (("remove",), "key remove: the key's name is missing: uma key remove NAME"),
        (("list", "me"), "key list: takes no name, and got me"),
        (("list",), "none.toml: `uma key new NAME` makes it"),
        (("remove", "me"), "none.toml: `uma key new NAME` makes it"),
    ],
)
def test_a_key_command_that_cannot_be_obeyed_says_why(
    arguments: tuple[str, ...], said: str, tmp_path: Path, uma_told: RunInProcessText
) -> None:
    done = uma_told("key", *arguments, "--keys", str(tmp_path / "none.toml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.fixture(scope="module")
def keys() -> Iterator[Path]:
    """A file with one key, `owner`'s, beside the server's socket."""
    with short_directory() as directory:
        add(directory / "keys.toml", "owner")
        yield directory / "keys.toml"


@pytest.fixture(scope="module")
def locked(keys: Path, tiny: Path) -> Iterator[HttpServer]:
    """A server that asks for them."""
    with running_http(keys.parent, "--model", str(tiny), "--http-keys", str(keys)) as server:
        yield server


def status(server: HttpServer, key: str) -> int:
    """What a request with this key is answered."""
    return server.ask("GET", "/v1/models", authorization=f"Bearer {key}").status


def test_a_server_knows_a_new_key_at_once_and_a_removed_one_no_longer(
    locked: HttpServer, keys: Path, uma_told: RunInProcessText
) -> None:
    made = uma_told("key", "new", "guest", "--keys", str(keys))
    assert "a server that runs with it knows the key already" in made.stderr
    key = made.stdout.strip()
    assert status(locked, key) == 200
    removed = uma_told("key", "remove", "guest", "--keys", str(keys))
    assert (removed.returncode, removed.stdout) == (0, "")
    assert status(locked, key) == 401


def test_a_broken_file_of_keys_leaves_them_as_they_are_and_is_warned_of_once(locked: HttpServer, keys: Path) -> None:
    key = add(keys, "kept")
    assert status(locked, key) == 200
    good, mark = keys.read_text(), locked.process.log.mark()
    keys.write_text(good + "[broken\n")
    assert [status(locked, key) for _ in range(3)] == [200] * 3
    assert "is not TOML" in locked.process.log.wait_for("event=http.keys_not_reloaded kept=", since=mark)
    keys.unlink()
    assert status(locked, key) == 200
    assert "cannot be read" in locked.process.log.wait_for(
        "event=http.keys_not_reloaded kept=.*cannot be read", since=mark
    )
    assert locked.process.log.text.count("event=http.keys_not_reloaded kept=") == 2
    keys.write_text(good)
    assert status(locked, key) == 200


def test_a_server_whose_last_key_is_removed_is_closed_and_not_open(locked: HttpServer, keys: Path) -> None:
    good = keys.read_text()
    key = add(keys, "last")
    keys.write_text("\n")
    assert status(locked, key) == 401
    assert locked.ask("GET", "/v1/models").status == 401
    keys.write_text(good)


def test_a_key_without_models_reads_metrics_and_health_and_asks_nothing(
    locked: HttpServer, keys: Path, uma_told: RunInProcessText
) -> None:
    made = uma_told("key", "new", "prometheus", "--models", "", "--keys", str(keys))
    assert (made.returncode, "warning" in made.stderr) == (0, False)
    assert "prometheus  models=none" in uma_told("key", "list", "--keys", str(keys)).stdout
    key = {"authorization": f"Bearer {made.stdout.strip()}"}
    assert [locked.ask("GET", path, **key).status for path in ("/metrics", "/health")] == [200, 200]
    refused = locked.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 1}, **key)
    assert (refused.status, "may use no model" in str(refused.json)) == (403, True)


def test_a_new_key_s_models_that_are_not_here_are_warned_of(tmp_path: Path, uma_told: RunInProcessText) -> None:
    made = uma_told("key", "new", "big", "--models", "builtin,nosuch", "--keys", str(tmp_path / "keys.toml"))
    told = " ".join(made.stderr.split())
    assert (made.returncode, told.count("warning")) == (0, 1)
    assert "uma: warning: --models: nosuch: model not found" in told
    assert 'models = ["builtin", "nosuch"]' in (tmp_path / "keys.toml").read_text()


def used(server: HttpServer, holder: str, **headers: str) -> dict[str, dict[str, int]]:
    """What `/metrics` tells a key of the use of each key or user: by its name, by figure."""
    text, found = server.ask("GET", "/metrics", **headers).body.decode(), dict[str, dict[str, int]]()
    pattern = rf'^uma_{holder}_(\w+)_total{{{holder}="([\w-]+)"}} (\d+)$'
    for figure, name, value in re.findall(pattern, text, re.MULTILINE):
        found.setdefault(name, {})[figure] = int(value)
    return found


def test_metrics_tell_what_each_key_asked_generated_and_was_refused(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "keys.toml"
    bounds = {"alice": "", "bob": "max_tokens_per_minute = 1", "scraper": "models = []"}
    made = {name: {"authorization": f"Bearer {new_key(name, path, bound)}"} for name, bound in bounds.items()}
    asked = {"prompt": "Once upon", "max_tokens": 5, "ignore_eos": True}
    with (
        short_directory() as directory,
        running_http(directory, "--model", str(tiny), "--http-keys", str(path)) as server,
    ):
        zeros = {"requests": 0, "refused": 0, "prompt_tokens": 0, "completion_tokens": 0}
        assert used(server, "key", **made["scraper"]) == {"alice": zeros, "bob": zeros, "scraper": zeros}
        prompt = server.ask("POST", "/v1/completions", asked, **made["alice"]).json["usage"]["prompt_tokens"]
        assert server.ask("POST", "/v1/completions", {**asked, "stream": True}, **made["alice"]).status == 200
        embedded = server.ask("POST", "/v1/embeddings", {"input": "a fox"}, **made["alice"]).json["usage"]
        assert [server.ask("POST", "/v1/completions", asked, **made["bob"]).status for _ in range(3)] == [200, 429, 429]
        of_alice = {
            "requests": 3,
            "refused": 0,
            "prompt_tokens": 2 * prompt + embedded["prompt_tokens"],
            "completion_tokens": 10,
        }
        of_bob = {"requests": 1, "refused": 2, "prompt_tokens": prompt, "completion_tokens": 5}
        assert used(server, "key", **made["scraper"]) == {"alice": of_alice, "bob": of_bob, "scraper": zeros}
        assert used(server, "key", **made["alice"]) == {"alice": of_alice}, "the others' use is none of its business"


def test_tokens_of_a_client_that_hung_up_are_counted_on_its_key(tmp_path: Path, heavy: Path) -> None:
    path = tmp_path / "keys.toml"
    mine = {"authorization": f"Bearer {new_key('ada', path)}"}
    with (
        short_directory() as directory,
        running_http(directory, "--model", str(heavy), "--http-keys", str(path)) as server,
    ):
        with server.connect() as raw:
            raw.send("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2_000, "ignore_eos": True}, **mine)
            until(server.process.metrics, lambda found: found["tokens_generated_total"] > 0)
        told = until(lambda: used(server, "key", **mine)["ada"], lambda found: found["completion_tokens"] > 0)
        assert told["requests"] == 1
        assert told["prompt_tokens"] > 0


def test_metrics_tell_the_use_of_users_that_no_file_names_by_user_id(locked: HttpServer, keys: Path) -> None:
    reader = {"authorization": f"Bearer {add(keys, 'reader')}"}
    me, before = str(os.getuid()), used(locked, "user", **reader).get(str(os.getuid()), {}).get("requests", 0)
    with locked.process.connect() as raw:
        raw.hello()
        raw.send(ask("a", max_tokens=3))
        raw.last_of("a")
    assert used(locked, "user", **reader)[me]["requests"] == before + 1


def test_metrics_tell_what_each_user_of_the_socket_asked_and_was_refused(tmp_path: Path, tiny: Path) -> None:
    bounds = tmp_path / "users.toml"
    bounds.write_text("[others]\nmax_tokens_per_minute = 1\n")
    with (
        short_directory() as directory,
        running_http(directory, "--model", str(tiny), "--socket-users", str(bounds)) as server,
    ):
        with server.process.connect() as raw:
            raw.hello()
            raw.send(ask("a", max_tokens=3, ignore_eos=True))
            assert raw.last_of("a")["reason"] == "length"
            raw.send(ask("b"))
            assert raw.last_of("b")["code"] == "E_LIMIT_OVERLOADED"
        (mine,) = used(server, "user").values()
        assert (mine["requests"], mine["refused"], mine["completion_tokens"]) == (1, 1, 3)
        on_socket = server.process.metrics()
        assert on_socket["user_completion_tokens_total"] == {str(os.getuid()): 3}
        with running_gateway(server.process) as gateway:
            assert used(gateway, "user") == {str(os.getuid()): mine}
