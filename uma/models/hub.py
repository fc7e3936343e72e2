"""What a repository of the Hugging Face hub offers: which models, how large, with which checksums.

`huggingface_hub` asks the hub, so that its variables, its token and its mirrors are those of every other program. It is
slow to import, so each function that needs it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import attrs

from uma.errors import ModelError, UmaError, told
from uma.llama import header
from uma.models import projectors
from uma.models.names import HOSTS
from uma.models.places import is_projector, quantization_of
from uma.wrong import nearest

MAIN = "main"
LIST_SEC = 30.0
"""Maximum time without a byte of a repository's list of files."""
PREFERRED = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "MXFP4", "MXFP4_MOE", "Q4_0", "IQ4_NL", "IQ4_XS", "Q5_K_M", "Q5_K_S", "Q5_0"),
    *("Q6_K", "Q8_0", "Q3_K_M", "IQ3_M", "Q2_K", "BF16", "F16", "F32"),
)
"""Quantizations in the order in which one is chosen: what people take, then larger ones, then smaller ones."""

_REFERENCE = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<before>[^:@]+))?(?::(?P<what>[^@:]+))?(?:@(?P<behind>[^:@]+))?"
)

_PATH = re.compile(r"(?P<repository>[^/]+/[^/]+)(?:/(?:resolve|blob|raw|tree)/(?P<revision>[^/]+)(?:/(?P<what>.+))?)?")


@attrs.frozen
class Reference:
    """What is asked for: a repository, and of it a quantization or a file."""

    repository: str
    what: str = ""
    """Empty: one is chosen."""
    revision: str = MAIN


@attrs.frozen
class RemoteFile:
    """A file of a repository."""

    path: str
    size_bytes: int
    sha256: str
    """Checksum of the file, which is its name in the cache."""


@attrs.frozen
class Offer:
    """A model that a repository has: one file, or all parts of a split one."""

    name: str
    files: tuple[RemoteFile, ...]

    @property
    def quantization(self) -> str:
        return quantization_of(self.name)

    @property
    def size_bytes(self) -> int:
        """Size of all parts."""
        return sum(file.size_bytes for file in self.files)

    def beside(self, projector: RemoteFile | None) -> Offer:
        """A copy with a projector, so that neither is seen without the other."""
        return self if projector is None else attrs.evolve(self, files=(*self.files, projector))


@attrs.frozen
class Listing:
    """What a repository offers at one commit."""

    reference: Reference
    commit: str
    offers: tuple[Offer, ...]
    projectors: tuple[RemoteFile, ...] = ()

    def projector_of(self, offer: Offer) -> RemoteFile | None:
        """The projector that a model's files take to see or hear by, in their folder or one above it."""
        folders = PurePosixPath(offer.files[0].path).parents
        near = {
            projector.path: projector
            for projector in self.projectors
            if PurePosixPath(projector.path).parent in folders
        }
        name = projectors.best(offer.files[0].path, near, self.reference.repository)
        return None if name is None else near[name]

    def choose(self) -> Offer:
        """What was asked for, else the first of `PREFERRED` that there is. Raises `ModelError`."""
        asked, repository = self.reference.what, self.reference.repository
        if not self.offers:
            raise ModelError(f"{repository}: has no GGUF file of a model; look for a repository that ends in -GGUF")
        wanted = asked.casefold().removesuffix(".gguf")
        chosen = [offer for offer in self.offers if wanted in _names(offer)] if asked else self._preferred()
        if len(chosen) == 1:
            return chosen[0]
        known = sorted({offer.quantization or offer.name for offer in chosen or self.offers})
        if not chosen:
            hint = nearest(asked, known) or f"; it has {', '.join(known)}"
            raise ModelError(f"{repository}: has no {asked}{hint}")
        names = ", ".join(offer.name for offer in chosen)
        raise ModelError(
            f"{repository}: {len(chosen)} models of it are {asked or 'as good'}: {names}; name one of them"
        )

    def _preferred(self) -> list[Offer]:
        for quantization in PREFERRED:
            if found := [offer for offer in self.offers if offer.quantization == quantization]:
                return found
        return list(self.offers[:1])


def _names(offer: Offer) -> set[str]:
    names = {offer.quantization, offer.name, offer.name.rpartition("/")[2], *(file.path for file in offer.files)}
    return {name.casefold().removesuffix(".gguf") for name in names}


def parse(text: str, environ: Mapping[str, str]) -> Reference:
    """`OWNER/NAME[@REVISION][:QUANTIZATION or file]`, with or without `hf.co/`, or a URL of the hub's.

    Raises `ModelError` for anything else.
    """
    endpoint = endpoint_of(environ)
    ours = [*(f"https://{host}" for host in HOSTS), *([endpoint] if endpoint else [])]
    base = next((our for our in ours if text.startswith(f"{our}/")), None)
    if base is not None:
        match = _PATH.fullmatch(unquote(urlsplit(text[len(base) :]).path).strip("/"))
        groups = match.groupdict() if match else {}
        found = Reference(groups.get("repository") or "", groups.get("what") or "", groups.get("revision") or MAIN)
    else:
        host = next((f"{name}/" for name in HOSTS if text.startswith(f"{name}/")), "")
        match = _REFERENCE.fullmatch(text.removeprefix(host))
        groups = match.groupdict() if match else {}
        revision = groups.get("before") or groups.get("behind") or MAIN
        found = Reference(groups.get("repository") or "", groups.get("what") or "", revision)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", found.repository) or not is_inside(found.revision):
        hub = endpoint or ours[0]
        raise ModelError(
            f"{text}: is no repository of the hub; name it as OWNER/NAME, such as Qwen/Qwen3-1.7B-GGUF, as "
            f"OWNER/NAME:Q4_K_M, or by a URL of {hub}"
        )
    return found


def endpoint_of(environ: Mapping[str, str]) -> str | None:
    """The hub, or the mirror, that the user has named; None: the usual one."""
    return environ.get("HF_ENDPOINT", "").rstrip("/") or None


def is_inside(path: str) -> bool:
    """Whether a path that the hub or a user gives stays below the folder that it is meant from."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\\" not in path and "\0" not in path


def listing(reference: Reference, endpoint: str | None) -> Listing:
    """What the repository has. Raises `ModelError` where there is none, `UmaError` where the hub does not tell."""
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.utils import get_session, hf_raise_for_status  # noqa: PLC0415
    from huggingface_hub.utils import validate_repo_id as check_name  # noqa: PLC0415

    # Read here and not by `HfApi`, which takes no answer of a mirror that lacks a field, needed or not.
    with explained(reference, endpoint):
        check_name(reference.repository)
        url = f"{endpoint or constants.ENDPOINT}/api/models/{reference.repository}/revision"
        url = f"{url}/{quote(reference.revision, safe='')}?blobs=true"
        response = get_session().get(url, headers=headers(), timeout=LIST_SEC)
        hf_raise_for_status(response)
    try:
        info = response.json()
        entries = [entry for entry in info.get("siblings") or () if str(entry["rfilename"]).endswith(".gguf")]
        commit, files = str(info["sha"]), [_file_of(entry) for entry in entries]
    except (ValueError, LookupError, TypeError, AttributeError):
        commit, files = "", []
    keys = [commit, *(file.sha256 for file in files)]
    if not all(re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", key) for key in keys):
        raise UmaError(f"{reference.repository}: the hub's answer has no checksums; look at HF_ENDPOINT")
    return Listing(reference, commit, tuple(_offers(files)), tuple(filter(_is_projector, files)))


def headers() -> dict[str, str]:
    """Headers of a request to the hub. With its telemetry `huggingface_hub` would also ask the hub how to recognise
    coding agents, and tell it by which one, and with which torch, this program was called.
    """
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # noqa: PLC0415

    constants.HF_HUB_DISABLE_TELEMETRY = True
    return dict(build_hf_headers(library_name="uma"))


def _file_of(entry: Mapping[str, Any]) -> RemoteFile:
    lfs = entry.get("lfs") or {}
    return RemoteFile(str(entry["rfilename"]), int(lfs.get("size") or 0), str(lfs.get("sha256")))


def _offers(files: list[RemoteFile]) -> Iterator[Offer]:
    """Models by name. Projectors and importance matrices are none; nor are parts whose others are missing."""
    found: dict[str, list[RemoteFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        path = Path(file.path)
        is_model = path.suffix == ".gguf" and not is_projector(path.name) and "imatrix" not in path.name
        if is_model and is_inside(file.path):
            found.setdefault(path.with_name(header.model_stem(path)).as_posix(), []).append(file)
    for name, parts in found.items():
        match = re.search(r"-of-(\d{5})\.gguf$", parts[0].path)
        if len(parts) == (int(match[1]) if match else 1):
            yield Offer(name, tuple(parts))


def _is_projector(file: RemoteFile) -> bool:
    path = PurePosixPath(file.path)
    return path.suffix == ".gguf" and is_projector(path.name) and is_inside(file.path)


@contextmanager
def explained(reference: Reference, endpoint: str | None, kept: str = "") -> Iterator[None]:
    """Turns what `huggingface_hub` raises into one sentence that says what to do, and what is `kept`."""
    from huggingface_hub import errors  # noqa: PLC0415

    hub, repository = endpoint or f"https://{HOSTS[0]}", reference.repository
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise UmaError(f"{repository}: HF_HUB_OFFLINE is set; unset it to pull") from None
    except errors.GatedRepoError:
        raise UmaError(
            f"{repository}: is gated; accept its terms at {hub}/{repository}, and set HF_TOKEN to a token of yours"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repository}: has no revision {reference.revision}; leave it out for {MAIN}") from None
    except errors.HFValidationError:
        raise ModelError(f"{repository}: is no name that a repository can have; look at it on {hub}") from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        if code in (401, 404):
            raise ModelError(
                f"{repository}: there is none at {hub}, or it is private; look at the name, or set HF_TOKEN to one "
                "that may read it"
            ) from None
        advice = "set HF_TOKEN to one that may read it" if code == 403 else "try again later"
        raise UmaError(f"{repository}: {hub} answers {code}; {advice}") from None
    except (transport_error(), ConnectionError, TimeoutError) as error:
        raise UmaError(
            f"{hub}: cannot be reached: {told(error)}; look at the network, and at HF_ENDPOINT and HTTPS_PROXY{kept}"
        ) from None


def transport_error() -> type[Exception]:
    """What the HTTP library of `huggingface_hub` raises: httpx under version 1, httpx2 under version 2."""
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    found: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    return found
