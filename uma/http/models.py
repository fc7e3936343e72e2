"""Which names a request's `model` field can have, and when the model appeared, for the dialects' lists."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import attrs

from uma.config import RuntimeConfig
from uma.errors import UnknownModel
from uma.http.exchange import Exchange
from uma.models.names import meant, without_adapter
from uma.types import Source

FOREIGN = ("claude-", "gpt-", "jev-")
"""What the names of Anthropic's, OpenAI's and TypeSafe's models begin with. Programs ask for these that know no
others."""
MODEL_HEADER = "x-uma-model"
"""The header of an answer that another model gave than was asked for."""
_AS_IT_IS = "".join(map(chr, range(ord("!"), ord("~") + 1))).replace("%", "")

SERVER_NAMES = "--alias gives it more names, --alias '*' any"


@attrs.frozen
class ModelNames:
    """The loaded model's name, and its aliases."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    """LoRA adapters of the model, by their names."""
    takes_any: bool = False
    """Any name means the loaded model."""
    more_names: str = SERVER_NAMES
    """How it gets other names, for the error where one is asked for."""
    loaded_at: int = attrs.field(factory=lambda: int(time.time()))
    """Unix time, for lists that have a date."""

    @property
    def loaded_time(self) -> str:
        """`loaded_at` as ISO 8601 has it."""
        return iso_time(datetime.fromtimestamp(self.loaded_at, UTC))

    @classmethod
    def of(cls, source: Source, config: RuntimeConfig) -> ModelNames:
        """The names of `source`'s model: what it is called by, the configured aliases, its file's name, and what
        the file itself says.
        """
        model = source.info.model
        path = Path(model.path)
        names = dict.fromkeys((*config.aliases, model.title, path.stem, path.name))
        others = tuple(name for name in names if name not in (model.name, ""))
        more = SERVER_NAMES if config.http else "--any-model takes such rows"  # without HTTP it is a job's
        return cls(
            model.name, others, source.info.capabilities.adapters, takes_any=config.takes_any_model, more_names=more
        )

    def check(self, asked: str | None, http: Exchange | None = None) -> str:
        """The name to answer with. None asks for the loaded model. Raises `UnknownModel`.

        With `http`, the name of another company's model is taken for the loaded one. The answer's header names the
        model where its whole name was not asked for.
        """
        if asked is None or without_adapter(asked, self.adapters) == self.name:
            return asked or self.name
        if self.takes_any or self.knows(asked) or (http is not None and asked.startswith(FOREIGN)):
            if http is not None:
                http.extra_headers.append(answered_by(self.name))
            return asked
        raise UnknownModel(f"model: {asked[:200]!r} is not loaded here; {self.name!r} is ({self.more_names})")

    def knows(self, asked: str) -> bool:
        """Whether `asked` is one of the names, as `--model` takes them: in capitals or not, or the beginning of one."""
        return bool(meant(without_adapter(asked, self.adapters), {self.name: (self.name, *self.aliases)}))


def answered_by(name: str) -> tuple[bytes, bytes]:
    """The header that names the model of an answer as lists do: percent-encoded where it has more than visible ASCII,
    so that a client can have it back whole.
    """
    return MODEL_HEADER.encode(), quote(name, safe=_AS_IT_IS).encode()


def iso_time(at: datetime) -> str:
    """A time of day in UTC as ISO 8601 has it."""
    return at.isoformat().replace("+00:00", "Z")
