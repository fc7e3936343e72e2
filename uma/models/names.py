"""Which models a name means: one rule for the command line and for whoever asks a server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import TypeVar

from uma.errors import UnknownModel

T = TypeVar("T")

HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
"""The names of the Hugging Face hub."""
MAX_NAMED = 20
"""Maximum of names in one message."""
MAX_SHOWN = 200
"""Maximum of characters of a name that was asked for in a message."""
MAX_WAYS = 8_192
"""Maximum of names whose plain spellings are known: more than a server's models have together."""
NEAR = 0.6
"""Likeness (`difflib`) from which a name is near."""
NEAR_BEGINNING = 0.75
"""Likeness from which a name's beginning is near: short ones are alike by chance."""


def meant(asked: str, names: Mapping[T, Iterable[str]]) -> list[T]:
    """Models with these names that are called so as it stands, else in other capitals, else those with a
    name that begins so. One alone is meant; of several none is.

    Names count with and without `.gguf`, Ollama's `:latest` and what stands before a `/`, such as `hf.co/`.
    """
    wanted = _plain(asked)

    def called(test: Callable[[str], bool]) -> list[T]:
        return [model for model, every in names.items() if any(test(way) for name in every for way in _ways(name))]

    exact = [model for model, every in names.items() if {asked, asked.removesuffix(".gguf")}.intersection(every)]
    if exact or not wanted:
        return exact
    return called(lambda name: name == wanted) or called(lambda name: name.startswith(wanted))


def adapter_in(asked: str, adapters: Collection[str]) -> str | None:
    """The adapter that `model+NAME` asks for; None where no adapter is called so."""
    _, plus, wanted = asked.rpartition("+")
    return next((name for name in adapters if plus and name.casefold() == wanted.casefold()), None)


def with_each(name: str, adapters: Iterable[str]) -> list[str]:
    """Names of a model with each of its adapters."""
    return [f"{name}+{adapter}" for adapter in adapters]


def with_adapter(name: str, asked: str | None, adapters: Collection[str]) -> str:
    """The model of this name with the adapter that is asked for, if there is one."""
    adapter = None if asked is None else adapter_in(asked, adapters)
    return name if adapter is None else with_each(name, [adapter])[0]


def without_adapter(asked: str, adapters: Collection[str]) -> str:
    """The model that is asked for with or without one of its adapters."""
    return asked if adapter_in(asked, adapters) is None else asked.rpartition("+")[0]


def one_meant(
    asked: str, names: Mapping[str, Iterable[str]], adapters: Mapping[str, Collection[str]] | None = None
) -> str:
    """The key of the one model that is meant, with or without one of its `adapters`. Raises `UnknownModel` for none, or
    several.
    """
    found = meant(asked, names)
    if not found and (adapted := {name for name, own in (adapters or {}).items() if adapter_in(asked, own)}):
        found = meant(asked.rpartition("+")[0], {name: names[name] for name in adapted})
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownModel(f"model: {asked[:MAX_SHOWN]!r}: {several_words(found)}")
    near = nearest_model(asked, tuple(dict.fromkeys((*names, *(name for every in names.values() for name in every)))))
    there = near or f"; there are {', '.join(islice(names, MAX_NAMED))}"
    raise UnknownModel(f"model: {asked[:MAX_SHOWN]!r}: {NONE_HERE}{there}")


def check_alone(asked: str, name: str, others: Iterable[str], adapters: Collection[str]) -> None:
    """Raise `UnknownModel` where this does not mean the one model that is here, with or without an adapter."""
    if not meant(without_adapter(asked, adapters), {name: (name, *others)}):
        *more, last = map(repr, (name, *with_each(name, adapters)))
        there = f"{', '.join(more[:MAX_NAMED])} and {last} are" if more else f"{last} is"
        raise UnknownModel.at("model", f"{asked[:MAX_SHOWN]!r} is not loaded here; {there}")


NONE_HERE = "model not found"
"""What is said of a name that means none; behind it comes what to name instead."""


def several_words(found: Collection[str]) -> str:
    """What is said of a name that means several."""
    return f"{len(found)} models have this name or begin so: {', '.join(found)}"


@lru_cache(maxsize=64)
def nearest_model(asked: str, names: tuple[str, ...]) -> str:
    """`; did you mean X?`, or nothing where no name is near. A name is near by its beginning, too, since that is enough
    to name a model by, and in any capitals. Kept, since a server looks for a name before and after it has looked at
    its folders.
    """
    wanted = _plain(asked[:MAX_SHOWN])
    whole, begun = dict[str, str](), dict[str, str]()
    for name in names:
        for way in _ways(name):
            whole.setdefault(way, name)
            for length in range(len(wanted) - 1, len(wanted) + 2):  # a letter more or less
                begun.setdefault(way[:length], name)
    for known, cutoff in ((whole, NEAR), (begun, NEAR_BEGINNING)):
        if (close := _closest(wanted, known, cutoff)) is not None:
            return f"; did you mean {known[close]}?"
    return ""


def _closest(wanted: str, known: Collection[str], cutoff: float) -> str | None:
    """The name of `known` that is most like `wanted`, with at least this likeness.

    difflib takes 20 us for each, on a server's Trio thread for each request that names no model: 5 ms for 120 models.
    So it sees those alone that have enough of the letters.
    """
    from difflib import get_close_matches  # noqa: PLC0415  (only a typo needs it)

    likely = [name for name in known if 2 * sum(map(name.__contains__, wanted)) >= cutoff * (len(wanted) + len(name))]
    return next(iter(get_close_matches(wanted, likely, n=1, cutoff=cutoff)), None)


@lru_cache(maxsize=MAX_WAYS)
def _ways(name: str) -> tuple[str, ...]:
    """A name and what is left of it without what stands before a `/`."""
    parts = _plain(name).split("/")
    return tuple("/".join(parts[at:]) for at in range(len(parts)))


def _plain(name: str) -> str:
    plain = name.casefold().removesuffix(":latest").removesuffix(".gguf")
    return next((plain.removeprefix(f"{host}/") for host in HOSTS if plain.startswith(f"{host}/")), plain)
