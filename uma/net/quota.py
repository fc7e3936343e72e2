"""Quotas of an API key or a user: concurrent requests, tokens a minute, tokens of a request, priority.

Pure: the time is an argument. HTTP's keys and the socket's users have the same bounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Literal

import attrs

from uma.constraints import Length, Range
from uma.errors import ModelUnusable, UnknownModel, WrongValues
from uma.types import Limits, Models, Request, Slo, Usage
from uma.wrong import Wrong

Lane = Literal[-1, 0, 1]
"""A request's `priority`."""

USE = ("requests", "refused", "prompt_tokens", "completion_tokens")
"""What an account counts since the start."""
WINDOW_SEC = 60.0
"""Length of the sliding window of `max_tokens_per_minute`."""


@attrs.frozen(kw_only=True)
class Bounds:
    """Bounds of one account. None: only the server's own bound, or the request's own value. Raises `ValueError` where
    `priority` is over `max_priority`.
    """

    max_concurrent: Annotated[int, Range(1)] | None = None
    """Maximum requests that run or wait at once; an HTTP body with several prompts counts one for each. Also the
    maximum HTTP bodies that are being sent, read, tokenized or rendered at once."""
    max_tokens_per_minute: Annotated[int, Range(1)] | None = None
    """Prompt and completion tokens, counted when a request ends. While they are over, new requests are refused."""
    max_priority: Lane | None = None
    """Highest lane. A request without a priority gets this lane where it is lower than the default."""
    max_tokens: Annotated[int, Range(1)] | None = None
    """Maximum tokens that one request can generate, in all its answers together. A request without `max_tokens` gets
    this number, or the server's default where that is lower. Each prompt of an HTTP body is a request."""
    max_reasoning_tokens: Annotated[int, Range(0)] | None = None
    """Maximum tokens of thinking in each answer. A request that asks for more, or does not say, gets this number,
    instead of the server's `--reasoning-budget`."""
    priority: Lane | None = None
    """Lane of every request, whatever lane it asks for."""
    target_ttft_ms: Annotated[float, Range(gt=0)] | None = None
    """Target of every request, whatever target it asks for. A request for which it cannot be met is refused."""
    target_tbt_ms: Annotated[float, Range(gt=0)] | None = None
    """Target of every request, whatever target it asks for."""
    models: tuple[Annotated[str, Length(1)], ...] | None = None
    """Names of the models that the account can use, as a request would name them; empty: none."""

    def __attrs_post_init__(self) -> None:
        if self.priority is not None and self.max_priority is not None and self.priority > self.max_priority:
            raise WrongValues(Wrong("priority", f"{self.priority} is over max_priority, {self.max_priority}"))


@attrs.frozen
class Excess:
    """A bound that a request exceeds."""

    message: str
    retry_after_ms: int | None
    """Time after which the request can be repeated; None: waiting does not help."""


@attrs.define(eq=False)
class ClientAccount:
    """What one holder of bounds (a key or a user) is using of them. Belongs to one thread."""

    name: str
    bounds: Bounds = Bounds()
    manages_models: bool = False
    """Whether the holder can pull, delete and pin models."""
    running: int = attrs.field(default=0, init=False)
    sending: int = attrs.field(default=0, init=False)
    """HTTP requests whose bodies are incomplete, not parsed yet, or being tokenized."""
    requests: int = attrs.field(default=0, init=False)
    """Requests that were let in, since the start as all that follows."""
    refused: int = attrs.field(default=0, init=False)
    """Requests refused for its limits or for overload: those that can be asked again later."""
    prompt_tokens: int = attrs.field(default=0, init=False)
    completion_tokens: int = attrs.field(default=0, init=False)
    _used: deque[tuple[float, int]] = attrs.field(factory=deque, init=False)
    _used_tokens: int = attrs.field(default=0, init=False)

    @property
    def is_bounded(self) -> bool:
        """Whether the account has any bound beside the server's."""
        return self.bounds != Bounds()

    def objection(self, requests: int, now: float) -> Excess | None:
        """Why `requests` more must not run now; None where they can."""
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
        """Time at which enough tokens have left the window that the rest is below `rate`."""
        left = self._used_tokens
        for at, tokens in self._used:
            left -= tokens
            if left < rate:
                return at + WINDOW_SEC
        raise AssertionError(f"{left} tokens are not in the window")

    def fit(self, request: Request, *, has_priority: bool, default_max_tokens: int) -> Request | Excess:
        """The request with what the bounds fix, and with their defaults for what it does not say; or the bound that it
        exceeds. `default_max_tokens` is the server's default for a request without `max_tokens`.
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
            # Not set where the server's default is lower: the default is cut to the context without a warning.
            if sampling.max_tokens is None and most < default_max_tokens:
                request = attrs.evolve(request, sampling=attrs.evolve(sampling, max_tokens=most))
        return request

    def limits(self, server: Limits) -> Limits:
        """The server's limits, narrowed to this account's."""
        bounds = self.bounds
        return attrs.evolve(
            server,
            max_tokens=min(server.max_tokens, bounds.max_tokens or server.max_tokens),
            # Where the account has a fixed lane, a request's own priority is ignored, not refused.
            max_priority=1 if bounds.priority is not None or bounds.max_priority is None else bounds.max_priority,
        )

    def lane(self, priority: Lane, *, has_priority: bool) -> Lane | Excess:
        """The lane that a request gets, or the bound that its own priority exceeds."""
        if self.bounds.priority is not None:
            return self.bounds.priority
        most = self.bounds.max_priority
        if most is None or priority <= most:
            return priority
        return Excess(f"priority: {self.name} may use {most} at most", None) if has_priority else most

    def usable(self, models: Models) -> frozenset[str] | None:
        """Names of the models that the account can use; None: all. A name in `bounds.models` that matches no model, or
        several, or a file that cannot be used, is left out.
        """
        if self.bounds.models is None:
            return None
        found = set()
        for name in self.bounds.models:
            with suppress(UnknownModel, ModelUnusable):
                found.add(models.find(name).name)
        return frozenset(found)

    def model(self, asked: str | None, models: Models) -> str | Excess | None:
        """The model that a request for `asked` gets, or the bound that it exceeds. None is the server's default model;
        where the account cannot use that, its first own one.
        """
        if (usable := self.usable(models)) is None:
            return asked
        own = [model.name for model in models.listed() if model.name in usable]
        with suppress(UnknownModel):
            if asked is not None and models.find(asked).name in own:
                return asked
        if asked is None and own:
            return own[0]
        return self.other_model(asked, own)

    def other_model(self, asked: str | None, own: Sequence[str] = ()) -> Excess:
        """Refusal of a request for a model that is not among the account's `own`."""
        denied = "" if asked is None else f", and not {asked[:200]}"
        return Excess(f"model: {self.name} may use {', '.join(own) or 'no model that is here'} (models){denied}", None)

    def _slo(self, asked: Slo) -> Slo:
        bounds = self.bounds
        return Slo(bounds.target_ttft_ms or asked.target_ttft_ms, bounds.target_tbt_ms or asked.target_tbt_ms)

    @contextmanager
    def running_now(self, requests: int) -> Iterator[None]:
        """A block in which `requests` run."""
        self.begin(requests)
        try:
            yield
        finally:
            self.end(requests)

    def sending_objection(self) -> Excess | None:
        """Why the account must not send another request now; None where it can."""
        most = self.bounds.max_concurrent
        if most is None or self.sending < most:
            return None
        on_their_way = _requests(self.sending)
        return Excess(f"{self.name} has {on_their_way} on the way and may have {most} (max_concurrent)", 1000)

    @contextmanager
    def sending_now(self) -> Iterator[None]:
        """A block in which one more request is being sent."""
        self.sending += 1
        try:
            yield
        finally:
            self.sending -= 1

    def begin(self, requests: int) -> None:
        """Count `requests` as running; `end` reverses it."""
        self.running += requests
        self.requests += requests

    def end(self, requests: int) -> None:
        """Count `requests` as running no more."""
        self.running -= requests

    def charge(self, usage: Usage, now: float) -> None:
        """Count tokens that were computed for the account."""
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        tokens = usage.prompt_tokens + usage.completion_tokens + usage.summary_tokens
        if tokens and self.bounds.max_tokens_per_minute is not None:
            self._used.append((now, tokens))
            self._used_tokens += tokens

    def _tokens_lately(self, now: float) -> int:
        while self._used and self._used[0][0] <= now - WINDOW_SEC:
            self._used_tokens -= self._used.popleft()[1]
        return self._used_tokens


def figures(holder: Literal["key", "user"], accounts: Iterable[ClientAccount]) -> dict[str, dict[str, int]]:
    """What each account has used so far, by its name: figures for a snapshot of metrics."""
    named = {account.name.removeprefix(f"{holder} "): account for account in accounts}
    return {
        f"{holder}_{figure}_total": {name: getattr(account, figure) for name, account in named.items()}
        for figure in USE
        if named
    }


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
