"""Which models a name means: one rule for the command line and for whoever asks a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from uma.config import nearest
from uma.errors import UnknownModel

T = TypeVar("T")

HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
"""The names of the Hugging Face hub."""
MOST_NAMED = 20
"""Maximum of names in one message."""


def meant(asked: str, names: Mapping[T, Iterable[str]]) -> list[T]:
    """Of the models with these names those that are called so as it stands, else in other capitals, else those with a
    name that begins so. One alone is meant; of several none is.

    Names count with and without `.gguf`, Ollama's `:latest` and what stands before a `/`, such as `hf.co/`.
    """
    wanted = _plain(asked)

    def called(test: Callable[[str], bool]) -> list[T]:
        return [model for model, every in names.items() if any(test(each) for name in every for each in _ways(name))]

    exact = [model for model, every in names.items() if {asked, asked.removesuffix(".gguf")}.intersection(every)]
    if exact or not wanted:
        return exact
    return called(lambda name: name == wanted) or called(lambda name: name.startswith(wanted))


def one_meant(asked: str, names: Mapping[str, Iterable[str]]) -> str:
    """The key of the one model that is meant. Raises `UnknownModel` for none, or several."""
    found = meant(asked, names)
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownModel(f"model: {asked[:200]!r}: {len(found)} models begin so: {', '.join(found)}")
    near = nearest(asked, names) or f"; there are {', '.join(list(names)[:MOST_NAMED])}"
    raise UnknownModel(f"model: {asked[:200]!r} is not here{near}")


def _ways(name: str) -> Iterator[str]:
    """A name and what is left of it without what stands before a `/`."""
    parts = _plain(name).split("/")
    return ("/".join(parts[at:]) for at in range(len(parts)))


def _plain(name: str) -> str:
    plain = name.casefold().removesuffix(":latest").removesuffix(".gguf")
    return next((plain.removeprefix(f"{host}/") for host in HOSTS if plain.startswith(f"{host}/")), plain)
