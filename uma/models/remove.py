"""A model off the disk: from `UMA_MODELS` and the Hugging Face cache, never from the folders of other programs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import attrs

from uma.errors import ModelError
from uma.llama import header
from uma.models.glance import glance
from uma.models.places import HUGGING_FACE, UMA_MODELS, Found, files_below
from uma.models.projectors import Projectors, beside

_OTHERS = {"LM Studio": "remove it there", "Ollama": "`ollama rm` removes it"}


@attrs.frozen
class Removal:
    """The files to delete, in an order in which no part is seen without the first, and what that frees."""

    files: tuple[Path, ...]
    repository: Path | None = None
    """Repository's folder in the Hugging Face cache."""
    projector: Path | None = None
    """The model's own, which goes with it; None: it has none, or others have the same."""

    @property
    def freed_bytes(self) -> int:
        """Bytes of files that have no further name."""
        whole = [each.lstat() for each in self.files if not each.is_symlink()]
        return sum(status.st_size for status in whole if status.st_nlink == 1)

    def run(self) -> None:
        """Delete them, and in the cache what then is empty. Raises `OSError` where a file cannot be deleted."""
        for each in self.files:
            each.unlink(missing_ok=True)
        if self.repository is not None:
            _tidy(self.repository)


def removal(found: Found) -> Removal:
    """What removing a model is. Raises `ModelError` where it is another program's."""
    if found.place not in (UMA_MODELS, HUGGING_FACE):
        raise ModelError(f"{found.name}: is {found.place}'s, which keeps its own list; {_OTHERS[found.place]}")
    parts = _parts(found.path)
    if found.place == UMA_MODELS:
        projector = _own_projector(found.path, parts, found.path.parent)
        return Removal((*parts, *([] if projector is None else [projector])), projector=projector)
    snapshots = next(each for each in found.path.parents if each.name == "snapshots")
    projector = _own_projector(found.path, parts, snapshots)
    parts += [] if projector is None else [projector]
    blobs = {part.resolve() for part in parts}
    # Other revisions have links to the same files: one that stayed would keep the file, or lead nowhere.
    links = [each for each in snapshots.rglob("*") if each.is_symlink() and each.resolve() in blobs]
    first = sorted(links, key=lambda each: (header.part_number(each) or 1, each))
    own = [each for each in blobs if each.parent == snapshots.parent.resolve() / "blobs"]
    return Removal((*first, *(each for each in parts if not each.is_symlink()), *own), snapshots.parent, projector)


def _own_projector(path: Path, parts: list[Path], folder: Path) -> Path | None:
    """The projector of the model of these parts, where no other one below `folder` has the same."""
    projector = beside(path)
    if projector is None:
        return None
    look, own = Projectors(), {each.resolve() for each in parts}
    for each in files_below(folder):
        other = None if each.suffix != ".gguf" or each.resolve() in own else glance(each)
        found = None if other is None else look.of(each, other.metadata)
        if found is not None and found.resolve() == projector.resolve():
            return None
    return projector


def _parts(path: Path) -> list[Path]:
    """All parts that are there, given the first."""
    if header.part_number(path) is None:
        return [path]
    count = int(path.stem[-5:])
    return [each for at in range(1, count + 1) if os.path.lexists(each := header.part_path(path, at, count))]


def _tidy(repository: Path) -> None:
    """Delete the folders of a repository that are empty, and the names of revisions of which nothing is left."""
    for folder in sorted((repository / "snapshots").rglob("*"), reverse=True):
        _delete_empty(folder)
    for ref in (each for each in (repository / "refs").rglob("*") if each.is_file()):
        if not (repository / "snapshots" / ref.read_text(errors="replace").strip()).exists():
            ref.unlink()
    for folder in (*sorted((repository / "refs").rglob("*"), reverse=True), *map(repository.joinpath, _FOLDERS)):
        _delete_empty(folder)


_FOLDERS = ("refs", "snapshots", "blobs", "")
"""Folders of a repository, and itself."""


def _delete_empty(folder: Path) -> None:
    with suppress(OSError):
        if not folder.is_symlink():
            folder.rmdir()
