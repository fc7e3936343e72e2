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
from uma.errors import WrongKind
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
from uma.llm.batch import GivenPrompt, Raises, every_result, progress_bar, results_of, warn_of_failures
from uma.llm.checkpoint import results_with
from uma.llm.place import place_of
from uma.llm.results import RequestOutput, array_of, labelled
from uma.llm.stream import LLMStream
from uma.llm.thread import NO_THREADS, Deadline, SourceThread
from uma.models.names import check_alone
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
    SamplingParams,
    ServerInfo,
)

Embedded = list["array.array[float] | None"]
"""The vector of each text; None for one of no token."""
Asked = tuple[list[GivenPrompt], Raises]
"""Prompts, and which of their errors the call raises."""


class LLM(Closing):
    """A model, loaded, ready to answer prompts. Safe to use from several threads; close it or use it in a `with` block.

        with LLM("model.gguf", n_ctx=8192) as llm:
            for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
                print(out.text if out.error is None else out.error)

    `model` is a GGUF file, a name that `uma models` lists, or nothing for the built-in model. Further keywords are
    the fields of `RuntimeConfig` that a model in this process has a use for; nothing else counts, no `UMA_…` setting
    and no file. Raises `ModelError` or `ConfigError` where the model cannot be loaded,
    `UnknownModel`, which is a `ModelError`, where none has this name.

    Where neither a prompt's parameters nor these keywords say how tokens are drawn, the model's file does
    (`general.sampling.…`), else temperature 0.7 and top_p 0.95 hold: `temperature=0` always takes the likeliest.

    With `socket`, the path of a server's Unix socket, it is a client of that server, which has settings of its own:
    keywords are a `ConfigError`. `model` is then one of the server's by its name, or nothing for its default.
    `ConnectionLost` where no server listens there.

    An LLM belongs to the process that made it: a forked child gets `RuntimeError`, and can make its own.
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
        """The model, what it can do, and its limits."""
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
        """Continue each prompt, all batched together; results in the order of the prompts.

        A prompt is a text, or a list of its token ids. `sampling_params` is one for all or one for each (`WrongValues`
        where their number differs). `model` is `model+NAME` for one of its LoRA adapters; `UnknownModel` where there is
        none of that name. `progress` shows a bar on standard error; by default on a terminal. Ctrl-C cancels what runs
        and raises `KeyboardInterrupt`, and what takes longer than `timeout` seconds in all `TimedOut`, which is a
        `TimeoutError`; the LLM remains usable.

        One prompt alone raises its error, an `UmaError`. In a list of prompts one that fails is a result with
        `error` set, and one `UserWarning` says how many failed; what is wrong for all of them, as a grammar in
        `sampling_params`, raises `BadRequest`, and what is no prompt at all `WrongKind`.

        With `checkpoint`, a file, each result is appended to it as a line of JSON (`RequestOutput.to_dict`) in the
        order of the prompts, with a journal beside it. The same call, also after a kill or a power cut, takes what is
        there and goes on behind it; more prompts can follow by then. Results are those of the prompts and parameters
        that they were made with: `JobChanged`, a `ConfigError`, where one is another now, or the model is.
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
        """`generate` for asyncio: a timeout, or another cancellation of the task, ends the work.

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
        """The result of each row, a prompt or a conversation, as soon as it is there: for jobs that keep what is done.

            for out in llm.imap(open("prompts.txt")):
                print(json.dumps(out.to_dict()), file=results, flush=True)

        `rows` is read as far as there is work for, so it can be longer than memory. Results are in its order, or with
        `in_order=False` as they end; `RequestOutput.index` is the row's number. A row that fails is a result with
        `error` set; what is wrong for all rows raises `BadRequest`, and what is neither prompt nor conversation a
        `WrongKind`. Leaving the loop, Ctrl-C included, cancels what runs, and so does `TimedOut` where all of it takes
        longer than `timeout` seconds. The other keywords are those of `chat`, for rows that are conversations.
        """
        check_keywords(unknown, self.imap)
        if isinstance(rows, str | BYTES) or not isinstance(rows, Iterable):
            raise WrongKind(f"rows: expected a list of prompts, not {shown(rows)}; llm.generate takes one alone")
        sampling = sampling_of(sampling_params, "sampling_params")
        fields = tool_fields(tools, tool_choice, reasoning, is_parallel=parallel_tool_calls)
        self._loop.check_process()
        sampling = self._drawn(sampling)
        made = (GivenPrompt(index, row, row_fields(row, index, fields), sampling) for index, row in enumerate(rows))
        raises = partial(is_fault_of_call, own_sampling=False)
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
        """Answer each conversation, through the model's chat template. Otherwise as `generate`.

        A conversation is a question as a string, or a list of `Message`s, or of dicts as OpenAI has them (`role`,
        `content`, `tool_calls`, `tool_call_id`, `name`); one alone can be given as it is, or as `messages=`. An
        empty list is no conversation, and its result an empty list; as `messages` it is `BadRequest`.
        Calls of the `tools` (Python functions with annotations, `Tool`s, or dicts as OpenAI has them) are in
        `Completion.tool_calls`. A conversation goes on with `Message("assistant", out.text, out.tool_calls)` and, for
        each of them, `Message("tool", result, tool_call_id=call.id, name=call.name)`. The other keywords are the fields
        of `Request`.
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
        """`chat` for asyncio, as `agenerate` is `generate`: cancelling the task ends the work."""
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
        """The continuation of a prompt, or the answer to a conversation, piece by piece as it is generated.

            for text in llm.stream("Once upon a time"):
                print(text, end="", flush=True)

        The pieces are whole characters; afterwards `LLMStream.finished` has usage, figures and calls of the `tools`.
        `LLMStream.events` gives thinking and calls as they grow, too. The keywords are those of `chat`. A failure is
        raised, as an `UmaError`: `TimedOut` behind the pieces until then where it takes longer than `timeout` seconds.
        Leaving the loop early and closing the stream, or its `with` block, cancels. With asyncio it is `async for text
        in llm.stream(…)`.
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
        """An embedding of each text, as the rows of an array in their order; of one string, a single row.

        Each has length 1 unless `normalize` is false; `dimensions` keeps its first figures, normalised after the cut.
        A text of no token, such as an empty one, has a row of NaN, and one warning tells of them all. Raises
        `PromptTooLarge` for a text that does not fit the context (none is ever cut), and `BadRequest` where the model
        gives no embeddings, or with `fail_on_empty` for a text of no token.
        """
        check_keywords(unknown, self.embed)
        options = {"dimensions": dimensions, "normalize": normalize, "fail_on_empty": fail_on_empty}
        return array_of(self._loop.call(self._embedded, texts_of(texts, "texts"), options, deadline=Deadline(timeout)))

    async def aembed(
        self, texts: str | Iterable[str], *, timeout: float | None = None, **options: Any
    ) -> npt.NDArray[np.float32]:
        """`embed` for asyncio, as `agenerate` is `generate`: cancelling the task ends the work."""
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
                rows += (await self._loop.source.embed(request)).vectors
        return rows

    def rerank(
        self, query: str, documents: Iterable[str], *, top_n: int | None = None, timeout: float | None = None
    ) -> list[Ranked]:
        """The documents, best first, by how well each answers the query; `top_n` keeps the first ones.

        `Ranked.index` says which document it is. Raises `BadRequest` where the model is no reranker, and otherwise what
        `embed` does.
        """
        request = rerank_request(query, documents, top_n)
        return list(self._loop.call(self._loop.source.rerank, request, deadline=Deadline(timeout)).results)

    async def arerank(
        self, query: str, documents: Iterable[str], *, top_n: int | None = None, timeout: float | None = None
    ) -> list[Ranked]:
        """`rerank` for asyncio."""
        request = rerank_request(query, documents, top_n)
        return list(
            (await self._loop.call_async(self._loop.source.rerank, request, deadline=Deadline(timeout))).results
        )

    def decide(
        self,
        state: str | Conversation | Mapping[str, Any],
        questions: str | DecisionQuestion | Iterable[str | DecisionQuestion],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Decision]:
        """Probabilities of the answers to questions about a state: a text, a conversation, or anything else as JSON.

            spam, topic = llm.decide(mail, ["Is it spam?", DecisionQuestion.choice("Topic?", ["work", "home"])])
            print(spam.probability, topic.best, topic.probabilities)

        Nothing is generated, and the state is read once for all questions. A string is a question of yes or no,
        and one question can be given alone. `options` are fields of `DecisionRequest`: `labels`, `orders`,
        `temperature`, `min_label_mass`, `reproducible`.
        """
        check_keywords(options.keys() - DECISION_FIELDS, self.decide, DECISION_FIELDS)
        request = self._decision(state, questions, options)
        return labelled(request, self._loop.call(self._loop.source.decide, request, deadline=Deadline(timeout)))

    async def adecide(
        self,
        state: str | Conversation | Mapping[str, Any],
        questions: str | DecisionQuestion | Iterable[str | DecisionQuestion],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Decision]:
        """`decide` for asyncio."""
        check_keywords(options.keys() - DECISION_FIELDS, self.adecide, DECISION_FIELDS)
        request = self._decision(state, questions, options)
        return labelled(
            request, await self._loop.call_async(self._loop.source.decide, request, deadline=Deadline(timeout))
        )

    def _decision(self, state: Any, questions: Any, options: Mapping[str, Any]) -> DecisionRequest:
        fields = {"messages": state_of(state), "questions": questions_of(questions), **options}
        return DecisionRequest(id=f"decide-{self._loop.next_number()}", **fields)

    def tokenize(self, prompt: Prompt | Conversation) -> list[int]:
        """The token ids that `generate` computes for this prompt, or `chat` for this conversation.

        Raises `BadRequest` where it can be no prompt, and `PromptTooLarge` where it is over `max_prompt_bytes`.
        """
        request = Request(id="tokenize", **prompt_fields(prompt))
        return list(self._loop.call(self._loop.source.tokenize, request).token_ids)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of tokens. Special tokens have none; bytes that are not UTF-8 become replacement characters."""
        if not (ids := tuple(listed(token_ids, "token_ids", "expected a list of integers"))):
            return ""
        request = Request(id="detokenize", token_ids=ids)
        return self._loop.call(self._loop.source.tokenize, request).text or ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        import asyncio  # noqa: PLC0415  (whoever has a task has imported it)

        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Free the model. Harmless when repeated. Requests that run are cancelled, and one whose picture or sound is
        being decoded ends with that file: its thread still uses the projector, and has 5 s of CPU at most, a minute
        where the machine has no time for it.
        """
        self._finalizer()

    def _drawn(self, params: SamplingParams) -> SamplingParams:
        return params.with_suggested({**CHAT_SAMPLING, **self.info.capabilities.suggested_sampling})

    def _of_model(self, model: str | None) -> dict[str, Any]:
        """The field of a `Request` that names the model. Raises `UnknownModel`."""
        card, adapters = self.info.model, self.info.capabilities.adapters
        if not isinstance(model, str | None):
            raise WrongKind(f"model: expected a name, not {shown(model)}")
        if model is None:
            return {}
        if self.info.models:
            return {"model": model}
        check_alone(model, card.name, [card.title], adapters)
        return {"model": model}

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
        warn_of_failures(outputs)
        return outputs

    async def _run_async(self, asked: Asked, deadline: Deadline) -> list[RequestOutput]:
        rows, raises = asked
        outputs = await self._loop.call_async(every_result, self._loop, iter(rows), raises, deadline=deadline)
        warn_of_failures(outputs)
        return outputs
