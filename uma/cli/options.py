"""Options derived from the classes they fill: `RuntimeConfig`'s settings and `SamplingParams`' fields.

A setting added there is an option here, with its unit, default and range. This module only describes and reads
options; it imports nothing that starts slowly, because `uma --help` goes through it.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_origin

import attrs

from uma.cli import say
from uma.config import HTTP, LOG, Loaded, Setting, load, settings, without_none
from uma.constraints import Range, hints_of, problems
from uma.errors import ConfigError
from uma.types import CHAT_SAMPLING, SAMPLER_FIELDS, SamplingParams

GATEWAY = (
    HTTP | LOG | {"socket", "max_sessions", "max_frame_bytes", "drain_timeout_sec", "max_tx_bytes", "tx_timeout_sec"}
)
"""Settings that `uma gateway` has a use for."""

DYNAMO_PLANES: Mapping[str, tuple[str, tuple[str, ...]]] = types.MappingProxyType(
    {
        "discovery-backend": ("etcd", ("etcd", "file", "kubernetes", "mem")),
        "request-plane": ("tcp", ("tcp", "nats")),
        "event-plane": ("zmq", ("zmq", "nats")),
    }
)
"""Options of `uma worker` that Dynamo has variables for, too: each with its default and the words it can be."""


def plane_variable(name: str) -> str:
    """Dynamo's own variable for one of `DYNAMO_PLANES`."""
    return f"DYN_{name.replace('-', '_').upper()}"


SHORT: Mapping[str, str] = types.MappingProxyType({"model": "-m", "n_ctx": "-c", "threads": "-t"})
"""Short forms of options, as llama.cpp's own programs have them."""

OTHER_DEFAULTS: Mapping[str, str] = types.MappingProxyType(
    {"model": "the first that is here, generates and fits; else builtin"}
)
"""What commands take where a setting is left at its default, and that is not the default itself."""

LISTS = frozenset({"alias", "lora", "models", "http_cors", "http_hosts"})
"""Settings that are words with commas between: their options can also be given several times."""

SAMPLING = frozenset({"max_tokens", *SAMPLER_FIELDS})
"""Settings that a request can ask for too: options of the sampling group where there is one."""

SAMPLING_HELP: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {
        "max_tokens": ("maximum tokens to generate", "tokens"),
        "min_tokens": ("do not end before this many tokens", "tokens"),
        "max_reasoning_tokens": ("end a model's thinking behind this many tokens", "tokens"),
        "seed": ("makes a drawn output repeatable", "0 to 4294967295"),
        "reproducible": ("compute apart from all else: the same prompt and seed give the same text, slower", ""),
        "stop": ("end the output before this text; can be given up to 16 times", ""),
        "penalty_window": ("tokens that the three penalties look back over", "tokens"),
        "typical_p": ("keep the tokens nearest to the expected information; 1: off", "over 0, at most 1"),
        "top_n_sigma": ("keep tokens within so many standard deviations of the highest score", "over 0"),
        "xtc_probability": ("how often to drop all but the least likely of the likely tokens; 0: never", "0 to 1"),
        "xtc_threshold": ("which tokens are likely ones for that", "0 to 0.5"),
        "dynatemp_range": ("how far the temperature follows the uncertainty up and down; 0: fixed", "0 to 2"),
        "dynatemp_exponent": ("how steeply it follows", "over 0, at most 10"),
        "mirostat": ("draw by Mirostat of this version; 0: off", "0, 1 or 2"),
        "mirostat_tau": ("the surprise Mirostat aims at", "bits"),
        "mirostat_eta": ("how fast Mirostat corrects itself", "over 0, at most 1"),
        "dry_multiplier": ("how strongly to penalise repeating a passage; 0: off", "0 to 100"),
        "dry_base": ("by what that grows with each token of the passage", "1 to 10"),
        "dry_allowed_length": ("passages up to this length can repeat", "tokens"),
        "dry_window": ("tokens in which passages are looked for", "tokens"),
        "dry_sequence_breakers": ("text that ends a passage; can be given several times", ""),
        "ignore_eos": ("generate --max-tokens tokens, also where the model would end earlier", ""),
    }
)

"""Help and unit of each field of `SamplingParams` that is an option and no setting."""


def add_flag(parser: argparse._ActionsContainer, name: str, text: str, default: str = "off") -> None:
    """Give `parser` an option without a value; `default` is what its help says of leaving it out, but for `off`."""
    parser.add_argument(name, action="store_true", help=text if default == "off" else f"{text} (default: {default})")


def add_option(
    parser: argparse._ActionsContainer,
    names: str,
    metavar: str | tuple[str, ...] | None,
    text: str,
    default: str = "none",
    unit: str = "",
    *,
    value: Any = None,
    **how: Any,
) -> None:
    """Give `parser` an option with a value, which without it is `value`; its help says `text`, `unit` and `default`."""
    notes = "; ".join(filter(None, [unit, f"default: {default}"]))
    parser.add_argument(*names.split(), metavar=metavar, default=value, help=f"{text} ({notes})", **how)


def add_settings(parser: argparse.ArgumentParser, *, leave_out: frozenset[str] = frozenset()) -> None:
    """Give `parser` an option for each setting, and `--config`."""
    group = parser.add_argument_group(
        "settings",
        "Each is also a variable (UMA_N_CTX for --n-ctx) and a key of the --config file (n_ctx). "
        "The option wins over the variable, the variable over the file; `uma config` shows the outcome.",
    )
    group.add_argument(
        "--config", dest="config_file", metavar="FILE", type=Path, help="TOML file of settings (default: $UMA_CONFIG)"
    )
    for setting in settings().values():
        if setting.name not in leave_out:
            _add_setting(group, setting)

    if "log_level" not in leave_out:
        group.add_argument(
            "-v", "--verbose", dest="setting_log_level", action="store_const", const="debug",
            help="every log line; the same as --log-level debug (default: off)",
        )  # fmt: skip


def _add_setting(group: argparse._ArgumentGroup, option: Setting, default: str = "") -> None:
    what = ", ".join(option.choices) if option.choices else option.unit
    default = default or OTHER_DEFAULTS.get(option.name) or option.show(option.default) or "none"
    notes = "; ".join(filter(None, [what, f"default: {default}"]))
    text = f"{option.help} ({notes})".replace("%", "%%")  # argparse formats it
    dest = _dest(option.name)
    flags = [option.flag, *filter(None, [SHORT.get(option.name)])]
    if option.base is bool:
        group.add_argument(option.flag, dest=dest, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif get_origin(option.base) is tuple:
        group.add_argument(option.flag, dest=dest, action="append", metavar="TEXT", type=_stop_text, help=text)
    elif option.bare is not None:
        group.add_argument(
            option.flag,
            dest=dest,
            type=_setting_reader(option),
            metavar=_metavar(option),
            nargs="?",
            const=option.bare,
            help=text,
        )
    else:
        action = _Again if option.name in (*LISTS, "model") else "store"
        group.add_argument(
            *flags, dest=dest, type=_setting_reader(option), metavar=_metavar(option), help=text, action=action
        )


class _Again(argparse.Action):
    """Joins the values of an option that is given several times by commas; refuses a second `--model`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        every = values if before in (None, values) else f"{before},{values}"
        if every != values and "--model" in self.option_strings:
            raise argparse.ArgumentError(self, f"two models are named; `uma run --models {every}` serves both")
        setattr(namespace, self.dest, every)


def _metavar(option: Setting) -> str:
    if option.choices:
        return "WORD"
    if option.unit == "path":
        return "PATH"
    return {int: "N", float: "X"}.get(option.base, "TEXT") if option.name != "model" else "MODEL"


def _setting_reader(option: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = option.parse(text, "")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message.removeprefix(": ")) from None
        return _allowed(value, option.hint)

    return read


def _allowed(value: Any, hint: Any) -> Any:
    """`value`, or an `ArgumentTypeError` that says what is allowed."""
    for line in problems(value, hint, ""):
        raise argparse.ArgumentTypeError(line.removeprefix(": "))
    return value


def load_settings(options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Loaded:
    """The configuration that `options`, the environment, by default this process's, and the file make together
    (`ConfigError`).
    """
    prefix = "setting_"
    flags = {name.removeprefix(prefix): value for name, value in vars(options).items() if name.startswith(prefix)}
    named = getattr(options, "positional_models", None) or []
    if len(named) > 1:
        flags["models"] = ",".join([*named, *filter(None, [flags.get("models")])])
    elif named and flags.get("model") not in (None, *named):
        raise ConfigError(f"two models are named: {named[0]} and --model {flags['model']}; name one")
    elif named:
        (flags["model"],) = named
    loaded = load(flags, environ, options.config_file)
    for warning in loaded.warnings:
        say.warn(warning)
    return loaded


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Give `parser` an option for each field of `SamplingParams`.

    `--max-tokens` is both: what is asked for, and the limit of a model that is loaded here. So are `SAMPLER_FIELDS`:
    what is asked for, and the default of an engine in this process.
    """
    group = parser.add_argument_group(
        "sampling",
        "How the next token is chosen, in the order of llama.cpp: penalties, top-k, top-p, min-p, temperature.",
    )
    known = settings()
    for name in SAMPLER_FIELDS:
        _add_setting(group, known[name], f"the model's own, else {CHAT_SAMPLING.get(name, 'off')}")
    for option in _other_fields():
        _add_setting(group, option, _default_words(option.name, option.default))


def sampling_of(options: argparse.Namespace, loaded: Loaded) -> SamplingParams:
    """What is asked for by options, variables and the file; the rest is left to whichever engine answers.

    Raises `ConfigError` where fields do not go together.
    """
    given = {field.name: getattr(options, _dest(field.name)) for field in _other_fields()}
    chosen = {name: getattr(loaded.config, name) for name in SAMPLER_FIELDS if loaded.origins[name] != "default"}
    try:
        return SamplingParams(**chosen, **{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise ConfigError("--" + str(error).replace("_", "-")) from None


def _other_fields() -> list[Setting]:
    hints = {name: without_none(hint) for name, hint in hints_of(SamplingParams).items()}
    # A command that generates nothing would print nothing, and say no word of why.
    hints["max_tokens"] = Annotated[int, Range(1)]
    fields = (field for field in attrs.fields(SamplingParams) if field.name in SAMPLING_HELP)
    return [Setting(field.name, hints[field.name], field.default, *SAMPLING_HELP[field.name]) for field in fields]


def _dest(name: str) -> str:
    """The attribute that an option's value is kept in: of a setting, or of a field of `SamplingParams` that is none."""
    return f"{'sampling' if name in SAMPLING_HELP and name not in SAMPLING else 'setting'}_{name}"


def _default_words(name: str, default: Any) -> str:
    if name in ("max_tokens", "seed"):
        return {
            "max_tokens": "the limit of the server or UMA_MAX_TOKENS, without one 4096",
            "seed": "drawn; --stats tells it",
        }[name]
    if isinstance(default, tuple):
        return " ".join(map(repr, default)) or "none"
    if default is None:
        return "off"
    return str(default).lower() if isinstance(default, bool) else f"{default:g}"


def _stop_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text
