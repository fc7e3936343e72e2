"""The model that is taken where none is named: the one that `uma run` would have for a request that names none."""

from __future__ import annotations

import os

import attrs

from uma.config import ALL_MODELS, BUILTIN, Loaded, settings
from uma.errors import ConfigError

ABOUT_ONE = ("models", "alias", "mmproj", "lora", "draft", "protocol")
"""Settings that say which models are served, or that there is one."""


@attrs.frozen
class Taken:
    """A model that nobody has named."""

    name: str
    """What `uma models` calls it."""
    setting: str
    """What the setting `model` is for it: its file, or `BUILTIN`."""


def check_folder() -> None:
    """Raise `ConfigError` where the folder that `UMA_MODELS` names cannot be read: its models would be missing in
    silence.
    """
    from uma.models import places  # noqa: PLC0415  (slow to import, and not needed with a server)

    if problem := places.folder_problem(os.environ):
        raise ConfigError(problem)


def with_all(loaded: Loaded) -> Loaded:
    """The settings, with all models that are here where none was chosen, and there is one beside the built-in one."""
    from uma.models import places  # noqa: PLC0415  (slow to import, and not needed with a server)

    known = settings()
    is_chosen = any(getattr(loaded.config, name) != known[name].default for name in ABOUT_ONE)
    if is_chosen or loaded.origins["model"] != "default" or not places.find(os.environ):
        return loaded
    return attrs.evolve(loaded, config=attrs.evolve(loaded.config, models=ALL_MODELS))


def default_model(loaded: Loaded) -> Taken:
    """The model of these settings, which name none: the first of those that they serve, with `ALL_MODELS` the first
    that generates and fits, and the built-in one where there is no other.

    Reads headers. Raises `ModelError` where one that the settings serve is not here.
    """
    config = with_all(loaded).config
    if not config.models:
        return Taken(BUILTIN, BUILTIN)
    # Slow to import, and not needed with a server.
    from uma.supervisor import shelf_of  # noqa: PLC0415

    shelf = shelf_of(config, loaded.models)
    shelf.read()
    first = shelf.files[0]
    return Taken(first.name, BUILTIN if first.name == BUILTIN else str(first.path))


def with_default(loaded: Loaded) -> Loaded:
    """Settings with the model of `default_model` where they name none."""
    if loaded.origins["model"] != "default":
        return loaded
    return attrs.evolve(loaded, config=attrs.evolve(loaded.config, model=default_model(loaded).setting))
