"""`LLM`: the synchronous way in, for scripts and notebooks."""

from __future__ import annotations

import array
import warnings
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Never, Self

import numpy as np
import numpy.typing as npt

from uma.client.parts import errors_moved
from uma.closing import Closing
from uma.errors import UmaError, WrongKind
from uma.llm.arguments import (
    BYTES,
    DECISION_FIELDS,
    EMBED_FIELDS,
    KEYWORDS,
    Choice,
    Conversation,
    GivenTool,
    Prompt,
    Sampling,
    check_keywords,
    conversations_of,
    is_fault_of_call,
    listed,
    params_for,
    prompt_fields,
    prompts_of,
    questions_of,
    rerank_request,
    row_fields,
    sampling_of,
    shown,
    state_of,
    texts_of,
    tool_fields,
)
from uma.llm.batch import GONE, GivenPrompt, Raises, every_result, progress_bar, results_of, tell_of_failures
from uma.llm.checkpoint import results_with
from uma.llm.place import place_of
from uma.llm.results import RequestOutput, array_of, labelled
from uma.llm.stream import LLMStream
from uma.llm.thread import NO_THREADS, Deadline, SourceThread
from uma.models.names import check_alone
from uma.net.trio_only import require_asyncio
from uma.types import (
    CHAT_SAMPLING,
    MAX_TEXTS,
    PAUSED,
    Decision,
    DecisionQuestion,
    DecisionRequest,
    EmbedRequest,
    Ranked,
    ReasoningMode,
    Request,
    RerankRequest,
    SamplingParams,
    ServerInfo,
    Tokenized,
)

Embedded = list["array.array[float] | None"]
"""The vector of each text; None for one of no token."""
Asked = tuple[list[GivenPrompt], Raises]
"""Prompts, and which of their errors the call raises."""


class LLM(Closing):
    """A language model, loaded into this process or used on a server. Its methods can be called from several threads.

        with LLM("model.gguf", n_ctx=8192) as llm:
            for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
                print(out.text if out.error is None else out.error)

    `model` is a GGUF file or a name that `uma models` lists; None is the built-in model. Further keywords are settings
    of the engine, such as `n_ctx` (those fields of `RuntimeConfig` that apply to a model in this process). `UMA_…`
    variables and files are not read. Raises `ModelError` or `ConfigError` if the model cannot be loaded, and
    `UnknownModel`, a `ModelError`, if no model has this name.

    With `socket`, the path of a server's Unix socket, the LLM is a client of that server. `model` is then the name of
    one of its models; None is its default. The server has its own settings, so keywords raise `ConfigError`. Raises
    `ConnectionLost` if no server listens there. What runs when the server is lost raises it, too, except a list with
    results that are ready (see `generate`); the next call opens a new session, or raises `ConnectionLost` if no server
    listens or the one there has another model.

    A parameter of sampling that is None in `SamplingParams` is that of the keywords here, else that of the model's file
    (`general.sampling.…`), else the default: temperature 0.7 and top_p 0.95. `temperature=0` is greedy.

    Leave the `with` block or call `close` to free the model. An LLM belongs to the process that made it: after a fork,
    the child gets `WrongPlace`, a `RuntimeError`, and can make its own.
    """

    def __init__(
        self, model: str | PathLike[str] | None = None, *, socket: str | PathLike[str] | None = None, **settings: Any
    ) -> None:
        check_keywords(settings.keys() - KEYWORDS, LLM.__init__, KEYWORDS)
        self._place = place_of(model, socket, settings)
        self._loop = SourceThread(self._place.opened)
        # An LLM that is never closed must not keep the interpreter from ending, nor outlive its last reference.
        self._finalizer = weakref.finalize(self, self._loop.close)
        if socket is not None and self._loop.call(partial(self._loop.source.health, probe=False)).paused_sec:
            warnings.warn(PAUSED, stacklevel=2)

    @property
    def info(self) -> ServerInfo:
        """The model's card, its capabilities and its limits."""
        return self._loop.source.info

    def __repr__(self) -> str:
        state = "closed" if self._loop.is_closed else f"{self.info.limits.n_ctx:,} tokens of context"
        return f"<uma.LLM {self._place.name!r}: {self.info.model.name}, {state}>"

    def __reduce__(self) -> Any:
        raise WrongKind(NO_THREADS.format(elsewhere="another one"))

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        model: str | None = None,
        progress: bool | None = None,
        checkpoint: str | PathLike[str] | None = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Continue each prompt. All prompts are batched; the results are in the order of the prompts.

        A prompt is a text, or a list of its token ids. `sampling_params` is one for all prompts, or a list with one for
        each (`WrongValues` if their numbers differ). `model` can be `model+NAME`, for a LoRA adapter of the model;
        `UnknownModel` if there is none of that name. `progress` shows a progress bar on standard error; None shows it
        on a terminal. Ctrl-C cancels the requests and raises `KeyboardInterrupt`. A call that takes longer than
        `timeout` seconds cancels them and raises `TimedOut`, a `TimeoutError`. The LLM remains usable after both.

        If a single prompt fails, its error is raised, an `UmaError`. If a prompt of a list fails, its result has
        `error` set, the others are answered, and one `UserWarning` says how many failed. A fault of the whole call,
        such as a wrong grammar in `sampling_params`, raises `BadRequest`; an argument that is no prompt, `WrongKind`.
        If the server is lost or stops before any prompt is answered, `ConnectionLost` or `ShuttingDown` is raised;
        later, the results that are ready are returned, and the others have it as `error`.

        `checkpoint` is a file to which each result is appended as a line of JSON (`RequestOutput.to_dict`), in the
        order of the prompts, with a journal beside it. The same call continues after the results in that file, also
        after a kill or a power cut; prompts can be added at the end. Raises `JobChanged`, a `ConfigError`, if an
        earlier prompt, its parameters or the model has changed since.
        """
        check_keywords(unknown, self.generate)
        return self._run(self._prompts(prompts, model, sampling_params), Deadline(timeout), progress, checkpoint)

    async def agenerate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """`generate` for asyncio. A cancelled task cancels its requests, and so does a timeout.

        outs = await asyncio.wait_for(llm.agenerate(prompts), timeout=30)
        """
        check_keywords(unknown, self.agenerate)
        return await self._run_async(self._prompts(prompts, model, sampling_params), Deadline(timeout))

    def imap(
        self,
        rows: Iterable[Prompt | Conversation],
        sampling_params: Sampling | None = None,
        *,
        in_order: bool = True,
        tools: Iterable[GivenTool] = (),
        tool_choice: Choice = "auto",
        parallel_tool_calls: bool = True,
        reasoning: ReasoningMode | None = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Generator[RequestOutput, None, None]:
        """Yield the result of each row, a prompt or a conversation, as soon as it is ready. For jobs with many rows.

            for out in llm.imap(open("prompts.txt")):
                print(json.dumps(out.to_dict()), file=results, flush=True)

        `rows` is read step by step, so it can be larger than memory. Results are in the order of the rows, or with
        `in_order=False` in the order in which they end; `RequestOutput.index` is the number of the row. If a row fails,
        its result has `error` set. A fault of all rows raises `BadRequest`; a row that is neither a prompt nor a
        conversation, `WrongKind`. If the server is lost or stops, `ConnectionLost` or `ShuttingDown` is raised after
        the results that are ready, and no more rows are read. Leaving the loop, also by Ctrl-C, cancels the rows that
        run, and so does `TimedOut`, when all rows take longer than `timeout` seconds. The other keywords are those of
        `chat`, for conversations.
        """
        check_keywords(unknown, self.imap)
        if isinstance(rows, str | BYTES) or not isinstance(rows, Iterable):
            raise WrongKind(f"rows: expected a list of prompts, not {shown(rows)}; llm.generate takes one alone")
        sampling = sampling_of(sampling_params, "sampling_params")
        fields = tool_fields(tools, tool_choice, reasoning, is_parallel=parallel_tool_calls)
        self._loop.check_process()
        sampling = self._drawn(sampling)
        made = (GivenPrompt(index, row, row_fields(row, index, fields), sampling) for index, row in enumerate(rows))

        def raises(error: UmaError) -> bool:
            return isinstance(error, GONE) or is_fault_of_call(error, own_sampling=False)

        return results_of(self._loop, made, Deadline(timeout), in_order=in_order, raises=raises)

    def chat(
        self,
        conversations: str | Conversation | Sequence[str | Conversation] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        messages: Conversation | None = None,
        model: str | None = None,
        tools: Iterable[GivenTool] = (),
        tool_choice: Choice = "auto",
        parallel_tool_calls: bool = True,
        reasoning: ReasoningMode | None = None,
        progress: bool | None = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Answer each conversation, in the form of the model's chat template. Arguments and errors as for `generate`.

        A conversation is a question as a string, or a list of messages: `Message`s, or dicts as in OpenAI's API
        (`role`, `content`, `tool_calls`, `tool_call_id`, `name`). A single conversation needs no list around it, and
        can also be given as `messages=`. An empty list has an empty list of results; an empty `messages` raises
        `BadRequest`. A tool is a Python function with annotations, a `Tool`, or a dict as in OpenAI's API; the model's
        calls are in `Completion.tool_calls`. To continue, add `Message("assistant", out.text, out.tool_calls)`, and for
        each call `Message("tool", result, tool_call_id=call.id, name=call.name)`. The other keywords are fields of
        `Request`.
        """
        check_keywords(unknown, self.chat)
        fields = tool_fields(tools, tool_choice, reasoning, is_parallel=parallel_tool_calls) | self._of_model(model)
        return self._run(
            self._conversations(conversations, messages, fields, sampling_params), Deadline(timeout), progress
        )

    async def achat(
        self,
        conversations: str | Conversation | Sequence[str | Conversation] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        *,
        messages: Conversation | None = None,
        model: str | None = None,
        tools: Iterable[GivenTool] = (),
        tool_choice: Choice = "auto",
        parallel_tool_calls: bool = True,
        reasoning: ReasoningMode | None = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """`chat` for asyncio. A cancelled task cancels its requests, and so does a timeout."""
        check_keywords(unknown, self.achat)
        fields = tool_fields(tools, tool_choice, reasoning, is_parallel=parallel_tool_calls) | self._of_model(model)
        return await self._run_async(
            self._conversations(conversations, messages, fields, sampling_params), Deadline(timeout)
        )

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: Sampling | None = None,
        *,
        model: str | None = None,
        tools: Iterable[GivenTool] = (),
        tool_choice: Choice = "auto",
        parallel_tool_calls: bool = True,
        reasoning: ReasoningMode | None = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> LLMStream:
        """Stream the continuation of a prompt, or the answer to a conversation, as pieces of text.

            for text in llm.stream("Once upon a time"):
                print(text, end="", flush=True)

        A piece has whole characters. After the last one, `LLMStream.finished` has the usage, the metrics and the calls
        of the `tools`. `LLMStream.events` also yields thinking and calls while they are written, and several answers
        (`n`), whose pieces of text would be mixed here: `WrongValues`. The keywords are those of `chat`. An error is
        raised from the loop, as an `UmaError`: `TimedOut`, after the pieces so far, if the answer takes longer than
        `timeout` seconds. To cancel, leave the loop and close the stream, or leave its `with` block. With asyncio use
        `async for text in llm.stream(…)`.
        """
        check_keywords(unknown, self.stream)
        fields = prompt_fields(prompt) | tool_fields(tools, tool_choice, reasoning, is_parallel=parallel_tool_calls)
        fields |= self._of_model(model)
        sampling = self._drawn(sampling_of(sampling_params, "sampling_params"))
        request = Request(id=f"stream-{self._loop.next_number()}", sampling=sampling, **fields)
        return LLMStream(self._loop, request, Deadline(timeout))

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        fail_on_empty: bool = False,
        timeout: float | None = None,
        **unknown: Never,
    ) -> npt.NDArray[np.float32]:
        """Compute an embedding of each text: an array with one row for each text, so of shape (1, size) for one string.

        Each row has length 1, unless `normalize` is false. `dimensions` keeps its first numbers, and normalizes these.
        A text without tokens, such as an empty one, has a row of NaN, and one warning counts such texts. Raises
        `PromptTooLarge` for a text that does not fit the context (texts are never truncated), and `BadRequest` if the
        model has no embeddings, or with `fail_on_empty` for a text without tokens.
        """
        check_keywords(unknown, self.embed)
        options = {"dimensions": dimensions, "normalize": normalize, "fail_on_empty": fail_on_empty}
        return array_of(self._loop.call(self._embedded, texts_of(texts, "texts"), options, deadline=Deadline(timeout)))

    async def aembed(
        self, texts: str | Iterable[str], *, timeout: float | None = None, **options: Any
    ) -> npt.NDArray[np.float32]:
        """`embed` for asyncio. A cancelled task cancels its requests, and so does a timeout."""
        check_keywords(options.keys() - EMBED_FIELDS, self.aembed, EMBED_FIELDS)
        return array_of(
            await self._loop.call_async(self._embedded, texts_of(texts, "texts"), options, deadline=Deadline(timeout))
        )

    async def _embedded(self, texts: Sequence[str], options: Mapping[str, Any]) -> Embedded:
        """An embedding of each text, on the loop; errors name a text by its index."""
        rows: Embedded = []
        for start in range(0, len(texts), MAX_TEXTS):
            part = texts[start : start + MAX_TEXTS]
            with errors_moved(start):
                request = EmbedRequest(id=f"embed-{start}", texts=part, **options)
                rows += (await (await self._loop.live()).embed(request)).vectors
        return rows

    def rerank(
        self, query: str, documents: Iterable[str], *, top_n: int | None = None, timeout: float | None = None
    ) -> list[Ranked]:
        """Rank documents by how well each answers the query, the best first; `top_n` returns only the first ones.

        `Ranked.index` is the place of a document in `documents`. Raises `BadRequest` if the model is no reranker, and
        the errors of `embed`.
        """
        request = rerank_request(query, documents, top_n)
        return self._loop.call(self._ranked, request, deadline=Deadline(timeout))

    async def arerank(
        self, query: str, documents: Iterable[str], *, top_n: int | None = None, timeout: float | None = None
    ) -> list[Ranked]:
        """`rerank` for asyncio. A cancelled task cancels its request, and so does a timeout."""
        request = rerank_request(query, documents, top_n)
        return await self._loop.call_async(self._ranked, request, deadline=Deadline(timeout))

    async def _ranked(self, request: RerankRequest) -> list[Ranked]:
        return list((await (await self._loop.live()).rerank(request)).results)

    def decide(
        self,
        state: str | Conversation | Mapping[str, Any],
        questions: str | DecisionQuestion | Iterable[str | DecisionQuestion],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Decision]:
        """Compute the probability of each answer to questions about a text, a conversation, or a dict as JSON.

            spam, topic = llm.decide(mail, ["Is it spam?", DecisionQuestion.choice("Topic?", ["work", "home"])])
            print(spam.probability, topic.best, topic.probabilities)

        The model generates no text, and reads `state` once for all questions. A string is a question with the answers
        yes and no. A single question needs no list around it. `options` are fields of `DecisionRequest`: `labels`,
        `orders`, `temperature`, `min_label_mass`, `reproducible`.
        """
        check_keywords(options.keys() - DECISION_FIELDS, self.decide, DECISION_FIELDS)
        request = self._decision(state, questions, options)
        return self._loop.call(self._decided, request, deadline=Deadline(timeout))

    async def adecide(
        self,
        state: str | Conversation | Mapping[str, Any],
        questions: str | DecisionQuestion | Iterable[str | DecisionQuestion],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Decision]:
        """`decide` for asyncio. A cancelled task cancels its request, and so does a timeout."""
        check_keywords(options.keys() - DECISION_FIELDS, self.adecide, DECISION_FIELDS)
        request = self._decision(state, questions, options)
        return await self._loop.call_async(self._decided, request, deadline=Deadline(timeout))

    async def _decided(self, request: DecisionRequest) -> list[Decision]:
        return labelled(request, await (await self._loop.live()).decide(request))

    def _decision(self, state: Any, questions: Any, options: Mapping[str, Any]) -> DecisionRequest:
        fields = {"messages": state_of(state), "questions": questions_of(questions), **options}
        return DecisionRequest(id=f"decide-{self._loop.next_number()}", **fields)

    def tokenize(self, prompt: Prompt | Conversation) -> list[int]:
        """Tokenize a prompt as `generate` does, or a conversation as `chat` does, and return the token ids.

        Raises `BadRequest` if it is not a valid prompt, and `PromptTooLarge` if it has more than `max_prompt_bytes`.
        """
        request = Request(id="tokenize", **prompt_fields(prompt))
        return list(self._loop.call(self._tokenized, request).token_ids)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens. Special tokens have no text; bytes that are not UTF-8 become U+FFFD."""
        if not (ids := tuple(listed(token_ids, "token_ids", "expected a list of integers"))):
            return ""
        request = Request(id="detokenize", token_ids=ids)
        return self._loop.call(self._tokenized, request).text or ""

    async def _tokenized(self, request: Request) -> Tokenized:
        return await (await self._loop.live()).tokenize(request)

    async def __aenter__(self) -> Self:
        require_asyncio()
        return self

    async def __aexit__(self, *_: object) -> None:
        import asyncio  # noqa: PLC0415  (whoever has a task has imported it)

        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Free the model, and cancel the requests that run. A second call has no effect. If a picture or sound is being
        decoded, `close` waits for that file, because the decoder's thread still uses the projector: for 5 s of CPU at
        most, or a minute if the machine is busy.
        """
        self._finalizer()

    def _drawn(self, params: SamplingParams) -> SamplingParams:
        return params.with_suggested({**CHAT_SAMPLING, **self.info.capabilities.suggested_sampling})

    def _of_model(self, model: str | None) -> dict[str, Any]:
        """The field of a `Request` that names the model. Raises `UnknownModel`."""
        card, adapters = self.info.model, self.info.capabilities.adapters
        if not isinstance(model, str | None):
            raise WrongKind(f"model: expected a name, not {shown(model)}")
        if model is not None and not self.info.models:
            check_alone(model, card.name, [card.title], adapters)
        return {} if model is None else {"model": model}

    def _prompts(
        self, prompts: Prompt | Iterable[Prompt], model: str | None, params: Sampling | Sequence[Sampling] | None
    ) -> Asked:
        (found, is_alone), more = prompts_of(prompts), self._of_model(model)
        return self._asked([(prompt, fields | more) for prompt, fields in found], params, is_alone)

    def _conversations(
        self, given: Any, messages: Any, fields: dict[str, Any], params: Sampling | Sequence[Sampling] | None
    ) -> Asked:
        if (given is None) == (messages is None):
            raise WrongKind("conversations: give these, or messages, which is one of them")
        found, is_alone = conversations_of(messages if given is None else given, is_one=given is None)
        return self._asked([(messages, {"messages": messages, **fields}) for messages in found], params, is_alone)

    def _asked(
        self,
        asked: list[tuple[Any, dict[str, Any]]],
        sampling_params: Sampling | Sequence[Sampling] | None,
        is_alone: bool,
    ) -> Asked:
        self._loop.check_process()
        params = map(self._drawn, params_for(len(asked), sampling_params))
        rows = [
            GivenPrompt(index, prompt, fields, sampling)
            for index, ((prompt, fields), sampling) in enumerate(zip(asked, params, strict=True))
        ]
        own_sampling = not isinstance(sampling_params, SamplingParams | Mapping | None)
        return rows, (lambda _: True) if is_alone else partial(is_fault_of_call, own_sampling=own_sampling)

    def _run(
        self,
        asked: Asked,
        deadline: Deadline,
        progress: bool | None,
        checkpoint: str | PathLike[str] | None = None,
    ) -> list[RequestOutput]:
        rows, raises = asked
        if not isinstance(checkpoint, str | PathLike | None):
            raise WrongKind(f"checkpoint: expected the path of a file, not {shown(checkpoint)}")
        outputs = []
        with progress_bar(len(rows), progress) as advance:
            if checkpoint is None:
                made = results_of(self._loop, iter(rows), deadline, in_order=False, raises=raises)
            else:
                made = results_with(self._loop, rows, deadline, Path(checkpoint), raises)
            with closing(made) as ended:
                for out in ended:
                    outputs.append(out)
                    advance()
        outputs.sort(key=lambda out: out.index)
        tell_of_failures(outputs)
        return outputs

    async def _run_async(self, asked: Asked, deadline: Deadline) -> list[RequestOutput]:
        rows, raises = asked
        outputs = await self._loop.call_async(every_result, self._loop, iter(rows), raises, deadline=deadline)
        tell_of_failures(outputs)
        return outputs
