"""A hub on 127.0.0.1 that speaks the part of the Hugging Face hub's API that downloads use, and fails as it is told.

with running_hub({"owner/name": {"model-Q4_K_M.gguf": data}}) as hub:
    hub.cuts = [1_000, 5_000]     # the first answer ends after 1,000 bytes, the second after 5,000
    ... HF_ENDPOINT=hub.url ...
    hub.sent                      # bytes of files sent, of all answers
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import attrs

COMMIT = "c" * 40
TOKEN = "hf_secret"

Repository = Mapping[str, bytes]


@attrs.define
class Hub:
    """What the hub has, how it fails, and what it was asked."""

    repositories: Mapping[str, Repository]
    url: str = ""
    cuts: list[int] = attrs.field(factory=list)
    """Bytes after which the next answers with a file's bytes are cut."""
    gated: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    spoiled: bool = False
    """The bytes are not those of the checksum."""
    claims: int | None = None
    """A size that is told of every file, instead of its own."""
    ignores_range: bool = False
    is_terse: bool = False
    """The list of files has what is needed alone."""
    goes_on: threading.Event = attrs.field(factory=threading.Event)
    """Cleared, the half of a file is sent, and nothing more until it is set."""
    failing: int | None = None
    """A status that every request for a file is answered with."""
    sent: int = 0
    ranges: list[int] = attrs.field(factory=list)
    """First byte of each answer."""
    asked: list[str] = attrs.field(factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.asked.append(path)
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        is_known = self.headers.get("authorization") == f"Bearer {TOKEN}"
        files = self.hub.repositories.get(name)
        if files is None or (name in self.hub.private and not is_known):
            self._refuse(401, "", "Repository not found")
        elif is_api and len(parts) > 5 and parts[5] not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound", "no such revision")
        elif is_api:
            self._json({"id": name, "sha": COMMIT, "siblings": [self._sibling(*each) for each in files.items()]})
        elif name in self.hub.gated and not is_known:
            self._refuse(403 if "authorization" in self.headers else 401, "GatedRepo", "gated")
        elif self.hub.failing is not None:
            self._refuse(self.hub.failing, "", "failing")
        else:
            self._file(files["/".join(parts[4:])])

    def _sibling(self, name: str, data: bytes) -> dict[str, Any]:
        size = self.hub.claims or len(data)
        lfs = {"size": size, "sha256": sha256(data).hexdigest()}
        if self.hub.is_terse:
            return {"rfilename": name, "lfs": lfs}
        lfs["pointerSize"] = 134
        return {"rfilename": name, "size": size, "blobId": "e" * 40, "lfs": lfs}

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._json({"error": message}, status, {"X-Error-Code": code} if code else {})

    def _json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for each in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(*each)
        self.end_headers()
        self.wfile.write(body)

    def _file(self, data: bytes) -> None:
        wanted = self.headers.get("Range", "bytes=0-")
        start = 0 if self.hub.ignores_range else int(wanted.removeprefix("bytes=").removesuffix("-"))
        self.hub.ranges.append(start)
        body = bytes(len(data)) if self.hub.spoiled else data
        body = body[start:]
        self.send_response(200 if self.hub.ignores_range else 206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{sha256(data).hexdigest()}"')
        self.send_header("X-Linked-Etag", f'"{sha256(data).hexdigest()}"')
        if not self.hub.ignores_range:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.hub.cuts:
            body = body[: self.hub.cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(body[: len(body) // 2])
        self.hub.goes_on.wait()
        self.wfile.write(body[len(body) // 2 :])
        self.hub.sent += len(body)


@contextmanager
def running_hub(repositories: Mapping[str, Repository]) -> Iterator[Hub]:
    """A hub that runs until the block's end."""
    hub = Hub(repositories)
    hub.goes_on.set()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
