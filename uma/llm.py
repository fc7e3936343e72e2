"""The synchronous way in, for scripts and notebooks: `LLM().generate(prompts)`.

An `LLM` keeps an engine on a Trio loop in a thread of its own, so it works wherever Python runs, also under a running
asyncio loop, and the model stays loaded between calls.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import attrs
import outcome
import trio

from uma.config import RuntimeConfig, nearest, settings
from uma.constraints import show
from uma.engine import Engine, open_engine
from uma.errors import BadRequest, ConfigError, ShuttingDown, UmaError
from uma.types import Finished, FinishReason, Message, Request, RequestMetrics, SamplingParams, ServerInfo, Usage

T = TypeVar("T")
Conversation = Sequence[Message | dict[str, str]]

IN_FLIGHT_PER_SEQUENCE = 2
"""Requests given to the engine at once, for each that it computes at once: the next one is always ready."""


@attrs.frozen
class Completion:
    """What was generated for one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@attrs.frozen
class RequestOutput:
    """One prompt's result. Where `error` is set the request failed, and the completion is empty."""

    prompt: str | tuple[Message, ...] | None
    """As it was asked; of a conversation that failed, the messages as they were given."""
    outputs: tuple[Completion]
    error: UmaError | None = None
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    seed: int | None = None
    warnings: tuple[str, ...] = ()
    """What was asked for and not done, such as a `max_tokens` over the limit."""


class LLM:
    """A model, loaded, ready to answer prompts. Safe to use from several threads; close it or use it in a `with` block.

        with LLM("model.gguf", n_ctx=8192) as llm:
            for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
                print(out.outputs[0].text)

    `model` is a GGUF file, a name in the `UMA_MODELS` folder, or nothing for the built-in model. Further keywords are
    the fields of `RuntimeConfig`; nothing else counts, no `UMA_…` setting and no file. Raises `ModelError` or
    `ConfigError` where the model cannot be loaded.
    """

    def __init__(self, model: str = "builtin", **settings: Any) -> None:
        self.config = _config(model, settings)
        self._loop = _EngineThread(self.config)
        # An LLM that nobody closed must not keep the interpreter from ending, nor outlive its last reference.
        self._finalizer = weakref.finalize(self, self._loop.close)

    @property
    def info(self) -> ServerInfo:
        """The model, what it can do, and its limits."""
        return self._loop.engine.info

    def generate(
        self,
        prompts: str | Iterable[str],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, all batched together; results in the order of the prompts.

        `sampling_params` is one for all or one for each prompt (`ValueError` where their number differs). `progress`
        shows a bar on standard error; by default on a terminal. A prompt that fails is a result with `error` set.
        Ctrl-C cancels what runs and raises `KeyboardInterrupt`; the LLM remains usable.
        """
        asked = [prompts] if isinstance(prompts, str) else prompts
        return self._run([(prompt, {"prompt": prompt}) for prompt in asked], sampling_params, progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation, through the model's chat template. Otherwise as `generate`.

        A conversation is a list of `Message`s, or of dicts with `role` and `content`; one alone may be given as it is.
        """
        single = bool(conversations) and isinstance(conversations[0], Message | dict)
        every: Any = [conversations] if single else conversations
        asked = [(tuple(conversation), {"messages": conversation}) for conversation in every]
        return self._run(asked, sampling_params, progress)

    def close(self) -> None:
        """Free the model. Harmless when repeated."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        asked: list[tuple[Any, dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
    ) -> list[RequestOutput]:
        params = _params_for(len(asked), sampling_params)
        with _progress_bar(len(asked), progress) as advance:
            return self._loop.call(_generate_all, self._loop.engine, asked, params, advance)


def _config(model: str, given: dict[str, Any]) -> RuntimeConfig:
    known = settings()
    unknown = [f"{name}: no such setting{nearest(name, known)}" for name in given if name not in known]
    if unknown:
        raise ConfigError("\n".join(unknown))
    return RuntimeConfig(model=model, **given)


def _params_for(count: int, given: SamplingParams | Sequence[SamplingParams] | None) -> Iterable[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return repeat(given or SamplingParams(), count)
    if len(given) != count:
        raise ValueError(f"sampling_params: {len(given)} came for {count} prompts; give one for all, or one for each")
    return given


async def _generate_all(
    engine: Engine,
    asked: list[tuple[Any, dict[str, Any]]],
    params: Iterable[SamplingParams],
    advance: Callable[[], None],
) -> list[RequestOutput]:
    results: list[RequestOutput | None] = [None] * len(asked)
    work = enumerate(zip(asked, params, strict=True))

    async def worker(jobs: Iterator[tuple[int, tuple[tuple[Any, dict[str, Any]], SamplingParams]]]) -> None:
        for index, ((prompt, fields), sampling) in jobs:
            results[index] = await _generate_one(engine, f"llm-{index}", prompt, fields, sampling)
            advance()

    # As many tasks as can be useful: memory stays bounded however many prompts there are.
    most = min(IN_FLIGHT_PER_SEQUENCE * engine.config.max_sequences, engine.config.max_queue)
    async with trio.open_nursery() as nursery:
        for first in (each for _, each in zip(range(most), iter(lambda: next(work, None), None), strict=False)):
            nursery.start_soon(worker, chain([first], work))
    return [result for result in results if result is not None]


async def _generate_one(
    engine: Engine, request_id: str, prompt: Any, fields: dict[str, Any], sampling: SamplingParams
) -> RequestOutput:
    try:
        if "messages" in fields:
            prompt = tuple(map(_message, prompt))
            fields = {"messages": prompt}
        request = Request(id=request_id, sampling=sampling, stream=False, **fields)
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    completion = Completion(event.text or "", event.token_ids or (), event.reason)
                    return RequestOutput(
                        prompt,
                        (completion,),
                        usage=event.usage,
                        metrics=event.metrics,
                        seed=event.seed,
                        warnings=event.warnings,
                    )
    except ShuttingDown:
        # The engine ends, and with it the loop: that is no result, so this waits to be cancelled.
        await trio.sleep_forever()
    except ValueError as error:
        return _failed(prompt, BadRequest(str(error)))
    except UmaError as error:
        return _failed(prompt, error)
    raise AssertionError("a stream ended without its last event")


def _message(given: Message | dict[str, str]) -> Message:
    """A turn of a conversation. Raises `ValueError` for what is none: one bad conversation must not cost the others."""
    if isinstance(given, Message):
        return given
    if not isinstance(given, dict) or given.keys() != {"role", "content"}:
        raise ValueError(f"messages: expected a Message, or a dict of role and content, not {show(given)}")
    return Message(**given)


def _failed(prompt: Any, error: UmaError) -> RequestOutput:
    return RequestOutput(prompt, (Completion("", (), "error"),), error=error)


@contextmanager
def _progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """A callable that advances the bar by one; it may be called from another thread."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415  (only who sees a bar pays for it)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=total)
        yield lambda: progress.advance(task)


class _EngineThread:
    """An open engine on a Trio loop in its own thread."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._stop = trio.Event()
        self._is_ready = threading.Event()
        self._ended: outcome.Outcome[None] | None = None
        loop: SimpleQueue[trio.lowlevel.TrioToken] = SimpleQueue()
        # A daemon: at the interpreter's end the finalizer stops it; a thread that is none would be waited for first.
        self._thread = threading.Thread(target=self._run, args=(loop,), name="uma-llm", daemon=True)
        self._thread.start()
        self._token = loop.get()
        try:
            self._is_ready.wait()
        except BaseException:
            # Nobody will ever have this LLM, so its model must not stay.
            self._post(self._stop.set)
            raise
        if self._ended is not None:
            self._ended.unwrap()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function on the loop and wait for its result. Ctrl-C cancels it first, then is raised."""
        done = threading.Event()
        result: list[outcome.Outcome[T]] = []
        scope = trio.CancelScope()

        async def run() -> None:
            try:
                with scope:
                    ended = await outcome.acapture(function, *args)
                    # What is no `Exception` is the end of the loop: no result.
                    if isinstance(ended, outcome.Value) or isinstance(ended.error, Exception):
                        result.append(ended)
            finally:
                done.set()

        def start() -> None:
            if self._is_open:
                self._nursery.start_soon(run)
            else:
                done.set()

        try:
            if self._post(start):
                done.wait()
        except BaseException:
            self._post(scope.cancel)
            done.wait()
            raise
        if not result:
            raise self._why_closed()
        return result[0].unwrap()

    def close(self) -> None:
        """Cancel what runs, free the model, end the thread."""
        self._post(self._stop.set)
        # The garbage collector may end an LLM on any thread, even on its own.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, function: Callable[[], object]) -> bool:
        """Call a function on the loop soon; False if that has ended."""
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def _why_closed(self) -> Exception:
        self._thread.join()
        if isinstance(self._ended, outcome.Error) and isinstance(self._ended.error, Exception):
            return self._ended.error
        return ValueError("this LLM is closed")

    def _run(self, loop: SimpleQueue[trio.lowlevel.TrioToken]) -> None:
        self._ended = outcome.capture(trio.run, self._serve, loop)
        self._is_ready.set()

    async def _serve(self, loop: SimpleQueue[trio.lowlevel.TrioToken]) -> None:
        self._is_open = False
        loop.put(trio.lowlevel.current_trio_token())
        async with open_engine(self._config) as self.engine, trio.open_nursery() as self._nursery:
            self._is_open = True
            self._is_ready.set()
            try:
                await self._stop.wait()
            finally:
                self._is_open = False
                self._nursery.cancel_scope.cancel()
