"""A model from the hub into the Hugging Face cache: resumed where it was cut, checked, and seen only when it is whole.

`huggingface_hub` deletes what a broken download has left, and checks no checksum over plain HTTP, so the files' bytes
are fetched here, by its session and into its layout: `blobs/` has the files by their checksums, `snapshots/` links to
them by their names. Links are made once all parts of a model are there, that of the first part last.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import attrs

from uma.errors import UmaError
from uma.models.hub import MAIN, Listing, Offer, RemoteFile, explained, transport_error
from uma.models.hub import headers as hub_headers

RETRY_SEC = (0.0, 1.0, 2.0, 4.0)
"""Waits before further tries that follow each other without a byte between them; behind the last it is given up."""
READ_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing to a full disk, over a quota or over a limit ends with."""


@attrs.frozen
class Pull:
    """One download. `on_progress` gets the bytes of all that are here and checked, at first and at each change; what it
    raises ends the download.
    """

    listing: Listing
    offer: Offer
    cache: Path
    endpoint: str | None
    on_progress: Callable[[int], None]

    def run(self) -> Path:
        """Fetch what is missing; the file to load. Raises `UmaError`; what was loaded is then kept, except for a file
        with a wrong checksum.
        """
        self._check_room(self.offer.size_bytes - sum(map(self._here, self.offer.files)))
        missing = [wanted for wanted in self.offer.files if not self._blob(wanted).is_file()]
        done = self.offer.size_bytes - sum(wanted.size_bytes for wanted in missing)
        self.on_progress(done)
        try:
            for file in missing:
                self._fetch(file, done)
                done += file.size_bytes
            return self._link()
        except OSError as error:
            if error.errno in FULL:
                raise self._full(f"{os.strerror(error.errno or 0).lower()}; what was loaded is kept") from None
            raise

    @property
    def is_done(self) -> bool:
        """Whether all files are here."""
        return all(self._blob(file).is_file() for file in self.offer.files)

    @property
    def _folder(self) -> Path:
        return self.cache / f"models--{self.listing.reference.repository.replace('/', '--')}"

    def _blob(self, file: RemoteFile) -> Path:
        return self._folder / "blobs" / file.sha256

    def _partial(self, file: RemoteFile) -> Path:
        blob = self._blob(file)
        return blob.with_name(f"{blob.name}.incomplete")

    def _here(self, file: RemoteFile) -> int:
        """Bytes of the file that need not be fetched."""
        if self._blob(file).is_file():
            return file.size_bytes
        partial = self._partial(file)
        return min(partial.stat().st_size, file.size_bytes) if partial.is_file() else 0

    def _check_room(self, needed: int) -> None:
        folder = next(parent for parent in (self._folder, *self._folder.parents) if parent.exists())
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise self._full(f"{needed:,} bytes are to be loaded and {free:,} are free")

    def _full(self, what: str) -> UmaError:
        return UmaError(f"{self.cache}: has no room for {self.offer.name}: {what}. Make room, or set HF_HOME")

    def _fetch(self, file: RemoteFile, before: int) -> None:
        """Fetch one file, with `before` bytes of others here already."""
        from filelock import Timeout  # noqa: PLC0415
        from huggingface_hub.utils import WeakFileLock  # noqa: PLC0415

        blob, partial = self._blob(file), self._partial(file)
        lock = self.cache / ".locks" / self._folder.name / f"{file.sha256}.lock"
        for path in (blob, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with WeakFileLock(lock, timeout=1):
                if blob.is_file():
                    return
                with partial.open("ab+", buffering=0) as out:
                    checksum = self._load(file, out, before)
                if checksum != file.sha256:
                    partial.unlink()
                    raise UmaError(
                        f"{file.path}: came with a wrong checksum ({checksum[:12]}…, not {file.sha256[:12]}…) and was "
                        "deleted; pull it again"
                    )
                partial.replace(blob)
        except Timeout:
            raise UmaError(f"{file.path}: another program is loading it; try again when that has ended") from None

    def _load(self, file: RemoteFile, out: IO[bytes], before: int) -> str:
        """Write what is missing of a file; the checksum of all of it."""
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

        have, hashed = 0, sha256()
        if os.fstat(out.fileno()).st_size > file.size_bytes:
            out.truncate(0)
        out.seek(0)
        while block := out.read(READ_BYTES):
            hashed.update(block)
            have += len(block)
            self.on_progress(before + have)
        n_failed = 0
        with explained(self.listing.reference, self.endpoint, ". What was loaded is kept"):
            while have < file.size_bytes:
                at = have
                failure: Exception | None = None
                try:
                    with self._stream(file, have) as response:
                        if have and response.status_code != HTTPStatus.PARTIAL_CONTENT:
                            out.truncate(0)
                            have, hashed = 0, sha256()
                        for chunk in response.iter_raw():
                            _write(out, chunk)
                            hashed.update(chunk)
                            have += len(chunk)
                            self.on_progress(before + have)
                except HfHubHTTPError as error:
                    if error.response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
                        raise
                    failure = error
                except (transport_error(), ConnectionError) as error:
                    failure = error
                n_failed = 0 if have > at else n_failed + 1
                if n_failed == len(RETRY_SEC):
                    raise failure or UmaError(f"{file.path}: the hub sends {have:,} bytes and no more; try again")
                time.sleep(RETRY_SEC[n_failed])
        return hashed.hexdigest()

    @contextmanager
    def _stream(self, file: RemoteFile, start: int) -> Iterator[Any]:
        from huggingface_hub import constants, hf_hub_url  # noqa: PLC0415
        from huggingface_hub.utils import get_session, hf_raise_for_status  # noqa: PLC0415

        reference = self.listing.reference
        url = hf_hub_url(reference.repository, file.path, revision=self.listing.commit, endpoint=self.endpoint)
        # Compressed bytes could not be counted.
        headers = {**hub_headers(), "Accept-Encoding": "identity", "Range": f"bytes={start}-"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            hf_raise_for_status(response)
            yield response

    def _link(self) -> Path:
        """Make the files seen by their names, and the revision known; the first part's link."""
        snapshot = self._folder / "snapshots" / self.listing.commit
        for file in reversed(self.offer.files):
            link = snapshot / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.unlink(missing_ok=True)  # one that leads nowhere
                link.symlink_to(os.path.relpath(self._blob(file), link.parent))
        revision = self.listing.reference.revision
        if revision != self.listing.commit:
            ref = self._folder / "refs" / (revision or MAIN)
            ref.parent.mkdir(parents=True, exist_ok=True)
            new = ref.with_name(f"{ref.name}.{os.getpid()}")
            new.write_text(self.listing.commit)
            new.replace(ref)
        return snapshot / self.offer.files[0].path


def _write(out: IO[bytes], chunk: bytes) -> None:
    """Write all of it: without a buffer, a file that meets a full disk takes a part."""
    view = memoryview(chunk)
    while view:
        view = view[out.write(view) :]
