"""The models of one server by their names: all that are here, or those that were chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from uma.config import ALL_MODELS, BUILTIN, ModelSettings, adapters_of
from uma.errors import ModelError, ModelUnusable
from uma.llama import adapters, header
from uma.models import catalog
from uma.models.catalog import ModelFile
from uma.models.names import meant, one_meant
from uma.models.places import Found, find
from uma.net.file_watch import FileState, state_of
from uma.types import EMBEDDINGS, RERANKER


@attrs.define
class Shelf:
    """Reads folders and headers, so `read` does not belong on a Trio thread."""

    chosen: str
    """Names with commas between, or `ALL_MODELS`."""
    environ: Mapping[str, str]
    default: str = BUILTIN
    """Name of the model that comes first; `builtin`: the first that was chosen."""
    tables: Mapping[str, ModelSettings] = attrs.field(factory=dict)
    """Settings of models, by what the configuration calls them."""
    most_bytes: float = math.inf
    """Maximum size of a model's weights for it to be loaded at all."""
    _files: dict[str, ModelFile] = attrs.field(factory=dict, init=False)
    _broken: dict[str, ModelFile] = attrs.field(factory=dict, init=False)
    """Files that cannot be loaded, by their names."""
    _states: dict[str, FileState | None] = attrs.field(factory=dict, init=False)
    """States of all files when they were read, by their models' names."""
    _settings: dict[str, ModelSettings] = attrs.field(factory=dict, init=False)
    _found: Sequence[Found] = attrs.field(default=(), init=False)
    """What all places had."""
    _was_there: dict[Path, bool] = attrs.field(factory=dict, init=False)
    """Whether each file that was served was there: one that has gone can come back, outside of all places too."""

    def read(self) -> None:
        """Look for what is here now. Raises `ModelError` where one that was chosen, or has settings, is not, or cannot
        be loaded, or a LoRA adapter of its settings not with it; at a later look it is left out, and so are its
        settings, unless no other one is there.
        """
        places = find(self.environ)  # before they are read: what comes meanwhile is seen at the next look
        found = catalog.available(self.environ)
        self._broken = {file.name: file for file in found if file.problem is not None}
        self._states = {file.name: state_of(file.path) for file in found}
        if self.chosen == ALL_MODELS:
            sound = sorted((candidate for candidate in found if candidate.problem is None), key=self._rank)
        else:
            names = [part.strip() for part in self.chosen.split(",") if part.strip()]
            sound = [file for name in names for file in self._chosen(name, found)]
        if self.default != BUILTIN:
            sound[:0] = self._chosen(self.default, found)
        if not sound:
            raise ModelError(f"{self.chosen}: no file of these models is there any longer")
        of_tables = [
            (file, table)
            for name, table in self.tables.items()
            if name != ALL_MODELS
            for file in self._chosen(name, found)
        ]
        settings = {file.name: table for file, table in of_tables}
        _check_aliases(settings)
        for file, table in () if self._files else of_tables:
            _check_adapters(table, file.path)
        self._files, self._settings = {file.name: file for file in sound}, settings
        self._states |= {file.name: state_of(file.path) for file in sound}
        served = dict.fromkeys((*self._was_there, *(file.path for file in sound)))
        self._found, self._was_there = places, {path: state_of(path) is not None for path in served}

    def _rank(self, file: ModelFile) -> tuple[bool, ...]:
        """The place of a model where nobody has chosen an order."""
        return (
            file.kind in (EMBEDDINGS, RERANKER),
            file.size_bytes > self.most_bytes,
            file.name == BUILTIN,
            file.is_base,
        )

    def settings_of(self, file: ModelFile) -> ModelSettings:
        """What the configuration has for this model alone."""
        return self._settings.get(file.name, _NOTHING)

    def _chosen(self, name: str, found: Sequence[ModelFile]) -> Sequence[ModelFile]:
        """The model that was chosen by this name, by a table of the configuration where it has one; none where it is
        not there any longer.
        """
        try:
            return [self._file(name, found)]
        except ModelError as error:
            if self._files:
                return []
            if name not in self.tables:
                raise
            raise ModelError(f"{self.tables[name].where or name}: {error.message}") from error

    def _file(self, name: str, found: Sequence[ModelFile]) -> ModelFile:
        wanted = catalog.resolve(name, self.environ)
        known = next((candidate for candidate in found if candidate.path == wanted.path), None)
        file = known or catalog.described(wanted.path.stem, wanted.path)
        if file.problem is not None:
            raise ModelError(file.problem)
        return file

    @property
    def files(self) -> Sequence[ModelFile]:
        """All of them, the default one first. Of `ALL_MODELS` first those that generate and fit, base models last of
        them but for the built-in one, then the larger ones, and those that only embed or rank.
        """
        return list(self._files.values())

    @property
    def broken(self) -> Sequence[str]:
        """What is wrong with files that would be served were they sound (see `catalog.broken`)."""
        return catalog.broken(self._broken.values()) if self.chosen == ALL_MODELS else ()

    def is_outdated(self) -> bool:
        """Whether a file that could not be loaded has changed since: it can have been incomplete. Any thread."""
        return any(state_of(file.path) != self._states[name] for name, file in self._broken.items())

    def has_changed(self) -> bool:
        """Whether files have come, or come back, or gone since, or a broken one is another. Any thread."""
        is_there = {path: state_of(path) is not None for path in self._was_there}
        return is_there != self._was_there or self.is_outdated() or find(self.environ) != self._found

    def named(self, asked: str) -> ModelFile:
        """The one that `asked` means. Raises `UnknownModel` for none, or several, and `ModelUnusable` for a broken
        file.
        """
        names = {name: (name, *file.also, *self.settings_of(file).alias) for name, file in self._files.items()}
        if len(broken := meant(asked, {name: (name,) for name in self._broken})) == 1 and not meant(asked, names):
            raise ModelUnusable(f"model: {self._broken[broken[0]].problem}")
        adapted = {name: settings.adapters for name, settings in self._settings.items() if name in names}
        return self._files[one_meant(asked, names, adapted)]


_NOTHING = ModelSettings()


def _check_adapters(table: ModelSettings, model: Path) -> None:
    """Raise `ModelError` where a LoRA adapter of this model's table is none of this model."""
    parts = [part.path for part in header.read_parts(model)]
    for adapter in adapters_of(table.values.get("lora", "")):
        try:
            adapters.check(Path(adapter.path), parts)
        except ModelError as error:
            raise ModelError(f"{table.where}: lora: {error.message}") from error


def _check_aliases(settings: Mapping[str, ModelSettings]) -> None:
    """Raise `ModelError` where two models have one alias."""
    owners: dict[str, str] = {}
    for name, setting in settings.items():
        for alias in setting.alias:
            if owners.setdefault(alias.casefold(), name) != name:
                raise ModelError(
                    f"alias: {alias}: is given to {owners[alias.casefold()]} and to {name}; one can have it"
                )
