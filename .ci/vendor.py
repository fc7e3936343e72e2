"""Fetches the page's libraries from npm, as uma/http/page/static/vendor/list.json names them.

For another version: write it there, empty `sha256` of its files, and run `python .ci/vendor.py`, which fills them
in. A file that is not what the list says is refused, and so is a package that is not what npm says (`integrity`). The
standard library is all that this needs.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

FOLDER = Path(__file__).parent.parent / "uma/http/page/static/vendor"
LIST = FOLDER / "list.json"
REGISTRY = "https://registry.npmjs.org"
TIMEOUT_SEC = 60


def read(url: str) -> bytes:
    with urlopen(url, timeout=TIMEOUT_SEC) as answer:
        return bytes(answer.read())


def fetch(entry: dict[str, Any]) -> None:
    """Write one package's files into the folder."""
    name, version = entry["package"], entry["version"]
    said = json.loads(read(f"{REGISTRY}/{quote(name, safe='@')}/{version}"))
    data = read(said["dist"]["tarball"])
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if integrity != said["dist"]["integrity"]:
        sys.exit(f"{name} {version}: its integrity is {integrity}, and npm says {said['dist']['integrity']}")
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        for to, file in entry["files"].items():
            # A path can be a pattern, then all that it fits go into the folder `to`, and have one hash together.
            names = sorted(fnmatch.filter(tar.getnames(), f"package/{file['path']}"))
            assert names, f"{file['path']} is no file of {name}"
            hashed = hashlib.sha256()
            for each in names:
                member = tar.extractfile(each)
                assert member is not None, f"{each} is no file of {name}"
                found = member.read()
                hashed.update(found)
                place = FOLDER / to / Path(each).name if "*" in file["path"] else FOLDER / to
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(found)
            sha256 = hashed.hexdigest()
            if file["sha256"] not in ("", sha256):
                sys.exit(f"{name} {version}: the SHA-256 of {file['path']} is {sha256}, and not {file['sha256']}")
            file["sha256"] = sha256
    entry["licence"] = said["license"]
    print(f"{name} {version}")


def main() -> None:
    packages = json.loads(LIST.read_text())
    for entry in packages:
        fetch(entry)
    LIST.write_text(json.dumps(packages, indent=2) + "\n")


if __name__ == "__main__":
    main()
