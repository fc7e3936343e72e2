"""What each endpoint of HTTP reads its body as, for tests that go over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from uma.http.app import ENDPOINTS
from uma.http.page.endpoints import ENDPOINTS as PAGE_ENDPOINTS


@attrs.frozen
class NoBody:
    """None is read."""


BODIES: Mapping[str, type[Any]] = {
    path: body or NoBody for method, path, _, body in (*ENDPOINTS, *PAGE_ENDPOINTS) if method == "POST"
}
"""By path."""
