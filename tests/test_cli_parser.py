"""The command line's grammar: complete, derived, quick, and helpful about typos."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import attrs
import pytest

from harness import RunInProcess, RunInProcessText, ServerProcess, clean_environ, run_to_end, uma_command
from uma.cli import main
from uma.cli.options import SAMPLING_HELP, load_settings, sampling_of
from uma.cli.parser import COMMANDS, EXAMPLES, GROUPS, OTHERS, CommandParser, build_parser
from uma.config import SERVER_ONLY, Setting, settings
from uma.errors import ConfigError
from uma.http.address import Address
from uma.net.client import is_loopback
from uma.types import SAMPLER_FIELDS, SamplingParams

ANSWER_FIELDS = {"grammar", "logprobs", "prompt_logprobs", "echo", "logit_bias", "n", "best_of"}
"""Fields of `SamplingParams` that options about the form of the answer fill."""
HEAVY = {"numpy", "llama_cpp", "rich", "trio", "prompt_toolkit", "cattrs", "orjson", "asyncio", "jinja2"}


def command(name: str) -> CommandParser:
    return build_parser().siblings[name]


def test_help_is_a_command_too(uma_told: RunInProcessText) -> None:
    assert uma_told("help").stdout == uma_told("--help").stdout != ""
    assert uma_told("help", "run").stdout == uma_told("run", "--help").stdout != ""
    assert uma_told("--help", "run").stdout == uma_told("-h", "run").stdout == uma_told("run", "--help").stdout
    assert "no such command: rnu; did you mean run?" in uma_told("help", "rnu").stderr


def test_a_shell_that_asks_argcomplete_for_completions_gets_those_of_the_whole_grammar(tmp_path: Path) -> None:
    asked = "import sys\n\ndef autocomplete(parser):\n    sys.exit(' '.join(parser.siblings))\n"
    (tmp_path / "argcomplete.py").write_text(asked)
    environ = clean_environ(_ARGCOMPLETE="1")
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environ["PYTHONPATH"]])
    done = run_to_end("env", *uma_command("run"), environ=environ)
    assert done.stderr.split() == [command.name for command in COMMANDS]


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command line that cannot be used is answered with; the exit code is 2 and nothing goes to stdout."""
    with pytest.raises(SystemExit) as left:
        build_parser().parse_args(arguments)
    assert left.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()[0]


@pytest.mark.parametrize("each", settings().values(), ids=lambda each: each.name)
def test_every_setting_is_an_option_of_run_and_config_with_its_unit_and_default(each: Setting) -> None:
    for name in ("run", "config"):
        parser = command(name)
        assert each.flag in parser.options()
        parser.tells_all = True
        text = " ".join(parser.format_help().split())
        assert " ".join(each.help.split()) in text
        assert f"{each.unit}; default: " in text or not each.unit


@pytest.mark.parametrize("name", ["chat", "generate"])
def test_chat_and_generate_take_every_setting_that_does_not_concern_a_server_alone(name: str) -> None:
    options = set(command(name).options())
    for each in settings().values():
        assert (each.flag in options) == (each.name not in SERVER_ONLY), each.name


@pytest.mark.parametrize("name", ["chat", "generate"])
def test_every_sampling_parameter_is_an_option(name: str) -> None:
    fields = {field.name for field in attrs.fields(SamplingParams)} - ANSWER_FIELDS
    fields -= {"penalize_prompt"}  # a dialect's default, which nobody would type
    assert {*SAMPLING_HELP, *SAMPLER_FIELDS} == fields
    assert {"--" + field.replace("_", "-") for field in fields} <= set(command(name).options())


def test_every_option_of_every_command_says_its_default() -> None:
    for each in COMMANDS:
        for action in command(each.name)._actions:
            if action.option_strings and action.nargs != 0:
                assert action.help is not None
                assert "default: " in action.help, action.option_strings


def test_help_tells_commands_exit_codes_and_variables_also_without_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    text = capsys.readouterr().err
    for word in [*(f"{each.name} " for each in COMMANDS), "130", "141", "143", "UMA_MODELS", "UMA_CONFIG", "UMA_DEBUG"]:
        assert word in text


def test_help_has_a_command_s_own_options_and_some_settings_and_help_all_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = []
    for asked in (["generate", "--help"], ["chat", "--help"], ["chat", "--help-all"]):
        with pytest.raises(SystemExit) as left:
            build_parser().parse_args(asked)
        assert left.value.code == 0
        texts.append(capsys.readouterr().out)
    generate, short, whole = texts
    assert len(generate.splitlines()) <= 72 and len(short.splitlines()) <= 53
    for default in ("chosen from the model", "this machine's cores", "all", "64", "the model's own, else 0.7", "drawn"):
        assert f"(default: {default})" in " ".join(short.split())
    assert "(default: none)" not in short.partition("sampling:")[2]
    for told in ("--system", "--model", "--n-ctx", "--temperature", "--help-all"):
        assert told in short
    assert "--kv-unified" not in short and "--kv-unified" in whole
    assert max(map(len, build_parser().format_help().splitlines())) <= 80


def test_help_leaves_out_three_settings_at_least_and_a_diagnosis_has_those_it_looks_at() -> None:
    n_rare = [len(command(each.name).rare()) for each in COMMANDS]
    assert 0 in n_rare and min(n for n in n_rare if n) >= 3
    assert "--config" in command("pin").format_help()
    options = command("doctor").options()
    assert {"--socket", "--threads", "--models", "--http-keys", "--http-tls-cert"} <= set(options)
    assert not {"--http", "--max-tokens", "--temperature"} & set(options)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_at_the_foot_of_a_command_s_help_are_commands(name: str) -> None:
    for example in EXAMPLES[name]:
        assert f"  {example}\n" in command(name).format_help()
        words = shlex.split(re.split(r"  | <", example)[0])
        assert words[:2] == ["uma", name]
        assert build_parser().parse_args(words[1:]).command == name


def test_each_command_is_in_one_group_of_the_help_and_of_its_page_in_the_same_order() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(each.name for each in COMMANDS)
    page = (Path(__file__).parent.parent / "docs/commands.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$((?:\n(?!## ).*)*)", page, re.MULTILINE)
    tables = {
        title.lower(): tuple(re.findall(r"^\| `uma ([\w-]+)` \|", text, re.MULTILINE)) for title, text in sections
    }
    assert list({title: names for title, names in tables.items() if names}.items()) == list(GROUPS.items())


@pytest.mark.parametrize("columns", ["20", "40", "200"])
def test_help_fits_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for parser in (build_parser(), command("chat")):
        text = parser.format_help()
        assert max(map(len, text.splitlines())) <= max(int(columns), 40)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["generate", "--max-token", "5"], "unknown option --max-token; did you mean --max-tokens?"),
        (["generate", "--max-token=5"], "unknown option --max-token; did you mean --max-tokens?"),
        (["generate", "--temprature", "1", "hello"], "unknown option --temprature; did you mean --temperature?"),
        (["run", "--no-use-mlok"], "unknown option --no-use-mlok; did you mean --no-use-mlock?"),
        (["launch", "clade"], "no such agent: clade; did you mean claude?"),
        (["genrate", "hello"], "no such command: genrate; did you mean generate?"),
        (["zzz"], "no such command: zzz"),
        *(([word], f"no such command: {word}; did you mean {own}?") for word, own in OTHERS.items()),
        (["launch"], "AGENT: missing; name one of claude, codex, "),
        (["service"], "ACTION: missing; name one of install, remove, show, status"),
        (["--modles"], "unknown option --modles"),
        (
            ["generate", "--idle-timeout-sec", "4"],
            "unknown option --idle-timeout-sec for uma generate; it is an option of uma run, launch",
        ),
        (
            ["run", "--kv-unified", "atuo"],
            "--kv-unified: expected one of 'auto', 'on', 'off', not 'atuo'; did you mean auto?",
        ),
        (["generate", "--priority", "norml"], "--priority: no such choice: norml; did you mean normal?"),
        (["chat", "a", "b"], "unexpected argument 'b'"),
        (["run", "-v", "--verbos"], "unknown option --verbos; did you mean --verbose?"),
        (["run", "-x"], "unknown option -x"),
        (["models", "all"], "unexpected argument 'all'"),
        (["run", "--n-ctx"], "--n-ctx: expected a value"),
        (["run", "--n-ctx", "many"], "--n-ctx: expected an integer, not 'many'"),
        (["run", "--n-batch", "0"], "--n-batch: 0 must be "),
        (["run", "--socket-mode", "999"], "--socket-mode: expected octal permissions such as 600, not '999'"),
        (["generate", "--max-tokens", "0"], "--max-tokens: 0 must be 1 or more"),
        (["generate", "--temperature", "2.5"], "--temperature: 2.5 must be from 0 to 2"),
        (["generate", "--temperature", "nan"], "--temperature: expected a finite number, not nan"),
        (["generate", "--top-k", "1.5"], "--top-k: expected an integer, not '1.5'"),
        (["generate", "--stop", ""], "--stop: must not be empty"),
        (
            ["run", "--model", "a", "-m", "b"],
            "--model: two models are named; `uma run --models a,b` serves both",
        ),
        (["config", "--json", "--toml"], "--toml: not allowed with argument --json"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(capsys, *arguments).startswith(f"uma: error: {answer}")


def test_options_are_never_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown option --temp" in complaint(capsys, "generate", "--temp", "1")
    assert complaint(capsys, "generate", "--zigzag", "x") == "uma: error: unknown option --zigzag", "nor near by dashes"


def test_values_reach_the_configuration_and_the_sampling() -> None:
    settings_given = ["--n-ctx", "512", "--use-mlock", "--use-mmap", "off"]
    sampling_given = ["--max-tokens", "9", "--top-k", "-1", "--temperature", "0", "--frequency-penalty", "-0.5"]
    stops_given = ["--stop", "A", "--stop", "B", "--ignore-eos"]
    options = build_parser().parse_args(["generate", "Once", "upon", *settings_given, *sampling_given, *stops_given])
    loaded = load_settings(options)
    config, sampling = loaded.config, sampling_of(options, loaded)
    assert options.prompt == ["Once", "upon"]
    assert (config.n_ctx, config.use_mlock, config.use_mmap, config.max_tokens) == (512, True, "off", 9)
    assert sampling == SamplingParams(
        max_tokens=9, temperature=0, top_k=-1, frequency_penalty=-0.5, stop=("A", "B"), ignore_eos=True
    )


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [
        (["--http"], "127.0.0.1", 8080),
        (["--http", "9000"], "127.0.0.1", 9000),
        (["--http", ":9000"], "127.0.0.1", 9000),
        (["--http", "[::1]:9000"], "::1", 9000),
        (["--http", "0.0.0.0:8080"], "0.0.0.0", 8080),
    ],
)
def test_http_listens_on_loopback_unless_another_address_is_given(given: list[str], host: str, port: int) -> None:
    address = Address.parse(load_settings(build_parser().parse_args(["run", *given])).config.http)
    assert (address.host, address.port, is_loopback(address.host)) == (host, port, host != "0.0.0.0")


@pytest.mark.parametrize("name", ["chat", "generate"])
def test_sampling_is_left_to_the_engine_unless_an_option_a_variable_or_the_file_says_otherwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uma.toml").write_text("top_p = 0.9\ntemperature = 0.1\n")
    monkeypatch.setenv("UMA_TEMPERATURE", "0.8")

    def asked(*arguments: str) -> SamplingParams:
        options = build_parser().parse_args([name, *arguments])
        return sampling_of(options, load_settings(options))

    assert asked("--config", str(tmp_path / "uma.toml"), "--min-p", "0.05") == SamplingParams(
        temperature=0.8, top_p=0.9, min_p=0.05
    )
    monkeypatch.delenv("UMA_TEMPERATURE")
    assert asked() == SamplingParams()


@pytest.mark.parametrize("name", ["run", "chat"])
def test_a_model_may_be_named_without_an_option(name: str) -> None:
    for arguments in (["llama3"], ["-m", "llama3"], ["--model", "llama3"], ["llama3", "-m", "llama3"]):
        loaded = load_settings(build_parser().parse_args([name, *arguments]))
        assert (loaded.config.model, loaded.origins["model"]) == ("llama3", "--model")
    with pytest.raises(ConfigError, match=r"^two models are named: a and --model b; name one$"):
        load_settings(build_parser().parse_args([name, "a", "--model", "b"]))


def test_run_takes_several_models_by_their_names_alone() -> None:
    config = load_settings(build_parser().parse_args(["run", "--threads", "1", "llama3", "qwen3"])).config
    assert (config.models, config.model) == ("llama3,qwen3", "builtin")


def test_common_options_have_short_forms() -> None:
    options = build_parser().parse_args(["generate", "-m", "x", "-c", "512", "-t", "2", "-n", "3", "-v", "hello"])
    loaded = load_settings(options)
    config = loaded.config
    assert (config.model, config.n_ctx, config.threads, options.n) == ("x", 512, 2, 3)
    assert config.log_level == "debug"


def test_too_many_stop_texts_are_refused_by_name() -> None:
    options = build_parser().parse_args(["chat", *(["--stop", "x"] * 17)])
    with pytest.raises(ConfigError, match=r"^--stop: "):
        sampling_of(options, load_settings(options))


def imported_by(*arguments: str) -> set[str]:
    """The top-level packages that a run of `uma` imports."""
    done = run_to_end(sys.executable, "-X", "importtime", *uma_command(*arguments)[1:])
    return {name.partition(".")[0] for name in re.findall(r"^import time:.*\|\s+(\S+)$", done.stderr, re.MULTILINE)}


@pytest.mark.parametrize(
    "arguments", [("--help",), ("generate", "--help"), ("--version",), ("genrate",), ("config", "--toml")]
)
def test_what_needs_no_model_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    found = imported_by(*arguments)
    assert "uma" in found
    assert not found & HEAVY


@pytest.mark.parametrize("command", [("generate", "hello", "--max-tokens", "2"), ("chat",)])
def test_a_client_of_a_server_in_a_pipe_imports_no_model_library_and_no_terminal_library(
    command: tuple[str, ...], server: ServerProcess
) -> None:
    found = imported_by(*command, "--socket", str(server.socket))
    assert "trio" in found
    assert not found & {"llama_cpp", "numpy", "rich", "prompt_toolkit", "jinja2"}


def test_a_worker_s_planes_are_those_of_dynamo_s_variables(
    uma_here: RunInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_REQUEST_PLANE", "nats")
    options = build_parser().parse_args(["worker", "--request-plane", "tcp"])
    assert (options.discovery_backend, options.request_plane, options.event_plane) == ("file", "tcp", "zmq")
    monkeypatch.setenv("DYN_EVENT_PLANE", "pigeons")
    done = uma_here("worker")
    assert done.returncode == 2
    assert b"DYN_EVENT_PLANE: 'pigeons' must be one of zmq, nats" in done.stderr
