"""Tools whose schemas no grammar can express in full, and that are not `strict`.

A coding agent sends its tools with every turn, so findings about a schema are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from uma import json_text
from uma.chat.relaxed import relaxed_schema
from uma.chat.schema import schema_of
from uma.types import Request, Tool

MAX_KEPT = 512
"""Maximum schemas whose findings are kept: an agent has up to 128 tools."""

MAX_NAMED = 10
"""Maximum places that a warning names."""


@attrs.frozen
class RelaxedRequest:
    """A request whose tools have schemas that a grammar can express."""

    request: Request
    dropped_keywords: tuple[str, ...] = ()
    """Places that were removed from these schemas, such as `tools[0].parameters.properties.x.not`."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warning about the first of these places."""
        if not self.dropped_keywords:
            return ()
        named, rest = ", ".join(self.dropped_keywords[:MAX_NAMED]), len(self.dropped_keywords) - MAX_NAMED
        more = f" and {rest} more" if rest > 0 else ""
        return (f"{named}{more}: calls are not held to this; no grammar can be made of it",)


class RelaxedTools:
    """Findings about the tools of one model. Belongs to one thread at a time."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[dict[str, Any], list[str]]] = OrderedDict()

    def known(self, request: Request) -> RelaxedRequest:
        """The request with schemas relaxed by known findings."""
        if not self._known or not can_call(request):
            return RelaxedRequest(request)
        return _applied(request, [self._known.get(_key(tool)) for tool in request.tools])

    def found(self, request: Request, fits: Callable[[Tool], bool]) -> RelaxedRequest:
        """The request with relaxed schemas. `fits` tells whether a grammar can express a tool's calls. Any thread."""
        return _applied(request, [self._of(tool, fits) for tool in request.tools])

    def _of(self, tool: Tool, fits: Callable[[Tool], bool]) -> tuple[dict[str, Any], list[str]] | None:
        if tool.strict:
            return None
        key = _key(tool)
        if key not in self._known:
            if fits(tool):
                return None
            self._known[key] = relaxed_schema(
                schema_of(tool), lambda schema: fits(attrs.evolve(tool, parameters=schema))
            )
            if len(self._known) > MAX_KEPT:
                self._known.popitem(last=False)
        return self._known[key]


def can_call(request: Request) -> bool:
    """Whether it has tools that can be called."""
    return bool(request.tools) and request.tool_choice != "none"


def _key(tool: Tool) -> str:
    # The name is also spelled in the grammar.
    return json_text.dumps([tool.name, tool.parameters, tool.strict])


def _applied(request: Request, found: Iterable[tuple[dict[str, Any], list[str]] | None]) -> RelaxedRequest:
    tools, dropped_keywords = list(request.tools), list[str]()
    for at, relaxed in enumerate(found):
        if relaxed is not None:
            schema, places = relaxed
            tools[at] = attrs.evolve(tools[at], parameters=schema)
            dropped_keywords += [f"tools[{at}].parameters{place}" for place in places]
    if not dropped_keywords:
        return RelaxedRequest(request)
    return RelaxedRequest(attrs.evolve(request, tools=tuple(tools)), tuple(dropped_keywords))
