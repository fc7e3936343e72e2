"""Where models lie on this machine: `UMA_MODELS`, the Hugging Face cache, LM Studio's folders and Ollama's.

Only names of files are read here, and Ollama's manifests. What a file is, `catalog` says.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from uma.constraints import is_utf8
from uma.llama import header

UMA_MODELS, HUGGING_FACE, LM_STUDIO, OLLAMA = "UMA_MODELS", "Hugging Face", "LM Studio", "Ollama"

MANIFEST_BYTES = 1_000_000
"""Maximum size of a manifest of Ollama's that is read; they have some 1,000 bytes."""
OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")
"""Where Ollama keeps models when its installer has made it a service."""

_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:IQ\d_[A-Z]+|T?Q\d(?:_[A-Z\d]+)+|Q\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))$",
    re.IGNORECASE,
)


@attrs.frozen
class Found:
    """A file, or the first part of a split one, that can be a model."""

    name: str
    """Full name, which tells it from all others of its place."""
    path: Path
    place: str
    also: tuple[str, ...] = ()
    """Other full names of it."""


def find(environ: Mapping[str, str]) -> list[Found]:
    """All files that can be models, by place and name. Folders that are not there, or cannot be read, have none."""
    return [
        *_in_folder(models_folder(environ), UMA_MODELS),
        *_in_cache(hub_cache(environ)),
        *(model for folder in _lm_studio_folders(environ) for model in _in_folder(folder, LM_STUDIO)),
        *(model for folder in _ollama_folders(environ) for model in _of_ollama(folder)),
    ]


def models_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder that `UMA_MODELS` names, or None."""
    return Path(environ["UMA_MODELS"]).expanduser() if environ.get("UMA_MODELS") else None


def folder_problem(environ: Mapping[str, str]) -> str:
    """Why the folder that `UMA_MODELS` names cannot be read, and what helps; empty where it can, or none is named."""
    if (folder := models_folder(environ)) is None:
        return ""
    try:
        with os.scandir(folder):
            return ""
    except NotADirectoryError:
        problem = "is no folder; name one"
    except FileNotFoundError:
        problem = "there is no such folder; make it"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; make it readable"
    return f"UMA_MODELS={folder}: {problem}, or unset UMA_MODELS"


def hub_cache(environ: Mapping[str, str]) -> Path | None:
    """The Hugging Face cache, by the same variables that `huggingface_hub` goes by; None without a home."""
    for name, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if environ.get(name):
            return Path(os.path.expandvars(environ[name])).expanduser() / below
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "huggingface" / "hub"
    return Path(environ["HOME"]) / ".cache" / "huggingface" / "hub" if environ.get("HOME") else None


def quantization_of(name: str) -> str:
    """What the name of a file says of its quantization, such as `Q4_K_M`; empty where it says nothing."""
    match = _QUANTIZATION.search(name)
    return match[1].upper() if match else ""


def is_projector(name: str) -> bool:
    """Whether a file is by its name a projector for images, which is no model."""
    return "mmproj" in name.casefold()


def _lm_studio_folders(environ: Mapping[str, str]) -> list[Path]:
    home = environ.get("HOME")
    return [Path(home, ".lmstudio", "models"), Path(home, ".cache", "lm-studio", "models")] if home else []


def _ollama_folders(environ: Mapping[str, str]) -> list[Path]:
    if environ.get("OLLAMA_MODELS"):
        return [Path(environ["OLLAMA_MODELS"]).expanduser()]
    return [Path(environ["HOME"], ".ollama", "models"), OLLAMA_SERVICE] if environ.get("HOME") else []


def _gguf_files(folder: Path) -> list[Path]:
    """Every GGUF file below the folder, but of a split model only the first part, by name. One whose path is no UTF-8
    is left out: no request and no list could name it.
    """
    return [
        path
        for path in files_below(folder)
        if path.suffix.casefold() == ".gguf" and header.part_number(path) in (None, 1) and is_utf8(str(path))
    ]


def _in_folder(folder: Path | None, place: str) -> Iterator[Found]:
    for path in _gguf_files(folder) if folder else ():
        if not is_projector(path.name):
            relative = path.relative_to(folder or "")
            yield Found(relative.with_name(header.model_stem(path)).as_posix(), path, place)


def _in_cache(cache: Path | None) -> Iterator[Found]:
    """The files of all snapshots of each repository. One that several snapshots have is listed once: as the one that
    `main` has, else with the revision behind its name.
    """
    for folder in entries(cache) if cache else ():
        if not folder.name.startswith("models--"):
            continue
        repository = folder.name.removeprefix("models--").replace("--", "/")
        refs = {
            _text(ref_file): ref_file.relative_to(folder / "refs").as_posix()
            for ref_file in files_below(folder / "refs")
        }
        main = next((commit for commit, ref in refs.items() if ref == "main"), None)
        seen: set[Path] = set()
        for at, snapshot in enumerate(sorted(entries(folder / "snapshots"), key=lambda folder: folder.name != main)):
            revision = f"@{refs.get(snapshot.name) or snapshot.name[:7]}" if at else ""
            for path in _gguf_files(snapshot):
                file = path.resolve()
                if file not in seen and not is_projector(path.name) and file.exists():
                    seen.add(file)
                    stem = path.relative_to(snapshot).with_name(header.model_stem(path)).as_posix()
                    quantization = quantization_of(stem) or stem
                    also = (f"{repository}{revision}:{quantization}", f"{repository}:{quantization}{revision}")
                    yield Found(f"{repository}/{stem}{revision}", path, HUGGING_FACE, also)


def _of_ollama(folder: Path) -> Iterator[Found]:
    """Every manifest's model: `qwen3:8b` for the registry's own, with who made it and the host for others."""
    manifests = folder / "manifests"
    for file in files_below(manifests):
        *owner, model, tag = file.relative_to(manifests).parts
        blob = _blob(folder, file, "model")
        if blob is not None and owner:
            own = [part for part in owner if part not in ("registry.ollama.ai", "library")]
            name = "/".join((*own, model))
            plain = (name,) if tag == "latest" else ()
            yield Found(f"{name}:{tag}", blob, OLLAMA, also=(f"{name}-{tag}", *plain))


def ollama_name(path: Path) -> str:
    """Name by which Ollama lists the model of this file, the first of several; empty for any other file."""
    listed = _of_ollama(path.parent.parent) if path.parent.name == "blobs" else ()
    return next((found.name for found in listed if found.path.name == path.name), "")


def ollama_projectors(blobs: Path) -> dict[Path, Path]:
    """What Ollama's manifests name as projectors, by the models' files; all lie in the folder `blobs`."""
    folder = blobs.parent
    pairs = (
        (_blob(folder, file, "model"), _blob(folder, file, "projector")) for file in files_below(folder / "manifests")
    )
    return {model: projector for model, projector in pairs if model is not None and projector is not None}


def _blob(folder: Path, manifest: Path, kind: str) -> Path | None:
    """The blob of a manifest's layer of this kind; None where there is none, or where the layer names no blob."""
    try:
        layers = json.loads(_text(manifest))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == f"application/vnd.ollama.image.{kind}"]
    except (ValueError, LookupError, TypeError):
        return None
    named = (str(digest) for digest in digests if re.fullmatch(r"sha256:[0-9a-f]{64}", str(digest)))
    blobs = (folder / "blobs" / digest.replace(":", "-") for digest in named)
    return next((blob for blob in blobs if os.path.isfile(blob)), None)


def files_below(folder: Path) -> list[Path]:
    """Every regular file below a folder, and every link that leads nowhere, sorted. Symbolic links are followed, to
    each folder once: by its own path where that is here. A folder that this user cannot enter, or that its file system
    does not tell of, has no files.
    """
    found: list[Path] = []
    seen = set[tuple[int, int]]()
    own, linked = deque([folder]), deque[Path]()
    while own or linked:
        at = own.popleft() if own else linked.popleft()
        with suppress(OSError):
            status = at.stat()
            if (key := (status.st_dev, status.st_ino)) in seen:
                continue
            seen.add(key)
            for entry in sorted(os.scandir(at), key=lambda entry: entry.name):
                with suppress(OSError):
                    if entry.is_dir():
                        (linked if entry.is_symlink() else own).append(at / entry.name)
                    elif entry.is_file() or not os.path.exists(entry):  # a pipe or a device would be waited for
                        found.append(at / entry.name)
    return sorted(found)


def entries(folder: Path) -> list[Path]:
    """What a folder has, sorted; nothing where that cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(MANIFEST_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""
