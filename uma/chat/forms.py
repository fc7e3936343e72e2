"""Forms of a single tool call: the texts before its name, between name and arguments, and behind them."""

from __future__ import annotations

import attrs

ID, COUNT, KIND = "\0", "\1", "\2"
"""Placeholders in a form's texts for a call's identifier, its number, the JSON type of a value."""
KINDS = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
"""JSON's types. A schema that allows numbers allows integers."""
_TEXT, _NUMBER = frozenset({"string"}), frozenset({"integer", "number"})


@attrs.frozen
class ObjectForm:
    """A JSON object with name and arguments: `{"name": …, "arguments": {…}}`."""

    before: str = '{"name": "'
    """Text before the name."""
    after: str = '", "arguments": '
    """Text between the name and the arguments."""
    end: str = "}"
    """Text behind the arguments."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can contain special tokens of a vocabulary."""
        return ()


@attrs.frozen
class NamedForm:
    """The name, followed by the arguments as a JSON object: `name[ARGS]{…}`. Where an identifier stands behind the
    name, a model that writes none also leaves out the text before it.
    """

    before: str
    """Text before the name."""
    after: str
    """Text between the name and the arguments."""
    end: str = ""
    """Text behind the arguments."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can contain special tokens of a vocabulary."""
        return (self.before, self.after, self.end)


@attrs.frozen
class PairsForm:
    """The name, and marks around each argument: `<function=name><parameter=city>Bern</parameter>`.

    A string is written as it is, or between `quote`s, any other value as JSON.
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
    """Text on both sides of a value that is not part of it."""
    trail: str
    """Text behind an argument."""
    end: str
    """Text behind the last argument."""
    json_close: str = ""
    """Text between an argument's name and a value that is not a string; empty: the same as for strings."""
    between: str = ""
    """Text between two arguments."""
    quote: str = ""
    """Quote around strings. If set, a value ends where the text behind it begins, and `True`, `False` and `None` are
    Python's."""

    @property
    def closes(self) -> dict[str, frozenset[str]]:
        """Texts between an argument's name and its value, with the JSON types of values behind each."""
        if KIND in self.key_close:
            kinds = {kind: frozenset({kind}) for kind in sorted(KINDS - _NUMBER)} | {"number": _NUMBER}
            return {self.key_close.replace(KIND, kind): of_kind for kind, of_kind in kinds.items()}
        if self.json_close:
            return {self.key_close: _TEXT, self.json_close: KINDS - _TEXT}
        return {self.key_close: KINDS}

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can contain special tokens of a vocabulary."""
        return (self.before, self.after, self.key_open, *self.closes, self.value_close, self.end, self.between)


@attrs.frozen
class BracesForm:
    """`call:name{city:<escape>Bern<escape>,days:3}`: braces and brackets as in JSON, keys without quotes, and the
    model's own quotes around strings.
    """

    quote: str
    before: str = "call:"

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can contain special tokens of a vocabulary."""
        return (self.quote,)


@attrs.frozen
class ElementsForm:
    """The name, and an element for each argument and each member of an object, named by its key. Items of lists are
    elements `item`. A mark stands before each tag: `#<city>Bern#</city>`. Null values are left out.
    """

    mark: str
    before: str
    """Text before the name."""
    after: str
    """Text between the name and the first argument."""
    end: str
    """Text behind the last argument."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can contain special tokens of a vocabulary."""
        return (self.mark, self.before, self.after, self.end)


Form = ObjectForm | NamedForm | PairsForm | BracesForm | ElementsForm
