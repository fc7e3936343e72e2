"""Which names a request's `model` field can have, and when the model appeared, for the dialects' lists."""

from __future__ import annotations

import time
from pathlib import Path

import attrs

from uma.config import RuntimeConfig
from uma.http.problem import ModelNotFound
from uma.types import Source


@attrs.frozen
class ModelNames:
    """The loaded model's name, and its aliases."""

    name: str
    aliases: tuple[str, ...] = ()
    takes_any: bool = False
    """Any name means the loaded model."""
    loaded_at: int = attrs.field(factory=lambda: int(time.time()))
    """Unix time, for lists that have a date."""

    @classmethod
    def of(cls, source: Source, config: RuntimeConfig) -> ModelNames:
        """The names of `source`'s model: its own, its file's with and without `.gguf`, and the configured aliases."""
        model = source.info.model
        path = Path(model.path)
        aliases = [each.strip() for each in config.alias.split(",") if each.strip()]
        aliases += [path.stem, path.name, *(["builtin"] if model.is_builtin else [])]
        return cls(
            model.name, tuple(dict.fromkeys(each for each in aliases if each != model.name)), config.http_any_model
        )

    def check(self, asked: str | None) -> str:
        """The name to answer with. None asks for the loaded model. Raises `ModelNotFound`."""
        if asked is None or self.takes_any or self.knows(asked):
            return asked or self.name
        raise ModelNotFound(
            f"model: {asked[:200]!r} is not loaded here; this server has {self.name!r} "
            "(--alias gives it more names, --http-any-model answers to all)"
        )

    def knows(self, asked: str) -> bool:
        """Whether `asked` is one of the names, with or without Ollama's `:latest`."""
        plain = asked.removesuffix(":latest")
        return plain == self.name or plain in self.aliases
