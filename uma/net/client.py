"""Which client a task works for, so that what all clients share is given to them in turns."""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar

CLIENT: ContextVar[Hashable] = ContextVar("CLIENT", default=None)
"""A connection, or the account that several connections belong to; None: this very process. Tasks inherit it."""
