"""Grammar of the output of a model with tools: free text until it opens a call, then only that call's form.

So every parsed call has arguments that validate against its tool's schema.

The grammar is a text in llguidance's variant of Lark's notation. A mark that is a special token of the vocabulary has
two spellings: the token, and its text. Both open the same thing, as in the parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from uma.chat.call_rules import answer_rule, braces_call, elements_call, object_call, pairs_call
from uma.chat.families import TO_USER, Family, Thinking
from uma.chat.forms import BracesForm, ElementsForm, NamedForm, ObjectForm, PairsForm
from uma.chat.harmony_grammar import harmony_grammar
from uma.chat.lark import LarkRules, Specials, ids, string
from uma.chat.schema import ANY, Schema, UnservableError, literal, schema_of
from uma.chat.thought import Thought
from uma.json_schema import problem
from uma.types import Tool

_SPACE = r"[\s\x1c-\x1f]*"


def calls_grammar(
    family: Family,
    tools: Sequence[Tool],
    specials: Specials,
    thinking: Thinking | None,
    *,
    must_call: bool,
    is_parallel: bool,
    begins_thinking: bool,
    answer: Schema | None = None,
) -> str:
    """Grammar of an output that can call `tools`; with `must_call`, of thinking and calls only.

    With `answer` the output consists of thinking, and of calls or JSON of that schema; the family's calls must then
    have a mark. Without `is_parallel` the output ends with its first call. `begins_thinking` says that the prompt ended
    with the opening mark; `thinking` is None where there can be none. Raises `schema.UnservableError` for schemas that
    the family's form of calls cannot express.
    """
    _check(tools)
    rules = LarkRules(specials)
    if family.has_channels:
        can_think = thinking is not None
        return harmony_grammar(rules, family, tools, can_think=can_think, must_call=must_call, answer=answer)
    lark = _Lark(rules, family, tools, thinking, is_parallel=is_parallel and not family.is_single)
    is_free = not must_call and answer is None
    rest = lark.thought.rest() if lark.thought and (begins_thinking or is_free) else ""
    body = lark.answer() if is_free else lark.only_calls(begins_thinking=begins_thinking, answer=answer)
    start = f"{rest} {body}" if begins_thinking else body
    if begins_thinking and is_free and lark.thought:
        start = f"{start} | {lark.thought.unfinished()}"
    return rules.grammar(start)


def _check(tools: Sequence[Tool]) -> None:
    for at, tool in enumerate(tools):
        if (found := problem(schema_of(tool))) is not None:
            raise UnservableError(*found, at)


class _Lark:
    """Rules of one grammar, made on first use."""

    def __init__(
        self, rules: LarkRules, family: Family, tools: Sequence[Tool], thinking: Thinking | None, *, is_parallel: bool
    ) -> None:
        self._rules = rules
        self._specials = rules.specials
        self._family = family
        self._tools = tools
        self.thought = Thought(rules, thinking) if thinking is not None else None
        self._is_parallel = is_parallel

    # Calls

    def _call(self) -> str:
        """One call, as the model was trained to write it."""
        if "call" not in self._rules:
            self._rules.add("call", " | ".join(self._tool_call(tool, at) for at, tool in enumerate(self._tools)))
        return "call"

    def _tool_call(self, tool: Tool, at: int) -> str:
        try:
            return self._in_form(tool, at)
        except UnservableError as error:
            raise UnservableError(error.place, error.reason, at) from None

    def _in_form(self, tool: Tool, at: int) -> str:
        form = self._family.form
        if isinstance(form, ObjectForm | NamedForm):
            return object_call(self._rules, form, tool, at)
        if isinstance(form, PairsForm):
            return pairs_call(self._rules, form, tool, at)
        if isinstance(form, ElementsForm):
            return elements_call(self._rules, form, tool, at)
        assert isinstance(form, BracesForm)
        return braces_call(self._rules, form, tool, at)

    def _more(self, between: str) -> str:
        return f"({string(between)} {self._call()})*" if self._is_parallel else ""

    def _calls(self) -> str:
        """Calls behind the opening mark, with the closing mark."""
        family = self._family
        if family.is_list or family.is_block:
            body = f"{string(family.lead)} {self._call()} {self._more(family.separator)} {string(family.trail)}"
        elif family.is_bare and not family.close:
            body = f"{self._call()} {self._more(family.separator)}"
        else:
            body = f"{string(family.lead)} {self._call()} {string(family.trail)}"
        return self._rules.add("calls", f"{body} {self._mark(family.close)}")

    def _marked(self) -> str:
        """Calls with the mark before them, and their header where there is one."""
        family = self._family
        if not family.header:
            return f"{self._mark(family.open)} {self._calls()}"
        ways = (
            f"{self._mark(family.header.format(tool.name) + family.open + family.lead)} {self._tool_call(tool, at)}"
            f" {self._mark(family.trail + family.close)}"
            for at, tool in enumerate(self._tools)
        )
        return self._rules.add("marked", " | ".join(ways))

    def _again(self) -> str:
        """Further calls, each with its marks."""
        family = self._family
        if not self._is_parallel or family.is_list or family.is_block:
            return ""
        return f"({self._mark(family.separator)} {self._marked()})*"

    def only_calls(self, *, begins_thinking: bool, answer: Schema | None) -> str:
        """Thinking, where it is possible, and calls; or an answer instead of calls."""
        family = self._family
        if family.is_bare:
            calls = f"{self._call()} {self._more(family.separator)}"
        else:
            calls = f"{self._calls() if family.to_answer else self._marked()} {self._again()}"
        if answer is not None:
            calls = f"({calls} | {answer_rule(self._rules, answer)})"
        if self.thought is None:
            return calls
        self._rules.add("SPACE", r"/[ \n]+/")
        if begins_thinking:
            return f"SPACE? {calls}"
        return f"({self._mark(self.thought.open)} {self.thought.rest()} SPACE?)? {calls}"

    def _bare(self) -> Iterator[str]:
        """Calls without a mark, with white space and other keys where models write them."""
        for at, tool in enumerate(self._tools):
            args, end = f"args_{at}", string("}")
            for name, opening, close in (("BARE", "", ""), ("LIST", rf"\[{_SPACE}", string("]"))):
                head = self._rules.add(f"{name}_{at}", f"/{_SPACE}{opening}{_named(tool.name)}{_ARGUMENTS_KEY}/")
                yield f"{head} {args} {end} {self._more(', ' if close else self._family.separator)} {close}"

    # Text and thinking

    def answer(self) -> str:
        """A whole answer."""
        free = self.free()
        return self._opened() if self._family.to_answer else free

    def _opened(self) -> str:
        """Text behind the opening mark: calls, or an answer where it has that mark, too."""
        family = self._family
        ends = not self._is_parallel or (family.is_bare and not family.close)
        calls = f"{self._calls()} {'' if ends else self._again() if family.ends_answer else 'free'}"
        return f"({calls} | {string(family.to_answer)} free)" if family.to_answer else calls

    def free(self) -> str:
        """Text, thinking and calls in any order."""
        if "free" in self._rules:
            return "free"
        self._rules.begin("free")
        text = f"{self._text()}?"
        family = self._family
        ways = [text]
        ways += [f"{opened} {self._opened()}" for opened in self._until(family.open, "TO_CALL")]
        for at, mark in enumerate(family.silent):  # (spelled as text, they are part of it)
            ways += [f"{opened} free" for opened in self._until_token(mark, f"TO_SILENT_{at}")]
        if self.thought is not None:
            for opened in self._until(self.thought.open, "TO_THOUGHT"):
                ways += [f"{opened} {self.thought.rest()} free", f"{opened} {self.thought.unfinished()}"]
        if self._specials.others:
            ways.append(f"{text} {ids(self._specials.others)} free")
        if family.is_bare:
            ways += self._bare()
        self._rules.complete("free", " | ".join(ways))
        return "free"

    def _text(self) -> str:
        """Text without any mark, that begins no call."""
        return self._rules.add("TEXT", f"/{ANY}+/ & ~/{ANY}*({self._marks})({ANY})*/{self._not_bare}")

    def _until(self, mark: str, name: str) -> Iterator[str]:
        """Text that ends with the mark, in each of the mark's spellings."""
        once = f"/{ANY}*{literal(mark)}/ & ~/{ANY}*({self._marks}){ANY}+/"
        yield self._rules.add(name, once + self._not_bare)
        yield from self._until_token(mark, name)

    def _until_token(self, mark: str, name: str) -> Iterator[str]:
        """Text that ends with the mark, where the mark contains a special token."""
        if special := self._rules.first_mark(mark):
            # Terminals match as much text as possible, so the mark's text before the special token must be part of one.
            begin, _, _ = mark.partition(special)
            names = "|".join(map(literal, (TO_USER, *(tool.name for tool in self._tools))))
            spelled = f"({names})".join(map(literal, begin.split("{}")))
            inside = f"/{ANY}*{spelled}/ & ~/{ANY}*({self._marks}){ANY}*/{self._not_bare}"
            text = self._rules.add(f"{name}_TOKEN", inside) if begin else f"{self._text()}?"
            yield f"{text} {self._mark(mark.removeprefix(begin))}"

    @property
    def _marks(self) -> str:
        """Regular expression of all opening marks."""
        marks = [self._family.open, *([self.thought.open] if self.thought is not None else [])]
        return "|".join(map(literal, marks))

    @property
    def _not_bare(self) -> str:
        if not self._family.is_bare:
            return ""
        names = "|".join(literal(string(tool.name)) for tool in self._tools)
        return rf" & ~/{_SPACE}(\[{_SPACE})?({_named(names, is_pattern=True)}|{_ARGUMENTS_FIRST}){ANY}*/"

    def _mark(self, mark: str) -> str:
        """A mark as the model was trained to write it: by its special token, where it has one."""
        return self._rules.spelled(mark)


_OTHER_KEYS = rf'("(type|id)"{_SPACE}:{_SPACE}"[^"\\]*"{_SPACE},{_SPACE})*'
_ARGUMENTS_KEY = rf'{_SPACE},{_SPACE}{_OTHER_KEYS}"(arguments|parameters)"{_SPACE}:{_SPACE}'
_ARGUMENTS_FIRST = rf'\{{{_SPACE}{_OTHER_KEYS}"(arguments|parameters)"'


def _named(name: str, *, is_pattern: bool = False) -> str:
    """Regular expression of a call's object up to its name."""
    spelled = name if is_pattern else literal(string(name))
    return rf'\{{{_SPACE}{_OTHER_KEYS}"name"{_SPACE}:{_SPACE}({spelled})'
