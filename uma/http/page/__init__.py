"""The page in the browser: a chat and a live view of the engine, served with the files in `static/` and nothing else."""

from uma.http.page.endpoints import Page

__all__ = ["Page"]
