"""What one holder of access can use: how much at once, how much a minute, how long, and how urgent its requests are.

Pure: time is passed in. HTTP's keys and the socket's users have the same bounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Literal

import attrs

from uma.constraints import Length, Range
from uma.errors import UnknownModel, WrongValues
from uma.types import Limits, Models, Request, Slo
from uma.wrong import Wrong

Lane = Literal[-1, 0, 1]
"""A priority."""

WINDOW_SEC = 60.0
"""Window of a minute's tokens: the last minute, not from one full minute to the next."""


@attrs.frozen(kw_only=True)
class Bounds:
    """None: no bound of its own beside the server's, and urgency as each request says. Raises `ValueError` where
    `priority` is over `max_priority`.
    """

    max_concurrent: Annotated[int, Range(1)] | None = None
    """Maximum requests that run or wait at once. An HTTP body with several prompts is as many. Also maximum HTTP bodies
    that are sent, read, tokenized or rendered at once."""
    max_tokens_per_minute: Annotated[int, Range(1)] | None = None
    """Prompt and completion tokens, counted at each request's end; a new request is refused while they are over."""
    max_priority: Lane | None = None
    """Highest lane. A request without a priority of its own gets this one where it is lower."""
    max_tokens: Annotated[int, Range(1)] | None = None
    """Maximum tokens that one request can generate, in all its answers. A request that asks for no number gets this
    one, or the server's default where that is less. An HTTP body with several prompts is as many requests."""
    max_reasoning_tokens: Annotated[int, Range(0)] | None = None
    """Maximum tokens that a model thinks in each answer. A request that asks for more, or for no number, gets this one,
    in place of the server's `--reasoning-budget`."""
    priority: Lane | None = None
    """Lane of every request, whatever it asks for."""
    target_ttft_ms: Annotated[float, Range(gt=0)] | None = None
    """Target of every request, whatever it asks for: where it cannot be met, the request is refused."""
    target_tbt_ms: Annotated[float, Range(gt=0)] | None = None
    """Target of every request, whatever it asks for."""
    models: tuple[Annotated[str, Length(1)], ...] | None = None
    """Names of the models that it can use, each as a request would name it; empty: it can use none."""

    def __attrs_post_init__(self) -> None:
        if self.priority is not None and self.max_priority is not None and self.priority > self.max_priority:
            raise WrongValues(Wrong("priority", f"{self.priority} is over max_priority, {self.max_priority}"))


@attrs.frozen
class Excess:
    """A bound that a request is over."""

    message: str
    retry_after_ms: int | None
    """None: waiting does not help."""


@attrs.define(eq=False)
class ClientAccount:
    """The use of one holder's bounds. Belongs to one thread."""

    name: str
    bounds: Bounds = Bounds()
    manages_models: bool = False
    """Whether it can pull, delete and pin models."""
    running: int = attrs.field(default=0, init=False)
    sending: int = attrs.field(default=0, init=False)
    """Requests that are on their way: the bodies of HTTP that are not complete, not parsed or being tokenized."""
    _used: deque[tuple[float, int]] = attrs.field(factory=deque, init=False)
    _used_tokens: int = attrs.field(default=0, init=False)

    @property
    def is_bounded(self) -> bool:
        """Whether it has any bound beside the server's."""
        return self.bounds != Bounds()

    def objection(self, requests: int, now: float) -> Excess | None:
        """Why so many more requests must not run now; None where they are allowed to."""
        most = self.bounds.max_concurrent
        if most is not None and requests > most:
            return Excess(
                f"{self.name} may have {_requests(most)} running (max_concurrent), and this body is {requests}: "
                "one for each prompt; send fewer in one body",
                None,
            )
        if most is not None and self.running + requests > most:
            running = _requests(self.running)
            return Excess(f"{self.name} has {running} running and may have {most} (max_concurrent)", 1000)
        rate = self.bounds.max_tokens_per_minute
        if rate is not None and self._tokens_lately(now) >= rate:
            return Excess(
                f"{self.name} has used {self._used_tokens:,} tokens within a minute and may use {rate:,} "
                "(max_tokens_per_minute)",
                max(1, math.ceil(1000 * (self._free_at(rate) - now))),
            )
        return None

    def _free_at(self, rate: int) -> float:
        """When so few of the tokens are of the last minute that they are below `rate`."""
        left = self._used_tokens
        for at, tokens in self._used:
            left -= tokens
            if left < rate:
                return at + WINDOW_SEC
        raise AssertionError(f"{left} tokens of nobody")

    def fit(self, request: Request, *, has_priority: bool, default_max_tokens: int) -> Request | Excess:
        """The request with what the bounds fix, and what they give it where it says nothing itself, or the bound that
        it is over. `default_max_tokens` is what the server gives a request without a number.
        """
        bounds, sampling = self.bounds, request.sampling
        lane = self.lane(request.priority, has_priority=has_priority)
        if isinstance(lane, Excess):
            return lane
        request = attrs.evolve(request, priority=lane, slo=self._slo(request.slo))
        if (most := bounds.max_reasoning_tokens) is not None:
            thinking = most if sampling.max_reasoning_tokens is None else min(sampling.max_reasoning_tokens, most)
            sampling = attrs.evolve(sampling, max_reasoning_tokens=thinking)
            request = attrs.evolve(request, sampling=sampling)
        if bounds.max_tokens is not None:
            answers = sampling.drawn_answers
            most = bounds.max_tokens // answers
            if (sampling.max_tokens or 1) > most:
                more = f", here {most:,} in each of {answers} answers" if answers > 1 else ""
                return Excess(f"max_tokens: {self.name} may generate {bounds.max_tokens:,} at most{more}", None)
            # The server's own default stays unsaid: it is cut to the context without a warning.
            if sampling.max_tokens is None and most < default_max_tokens:
                request = attrs.evolve(request, sampling=attrs.evolve(sampling, max_tokens=most))
        return request

    def limits(self, server: Limits) -> Limits:
        """The server's limits as they are for this account."""
        bounds = self.bounds
        return attrs.evolve(
            server,
            max_tokens=min(server.max_tokens, bounds.max_tokens or server.max_tokens),
            # With a lane for every request no wish is refused.
            max_priority=1 if bounds.priority is not None or bounds.max_priority is None else bounds.max_priority,
        )

    def lane(self, priority: Lane, *, has_priority: bool) -> Lane | Excess:
        """The lane that the bounds leave a request, or the bound that a lane of its own choice is over."""
        if self.bounds.priority is not None:
            return self.bounds.priority
        most = self.bounds.max_priority
        if most is None or priority <= most:
            return priority
        return Excess(f"priority: {self.name} may use {most} at most", None) if has_priority else most

    def usable(self, models: Models) -> frozenset[str] | None:
        """Names of the models that it can use; None: of all. A bound that means no model, or several, gives none."""
        if self.bounds.models is None:
            return None
        found = set()
        for name in self.bounds.models:
            with suppress(UnknownModel):
                found.add(models.find(name).name)
        return frozenset(found)

    def model(self, asked: str | None, models: Models) -> str | Excess | None:
        """The model of a request that asks for this one, or the bound that it is over. None is the default one; where
        that is not among its own, the first of these.
        """
        if (usable := self.usable(models)) is None:
            return asked
        own = [model.name for model in models.listed() if model.name in usable]
        with suppress(UnknownModel):
            if asked is not None and models.find(asked).name in own:
                return asked
        if asked is None and own:
            return own[0]
        return self.other_model(own)

    def other_model(self, own: Sequence[str]) -> Excess:
        """What a request for another model than its `own` is told."""
        return Excess(f"model: {self.name} may use {', '.join(own) or 'no model that is here'} (models)", None)

    def _slo(self, asked: Slo) -> Slo:
        bounds = self.bounds
        return Slo(bounds.target_ttft_ms or asked.target_ttft_ms, bounds.target_tbt_ms or asked.target_tbt_ms)

    @contextmanager
    def running_now(self, requests: int) -> Iterator[None]:
        """A block in which so many requests run."""
        self.begin(requests)
        try:
            yield
        finally:
            self.end(requests)

    def sending_objection(self) -> Excess | None:
        """Why another request must not be sent now; None where it can be."""
        most = self.bounds.max_concurrent
        if most is None or self.sending < most:
            return None
        on_their_way = _requests(self.sending)
        return Excess(f"{self.name} has {on_their_way} on the way and may have {most} (max_concurrent)", 1000)

    @contextmanager
    def sending_now(self) -> Iterator[None]:
        """A block in which another request is on its way."""
        self.sending += 1
        try:
            yield
        finally:
            self.sending -= 1

    def begin(self, requests: int) -> None:
        """So many requests run from now on; `end` takes them back."""
        self.running += requests

    def end(self, requests: int) -> None:
        """So many requests run no more."""
        self.running -= requests

    def charge(self, tokens: int, now: float) -> None:
        """Count tokens that were computed for it."""
        if tokens and self.bounds.max_tokens_per_minute is not None:
            self._used.append((now, tokens))
            self._used_tokens += tokens

    def _tokens_lately(self, now: float) -> int:
        while self._used and self._used[0][0] <= now - WINDOW_SEC:
            self._used_tokens -= self._used.popleft()[1]
        return self._used_tokens


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
