"""Base class for context managers that call `close`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Closes itself at the end of its `with` block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Free its resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
