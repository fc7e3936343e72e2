"""The forms of a single tool call: which text stands before its name, between name and arguments, and behind them."""

from __future__ import annotations

from collections.abc import Iterator

import attrs


@attrs.frozen
class ObjectForm:
    """A JSON object with the name and the arguments: `{"name": …, "arguments": {…}}`."""

    key: str = "arguments"
    """The arguments' key, as models of the family write it."""

    @property
    def marks(self) -> Iterator[str]:
        """Texts that can be special tokens of a vocabulary."""
        return iter(())


@attrs.frozen
class NamedForm:
    """The name, and the arguments as a JSON object behind it: `name[ARGS]{…}`."""

    before: str
    """Text before the name."""
    after: str
    """Text between the name and the arguments."""
    end: str = ""
    """Text behind the arguments."""
    id_mark: str = ""
    """Text behind the name, and before an identifier that the model gives the call; empty where it gives none."""
    special: tuple[str, ...] = ()
    """The parts of these texts that can be special tokens."""

    @property
    def marks(self) -> Iterator[str]:
        """Texts that can be special tokens of a vocabulary."""
        return iter(self.special)


@attrs.frozen
class PairsForm:
    """The name, and each argument between marks of its own: `<function=name><parameter=city>Bern</parameter>`.

    A string stands as it is, anything else as JSON.
    """

    before: str
    """Text before the name."""
    after: str
    """Text between the name and the first argument."""
    key_open: str
    """Text before an argument's name."""
    key_close: str
    """Text between an argument's name and its value."""
    value_close: str
    """Text behind a value."""
    padding: str
    """Text on either side of a value that is not part of it."""
    trail: str
    """Text behind an argument."""
    end: str
    """Text behind the last argument."""
    special: tuple[str, ...] = ()
    """The parts of these texts that can be special tokens."""

    @property
    def marks(self) -> Iterator[str]:
        """Texts that can be special tokens of a vocabulary."""
        return iter(self.special)


@attrs.frozen
class BracesForm:
    """`call:name{city:<escape>Bern<escape>,days:3}`: braces and brackets as in JSON, keys without quotes, and a mark
    of its own on either side of a string.
    """

    quote: str
    before: str = "call:"

    @property
    def marks(self) -> Iterator[str]:
        """Texts that can be special tokens of a vocabulary."""
        return iter((self.quote,))


Form = ObjectForm | NamedForm | PairsForm | BracesForm
