"""A model off the disk: from `UMA_MODELS` and the Hugging Face cache, never from the folders of other programs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import attrs

from uma.errors import ModelError
from uma.gguf import glance
from uma.llama import header
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
        whole = [file.lstat() for file in self.files if not file.is_symlink()]
        return sum(status.st_size for status in whole if status.st_nlink == 1)

    @property
    def kept_file(self) -> Path | None:
        """The file that stays where the first to be deleted is a link to it; None: it is no link, or its file goes."""
        file = self.files[0].resolve()
        return None if file in {path.resolve() for path in self.files if not path.is_symlink()} else file

    def run(self) -> None:
        """Delete them, and in the cache what then is empty. Raises `OSError` where a file cannot be deleted."""
        for file in self.files:
            file.unlink(missing_ok=True)
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
    snapshots = next(parent for parent in found.path.parents if parent.name == "snapshots")
    projector = _own_projector(found.path, parts, snapshots)
    parts += [] if projector is None else [projector]
    blobs = {part.resolve() for part in parts}
    # Other revisions have links to the same files: one that stayed would keep the file, or lead nowhere.
    links = [path for path in snapshots.rglob("*") if path.is_symlink() and path.resolve() in blobs]
    first = sorted(links, key=lambda link: (header.part_number(link) or 1, link))
    own = [blob for blob in blobs if blob.parent == snapshots.parent.resolve() / "blobs"]
    return Removal(
        (*first, *(part_path for part_path in parts if not part_path.is_symlink()), *own), snapshots.parent, projector
    )


def _own_projector(path: Path, parts: list[Path], folder: Path) -> Path | None:
    """The projector of the model of these parts, where no other one below `folder` has the same."""
    projector = beside(path)
    if projector is None:
        return None
    look, own = Projectors(), {part_path.resolve() for part_path in parts}
    for other_path in files_below(folder):
        other = None if other_path.suffix != ".gguf" or other_path.resolve() in own else glance(other_path)
        found = None if other is None else look.of(other_path, other.metadata)
        if found is not None and found.resolve() == projector.resolve():
            return None
    return projector


def _parts(path: Path) -> list[Path]:
    """All parts that are there, given the first."""
    if header.part_number(path) is None:
        return [path]
    count = int(path.stem[-5:])
    paths = (header.part_path(path, at, count) for at in range(1, count + 1))
    return [part for part in paths if os.path.lexists(part)]


def _tidy(repository: Path) -> None:
    """Delete the folders of a repository that are empty, and the names of revisions of which nothing is left."""
    for folder in sorted((repository / "snapshots").rglob("*"), reverse=True):
        _delete_empty(folder)
    for ref in (path for path in (repository / "refs").rglob("*") if path.is_file()):
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
