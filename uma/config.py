"""All settings of UMA in one class, and their sources.

Flags, `UMA_…` variables and the keys of a TOML file are all derived from the fields of `RuntimeConfig`. The first
source with a value wins, in this order: flag, variable, file, default.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import attrs

from uma import posix
from uma.constraints import Length, Range, hints_of, name_of, problems, show
from uma.errors import ConfigError
from uma.types import SAMPLER_FIELDS, Pace, Penalty, RepetitionPenalty, SamplerSettings, Share, Temperature, TopK
from uma.wrong import Wrong, nearest

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
Toggle = Literal["auto", "on", "off"]
Speculate = Literal["auto", "always", "mtp", "off"]

ANY_NAME = "*"
"""Alias that stands for any name."""
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
"""Words for switches that are on or off."""
BARE_HTTP = "127.0.0.1:8080"
"""Address of `--http` without a value."""


def default_socket() -> str:
    """`$XDG_RUNTIME_DIR/uma/uma.sock`, otherwise in a directory of this user in the system's temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "uma" if runtime else Path(_temporary()) / f"uma-{posix.user_id()}"
    return str(base / "uma.sock")


def _temporary() -> str:
    """The system's temporary folder, also where its disk is full: Python takes none then."""
    with suppress(FileNotFoundError):
        return tempfile.gettempdir()
    return os.environ.get("TMPDIR") or "/tmp"


def own_folder(name: str) -> str:
    """Data folder of UMA for this user: `$XDG_DATA_HOME/uma/NAME`, by default in `~/.local/share`; empty for a user
    without a home.
    """
    if data := os.environ.get("XDG_DATA_HOME"):
        return str(Path(data) / "uma" / name)
    try:
        return str(Path.home() / ".local" / "share" / "uma" / name)
    except RuntimeError:
        return ""


def default_jobs() -> str:
    """`own_folder` for files and batches; empty on Windows, because batches need file locks that it lacks."""
    return "" if sys.platform == "win32" else own_folder("jobs")


def setting(default: Any, help_text: str, unit: str = "", *, factory: bool = False, bare: str | None = None) -> Any:
    """Field of `RuntimeConfig` with its text for `--help` and `uma config`. `bare` is the value of the flag alone."""
    metadata = {"help": help_text, "unit": unit, "bare": bare}
    return (
        attrs.field(factory=default, metadata=metadata) if factory else attrs.field(default=default, metadata=metadata)
    )


_LORA = re.compile(r"([\w.-]{1,64})=(.+?)(?::(-?\d{1,6}(?:\.\d{1,6})?))?", re.ASCII).fullmatch
"""Pattern of a LoRA adapter's name, file and scale."""


class AdapterFile(NamedTuple):
    """LoRA adapter to load with the model."""

    name: str
    path: str
    scale: float


def adapters_of(lora: str) -> tuple[AdapterFile, ...]:
    """Adapters in a value of the setting `lora`."""
    found = [match.groups() for word in _words(lora) if (match := _LORA(word))]
    return tuple(AdapterFile(name, path, float(scale or 1)) for name, path, scale in found)


@attrs.frozen(kw_only=True)
class RuntimeConfig:
    """All settings. Every field is checked (`ConfigError`).

    The constructor only uses its arguments; `load` also reads `UMA_…` variables and a file.
    """

    model: Annotated[str, Length(1)] = setting(
        "builtin", "GGUF file to load or a name that `uma models` lists, or `builtin`"
    )
    models: str = setting(
        "",
        "serve several models by name, each in a process of its own: names with commas, or `all`; empty: the one "
        "of --model, without --model all",
    )
    memory: Annotated[int, Range(0)] = setting(
        0, "maximum memory of all models, or of --model alone; 0: of several 70 % of what is free at start", "MB"
    )
    idle_unload: Annotated[float, Range(-1)] = setting(
        -1.0,
        "a model that was not used for so long leaves, and the next request loads it; 0: it stays until its memory is "
        "needed; -1: 30 with several models, 0 with one",
        "minutes",
    )
    yield_memory: bool = setting(False, "where other programs need the memory, idle models leave, largest first")
    socket: str = setting(default_socket, "Unix socket of the server", "path", factory=True)
    socket_mode: Annotated[int, Range(0, 0o777)] = setting(0o600, "permissions of the socket file", "octal")
    socket_users: str = setting("", "TOML file of the limits that users have on the socket; empty: none", "path")
    protocol: Literal["json", "newline"] = setting("json", "wire protocol; newline is for debugging by hand")

    n_ctx: Annotated[int, Range(0, 2**31 - 1)] = setting(
        0, "KV cells shared by all sequences; 0: chosen from the model", "tokens"
    )
    n_batch: Annotated[int, Range(1, 2**20)] = setting(2048, "maximum tokens in one llama_decode call", "tokens")
    n_ubatch: Annotated[int, Range(1, 2**20)] = setting(512, "maximum tokens computed at once inside a call", "tokens")
    threads: Annotated[int, Range(0, 1024)] = setting(0, "CPU threads that compute; 0: this machine's cores", "threads")
    n_gpu_layers: Annotated[int, Range(-1, 10_000)] = setting(
        -1, "layers kept on the GPU; -1: all, or as many as its memory holds, 0: none", "layers"
    )
    n_cpu_moe: Annotated[int, Range(-1, 10_000)] = setting(
        -1,
        "first layers whose experts the CPU computes; alone: all; -1: those that the GPU's memory does not hold",
        "layers",
        bare="10000",
    )
    extra_buffers: Toggle = setting(
        "auto", "lay weights out for this CPU (llama.cpp's extra buffer types); auto: all but AMX, on: AMX too"
    )
    offload_kqv: bool = setting(True, "keep KV and attention on the GPU where there is one")
    kv_unified: Toggle = setting(
        "auto", "one KV buffer for all sequences; off: one each; auto: one, unless the context is as long as all need"
    )
    swa_full: Toggle = setting(
        "auto",
        "sliding-window layers keep all cells, or each sequence's window; auto: all, unless that saves much memory",
    )
    flash_attn: Toggle = setting("auto", "flash attention; auto: where llama.cpp has it for the model")
    cache_type_k: CacheType = setting("f16", "data type of cached keys")
    cache_type_v: CacheType = setting("f16", "data type of cached values; quantized types need flash attention")
    use_mmap: Toggle = setting(
        "auto", "map the model file; off: read it; auto: off where CPUs compute with huge pages and it fits easily"
    )
    use_mlock: bool = setting(False, "keep the model in RAM, never swapped out")

    pooling: Literal["auto", "mean", "cls", "last"] = setting(
        "auto", "how a text's embedding is made of its tokens'; auto: as the model says, mean where it does not"
    )

    max_sessions: Annotated[int, Range(1, 100_000)] = setting(
        256, "maximum sessions open at once; over HTTP eight times as many connections", "sessions"
    )
    max_sequences: Annotated[int, Range(0, 256)] = setting(
        0,
        "maximum requests computed at once, more wait; 0: 64, fewer where recurrent states or windows are large",
        "sequences",
    )
    max_queue: Annotated[int, Range(1, 1_000_000)] = setting(
        1024, "maximum requests waiting; background ones can be twice as many", "requests"
    )
    max_prompt_bytes: Annotated[int, Range(1)] = setting(1_000_000, "longest prompt", "bytes")
    max_frame_bytes: Annotated[int, Range(0, 2**31 - 1)] = setting(
        0, "longest frame, or body over HTTP; 0: 8 MiB, of frames 1 MiB where no model sees or hears", "bytes"
    )
    max_tokens: Annotated[int, Range(0)] = setting(
        0,
        "maximum tokens one request can generate; 0: no limit but the context; a request without max_tokens has 4096, "
        "over HTTP what the context leaves",
        "tokens",
    )
    reasoning_budget: Annotated[int, Range(-1)] = setting(
        -1, "end a model's thinking behind this many tokens, where a request does not say; -1: when it ends", "tokens"
    )
    temperature: Temperature | None = setting(
        None, "how freely the next token is drawn, where a request does not say; 0: always the likeliest", "0 to 2"
    )
    top_p: Share | None = setting(None, "draw from the likeliest tokens that make up this probability", "0 to 1")
    top_k: TopK | None = setting(None, "draw from this many likeliest tokens; 0: all", "tokens")
    min_p: Share | None = setting(
        None, "leave out tokens under this fraction of the likeliest one's probability", "0 to 1"
    )
    repetition_penalty: RepetitionPenalty | None = setting(
        None, "divide the score of tokens seen lately; 1: off", "over 0, at most 2"
    )
    frequency_penalty: Penalty | None = setting(None, "lower a token's score each time it was seen lately", "-2 to 2")
    presence_penalty: Penalty | None = setting(None, "lower a token's score once it was seen lately", "-2 to 2")

    idle_timeout_sec: Annotated[float, Range(gt=0)] = setting(
        300.0, "time without frames or work after which a session is closed", "seconds"
    )
    drain_timeout_sec: Annotated[float, Range(0)] = setting(
        5.0, "running requests can finish within this at shutdown", "seconds"
    )
    max_tx_bytes: Annotated[int, Range(1024)] = setting(
        1_048_576, "unread output of one session before it is paused", "bytes"
    )
    tx_timeout_sec: Annotated[float, Range(gt=0)] = setting(
        30.0, "time after which a session that reads less than 8 KiB of what waits for it is closed", "seconds"
    )

    tick_budget_ms: Annotated[float, Range(gt=0)] = setting(
        80.0,
        "time between a stream's tokens to aim for while prompts are read; faster ones can come several at a time",
        "milliseconds",
    )
    start_target_tokens: Annotated[int, Range(1)] = setting(
        64, "prefill chunk before this machine's speed is known", "tokens"
    )
    slo_ttft_ms: Annotated[float, Range(gt=0)] = setting(2000.0, "time to first token to aim for", "milliseconds")

    pace: Pace = setting(
        "auto", "hand out tokens evenly while prompts are read; off: as they are computed, also where a request asks"
    )

    mmproj: str = setting(
        "",
        "projector by which the model sees and hears; a GGUF file; empty: the one beside the model; off: none",
    )
    media_urls: bool = setting(
        False, "fetch pictures and sounds that requests name by http(s) URLs, never from this machine or its networks"
    )
    speculate: Speculate = setting(
        "off",
        "guess tokens and verify several at once, where that is faster; auto: where the text repeats, and by the "
        "model's own prediction head (MTP) where it has one; mtp: by that alone",
    )
    draft: str = setting(
        "", "small model of the same vocabulary that guesses tokens too; a GGUF file or a name; empty: none"
    )

    lora: str = setting(
        "", "LoRA adapters, each asked for as a model of its own, `model+NAME`: NAME=FILE[:SCALE], with commas"
    )

    cache_tokens: Annotated[int, Range(-1)] = setting(
        -1,
        "finished prefixes kept in KV cells, where they cost every stream a little; 0: none, -1: chosen from n_ctx",
        "tokens",
    )
    cache_ram_mb: Annotated[int, Range(-1)] = setting(
        -1, "prefixes kept in host memory; 0: none, -1: an eighth of what the context leaves, 8000 at most", "MB"
    )
    cache_dir: str = setting(
        "auto",
        "folder for prefixes that survive restarts; auto: with --models UMA's own, else none; empty: none",
        "path",
    )
    cache_disk_mb: Annotated[int, Range(1)] = setting(4000, "maximum that --cache-dir can hold, of all models", "MB")

    http: str = setting(
        "",
        "serve HTTP on this address too; the option alone: 127.0.0.1:8080; empty: no HTTP",
        "address",
        bare=BARE_HTTP,
    )
    http_keys: str = setting("", "TOML file of the API keys that HTTP clients need; empty: none", "path")
    http_tls_cert: str = setting("", "TLS certificate chain for HTTP (PEM); empty: no TLS", "path")
    http_tls_key: str = setting("", "private key of that certificate (PEM)", "path")
    http_insecure: bool = setting(False, "allow HTTP on other addresses than loopback without keys")
    http_hosts: str = setting(
        "", "names this server is reached by over HTTP, with commas; loopback names and IP addresses always are"
    )
    http_cors: str = setting(
        "", "origins whose pages can call the HTTP API, with commas; localhost: this machine's; *: all; empty: none"
    )
    http_jobs: str = setting(
        default_jobs, "folder for files and batches that HTTP clients send; empty: none", "path", factory=True
    )
    store_responses: Annotated[float, Range(0)] = setting(
        0.0, "answers of /v1/responses are stored for so long, for previous_response_id; 0: not at all", "days"
    )
    alias: str = setting("", "other names of the model over HTTP, with commas; *: whatever a request names")
    http_timeout_sec: Annotated[float, Range(gt=0)] = setting(
        30.0, "maximum time for an HTTP request's head and body, and for the wait for the next request", "seconds"
    )

    record_text: bool = setting(False, "keep some text of the last 1000 requests for `uma explain`")
    history: bool = setting(False, "keep requests of the last 7 days whole, 1 GiB at most, for `uma history`")
    history_redact: str = setting("", "regular expression of what the history keeps as [redacted]; empty: nothing")
    otel: bool = setting(False, "send a span of each request to an OpenTelemetry collector")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least severe log line shown")
    log_format: Literal["text", "json"] = setting("text", "log lines as key=value pairs, or as a JSON object each")

    def __attrs_post_init__(self) -> None:
        hints = hints_of(type(self))
        wrong = [line for name, hint in hints.items() for line in problems(getattr(self, name), hint, name)]
        if wrong:  # the rules below are about values of the right kind
            raise ConfigError(*wrong)

        def add(field: str, why: str) -> None:
            wrong.append(Wrong(field, why))

        if self.n_ubatch > self.n_batch:
            add("n_ubatch", f"{self.n_ubatch} must not be over n_batch, {self.n_batch}")
        try:
            re.compile(self.history_redact)
        except re.error as error:
            add("history_redact", f"{self.history_redact!r} is no regular expression: {error}")
        if self.draft and self.speculate == "off":
            add("draft", "--speculate is off, so it drafts nothing; add --speculate auto, or leave it out")
        if self.models and not self.models.strip(", "):
            add("models", f"expected names with commas between them, or {ALL_MODELS}, not {self.models!r}")
        if self.models and self.protocol == "newline":
            add("protocol", "newline has no word for a model's name; leave --models out, or use --protocol json")
        if self.models and self.mmproj not in ("", "off"):
            add("mmproj", "each of several models has the one beside it; leave --mmproj out, or --models")
        for word in _words(self.lora):
            if not _LORA(word):
                add("lora", f"expected NAME=FILE[:SCALE], not {word!r}")
        if len(names := {adapter.name.casefold() for adapter in self.adapters}) < len(self.adapters):
            add("lora", f"two adapters have one name; there are {', '.join(sorted(names))}")
        if wrong:
            raise ConfigError(*wrong)

    @property
    def adapters(self) -> tuple[AdapterFile, ...]:
        """Adapters in `lora`."""
        return adapters_of(self.lora)

    @property
    def takes_any_model(self) -> bool:
        """Whether an HTTP request is answered whatever model it names."""
        return ANY_NAME in _words(self.alias)

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names in `alias`."""
        return tuple(name for name in _words(self.alias) if name != ANY_NAME)

    def frame_bytes(self, *, takes_media: bool) -> int:
        """Maximum length of a frame. `takes_media`: pictures and sounds can be in it, as in an HTTP body."""
        return self.max_frame_bytes or 2**20 * (8 if takes_media else 1)

    @property
    def prefix_folder(self) -> str:
        """Folder for `cache_dir`, with `auto` resolved. Empty: none."""
        if self.cache_dir != "auto":
            return self.cache_dir
        return own_folder("cache") if self.models else ""

    @property
    def chosen_sampling(self) -> dict[str, Any]:
        """Fields of `SAMPLER_FIELDS` that are set, by name."""
        return {name: value for name in SAMPLER_FIELDS if (value := getattr(self, name)) is not None}

    @property
    def sampler(self) -> SamplerSettings:
        """Sampling parameters for requests that do not state them: greedy, unless set otherwise."""
        return SamplerSettings(**self.chosen_sampling)


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


@attrs.frozen
class Setting:
    """A setting as users see it: flag, variable, type, default, unit and help."""

    name: str
    hint: Any
    default: Any
    help: str
    unit: str
    bare: str | None = None
    """Value of the flag without a value; None: it needs one."""

    @property
    def flag(self) -> str:
        """`--max-tokens` for `max_tokens`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`UMA_MAX_TOKENS` for `max_tokens`."""
        return "UMA_" + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...] | None:
        """Allowed words; None: any value of the type."""
        return get_args(self.hint) if get_origin(self.hint) is Literal and self.base is str else None

    @property
    def base(self) -> type:
        """`str`, `int`, `float` or `bool`."""
        hint = get_args(self.hint)[0] if get_origin(self.hint) is Annotated else self.hint
        return type(get_args(hint)[0]) if get_origin(hint) is Literal else hint

    def parse(self, text: str, origin: str) -> Any:
        """Parse a value of a flag or variable. Raises `ConfigError` naming `origin`."""
        try:
            return self._parse(text.strip())
        except ValueError:
            raise ConfigError(f"{origin}: expected {self._expected()}, not {show(text)}") from None

    def _parse(self, text: str) -> Any:
        if self.base is bool:
            if (word := text.lower()) not in YES + NO:
                raise ValueError(text)
            return word in YES
        if self.name == "socket_mode":
            return int(text.removeprefix("0o"), 8)
        return self.base(text)

    def _expected(self) -> str:
        return "octal permissions such as 600" if self.name == "socket_mode" else name_of(self.hint)

    def show(self, value: Any) -> str:
        """A value as a user would type it; empty for None."""
        if value is None:
            return ""
        if self.name == "socket_mode":
            return f"{value:03o}"
        return str(value).lower() if isinstance(value, bool) else str(value)


def settings() -> dict[str, Setting]:
    """All settings, in the order of `RuntimeConfig`. Defaults depend on the current environment."""
    return {
        field.name: Setting(field.name, _types()[field.name], _default(field), **field.metadata)
        for field in attrs.fields(RuntimeConfig)
    }


@cache
def _types() -> dict[str, Any]:
    """Type of each setting's value. Cached: a command's options ask for all of them some twenty times."""
    return {name: without_none(hint) for name, hint in hints_of(RuntimeConfig).items()}


def without_none(hint: Any) -> Any:
    """Type of a setting's value, without `| None`."""
    inner = [inner for inner in get_args(hint) if inner is not type(None)]
    return inner[0] if isinstance(hint, UnionType) or get_origin(hint) is Union else hint


def _default(field: Any) -> Any:
    return field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]


HTTP = frozenset(name for name in settings() if "http" in name) | {"alias", "store_responses"}
"""Settings of HTTP."""
LOG = frozenset(name for name in settings() if name.startswith("log_"))
"""Settings of the log."""
SERVER_ONLY = HTTP | frozenset(
    {
        "models",
        "memory",
        "idle_unload",
        "yield_memory",
        "socket_mode",
        "socket_users",
        "protocol",
        "max_sessions",
        "max_frame_bytes",
        "idle_timeout_sec",
        "drain_timeout_sec",
        "max_tx_bytes",
        "tx_timeout_sec",
        "record_text",
        "history",
        "history_redact",
        "otel",
    }
)
"""Settings that only a server uses: options of `uma run` and `uma config` only, and not keywords of `LLM`."""


OF_MODEL = (frozenset(settings()) - SERVER_ONLY - LOG - {"model", "socket"}) | {"idle_unload"}
"""Settings that can be set for one of several models."""
ALL_MODELS = "all"
"""Word for all local models."""
BUILTIN = "builtin"
"""Name of the model that is included in UMA."""


@attrs.frozen
class ModelSettings:
    """Settings of one of several models: a table `[models."NAME"]` of the file."""

    alias: tuple[str, ...] = ()
    """Further names of the model."""
    values: Mapping[str, Any] = attrs.field(factory=dict)
    """Values of settings in `OF_MODEL`, by name."""
    pin: bool = False
    """Whether it is loaded at the start, and stays loaded."""
    where: str = attrs.field(default="", eq=False)
    """File and table, for messages."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of its LoRA adapters."""
        return tuple(adapter.name for adapter in adapters_of(self.values.get("lora", "")))


@attrs.frozen
class Loaded:
    """A configuration, and the origin of each value: `--flag`, `UMA_…`, a file's name, `default`."""

    config: RuntimeConfig
    origins: dict[str, str]
    warnings: tuple[str, ...] = ()
    """Values that were found but not used."""
    models: Mapping[str, ModelSettings] = attrs.field(factory=dict)
    """Settings by the name that the file has for a model, in the order of the file."""


RESERVED_VARIABLES = frozenset({"UMA_DEBUG", "UMA_MODELS", "UMA_CONFIG"})
"""Variables that are not settings: debug logs, the folder of models, and the file for `--config`."""


def is_debugging(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `UMA_DEBUG` asks for all log lines and for tracebacks."""
    return (os.environ if environ is None else environ).get("UMA_DEBUG", "") not in ("", "0")


def load(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Loaded:
    """Combine a configuration from `flags` (by field name, parsed), variables, file and defaults.

    Raises `ConfigError` naming the setting, its origin and what is allowed. Unknown keys of the file are refused, with
    the nearest known one. An unknown `UMA_…` variable, which another program can have set, is a warning.
    """
    known = settings()
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")
    environ = os.environ if environ is None else environ
    config_file = config_file or (Path(environ["UMA_CONFIG"]) if environ.get("UMA_CONFIG") else None)
    in_file, models = _from_file(config_file, known)
    for source in (in_file, _from_environ(environ, known), _from_flags(flags or {}, known)):
        for name, (value, origin) in source.items():
            wrong = list(problems(value, known[name].hint, origin))
            if wrong:
                raise ConfigError(*wrong)
            values[name], origins[name] = value, origin
    config = RuntimeConfig(**values)
    if config.lora and config.models:
        raise ConfigError(
            f'{origins["lora"]}: an adapter is of one model, and --models has several; put lora = "NAME=FILE" into '
            f'the table [models."MODEL"] of the file that --config names, or leave --models out'
        )
    for name, model in models.items():
        try:
            attrs.evolve(config, **model.values)
        except ConfigError as error:
            raise ConfigError(f"{_table(config_file, name)}: {error.message}") from None
    return Loaded(config, origins, tuple(_unknown_variables(environ, known)), models)


Found = dict[str, tuple[Any, str]]


def _from_flags(flags: Mapping[str, Any], known: Mapping[str, Setting]) -> Found:
    return {name: (value, known[name].flag) for name, value in flags.items() if value is not None}


def _from_environ(environ: Mapping[str, str], known: Mapping[str, Setting]) -> Found:
    by_variable = {setting.variable: setting for setting in known.values()}
    found: Found = {}
    for variable, text in environ.items():
        if not variable.startswith("UMA_") or variable in RESERVED_VARIABLES:
            continue
        if (own := by_variable.get(variable)) is not None:
            found[own.name] = (own.parse(text, variable), variable)
    return found


def _unknown_variables(environ: Mapping[str, str], known: Mapping[str, Setting]) -> list[str]:
    settable = [setting.variable for setting in known.values()]
    return [
        f"{variable}: no such setting, so it changes nothing{nearest(variable, settable, prefix='UMA_')}"
        for variable in environ
        if variable.startswith("UMA_") and variable not in RESERVED_VARIABLES and variable not in settable
    ]


def _from_file(path: Path | None, known: Mapping[str, Setting]) -> tuple[Found, dict[str, ModelSettings]]:
    """The file's settings, and those of models in it, which are then the models that are served."""
    if path is None:
        return {}, {}
    table = read_toml(path)
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: {key}: no such setting{nearest(key, known)}")
    models: dict[str, ModelSettings] = {}
    if isinstance(tables := table.get("models"), dict):
        models = {name: _model_settings(path, name, own_table, known) for name, own_table in tables.items()}
        table["models"] = ALL_MODELS if ALL_MODELS in models else ",".join(models)
    found = {
        name: (_file_value(known[name], value, path, f"{path}: {name}"), f"{path}: {name}")
        for name, value in table.items()
    }
    return found, models


_NAMES = tuple[Annotated[str, Length(1)], ...]


def _table(path: Path | None, name: str) -> str:
    return f'{path}: [models."{name}"]'


def _model_settings(path: Path, name: str, table: Any, known: Mapping[str, Setting]) -> ModelSettings:
    """Parse a model's table. Raises `ConfigError` naming the table and the problem."""
    where = _table(path, name)
    if not isinstance(table, dict):
        raise ConfigError(f'{path}: models: {name}: expected a table of settings, [models."{name}"]')
    if "," in name or not name.strip():
        raise ConfigError(f"{where}: no model has such a name")
    if name == ALL_MODELS and table:
        raise ConfigError(f"{where}: what all models have stands at the top of the file")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            raise ConfigError(f'{where}: {key}: is a table; quote the whole name: [models."{name}.{key}"]')
        if key in OF_MODEL:
            values[key] = _file_value(known[key], value, path, f"{where}: {key}")
            wrong = list(problems(values[key], known[key].hint, f"{where}: {key}"))
        elif key == "alias":
            wrong = list(problems(tuple(value) if isinstance(value, list) else value, _NAMES, f"{where}: alias"))
        elif key == "pin":
            wrong = list(problems(value, bool, f"{where}: pin"))
        elif key in known:
            raise ConfigError(f"{where}: {key}: is the whole server's; move it to the top of the file")
        else:
            raise ConfigError(f"{where}: {key}: no such setting of a model{nearest(key, {*OF_MODEL, 'alias', 'pin'})}")
        if wrong:
            raise ConfigError(*wrong)
    return ModelSettings(tuple(table.get("alias", ())), values, table.get("pin", False), where)


def read_toml(path: Path, field: str = "") -> dict[str, Any]:
    """Tables of a file. Raises `ConfigError` about the setting `field`, which names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", field=field) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}", field=field) from error


def _file_value(known: Setting, value: Any, file: Path, origin: str) -> Any:
    if not isinstance(value, str):
        return value
    # A string such as "600" is octal; TOML's own octal (0o600) is already a number.
    if known.name == "socket_mode":
        return known.parse(value, origin)
    # A relative path in a file is relative to the file, not to the working directory.
    is_path = known.unit == "path" and value not in ("", known.default)
    if is_path or (known.name in ("model", "draft") and _is_path(value, file.parent)):
        return str(file.parent.absolute() / Path(value).expanduser())
    return value


def _is_path(model: str, folder: Path) -> bool:
    """Whether a model or draft is given by path, and not by a name that `uma models` lists."""
    if model in ("", "builtin"):
        return False
    return model.startswith(("./", "../", "~")) or os.path.isfile(folder / model)
