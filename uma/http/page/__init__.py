"""The page in the browser: a chat and a live view of the engine, from its own files alone."""

from uma.http.page.endpoints import Page, is_file

__all__ = ["Page", "is_file"]
