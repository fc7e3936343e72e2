"""The models of one server by their names: all that are here, or those that were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from uma.config import nearest
from uma.errors import ModelError, UnknownModel
from uma.models import catalog
from uma.models.catalog import BUILTIN, ModelFile
from uma.models.names import meant

ALL = "all"
"""The word for all that are here."""


@attrs.define
class Shelf:
    """Reads folders and headers, so no method but `named` belongs on a Trio thread."""

    chosen: str
    """Names with commas between, or `ALL`."""
    environ: Mapping[str, str]
    default: str = BUILTIN
    """Name of the model that comes first; `builtin`: the first that was chosen."""
    _files: dict[str, ModelFile] = attrs.field(factory=dict, init=False)

    def read(self) -> None:
        """Look for what is here now. Raises `ModelError` where one that was chosen is not, or cannot be loaded."""
        found = catalog.available(self.environ)
        if self.chosen == ALL:
            sound = sorted((each for each in found if each.problem is None), key=lambda each: each.name == BUILTIN)
        else:
            names = [each.strip() for each in self.chosen.split(",") if each.strip()]
            sound = [self._file(name, found) for name in names]
        if self.default != BUILTIN:
            sound.insert(0, self._file(self.default, found))
        self._files = {each.name: each for each in sound}

    def _file(self, name: str, found: Sequence[ModelFile]) -> ModelFile:
        wanted = catalog.resolve(name, self.environ)
        known = next((each for each in found if each.path == wanted.path), None)
        file = known or catalog.described(wanted.path.stem, wanted.path)
        if file.problem is not None:
            raise ModelError(file.problem)
        return file

    @property
    def files(self) -> Sequence[ModelFile]:
        """All of them, the default one first. Of `ALL` the built-in one is the last."""
        return list(self._files.values())

    def named(self, asked: str) -> ModelFile:
        """The one that `asked` means, by `names.meant`. Raises `UnknownModel` for none, or several."""
        found = [self._files[name] for name in meant(asked, {name: (name,) for name in self._files})]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(each.name for each in found)
            raise UnknownModel(f"model: {asked[:200]!r}: {len(found)} models begin so: {names}")
        near = nearest(asked, self._files) or f"; there are {', '.join(list(self._files)[:20])}"
        raise UnknownModel(f"model: {asked[:200]!r} is not here{near}")
