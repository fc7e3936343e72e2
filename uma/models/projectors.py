"""Which projector (mmproj file) belongs to a model: the one that lies beside it and fits it. Only headers are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import attrs

from uma.gguf import Glance, glance
from uma.models.places import entries, is_projector, ollama_projectors

_PREFERRED = ("q8_0", "f16", "bf16", "f32")
"""Preferred precision among several projectors of one model, the best first."""
_EACH_HAS = re.compile(
    r"mmproj|gguf|ggml|models?|vision|projector|"
    r"instruct|it|chat|base|text|qat|ud|imat|"  # trainings and makes
    r"\d+(\.\d+)?[bmk]?|[ae]\d+(\.\d+)?b|v\d*(\.\d+)*|"  # sizes, versions, dates
    r"(i|t)?q\d+|i1|k|x*[sml]|nl|int\d+|b?fp?\d+|(mx|nv)fp\d+|moe|"  # quantizations
)
"""Words of names that tell no model from another."""
_ARCHITECTURE = "clip"
"""What the header of every projector has as its architecture."""
_WIDTH_UNTOLD = ("mlp", "ldp", "ldpv2")
"""Kinds of projectors whose `projection_dim` is the picture's side, not the model's."""


def beside(model: Path) -> Path | None:
    """The projector of a model that lies there; see `Projectors.of`."""
    seen = glance(model)
    return Projectors().of(model, {} if seen is None else seen.metadata)


def chosen(named: str, model: Path) -> Path | None:
    """The projector that `--mmproj` names, else the one that lies beside the model; None: it is to have none, or there
    is none.
    """
    if named == "off":
        return None
    return Path(named).expanduser() if named else beside(model)


def size_bytes(file: Path | None) -> int:
    """What its weights take of memory; 0 where there is no such file: loading it says what is wrong."""
    try:
        return 0 if file is None else file.stat().st_size
    except OSError:
        return 0


def best(model: str, projectors: Iterable[str], place: str = "") -> str | None:
    """Projector's file name for the model of this file's name, in the folder or repository `place`: the one
    that has most in common with it. One with a word that tells models apart, and that neither of these has, is another
    model's.
    """
    words = _words(PurePath(model).name)
    known = words | _words(place)
    own = {projector: _words(PurePath(projector).name) for projector in projectors}
    common = {
        entry: len(words & its)
        for entry, its in own.items()
        if all(word in known or _EACH_HAS.fullmatch(word) for word in its)
    }
    return min(sorted(common), key=lambda name: (-common[name], _rank(PurePath(name).name)), default=None)


def senses(projector: Path | None) -> tuple[bool, bool]:
    """Whether it takes pictures, and whether sounds, by its header; neither where there is none."""
    seen = None if projector is None else glance(projector)
    has = [seen is not None and seen.metadata.get(f"clip.has_{sense}_encoder") is True for sense in ("vision", "audio")]
    return has[0], has[1]


@attrs.define
class Projectors:
    """Looks for the projectors of many models: in each folder once. Any thread, one at a time."""

    _by_folder: dict[Path, dict[Path, Glance | None]] = attrs.field(factory=dict, init=False)
    _of_ollama: dict[Path, dict[Path, Path]] = attrs.field(factory=dict, init=False)

    def of(self, model: Path, metadata: Mapping[str, Any]) -> Path | None:
        """The projector of the model with this file and header; None where none fits it, or lies beside it: in its
        folder, or in the Hugging Face cache anywhere above it in its repository. Of a model of Ollama's, the one that
        its manifest names.
        """
        if model.parent.name == "blobs":
            if model.parent not in self._of_ollama:
                self._of_ollama[model.parent] = ollama_projectors(model.parent)
            return self._of_ollama[model.parent].get(model)
        if is_projector(model.name):
            return None
        width = metadata.get(f"{metadata.get('general.architecture')}.embedding_length")
        folders = _folders(model)
        near = [pair for folder in folders for pair in self._in(folder).items()]
        fitting = [str(path) for path, seen in near if _fits(seen, width)]
        top = folders[-1]
        name = best(model.name, fitting, (top.parents[1] if top.parent.name == "snapshots" else top).name)
        return None if name is None else Path(name)

    def _in(self, folder: Path) -> dict[Path, Glance | None]:
        if folder not in self._by_folder:
            named = [entry for entry in entries(folder) if entry.suffix == ".gguf" and is_projector(entry.name)]
            # Loading would wait for a pipe; of one that is missing it says what is wrong.
            found = [entry for entry in named if entry.is_file() or not entry.exists()]
            self._by_folder[folder] = {projector: glance(projector) for projector in found}
        return self._by_folder[folder]


def _folders(model: Path) -> list[Path]:
    above = list(model.parents)
    at = next((index for index, folder in enumerate(above) if folder.parent.name == "snapshots"), 0)
    return above[: at + 1]


def _fits(seen: Glance | None, width: Any) -> bool:
    """Whether a file's header does not say that it is no projector, or one for a model of another width."""
    if seen is None:
        return True  # loading it says what is wrong
    if seen.metadata.get("general.architecture") not in (None, _ARCHITECTURE):
        return False
    if width is None:
        return True
    for sense in ("vision", "audio"):
        reported = seen.metadata.get(f"clip.{sense}.projection_dim")
        # One that has both senses says of each what kind it is.
        kinds = [seen.metadata.get(name) for name in ("clip.projector_type", f"clip.{sense}.projector_type")]
        if reported and reported != width and not any(kind in _WIDTH_UNTOLD for kind in kinds):
            return False
    return True


def _words(name: str) -> set[str]:
    plain = re.sub("|".join(_PREFERRED), "", name.casefold())
    return set(re.split(r"[-_ /]+|\.(?!\d)|(?<!\d)\.", plain))  # 2.5 is one word


def _rank(name: str) -> int:
    words = re.split(r"[-. ]+", name.casefold())
    return next((rank for rank, form in enumerate(_PREFERRED) if form in words), len(_PREFERRED))
