"""A model's files that come and go while a server runs: from the Hugging Face hub, and off the disk."""

from __future__ import annotations

import os

import attrs

from uma.errors import BadRequest, ModelError, UmaError
from uma.models import hub, places
from uma.models.pull import Pull
from uma.models.remove import Removal, removal
from uma.types import Download


@attrs.define(eq=False)
class HubDownload(Download):
    """One download, which its own thread runs; see `types.Download`."""

    reference: hub.Reference
    digest: str = attrs.field(default="", init=False)
    total_bytes: int = attrs.field(default=0, init=False)
    completed_bytes: int = attrs.field(default=0, init=False)
    _is_stopped: bool = attrs.field(default=False, init=False)

    @classmethod
    def of(cls, name: str) -> HubDownload:
        """That of what `uma pull` takes. Raises `BadRequest` for anything else."""
        try:
            return cls(hub.parse(name, os.environ))
        except ModelError as error:
            raise BadRequest.at("model", f"{error.message}") from None

    def run(self) -> None:
        """Fetch it. Raises `UmaError`."""
        cache, endpoint = places.hub_cache(os.environ), hub.endpoint_of(os.environ)
        if cache is None:
            raise UmaError("there is no folder for the Hugging Face cache: name one by HF_HOME")
        listing = hub.listing(self.reference, endpoint)
        offer = listing.choose()
        offer = offer.beside(listing.projector_of(offer))
        self.digest, self.total_bytes = offer.files[0].sha256, offer.size_bytes
        try:
            Pull(listing, offer, cache, endpoint, self._note).run()
        except OSError as error:
            raise UmaError(f"{cache}: cannot be written: {error.strerror}") from error

    def stop(self) -> None:
        self._is_stopped = True

    def _note(self, n_bytes: int) -> None:
        if self._is_stopped:
            raise UmaError("the download was cancelled; what was loaded is kept")
        self.completed_bytes = n_bytes


def removal_of(path: str) -> Removal:
    """What removing the model of this file is. Raises `BadRequest` where it is another program's, or in no folder of
    models.
    """
    found = next((model for model in places.find(os.environ) if str(model.path) == path), None)
    if found is None:
        raise BadRequest.at("model", f"{path} is in no folder of models: `rm` removes it")
    try:
        return removal(found)
    except ModelError as error:
        raise BadRequest.at("model", f"{error.message}") from None


def remove(path: str) -> None:
    """Remove it. Raises as `removal_of`, and `UmaError` where that is not possible."""
    try:
        removal_of(path).run()
    except OSError as error:
        raise UmaError(f"model: {path} cannot be removed: {error.strerror}") from error
