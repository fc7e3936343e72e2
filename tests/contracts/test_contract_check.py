"""`uma contract check`: every claim of the real server is true, and a false one is found."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from http_server import HttpServer, running_http
from script_model import SWITCHED, THOUGHT, write_script_model

from harness import ONE_THREAD, RunInProcessText, ServerProcess, running_server, short_directory
from models import CHATML, write_encoder, write_model
from uma import RuntimeConfig, open_engine
from uma.cli.contract import Probe, check, prove
from uma.client.http import HttpClient
from uma.client.http_probe import HttpProbe
from uma.client.probe import SocketProbe
from uma.contracts.claims import claims_of
from uma.contracts.proofs import NOT_SHOWN, Claim, DisprovenError, Question, ServerReply
from uma.engine import Engine
from uma.errors import ConnectionLost
from uma.protocol.codec import message_of
from uma.protocol.messages import EmbedQuery, Generate, TokenizeQuery
from uma.types import FillIn, Finished, ReasoningDelta, Request, ServerInfo


def test_everything_the_server_claims_is_true(server: ServerProcess, uma_told: RunInProcessText) -> None:
    done = uma_told("contract", "check", "--json", "--socket", str(server.socket))
    found = json.loads(done.stdout)
    assert done.returncode == 0, [each for each in found if not each["is_true"]]
    assert done.stderr == f"{len(found)} claims, 0 false\n"
    names = {"streaming", "cancel", "chat", "reasoning", "logprobs", "speculation", "health", "metrics", "embeddings"}
    assert names <= {each["claim"] for each in found}


def test_everything_the_server_claims_is_true_over_http_too(
    http_server: HttpServer, uma_told: RunInProcessText
) -> None:
    done = uma_told("contract", "check", "--http", http_server.url)
    head, *found = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert head.split() == ["claim", "declared", "proven", "what", "was", "seen"]
    by_socket = [each.name for each in claims_of(SocketProbe(http_server.process.socket).introduce())]
    assert [line.partition("  ")[0] for line in found] == by_socket


@pytest.mark.parametrize(
    ("claim", "tampers"),
    [("sampling: seed", "forgets_the_seed"), ("streaming", "miscounts"), ("sampling: entropy_dial", "hides_warnings")],
)
def test_a_false_claim_is_found_over_http_too(http_server: HttpServer, claim: str, tampers: str) -> None:
    assert is_proven(claim, Liar(HttpProbe(HttpClient(http_server.url))))
    assert not is_proven(claim, Liar(HttpProbe(HttpClient(http_server.url)), tampers=globals()[tampers]))


@pytest.mark.parametrize(
    ("url", "line", "code"),
    [
        ("localhost", "--http: 'localhost' is no address of a server", 2),
        ("http://127.0.0.1:x", "--http: 'http://127.0.0.1:x' is no address of a server", 2),
        ("http://127.0.0.1:9", "http://127.0.0.1:9: ", 1),
    ],
)
def test_a_url_without_a_server_is_one_line(url: str, line: str, code: int, uma_told: RunInProcessText) -> None:
    done = uma_told("contract", "check", "--http", url)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"uma: error: {line}")


@pytest.mark.parametrize(
    ("pooling", "can", "cannot"), [("cls", "embeddings", "rerank"), ("rank", "rerank", "embeddings")]
)
def test_a_model_that_does_not_generate_claims_what_it_can_and_no_more(
    pooling: Literal["cls", "rank"], can: str, cannot: str, tmp_path: Path
) -> None:
    model = write_encoder(tmp_path / "encoder.gguf", pooling=pooling)
    with (
        short_directory() as directory,
        running_server(directory / "uma.sock", "--model", str(model), *ONE_THREAD) as it,
    ):
        found = {each.claim: each for each in check(SocketProbe(it.socket))}
    assert not [each for each in found.values() if not each.is_true]
    assert found[can].declared != "no"
    assert found[cannot].declared == found["generation"].declared == "no"
    assert not any(name.startswith(("sampling", "streaming", "tools")) for name in found)


POOLINGS: tuple[Literal["mean", "cls", "last"], ...] = ("mean", "cls", "last")


async def told(engine: Engine, request: Request) -> list[dict[str, Any]]:
    """A generation's thinking and its end, as the wire has them."""
    events: list[dict[str, Any]] = []
    async with engine.generate(request) as stream:
        async for each in stream:
            if isinstance(each, ReasoningDelta):
                events.append({"event": "reasoning", "text": each.text})
            elif isinstance(each, Finished):
                events.append({"event": "eos", "usage": attrs.asdict(each.usage), "warnings": each.warnings})
    return events


async def is_proven_in_process(claim: Claim, engine: Engine) -> bool:
    """Whether a claim about embeddings or the chat template is shown to be true of an engine in this process."""
    proof = claim.prove()
    try:
        question = next(proof)
        while True:
            events: list[dict[str, Any]]
            message = message_of({"id": "a", **question.fields})
            if isinstance(message, TokenizeQuery):
                events = [{"event": "tokenize", **attrs.asdict(await engine.tokenize(message.request))}]
            elif isinstance(message, EmbedQuery):
                found = await engine.embed(message.request)
                events = [{"event": "embed", "embeddings": [each and each.tolist() for each in found.vectors]}]
            else:
                assert isinstance(message, Generate)
                events = await told(engine, message.request)
            question = proof.send(ServerReply(tuple(events)))
    except StopIteration as end:
        return not end.value.startswith(NOT_SHOWN)
    except DisprovenError:
        return False


async def check_poolings(model: Path, pooling: Literal["mean", "cls", "last"], claims: tuple[str, ...]) -> None:
    """Check that of these claims the one that is so is proven of a model with this pooling."""
    config = RuntimeConfig(model=str(model), n_ctx=512, pooling=pooling, n_gpu_layers=0)
    async with open_engine(config) as engine:
        for told in claims:
            info = attrs.evolve(engine.info, capabilities=attrs.evolve(engine.info.capabilities, pooling=told))
            (claim,) = (each for each in claims_of(info) if each.name == "pooling")
            assert await is_proven_in_process(claim, engine) == (told == pooling)


@pytest.mark.parametrize("pooling", POOLINGS)
async def test_each_pooling_proves_itself_and_no_other(tiny: Path, pooling: Literal["mean", "cls", "last"]) -> None:
    await check_poolings(tiny, pooling, POOLINGS)


@pytest.mark.parametrize("template", [CHATML, None])
async def test_a_template_of_the_models_own_is_told_from_the_plain_one(template: str | None, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", chat_template=template)
    async with open_engine(RuntimeConfig(model=str(path), n_ctx=512)) as engine:
        for told in (True, False):
            info = attrs.evolve(engine.info, capabilities=attrs.evolve(engine.info.capabilities, chat=told))
            (claim,) = (each for each in claims_of(info) if each.name == "chat")
            assert await is_proven_in_process(claim, engine) == (told == (template is not None))


@pytest.mark.parametrize("is_true", [True, False])
async def test_a_template_s_switch_of_thinking_is_shown_and_one_that_does_nothing_is_not(
    is_true: bool, tmp_path: Path
) -> None:
    template = SWITCHED if is_true else SWITCHED.replace("not enable_thinking", "false")
    path = write_script_model(tmp_path / "model.gguf", (*THOUGHT, "It ", "rains."), template=template)
    async with open_engine(RuntimeConfig(model=str(path), n_ctx=512)) as engine:
        info = attrs.evolve(engine.info, capabilities=attrs.evolve(engine.info.capabilities, reasoning_switch=True))
        (claim,) = (each for each in claims_of(info) if each.name == "reasoning_switch")
        assert await is_proven_in_process(claim, engine) == is_true


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server whose model thinks, and that drafts whatever can be guessed."""
    path = tmp_path_factory.mktemp("model") / "thinks.gguf"
    template = "{# <think></think> #}{% for m in messages %}{{ m.content }}|{% endfor %}{{ '\\n' }}"
    write_script_model(path, "<think>Which city is it?</think>Oslo.", template=template)
    options = ("--model", str(path), "--speculate", "always", *ONE_THREAD)
    with short_directory() as directory, running_http(directory, *options) as process:
        yield process


DENIALS: dict[str, Any] = {"reasoning": False, "speculation": "none: for no reason"}


@pytest.mark.parametrize("is_http", [False, True], ids=["socket", "HTTP"])
def test_thinking_and_drafts_show_and_their_denial_is_found(thinker: HttpServer, is_http: bool) -> None:
    probe: Probe = HttpProbe(HttpClient(thinker.url)) if is_http else SocketProbe(thinker.process.socket)
    found = {each.name: prove(each, probe) for each in claims_of(probe.introduce()) if each.name in DENIALS}
    assert all(each.is_true and not each.seen.startswith(NOT_SHOWN) for each in found.values()), found
    for name, lie in DENIALS.items():
        assert not is_proven(name, Liar(probe, {name: lie}))
    assert not is_proven("reasoning_switch", Liar(probe, {"reasoning_switch": True}))


def test_thinking_that_stays_in_the_text_is_found(thinker: HttpServer) -> None:
    assert not is_proven("reasoning", Liar(SocketProbe(thinker.process.socket), mishears=without("reasoning")))


def test_there_is_a_claim_for_each_capability(server: ServerProcess) -> None:
    """Whatever is declared otherwise, other claims are made."""
    info = SocketProbe(server.socket).introduce()
    other: dict[str, Any] = {"prefix_sharing": "none: x", "pooling": "cls", "speculation": "prompt look-up"}
    other["fill_in"] = FillIn(1, 2, 3)

    def claims(**declared: Any) -> list[tuple[str, str]]:
        changed = attrs.evolve(info, capabilities=attrs.evolve(info.capabilities, **declared))
        return [(each.name, each.declared) for each in claims_of(changed)]

    # What a template and a file say of themselves, which adapters the settings name and what memory is laid out, is
    # told as it is read: no answer could prove it.
    read = {"suggested_sampling", "template_variables", "reasoning_efforts", "memory", "adapters"}
    for name, value in attrs.asdict(info.capabilities, recurse=False).items():
        if name in read:
            continue
        if isinstance(value, tuple):
            assert value, name
            for each in value:
                assert claims(**{name: tuple(kept for kept in value if kept != each)}) != claims(), (name, each)
        elif isinstance(value, bool):
            assert claims(**{name: not value}) != claims(), name
        else:
            assert claims(**{name: other[name] if isinstance(value, str | None) else value + 1}) != claims(), name


@attrs.frozen
class Liar:
    """A real server that says of itself what `lies` say, that hears what `mishears` makes of a question, and whose
    answers `tampers` with.
    """

    honest: Probe
    lies: dict[str, Any] = attrs.field(factory=dict)
    tampers: Callable[[Question, ServerReply], ServerReply] = lambda _, reply: reply
    mishears: Callable[[Question], Question] = lambda question: question

    def introduce(self) -> ServerInfo:
        info = self.honest.introduce()
        return attrs.evolve(info, capabilities=attrs.evolve(info.capabilities, **self.lies))

    def ask(self, question: Question) -> ServerReply:
        return self.tampers(question, self.honest.ask(self.mishears(question)))


def is_proven(name: str, liar: Liar) -> bool:
    """Whether what a server claims under this name is true. (That alone is asked for: all claims take seconds.)"""
    found = [prove(each, liar) for each in claims_of(liar.introduce()) if each.name == name]
    assert found
    print(*found, sep="\n")
    return all(each.is_true for each in found)


@pytest.mark.parametrize(
    ("lies", "claim"),
    [
        ({"streaming": False}, "streaming"),
        ({"cancel": False}, "cancel"),
        ({"sampling_params": ("temperature", "entropy_dial")}, "sampling: entropy_dial"),
        ({"max_stop_sequences": 17}, "max_stop_sequences"),
        ({"tools": ()}, "tools"),
        ({"reasoning": True}, "reasoning"),
        ({"max_stop_sequences": 2}, "3 stop sequences"),
        ({"prefix_sharing": "none: for no reason"}, "prefix_sharing"),
        ({"kv_unified": False}, "kv_unified"),
    ],
)
def test_a_false_declaration_is_found(server: ServerProcess, lies: dict[str, Any], claim: str) -> None:
    assert not is_proven(claim, Liar(SocketProbe(server.socket), lies))


def with_last(reply: ServerReply, **fields: Any) -> ServerReply:
    return ServerReply((*reply.events[:-1], {**reply.last, **fields}))


def hides_warnings(_: Question, reply: ServerReply) -> ServerReply:
    return with_last(reply, warnings=[])


def miscounts(_: Question, reply: ServerReply) -> ServerReply:
    usage = reply.last.get("usage")
    return with_last(reply, usage=usage | {"completion_tokens": 2}) if usage else reply


def forgets_the_seed(_: Question, reply: ServerReply) -> ServerReply:
    return with_last(reply, seed=1) if "seed" in reply.last else reply


def is_rude(_: Question, reply: ServerReply) -> ServerReply:
    return with_last(reply, code="E_RUNTIME_DECODE") if reply.error else reply


def is_vague(_: Question, reply: ServerReply) -> ServerReply:
    return with_last(reply, message="no") if reply.error else reply


def refuses_long_prompts(question: Question, reply: ServerReply) -> ServerReply:
    is_long = len(question.fields.get("token_ids", ())) > 8  # a share is that long in the smallest layout
    return ServerReply(({"event": "error", "code": "E_LIMIT_PROMPT_TOO_LARGE", "message": ""},)) if is_long else reply


@pytest.mark.parametrize(
    ("tampers", "claim"),
    [
        (hides_warnings, "sampling: entropy_dial"),
        (hides_warnings, "limits.max_tokens"),
        (miscounts, "streaming"),
        (miscounts, "sampling: max_tokens"),
        (forgets_the_seed, "sampling: seed"),
        (is_rude, "sampling: top_p = 2"),
        (is_vague, "a token beyond the vocabulary"),
        (refuses_long_prompts, "kv_unified"),
    ],
)
def test_a_server_that_behaves_otherwise_is_found(
    server: ServerProcess, tampers: Callable[[Question, ServerReply], ServerReply], claim: str
) -> None:
    assert is_proven(claim, Liar(SocketProbe(server.socket)))
    assert not is_proven(claim, Liar(SocketProbe(server.socket), tampers=tampers))


@pytest.mark.parametrize(
    ("code", "message", "is_refusal"),
    [
        ("E_PROTO_BAD_REQUEST", "type: cancel is not available", True),
        ("E_PROTO_BAD_REQUEST", "max_tokens: must be at most 64", False),
        ("E_LIMIT_OVERLOADED", "8 requests run or wait; cancel one", False),
    ],
)
def test_without_cancel_only_an_error_about_that_is_its_refusal(
    server: ServerProcess, code: str, message: str, is_refusal: bool
) -> None:
    error = ServerReply(({"event": "error", "code": code, "message": message},))
    short = Question({"prompt": "a", "max_tokens": 1})
    liar = Liar(SocketProbe(server.socket), {"cancel": False}, lambda *_: error, lambda _: short)
    assert is_proven("cancel", liar) == is_refusal


def without(name: str) -> Callable[[Question], Question]:
    """A server that takes a field and does nothing with it."""
    return lambda question: Question({each: value for each, value in question.fields.items() if each != name})


def hears_two_stops(question: Question) -> Question:
    return Question(
        question.fields | {"stop": question.fields["stop"][:2]} if "stop" in question.fields else question.fields
    )


def test_a_server_that_takes_sixteen_stop_strings_and_minds_two_is_found(server: ServerProcess) -> None:
    assert is_proven("max_stop_sequences", Liar(SocketProbe(server.socket)))
    assert not is_proven("max_stop_sequences", Liar(SocketProbe(server.socket), mishears=hears_two_stops))


@attrs.frozen
class Remembering:
    """A server that computes exactly, asked each question with one answer once: proofs try again where an answer may
    differ.
    """

    honest: SocketProbe
    introduce: Callable[[], ServerInfo]
    _answers: dict[str, ServerReply] = attrs.field(factory=dict)

    def ask(self, question: Question) -> ServerReply:
        key = json.dumps(question.fields)
        if question.fields.get("temperature") != 0 and "seed" not in question.fields:
            return self.honest.ask(question)
        if key not in self._answers:
            self._answers[key] = self.honest.ask(question)
        return self._answers[key]


def test_a_parameter_without_effect_is_found_whichever_it_is(server: ServerProcess) -> None:
    probe = SocketProbe(server.socket)
    info = probe.introduce()
    honest = Remembering(probe, lambda: info)
    # (Seeds, whose proof asks most, and an answer without a bound, which takes longest, are found above.)
    names = [name for name in info.capabilities.sampling_params if name not in ("seed", "max_tokens")]
    found = [name for name in names if not is_proven(f"sampling: {name}", Liar(honest, mishears=without(name)))]
    assert found == names


def test_a_place_where_no_server_listens_is_one_line_and_exit_code_1(
    server: ServerProcess, uma_told: RunInProcessText
) -> None:
    done = uma_told("contract", "check", "--socket", f"{server.socket}.not")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"uma: error: {server.socket}.not: ")


class Other(BaseHTTPRequestHandler):
    """A server that is none of UMA's: its streams hold no JSON."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: ready\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_stream_of_another_kind_is_no_server_of_ours() -> None:
    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request).start()
        probe = HttpProbe(HttpClient(f"http://127.0.0.1:{server.server_port}"))
        with pytest.raises(ConnectionLost, match="no JSON object, so no UMA server answers: b'data: ready"):
            probe.ask(Question({"prompt": "a"}))


@pytest.mark.parametrize("content", [b"\xff\xfe", "Schlüssel".encode(), b"a\nb", b""])
def test_a_file_that_holds_no_key_is_one_line(tmp_path: Path, content: bytes, uma_told: RunInProcessText) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    done = uma_told("contract", "check", "--http", "http://127.0.0.1:9", "--key-file", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"uma: error: --key-file: {path} holds no key; ")
    assert done.stderr.count("\n") == 1
