"""The forms of a single tool call: which text stands before its name, between name and arguments, and behind them."""

from __future__ import annotations

import attrs

ID, COUNT, KIND = "\0", "\1", "\2"
"""Places in a form's texts where the model writes a call's identifier, its number, or the JSON type of a value."""
KINDS = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
"""JSON's types. A schema that allows numbers allows integers."""
_TEXT, _NUMBER = frozenset({"string"}), frozenset({"integer", "number"})


@attrs.frozen
class ObjectForm:
    """A JSON object with the name and the arguments: `{"name": …, "arguments": {…}}`."""

    before: str = '{"name": "'
    """Text before the name, as models of the family write it."""
    after: str = '", "arguments": '
    """Text between the name and the arguments."""
    end: str = "}"
    """Text behind the arguments."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can have special tokens of a vocabulary in them."""
        return ()


@attrs.frozen
class NamedForm:
    """The name, and the arguments as a JSON object behind it: `name[ARGS]{…}`. What stands between two texts is an
    identifier: a model that gives none leaves it out, with the text before it, behind the name.
    """

    before: str
    """Text before the name."""
    after: str
    """Text between the name and the arguments."""
    end: str = ""
    """Text behind the arguments."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can have special tokens of a vocabulary in them."""
        return (self.before, self.after, self.end)


@attrs.frozen
class PairsForm:
    """The name, and each argument between marks of its own: `<function=name><parameter=city>Bern</parameter>`.

    A string stands as it is, or between `quote`s, anything else as JSON.
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
    json_close: str = ""
    """Text between an argument's name and its value where that is no string; empty: the same as for strings."""
    between: str = ""
    """Text between two arguments."""
    quote: str = ""
    """Mark on either side of a string. With it nothing closes a value but what stands behind it, and words that are no
    strings are Python's."""

    @property
    def closes(self) -> dict[str, frozenset[str]]:
        """Texts between an argument's name and its value, each with the JSON types of the values behind it."""
        if KIND in self.key_close:
            kinds = {kind: frozenset({kind}) for kind in sorted(KINDS - _NUMBER)} | {"number": _NUMBER}
            return {self.key_close.replace(KIND, kind): of_kind for kind, of_kind in kinds.items()}
        if self.json_close:
            return {self.key_close: _TEXT, self.json_close: KINDS - _TEXT}
        return {self.key_close: KINDS}

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can have special tokens of a vocabulary in them."""
        return (self.before, self.after, self.key_open, *self.closes, self.value_close, self.end, self.between)


@attrs.frozen
class BracesForm:
    """`call:name{city:<escape>Bern<escape>,days:3}`: braces and brackets as in JSON, keys without quotes, and a mark
    of its own on either side of a string.
    """

    quote: str
    before: str = "call:"

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that can have special tokens of a vocabulary in them."""
        return (self.quote,)


@attrs.frozen
class ElementsForm:
    """The name, and each argument as an element of its own name, as are members of objects; items of lists are elements
    `item`. A mark stands before each tag: `#<city>Bern#</city>`. What is null is left out.
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
        """Texts that can have special tokens of a vocabulary in them."""
        return (self.mark, self.before, self.after, self.end)


Form = ObjectForm | NamedForm | PairsForm | BracesForm | ElementsForm
