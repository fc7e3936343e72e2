"""Which models can be loaded from here: the built-in one, the files of the `UMA_MODELS` folder, and any path."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import attrs

from uma.config import nearest
from uma.errors import ModelError
from uma.llama import header
from uma.llama.header import Header

BUILTIN = "builtin"
BUILTIN_FILE = "uma-story.gguf"


@attrs.frozen
class ResolvedModel:
    """The file that a model's name stands for."""

    path: Path
    is_builtin: bool


@attrs.frozen
class ModelFile:
    """A model that can be loaded by its `name`, as its header describes it; or the `problem` that is in the way."""

    name: str
    path: Path
    size_bytes: int
    """Of all parts together."""
    quantization: str = ""
    context_length: int = 0
    architecture: str = ""
    parameters: int = 0
    problem: str | None = None


def builtin_path() -> Path:
    """The built-in model's file, as the package was installed."""
    return Path(str(files("uma") / "data" / BUILTIN_FILE))


def resolve(model: str, environ: Mapping[str, str]) -> ResolvedModel:
    """The file for `builtin`, a path, or a name in the `UMA_MODELS` folder, with or without `.gguf`, in any case,
    or as much of its beginning as tells it from the others.

    A path that exists wins over a name, a whole name over a beginning. Raises `ModelError` naming what was looked for
    and where.
    """
    if not model.strip():
        raise ModelError("the model's name is empty; name a GGUF file, a model in the UMA_MODELS folder, or builtin")
    if model == BUILTIN:
        return ResolvedModel(builtin_path(), is_builtin=True)
    path = Path(model).expanduser()
    if path.exists():
        return ResolvedModel(path, is_builtin=False)
    folder = models_folder(environ)
    found = {name: each for each in _model_files(folder) for name in (_name_of(each, folder), each.name)}
    if model in found:
        return ResolvedModel(found[model], is_builtin=False)
    if near := _named(model, found):
        if len(near) > 1:
            names = ", ".join(sorted(_name_of(each, folder) for each in near))
            raise ModelError(f"{model}: {len(near)} models in {folder} have that name or begin so: {names}")
        return ResolvedModel(near.pop(), is_builtin=False)
    if folder is None:
        raise ModelError(f"{model}: no such file, and UMA_MODELS names no folder to look for a model of this name")
    raise ModelError(f"{model}: no such file, and no model of this name in {folder}{nearest(model, found)}")


def _named(model: str, found: Mapping[str, Path]) -> set[Path]:
    """The files whose name is `model` in other capitals; where there is none, those whose name begins so. Of a name
    that is a path below the folder, the last part counts as well.
    """
    wanted = model.casefold()
    names = [(part.casefold(), path) for name, path in found.items() for part in (name, name.rpartition("/")[2])]
    return {path for name, path in names if name == wanted} or {path for name, path in names if name.startswith(wanted)}


def available(environ: Mapping[str, str]) -> list[ModelFile]:
    """The built-in model and those of the `UMA_MODELS` folder, by name. Reads headers only; a file that is no model is
    listed with its problem.
    """
    folder = models_folder(environ)
    return [
        _describe(BUILTIN, builtin_path()),
        *(_describe(_name_of(each, folder), each) for each in _model_files(folder)),
    ]


def models_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder that `UMA_MODELS` names, or None."""
    return Path(environ["UMA_MODELS"]).expanduser() if environ.get("UMA_MODELS") else None


def _model_files(folder: Path | None) -> list[Path]:
    """Every GGUF file below the folder, but of a split model only the first part, by name."""
    if folder is None:
        return []
    return sorted(path for path in folder.rglob("*.gguf") if header.part_number(path) in (None, 1))


def _name_of(path: Path, folder: Path | None) -> str:
    """Its path below the folder, without the ending and without the number of the part."""
    relative = path.relative_to(folder) if folder else path
    return relative.with_name(header.model_stem(path)).as_posix()


def _describe(name: str, path: Path) -> ModelFile:
    try:
        parts = header.read_parts(path)
    except ModelError as error:
        size = path.stat().st_size if path.is_file() else 0
        return ModelFile(name, path, size, problem=error.message)
    first = parts[0]
    if (problem := _no_model(parts)) is not None:
        return ModelFile(name, path, sum(part.size_bytes for part in parts), problem=f"{path}: {problem}")
    return ModelFile(
        name=name,
        path=path,
        size_bytes=sum(part.size_bytes for part in parts),
        quantization=first.quantization,
        context_length=first.context_length,
        architecture=first.architecture,
        parameters=sum(part.parameters for part in parts),
    )


_OTHER_KINDS = {
    "adapter": "is an adapter (LoRA), which changes a model and is none by itself",
    "mmproj": "is a projector for images, a part of a model that reads them",
    "imatrix": "is an importance matrix for quantizing, not a model",
}
"""What `general.type` says of GGUF files that hold no model."""


def _no_model(parts: list[Header]) -> str | None:
    """Why sound files do not make a model that generates text, or None."""
    kind = _OTHER_KINDS.get(str(parts[0].metadata.get("general.type")))
    if kind is None and not any(part.parameters for part in parts):
        return "holds a vocabulary and no weights, so there is nothing to compute with"
    return kind
