"""Models where other programs keep them: for tests of what is found there, and of what is left alone."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

MAIN, OTHER = "a" * 40, "b" * 40
"""Commits."""


def in_cache(home: Path, repository: str, file: Path, name: str, commit: str = MAIN, ref: str = "main") -> Path:
    """Put a file into the Hugging Face cache as `huggingface_hub` does; its link."""
    folder = home / ".cache" / "huggingface" / "hub" / f"models--{repository.replace('/', '--')}"
    blob = folder / "blobs" / sha256(file.read_bytes()).hexdigest()
    for each in (blob, folder / "refs" / ref, link := folder / "snapshots" / commit / name):
        each.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(file.read_bytes())
    (folder / "refs" / ref).write_text(commit)
    link.symlink_to(blob)
    return link


def in_ollama(folder: Path, name: str, file: Path, projector: Path | None = None) -> Path:
    """Put a file into a folder of Ollama's, under a manifest's path, with its projector; its blob."""
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    blob = _ollama_blob(folder, file)
    layers = [("image.template", "1" * 64), ("image.model", blob.name.removeprefix("sha256-"))]
    if projector is not None:
        layers.append(("image.projector", _ollama_blob(folder, projector).name.removeprefix("sha256-")))
    layer = [{"mediaType": f"application/vnd.ollama.{kind}", "digest": f"sha256:{hash}"} for kind, hash in layers]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layer}))
    return blob


def _ollama_blob(folder: Path, file: Path) -> Path:
    blob = folder / "blobs" / f"sha256-{sha256(file.read_bytes()).hexdigest()}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(file.read_bytes())
    return blob
