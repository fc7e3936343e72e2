"""What some tests need of the machine: a browser, curl, frameworks, coding agents, llama.cpp's source, real
models.

They are skipped by name where it is missing. `TEST_REQUIRED` names, with commas between, what has to be there:
`agents`, `browser`, `curl`, `clients`, `reference`. Then these tests fail.
"""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from typing import Any, NoReturn

import pytest


def missing(what: str, why: str) -> NoReturn:
    """Skip the test, or fail it where `what` is required; `why` says what is missing and how to get it."""
    if what in os.environ.get("TEST_REQUIRED", "").split(","):
        pytest.fail(f"{why} (TEST_REQUIRED asks for {what})")
    pytest.skip(why)


def required_command(name: str) -> str:
    """The path of the command `name`."""
    found = shutil.which(name)
    return missing(name, f"there is no {name}: apt-get install {name}") if found is None else found


def required_module(name: str) -> Any:
    """A module that the extra `clients` brings."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        missing("clients", f"there is no {name}: pip install '.[clients]'")


def separate_module(name: str, package: str) -> Any:
    """A module that needs another release of what the others need. Nothing requires it."""
    return pytest.importorskip(name, reason=f"there is no {name}: pip install {package}, which needs an older openai")
