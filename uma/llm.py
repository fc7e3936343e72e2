"""The synchronous way in, for scripts and notebooks: `LLM().generate(prompts)`.

An `LLM` keeps an engine on a Trio loop in a thread of its own, so it works wherever Python runs, also under a running
asyncio loop, and the model stays loaded between calls.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, repeat
from os import PathLike, fspath
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import outcome
import trio

from uma.config import RuntimeConfig, nearest, settings
from uma.constraints import show
from uma.engine import Engine, open_engine
from uma.errors import BadRequest, ConfigError, InternalError, ShuttingDown, UmaError
from uma.types import (
    MAX_TEXTS,
    Answer,
    EmbedRequest,
    Event,
    Finished,
    FinishReason,
    Logprobs,
    Message,
    Prompt,
    Ranked,
    ReasoningMode,
    Request,
    RequestMetrics,
    RerankRequest,
    SamplingParams,
    ServerInfo,
    Token,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)

T = TypeVar("T")
Conversation = Sequence[Message | Mapping[str, str]]

AHEAD_EVENTS = 64
"""Maximum events of an `LLMStream` that wait for its reader; then the engine's own bound applies."""
IN_FLIGHT_PER_SEQUENCE = 2
"""Requests given to the engine at once, for each that it computes at once: the next one is always ready."""


@attrs.frozen
class Completion:
    """What was generated for one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    index: int = 0
    """Which of the prompt's answers it is."""
    logprobs: tuple[dict[int, TokenLogprob], ...] | None = None
    """Where `logprobs` asked for them: for each token, by token id, itself and the likeliest ones."""
    cumulative_logprob: float | None = None
    """Sum of its tokens' log probabilities, likewise."""
    stop_reason: str | None = None
    """Of the `stop` strings the one that ended it; None where something else did."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of the `tools` that `LLM.chat` was given; `text` does not have them."""
    reasoning: str | None = None
    """The model's thinking, where `reasoning` asked for it to be told apart."""


@attrs.frozen
class RequestOutput:
    """One prompt's result. Where `error` is set the request failed, and the completion is empty."""

    prompt: str | tuple[Message, ...] | None
    """As it was asked; of a conversation that failed, the messages as they were given."""
    outputs: tuple[Completion, ...]
    """Its answers, by index: one, unless `n` asked for more."""
    error: UmaError | None = None
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    seed: int | None = None
    warnings: tuple[str, ...] = ()
    """What was asked for and not done, such as a `max_tokens` over the limit."""
    prompt_text: str | None = None
    """The prompt as the model got it, a conversation rendered. Where `echo` or `prompt_logprobs` asked; so are those
    below."""
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[dict[int, TokenLogprob] | None, ...] | None = None
    """Where `prompt_logprobs` asked: for each token, by token id, itself and the likeliest ones; None for the first."""


Sampling = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or a dict of their fields."""


class LLM:
    """A model, loaded, ready to answer prompts. Safe to use from several threads; close it or use it in a `with` block.

        with LLM("model.gguf", n_ctx=8192) as llm:
            for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
                print(out.outputs[0].text if out.error is None else out.error)

    `model` is a GGUF file, a name in the `UMA_MODELS` folder, or nothing for the built-in model. Further keywords are
    the fields of `RuntimeConfig`; nothing else counts, no `UMA_…` setting and no file. Raises `ModelError` or
    `ConfigError` where the model cannot be loaded. It belongs to the process that made it: a forked child gets
    `RuntimeError`, and can make its own.
    """

    def __init__(self, model: str | PathLike[str] = "builtin", **settings: Any) -> None:
        if not isinstance(model, str | PathLike):
            raise TypeError(f"model: expected a path or a name, not {show(model)}")
        self.config = _config(fspath(model), settings)
        self._loop = _EngineThread(self.config)
        # An LLM that nobody closed must not keep the interpreter from ending, nor outlive its last reference.
        self._finalizer = weakref.finalize(self, self._loop.close)
        self._numbers = count(1)

    @property
    def info(self) -> ServerInfo:
        """The model, what it can do, and its limits."""
        return self._loop.engine.info

    def __repr__(self) -> str:
        state = "closed" if self._loop.is_closed else f"{self.info.limits.n_ctx:,} tokens of context"
        return f"<uma.LLM {self.config.model!r}: {self._loop.engine.info.model.name}, {state}>"

    def generate(
        self,
        prompts: str | Iterable[str],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, all batched together; results in the order of the prompts.

        `sampling_params` is one for all or one for each prompt (`ValueError` where their number differs). `progress`
        shows a bar on standard error; by default on a terminal. A prompt that fails is a result with `error` set, and
        one `UserWarning` says how many failed; what is no prompt at all is a `TypeError`. Ctrl-C cancels what runs and
        raises `KeyboardInterrupt`; the LLM remains usable.
        """
        return self._run(
            [
                (prompt, {"prompt": prompt})
                for prompt in _texts(prompts, "prompts", hint="; llm.chat takes conversations")
            ],
            sampling_params,
            progress,
        )

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        tools: Iterable[Tool | Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        reasoning: ReasoningMode | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation, through the model's chat template. Otherwise as `generate`.

        A conversation is a list of `Message`s, or of dicts with `role` and `content`; one alone may be given as it is.
        Calls of the `tools` (`Tool`s, or dicts as OpenAI has them) are in `Completion.tool_calls`. A conversation goes
        on with `Message("assistant", out.text, out.tool_calls)` and, for each of them, `Message("tool", result,
        tool_call_id=call.id, name=call.name)`. The other keywords are the fields of `Request`.
        """
        fields = {
            "tools": tuple(_tool(each, f"tools[{index}]") for index, each in enumerate(tools)),
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "reasoning": reasoning,
        }
        asked = [(each, {"messages": each, **fields}) for each in _conversations(conversations)]
        return self._run(asked, sampling_params, progress)

    def stream(self, prompt: str | Conversation, sampling_params: Sampling | None = None) -> LLMStream:
        """The continuation of a prompt, or the answer to a conversation, piece by piece as it is generated.

            for text in llm.stream("Once upon a time"):
                print(text, end="", flush=True)

        The pieces are whole characters; afterwards `LLMStream.finished` has usage and figures. A failure is raised, as
        an `UmaError`. Leaving the loop early and closing the stream, or its `with` block, cancels.
        """
        fields = _fields(prompt)
        sampling = _sampling(sampling_params, "sampling_params")
        request = _request(Request, id=f"stream-{next(self._numbers)}", sampling=sampling, **fields)
        return LLMStream(self._loop, request)

    def embed(
        self, texts: str | Iterable[str], *, dimensions: int | None = None, normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """An embedding of each text, as the rows of an array in their order; of one string, a single row.

        Each has length 1 unless `normalize` is false; `dimensions` keeps its first figures, normalised after the cut.
        Raises `PromptTooLarge` for a text that does not fit the context (none is ever cut), and `BadRequest` where the
        model gives no embeddings.
        """
        asked = _texts(texts, "texts")
        parts = [asked[start : start + MAX_TEXTS] for start in range(0, len(asked), MAX_TEXTS)]
        requests = [
            _request(EmbedRequest, id=f"embed-{index}", texts=part, dimensions=dimensions, normalize=normalize)
            for index, part in enumerate(parts)
        ]
        rows = [row for request in requests for row in self._loop.call(self._loop.engine.embed, request).vectors]
        width = len(rows[0]) if rows else 0
        return np.array(rows, np.float32).reshape(len(rows), width)

    def rerank(self, query: str, documents: Iterable[str], *, top_n: int | None = None) -> list[Ranked]:
        """The documents, best first, by how well each answers the query; `top_n` keeps the first ones.

        `Ranked.index` says which document it is. Raises `BadRequest` where the model is no reranker, and otherwise what
        `embed` does.
        """
        request = _request(
            RerankRequest, id="rerank", query=query, documents=_texts(documents, "documents"), top_n=top_n
        )
        return list(self._loop.call(self._loop.engine.rerank, request).results)

    def tokenize(self, prompt: str | Conversation) -> list[int]:
        """The token ids that `generate` computes for this prompt, or `chat` for this conversation.

        Raises `BadRequest` where it can be no prompt, and `PromptTooLarge` where it is over `max_prompt_bytes`.
        """
        request = _request(Request, id="tokenize", **_fields(prompt))
        return list(self._loop.call(self._loop.engine.tokenize, request).token_ids)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of tokens. Special tokens have none; bytes that are not UTF-8 become replacement characters."""
        if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
            raise TypeError(f"token_ids: expected a list of integers, not {show(token_ids)}")
        ids = tuple(token_ids)
        if not ids:
            return ""
        request = _request(Request, id="detokenize", token_ids=ids)
        return self._loop.call(self._loop.engine.tokenize, request).text or ""

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
        sampling_params: Sampling | Sequence[Sampling] | None,
        progress: bool | None,
    ) -> list[RequestOutput]:
        params = _params_for(len(asked), sampling_params)
        self._loop.check_process()
        with _progress_bar(len(asked), progress) as advance:
            outputs = self._loop.call(_generate_all, self._loop.engine, asked, params, advance)
        _warn_of_failures(outputs)
        return outputs


def _config(model: str, given: dict[str, Any]) -> RuntimeConfig:
    known = settings()
    unknown = [f"{name}: no such setting{nearest(name, known)}" for name in given if name not in known]
    if unknown:
        raise ConfigError("\n".join(unknown))
    if isinstance(given.get("draft"), PathLike):
        given = {**given, "draft": fspath(given["draft"])}
    return RuntimeConfig(model=model, **given)


def _params_for(number: int, given: Sampling | Sequence[Sampling] | None) -> Iterable[SamplingParams]:
    if given is None or isinstance(given, SamplingParams | Mapping):
        return repeat(_sampling(given, "sampling_params"), number)
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise TypeError(f"sampling_params: expected SamplingParams, a dict of its fields, or a list, not {show(given)}")
    if len(given) != number:
        raise ValueError(f"sampling_params: {len(given)} came for {number} prompts; give one for all, or one for each")
    return [_sampling(each, f"sampling_params[{index}]") for index, each in enumerate(given)]


def _sampling(given: Sampling | None, where: str) -> SamplingParams:
    if given is None or isinstance(given, SamplingParams):
        return given or SamplingParams()
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: expected SamplingParams or a dict of its fields, not {show(given)}")
    known = [field.name for field in attrs.fields(SamplingParams)]
    for name in given:
        if name not in known:
            raise TypeError(f"{where}: {show(name)} is no field of SamplingParams{nearest(str(name), known)}")
    return SamplingParams(**given)


def _texts(given: str | Iterable[str], name: str, *, hint: str = "") -> list[str]:
    """The texts, each of them a string (`TypeError`, which says `hint` where one is a message or a conversation)."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected a string or a list of strings, not {show(given)}")
    found = list(given)
    for index, each in enumerate(found):
        if not isinstance(each, str):
            hinted = hint if isinstance(each, Message | Mapping) else ""
            raise TypeError(f"{name}[{index}]: expected a string, not {show(each)}{hinted}")
    return found


def _conversations(given: Conversation | Sequence[Conversation]) -> list[tuple[Any, ...]]:
    """The conversations, each a tuple of messages or dicts (`TypeError`). What is in a dict is looked at later."""
    expected = "expected a list of messages, each a Message or a dict of role and content"
    if isinstance(given, str | bytes | Mapping | Message) or not isinstance(given, Iterable):
        hint = "; llm.generate takes plain prompts" if isinstance(given, str) else ""
        raise TypeError(f"conversations: {expected}, not {show(given)}{hint}")
    every: Any = list(given)
    if every and isinstance(every[0], Message | Mapping):
        every = [every]
    found = []
    for index, each in enumerate(every):
        if isinstance(each, str | bytes | Mapping | Message) or not isinstance(each, Iterable):
            raise TypeError(f"conversations[{index}]: {expected}, not {show(each)}")
        messages = tuple(each)
        for place, message in enumerate(messages):
            if not isinstance(message, Message | Mapping):
                raise TypeError(f"conversations[{index}][{place}]: {expected}, not {show(message)}")
        found.append(messages)
    return found


def _fields(prompt: str | Conversation) -> dict[str, Any]:
    """A request's field for one prompt or one conversation. `TypeError` for neither, `BadRequest` for a wrong one."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, bytes | Mapping | Message) or not isinstance(prompt, Iterable):
        raise TypeError(f"prompt: expected a string, or a list of messages, not {show(prompt)}")
    ((*messages,),) = _conversations([tuple(prompt)])
    return {"messages": _request(lambda: tuple(map(_message, messages)))}


def _request(make: Callable[..., T], **fields: Any) -> T:
    """What `make` makes, its `ValueError` as `BadRequest`: what the engine would call it."""
    try:
        return make(**fields)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _warn_of_failures(outputs: Sequence[RequestOutput]) -> None:
    failed = [out.error for out in outputs if out.error is not None]
    if failed:
        warnings.warn(
            f"{len(failed):,} of {len(outputs):,} prompts failed, the first because: {failed[0]} "
            "(each result that failed has an `error`)",
            stacklevel=4,
        )


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
            fields = {**fields, "messages": prompt}
        request = Request(id=request_id, sampling=sampling, stream=False, **fields)
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    return RequestOutput(
                        prompt,
                        _completions(event),
                        usage=event.usage,
                        metrics=event.metrics,
                        seed=event.seed,
                        warnings=event.warnings,
                        **_told(event.prompt),
                    )
    except (ShuttingDown, InternalError) as error:
        if isinstance(error, InternalError) and not engine.worker.has_failed:
            return _failed(prompt, error)
        # The engine ends, and with it the loop: that is no result, so this waits to be cancelled.
        await trio.sleep_forever()
    except ValueError as error:
        return _failed(prompt, BadRequest(str(error)))
    except UmaError as error:
        return _failed(prompt, error)
    raise AssertionError("a stream ended without its last event")


def _message(given: Message | Mapping[str, str]) -> Message:
    """A turn of a conversation. Raises `ValueError` for what is none: one bad conversation must not cost the others."""
    if isinstance(given, Message):
        return given
    if not isinstance(given, Mapping) or given.keys() != {"role", "content"}:
        raise ValueError(f"messages: expected a Message, or a dict of role and content, not {show(given)}")
    return Message(**given)


def _tool(given: Tool | Mapping[str, Any], where: str) -> Tool:
    if isinstance(given, Tool):
        return given
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(inner, Mapping) or "name" not in inner:
        raise TypeError(f"{where}: expected a Tool, or a dict with a function's name, not {show(given)}")
    return Tool(inner["name"], inner.get("description") or "", inner.get("parameters"))


def _completions(finished: Finished) -> tuple[Completion, ...]:
    only = Answer(
        index=0,
        reason=finished.reason,
        seed=finished.seed,
        completion_tokens=finished.usage.completion_tokens,
        text=finished.text,
        token_ids=finished.token_ids,
        logprobs=finished.logprobs,
        stop_string=finished.stop_string,
        tool_calls=finished.tool_calls,
        reasoning=finished.reasoning,
    )
    return tuple(map(_completion, finished.answers or (only,)))


def _completion(answer: Answer) -> Completion:
    known = answer.logprobs
    return Completion(
        answer.text or "",
        answer.token_ids or (),
        answer.reason,
        answer.index,
        logprobs=None if known is None else tuple(map(_by_token, known)),
        cumulative_logprob=None if known is None else sum(each.chosen.logprob for each in known),
        stop_reason=answer.stop_string,
        tool_calls=answer.tool_calls,
        reasoning=answer.reasoning,
    )


def _told(prompt: Prompt | None) -> dict[str, Any]:
    if prompt is None:
        return {}
    known = prompt.logprobs
    return {
        "prompt_text": prompt.text,
        "prompt_token_ids": prompt.token_ids,
        "prompt_logprobs": None if known is None else tuple(each and _by_token(each) for each in known),
    }


def _by_token(known: Logprobs) -> dict[int, TokenLogprob]:
    return {each.token_id: each for each in (known.chosen, *known.top)}


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


class LLMStream:
    """An answer on its way: an iterator of its pieces of text. Made by `LLM.stream`; belongs to one thread at a time.

    The engine runs a bounded number of tokens ahead of the loop that takes them.
    """

    def __init__(self, loop: _EngineThread, request: Request) -> None:
        self._loop = loop
        self._scope = trio.CancelScope()
        send, self._events = trio.open_memory_channel[Event](AHEAD_EVENTS)
        self.finished: Finished | None = None
        """The last event, with the reason of the end, usage and figures; None until the text is complete."""
        self._failure: Exception | None = None
        self._echoes = request.sampling.echo
        loop.spawn(self._produce, request, send)
        self._finalizer = weakref.finalize(self, loop.post, self._scope.cancel)

    async def _produce(self, request: Request, send: trio.MemorySendChannel[Event]) -> None:
        with self._scope, send:
            try:
                async with self._loop.engine.generate(request) as stream:
                    async for event in stream:
                        await send.send(event)
            except (UmaError, ValueError) as error:
                self._failure = error

    def __iter__(self) -> LLMStream:
        return self

    def __next__(self) -> str:
        while self.finished is None:
            try:
                event = self._loop.call(self._events.receive)
            except (trio.EndOfChannel, trio.ClosedResourceError):
                if self._failure is not None:
                    raise self._failure from None
                break
            if isinstance(event, Finished):
                self.finished = event
            elif isinstance(event, Token | Prompt) and event.text and (self._echoes or isinstance(event, Token)):
                return event.text
        raise StopIteration

    def close(self) -> None:
        """Cancel what is not generated yet. Harmless when repeated."""
        self._finalizer()

    def __enter__(self) -> LLMStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _EngineThread:
    """An open engine on a Trio loop in its own thread."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._process_id = os.getpid()
        self.is_closed = False
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

    def check_process(self) -> None:
        """Raise `RuntimeError` in a forked child, which has the memory of an engine and none of its threads."""
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "this LLM belongs to the process that made it, and a forked child has none of its threads; "
                "make the LLM in the child (with multiprocessing: in the worker's initializer, or use 'spawn')"
            )

    def spawn(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start an async function on the loop. Raises where the loop has ended."""

        async def start() -> None:
            self._nursery.start_soon(function, *args)

        self.call(start)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function on the loop and wait for its result. Ctrl-C cancels it first, then is raised."""
        self.check_process()
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
        """Cancel what runs, free the model, end the thread. In a forked child there is nothing to end."""
        if os.getpid() != self._process_id:
            return
        self.is_closed = True
        self._post(self._stop.set)
        # The garbage collector may end an LLM on any thread, even on its own.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def post(self, function: Callable[[], object]) -> None:
        """Call a function on the loop soon, if there is one in this process."""
        if os.getpid() == self._process_id:
            self._post(function)

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
