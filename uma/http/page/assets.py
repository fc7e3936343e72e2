"""The page's own files, read once when the server starts, and the headers that keep the page what it is.

Only these few names can be asked for, so no path leads anywhere else.
"""

from __future__ import annotations

import hashlib
from html import escape
from importlib.resources import files

import attrs

Header = tuple[bytes, bytes]

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",  # a conversation's own pictures
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # HTML is made of text by the sanitizer alone, scripts of vendor/'s files alone: no other policy can be made.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify vendor",
    )
)

SECURITY: list[Header] = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]

HTML = b"text/html; charset=utf-8"
_MEDIA_TYPES = {
    "html": HTML,
    "js": b"text/javascript; charset=utf-8",
    "mjs": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
    "woff2": b"font/woff2",
    "bcmap": b"application/octet-stream",
    "txt": b"text/plain; charset=utf-8",
}


@attrs.frozen
class Asset:
    """One file, ready to be sent."""

    data: bytes
    media_type: bytes
    etag: bytes

    @property
    def headers(self) -> list[Header]:
        """All but the media type. Browsers keep the file, and ask each time whether it is still this one."""
        return [(b"etag", self.etag), (b"cache-control", b"no-cache"), *SECURITY]


def load() -> dict[str, Asset]:
    """All files of `static/`, by name; those of its libraries with their folder's name before it."""
    found: dict[str, Asset] = {}
    static = files(__package__).joinpath("static")
    for prefix in ("", "vendor/", "vendor/cmaps/"):
        for entry in static.joinpath(prefix).iterdir():
            media_type = _MEDIA_TYPES.get(entry.name.rpartition(".")[2])
            if media_type is not None:
                data = entry.read_bytes()
                etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'.encode()
                found[prefix + entry.name] = Asset(data, media_type, etag)
    return found


def refusal(why: str) -> bytes:
    """A page for a person whose browser is not let in, as by a name that is none of this server's. It has no styles:
    their files would be refused too.
    """
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
    return f"{head}<title>UMA</title><h1>UMA does not show its page here</h1><p>{escape(why)}</p></html>".encode()
