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


def in_ollama(folder: Path, name: str, file: Path) -> Path:
    """Put a file into a folder of Ollama's, under a manifest's path; its blob."""
    digest = sha256(file.read_bytes()).hexdigest()
    blob, manifest = folder / "blobs" / f"sha256-{digest}", folder / "manifests" / name
    for each in (blob, manifest):
        each.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(file.read_bytes())
    layers = [("image.template", "1" * 64), ("image.model", digest)]
    layer = [{"mediaType": f"application/vnd.ollama.{kind}", "digest": f"sha256:{hash}"} for kind, hash in layers]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layer}))
    return blob
