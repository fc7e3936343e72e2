"""`LLM.imap`, and an `LLM` that is a client of a server: results as they come, and the same methods."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import trio

from harness import Serve, ServerProcess, running_server, until
from uma import LLM, Grammar, Message, Request, SamplingParams
from uma.errors import (
    BadRequest,
    ConfigError,
    ConnectionLost,
    ModelError,
    PromptTooLarge,
    ShuttingDown,
    UmaError,
    UnknownModel,
    WrongPlace,
    WrongValues,
)
from uma.jobs import JobChanged
from uma.types import GRAMMAR_FIELDS, DecisionQuestion, EmbedRequest, RerankRequest, Token

SETTINGS: dict[str, Any] = {"n_ctx": 4_096, "threads": 1, "n_gpu_layers": 0, "max_sequences": 4}
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def kept(given: Any) -> Any:
    """The same, of no type that mypy would check."""
    return given


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **SETTINGS) as opened:
        yield opened


@pytest.fixture(scope="module")
def served(server: ServerProcess) -> Iterator[LLM]:
    with LLM(socket=server.socket) as opened:
        yield opened


def test_imap_gives_the_first_results_before_the_last_row_exists(llm: LLM) -> None:
    taken: list[int] = []

    def endless() -> Iterator[str]:
        while True:
            taken.append(len(taken))
            yield f"Row {len(taken)}"

    results = llm.imap(endless(), SHORT)
    first = [next(results) for _ in range(20)]
    results.close()
    assert [out.index for out in first] == list(range(20))
    assert [out.prompt for out in first] == [f"Row {index + 1}" for index in range(20)]
    assert len(taken) < 200, "rows are read as far as there is work for"


def test_imap_and_generate_give_the_same(llm: LLM) -> None:
    prompts = [f"Prompt {index}" for index in range(30)]
    texts = [out.outputs[0].text for out in llm.generate(prompts, SHORT)]
    assert [out.outputs[0].text for out in llm.imap(prompts, SHORT)] == texts
    loose = list(llm.imap(prompts, SHORT, in_order=False))
    assert sorted(out.index for out in loose) == list(range(30))
    assert [out.outputs[0].text for out in sorted(loose, key=lambda out: out.index)] == texts


def test_a_row_that_ends_first_need_not_wait_for_a_longer_one(llm: LLM) -> None:
    # The second row's prompt makes it fail at once; the first row has 2,000 tokens to write.
    rows = iter(llm.imap(["Once", "x" * 20_000], SamplingParams(max_tokens=2_000, ignore_eos=True), in_order=False))
    assert next(rows).index == 1
    rows.close()


def test_a_row_may_be_a_conversation_and_a_bad_one_costs_the_others_nothing(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    rows: list[Any] = ["Once", talk, "x" * 20_000, [{"role": "user"}], [Message("user", "Hi")]]
    outs = list(llm.imap(rows, SHORT))
    assert [type(out.error) for out in outs] == [type(None), type(None), PromptTooLarge, WrongValues, type(None)]
    assert outs[1].outputs[0].text == outs[4].outputs[0].text == llm.chat(talk, SHORT)[0].outputs[0].text


@pytest.mark.parametrize("row", [7, b"x", {"role": "user", "content": "Hi"}, None])
def test_what_is_no_row_is_a_type_error_that_names_it(llm: LLM, row: Any) -> None:
    with pytest.raises(TypeError, match=r"rows\[1\]: expected a string or a list of token ids, or a list of messages"):
        list(llm.imap(["Once", row], SHORT))
    assert len(llm.generate("Again", SHORT)[0].outputs[0].token_ids) == 6


def test_leaving_imap_cancels_what_runs(tiny: Path) -> None:
    with LLM(tiny, **SETTINGS | {"n_ctx": 16_384, "max_sequences": 1}) as llm:
        for out in llm.imap(["x" * 100_000, *["Once"] * 50], SamplingParams(max_tokens=4_000, ignore_eos=True)):
            assert out.error is not None
            break
        # With one sequence at a time this would wait for 200,000 tokens.
        assert len(llm.generate("Again", SHORT)[0].outputs[0].token_ids) == 6


def test_an_output_is_plain_data_for_json(llm: LLM) -> None:
    asked = SamplingParams(max_tokens=3, logprobs=2, echo=True, prompt_logprobs=1, temperature=0)
    good, bad, chat = llm.imap(["Once", "x" * 20_000, [{"role": "user", "content": "Hi"}]], asked)
    read = json.loads(json.dumps(good.to_dict()))
    assert read["prompt"] == "Once"
    assert read["outputs"][0]["text"] == good.outputs[0].text
    assert good.usage is not None
    assert read["usage"]["completion_tokens"] == good.usage.completion_tokens
    assert (read["index"], read["error"]) == (0, None)
    assert bad.error is not None
    assert json.loads(json.dumps(bad.to_dict()))["error"] == {"code": bad.error.code, "message": str(bad.error)}
    assert json.loads(json.dumps(chat.to_dict()))["prompt"][0]["role"] == "user"


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_that_is_pickled_or_copied_says_what_to_do(llm: LLM, copied: Any) -> None:
    with pytest.raises(TypeError, match=r"belongs to the process that made it.*make the LLM in the child"):
        copied(llm)


def test_a_grammar_s_fields_are_taken_as_sampling_parameters_one_at_a_time(llm: LLM) -> None:
    given: list[dict[str, Any]] = [{"json_schema": {"type": "string"}}, {"regex": "yes|no"}, {"json_object": True}]
    for fields in given:
        assert SamplingParams(**fields, max_tokens=5) == SamplingParams(grammar=Grammar(**fields), max_tokens=5)
        with pytest.raises(ValueError, match=f"grammar: {next(iter(fields))} says"):
            SamplingParams(**fields, grammar=Grammar(regex="x"))
    with pytest.raises(ValueError, match="these came: regex, choice"):
        SamplingParams(regex="a", choice=["b"])
    (out,) = llm.generate("Once", {"choice": ["yes", "no"], "max_tokens": 8})
    assert out.outputs[0].text in ("yes", "no")


def test_a_grammar_s_fields_are_in_the_signature_of_sampling_parameters_and_can_be_read() -> None:
    assert {*GRAMMAR_FIELDS} <= {*signature(SamplingParams).parameters}
    assert SamplingParams(regex="yes|no").regex == "yes|no"
    assert SamplingParams(regex="yes|no").choice is SamplingParams().regex is None


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SamplingParams(choice="yes"), "choice"),
        (lambda: Grammar(choice="yes"), "choice"),
        (lambda: EmbedRequest("1", "a fox"), "texts"),
        (lambda: RerankRequest("1", query="a fox", documents="a fox"), "documents"),
        (lambda: DecisionQuestion.choice("Which?", kept("yes")), "options"),
        (lambda: Request("1", token_ids="12"), "token_ids"),
        (lambda: Request("1", token_ids=kept(12)), "token_ids"),
    ],
)
def test_a_text_where_a_list_belongs_is_not_taken_for_its_letters(make: Callable[[], Any], field: str) -> None:
    with pytest.raises(WrongValues, match=f"^{field}: expected a list of "):
        make()


def test_a_copy_of_parameters_has_the_changes_checked_and_a_field_that_is_set_says_how(llm: LLM) -> None:
    given = SamplingParams(n=2, max_tokens=5, grammar=Grammar(regex="yes|no"), stop="x")
    assert given.replace(n=3) == SamplingParams(n=3, max_tokens=5, grammar=given.grammar, stop="x")
    assert given.replace(choice=["a"]) == SamplingParams(n=2, max_tokens=5, grammar=Grammar(choice=["a"]), stop="x")
    assert given.replace(grammar=None).grammar is None
    with pytest.raises(WrongValues, match="n: 0 must be from 1"):
        given.replace(n=0)
    with pytest.raises(WrongValues, match="best_of: 1 answers cannot have the 2 best"):
        given.replace(best_of=1)
    with pytest.raises(AttributeError, match=r"params\.replace\(n=…\) returns a copy"):
        given.n = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(given)) == copy.deepcopy(given) == given


def test_an_llm_on_a_socket_has_the_server_s_model_and_every_method(served: LLM, server: ServerProcess) -> None:
    assert repr(served).startswith(f"<uma.LLM {str(server.socket)!r}: ")
    assert served.info.model.is_builtin
    prompts = ["Once upon a time,", "The owl said:"]
    outs = served.generate(prompts, SHORT)
    assert [len(out.outputs[0].token_ids) for out in outs] == [6, 6]
    talk = [{"role": "user", "content": "Hi"}]
    assert "".join(served.stream(talk, SHORT)) == served.chat(talk, SHORT)[0].outputs[0].text
    ids = served.tokenize("Once upon a time")
    assert served.detokenize(ids) == "Once upon a time"
    assert served.embed(["a fox", "an owl"]).shape[0] == 2
    assert [out.index for out in served.imap(["x"] * 5, SHORT)] == list(range(5))
    before = server.metrics()["requests_cancelled"]
    with pytest.raises(TimeoutError, match="longer than its timeout"):
        served.generate("Once", SamplingParams(max_tokens=1_000, ignore_eos=True), timeout=0.1)
    until(lambda: server.metrics()["requests_cancelled"], lambda count: count > before)
    # The tokens were the server's.
    assert server.metrics()["requests_length"] >= 9


def test_a_job_on_a_socket_waits_where_the_server_is_full(serve: Serve) -> None:
    server = serve("--max-queue", "2", "--max-sequences", "1", "--n-ctx", "2048")
    with LLM(socket=server.socket) as one, LLM(socket=server.socket) as other:
        rest = other.imap(["Once"] * 12, SHORT)
        outs = [*one.imap(["Again"] * 12, SHORT), *rest]
    assert [out.error for out in outs] == [None] * 24


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, ConnectionLost), (signal.SIGTERM, ShuttingDown)])
@pytest.mark.parametrize("in_order", [True, False])
def test_imap_reads_no_more_rows_once_its_server_ends(
    serve: Serve, number: int, kind: type[UmaError], in_order: bool
) -> None:
    server = serve("--max-sequences", "1", "--n-ctx", "2048", "--drain-timeout-sec", "0")
    rows = iter(["Once"] * 5_000)
    with LLM(socket=server.socket) as llm:
        results = llm.imap(rows, SamplingParams(max_tokens=200, ignore_eos=True), in_order=in_order)
        found = [next(results)]
        server.signal(number)
        with pytest.raises((kind, ConnectionLost)):
            found.extend(results)
    assert {out.error for out in found} == {None}
    assert len(list(rows)) > 4_900


def test_what_ran_when_the_server_went_away_raises_once_and_the_next_call_has_a_new_session(serve: Serve) -> None:
    server = serve("--drain-timeout-sec", "0")
    with LLM(socket=server.socket) as llm:
        before = llm.tokenize("Once")
        stream = llm.stream("Once", SamplingParams(max_tokens=1_000, ignore_eos=True))
        next(stream)
        server.process.kill()
        server.wait()
        with pytest.raises(ConnectionLost, match="the server went away"):
            list(stream)
        for ask in (lambda: llm.chat("Once", SHORT), lambda: llm.embed("x"), lambda: next(llm.imap(["Once"], SHORT))):
            with pytest.raises(ConnectionLost, match="no server listens there; start one with `uma run --socket"):
                ask()
        server = serve()
        assert llm.tokenize("Once") == before
        server.process.kill()
        server.wait()
        serve()
        assert asyncio.run(llm.achat("Once", SHORT))[0].error is None
        assert "".join(llm.stream("Once", SHORT)) == llm.generate(["Once"], SHORT)[0].text


def test_a_new_server_with_another_model_is_no_new_session_and_says_which_it_has(serve: Serve, tiny: Path) -> None:
    server = serve()
    with LLM(socket=server.socket) as llm, LLM(tiny.stem, socket=server.socket) as named:
        server.process.kill()
        server.wait()
        with running_server(server.socket, "--model", "builtin"):
            for each in (llm, named):
                with pytest.raises(ConnectionLost, match=r"another model, builtin|'builtin' is$"):
                    each.generate("Once", SHORT)


def test_of_a_list_the_results_that_were_there_stay_when_the_server_goes_away(serve: Serve) -> None:
    server = serve("--max-sequences", "1", "--n-ctx", "2048")
    asked = [SHORT, *[SamplingParams(max_tokens=1_500, ignore_eos=True)] * 9]
    lost = pytest.warns(UserWarning, match=r"prompts failed, the first because: .* the server went away")
    with LLM(socket=server.socket) as llm, ThreadPoolExecutor() as pool, lost:
        outs = pool.submit(llm.generate, ["Once"] * 10, asked)
        until(server.metrics, lambda metrics: metrics["requests_length"] >= 2)
        server.process.kill()
        found = outs.result()
    assert found[0].error is None
    assert isinstance(found[-1].error, ConnectionLost)


@pytest.mark.parametrize("prompts", [["Once"], ["Once"] * 3])
def test_a_call_without_any_result_raises_the_loss_of_its_server_for_a_list_too(
    serve: Serve, prompts: list[str]
) -> None:
    server = serve("--n-ctx", "2048")
    with LLM(socket=server.socket) as llm:
        server.process.kill()
        server.wait()
        for ask in (llm.generate, llm.chat, lambda asked: asyncio.run(llm.agenerate(asked))):
            with pytest.raises(ConnectionLost, match="no server listens there"):
                ask(prompts)


def test_all_rows_of_a_call_share_one_attempt_at_a_new_session(serve: Serve) -> None:
    server = serve("--n-ctx", "2048", "--max-sequences", "1")
    with LLM(socket=server.socket) as llm:
        server.process.kill()
        server.wait()
        server.socket.unlink(missing_ok=True)
        attempts = list[socket.socket]()
        with socket.socket(socket.AF_UNIX) as mute, ThreadPoolExecutor() as pool:
            mute.bind(str(server.socket))
            mute.listen()
            asked = pool.submit(llm.generate, ["Once"] * 40, SHORT)
            attempts.append(mute.accept()[0])
            attempts[0].close()
            with pytest.raises(ConnectionLost):
                asked.result()
            mute.setblocking(False)
            with pytest.raises(BlockingIOError):
                mute.accept()


@pytest.mark.parametrize("given", [{"n_ctx": 512}, {"temperature": 0.5}])
def test_what_a_server_has_of_its_own_is_refused_beside_a_socket(given: dict[str, Any], server: ServerProcess) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))}: the server on the socket has its own"):
        LLM(socket=server.socket, **given)


def test_a_model_beside_a_socket_is_the_server_s_own_of_that_name(server: ServerProcess) -> None:
    with LLM("builtin", socket=server.socket) as llm:
        assert llm.generate("Once", SamplingParams(max_tokens=2))[0].error is None
    with LLM() as own, LLM(socket=server.socket) as served:
        nowhere: list[Callable[[], object]] = [
            lambda: LLM("qwen3-8b"),
            lambda: LLM("qwen3-8b", socket=server.socket),
            lambda: own.generate("Once", model="qwen3-8b"),
            lambda: served.generate("Once", model="qwen3-8b"),
            lambda: served._loop.call(served._loop.source.tokenize, Request("a", prompt="x", model="qwen3-8b")),
        ]
        for ask in nowhere:
            with pytest.raises(UnknownModel) as error:
                ask()
            assert isinstance(error.value, ModelError) and isinstance(error.value, BadRequest)
        with pytest.raises(UnknownModel, match=r"^model: 'builtin\+pirate' is not loaded here; 'builtin' is$"):
            own.generate("Once", model="builtin+pirate")


@pytest.mark.parametrize("name", ["http", "max_sessions", "socket_mode", "idle_timeout_sec", "alias", "log_format"])
def test_a_setting_of_a_server_is_refused_without_one(name: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=f"'{name}'; it is a setting of a server"):
        LLM(**given)


def test_a_socket_without_a_server_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match="uma run"):
        LLM(socket=tmp_path / "uma.sock")
    with pytest.raises(TypeError, match="socket: expected the path"):
        LLM(socket=7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a Unix socket's path, not a URL"):
        LLM(socket="http://127.0.0.1:8000")
    with pytest.raises(ConfigError, match=r"model: expected a file or a name, not a URL: .* OpenAI's API"):
        LLM("http://127.0.0.1:8000/v1")


def test_with_a_checkpoint_the_same_call_takes_what_is_there_and_goes_on(llm: LLM, tmp_path: Path) -> None:
    out, prompts = tmp_path / "out.jsonl", [f"Prompt {index}" for index in range(12)]
    likely = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)
    with pytest.warns(UserWarning, match="1 of 6 prompts failed"):
        first = llm.generate([*prompts[:5], "x" * 200_000], likely, checkpoint=out)
    kept = out.read_bytes()
    assert [json.loads(line)["prompt"] for line in kept.splitlines()] == [*prompts[:5], "x" * 200_000]
    out.write_bytes(kept + b'{"prompt": "torn')
    with pytest.warns(UserWarning, match="1 of 13 prompts failed"):
        every = llm.generate([*prompts[:5], "x" * 200_000, *prompts[5:]], likely, checkpoint=out)
    assert out.read_bytes().startswith(kept), "what was done is not done again"
    assert [each.to_dict() for each in every[:6]] == [each.to_dict() for each in first]
    assert isinstance(every[5].error, PromptTooLarge)
    assert [each.prompt for each in every if each.error is None] == prompts
    plain = llm.generate(prompts, SHORT)
    assert [each.outputs[0].text for each in every if each.error is None] == [each.outputs[0].text for each in plain]
    with pytest.raises(JobChanged, match="prompt 1 or its parameters"):
        llm.generate([prompts[0], "Another", *prompts[1:]], likely, checkpoint=out)
    with pytest.raises(JobChanged, match=r"has results of 13 prompts.*remove it and its journal"):
        llm.generate(prompts[:3], likely, checkpoint=out)


def test_the_methods_for_asyncio_say_under_trio_what_to_use(llm: LLM) -> None:
    async def entered() -> None:
        async with llm:
            pass

    async def streamed() -> None:
        async for _ in llm.stream("Once", SHORT):
            pass

    for ask in (partial(llm.agenerate, "Once"), partial(llm.aembed, "Once"), entered, streamed):
        with pytest.raises(WrongPlace, match=r"with Trio use uma\.open_engine"):
            trio.run(ask)


def test_the_text_of_a_stream_is_that_of_one_answer(llm: LLM) -> None:
    several = SHORT.replace(n=2)
    with llm.stream("Once", several) as stream, pytest.raises(WrongValues, match=r"^n: .* llm\.generate returns"):
        next(stream)
    with llm.stream("Once", several) as stream:
        assert {event.index for event in stream.events() if isinstance(event, Token)} == {0, 1}


def test_a_function_given_as_a_tool_can_be_the_one_to_call(llm: LLM) -> None:
    def weather(city: str) -> None: ...

    (out,) = llm.chat("Oslo?", SamplingParams(max_tokens=60), tools=[weather], tool_choice=weather)
    assert {call.name for call in out.outputs[0].tool_calls} <= {"weather"}
    with pytest.raises(BadRequest, match="tool_choice"):
        llm.chat("Oslo?", tools=[], tool_choice=weather)


@pytest.mark.parametrize(
    ("ask", "hint"),
    [
        (lambda llm: SamplingParams(**kept({"max_completion_tokens": 3})), "did you mean max_tokens"),
        (lambda llm: SamplingParams(**kept({"max_new_tokens": 3})), "did you mean max_tokens"),
        (lambda llm: llm.embed("a", dims=3), "did you mean dimensions"),
        (lambda llm: asyncio.run(llm.aembed("a", dims=3)), "did you mean dimensions"),
        (lambda llm: LLM("Qwen/Nothing-9B-GGUF"), "`uma pull Qwen/Nothing-9B-GGUF` gets it"),
        (lambda llm: LLM("Qwen/Nothing-9B-GGUF:Q8_0"), "`uma pull Qwen/Nothing-9B-GGUF:Q8_0` gets it"),
        (lambda llm: LLM("models/nothing.gguf"), "`uma models` tells"),
        (lambda llm: LLM("./nothing"), "`uma models` tells"),
    ],
)
def test_the_names_of_other_libraries_are_answered_with_what_to_write(
    llm: LLM, ask: Callable[[Any], Any], hint: str
) -> None:
    with pytest.raises(UmaError, match=hint):
        ask(llm)
