"""Sessions: what may come when, what is closed after what, and that every request gets exactly one end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from protocol_messages import INFO, N_VOCAB, finished

from uma import errors, types
from uma.protocol import messages
from uma.protocol.codec import encode_event, parse_event
from uma.protocol.frames import HEADER_BYTES, FrameDecoder, encode_frame
from uma.protocol.session import ClientSession, Incoming, Refused, ServerSession
from uma.protocol.states import (
    AFTER_ERROR,
    PHASES,
    LocalProtocolError,
    Phase,
)

HELLO = {"type": "hello", "versions": ["1.0"], "client": "test/1"}


def frame(fields: Any) -> bytes:
    return encode_frame(fields if isinstance(fields, bytes) else json.dumps(fields).encode())


def ask(id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"id": id, "prompt": "x", **fields}


def give(session: ServerSession, *messages: Any) -> list[Incoming]:
    """What comes out of a session for frames that come in."""
    session.receive(b"".join(map(frame, messages)))
    out = []
    while (message := session.next_message()) is not None:
        out.append(message)
    return out


def refusal(session: ServerSession, *messages: Any) -> Refused:
    refused = give(session, *messages)[-1]
    assert isinstance(refused, Refused)
    assert events(refused.data) == [refused.event]
    return refused


def events(data: bytes) -> list[messages.ServerEvent]:
    decoder = FrameDecoder(2**20)
    decoder.feed(data)
    out = []
    while (payload := decoder.next_frame()) is not None:
        out.append(parse_event(payload))
    assert not decoder.is_mid_frame
    return out


def event(data: bytes) -> messages.ServerEvent:
    (one,) = events(data)
    return one


def plain(**bounds: Any) -> ServerSession:
    return ServerSession(**bounds)


def hello(*, strict: bool = False, **bounds: Any) -> ServerSession:
    session = ServerSession(**bounds)
    (message,) = give(session, HELLO | {"strict": strict})
    assert isinstance(message, messages.Hello)
    session.welcome(INFO)
    return session


# The states of a session.


def test_every_state_can_be_reached_and_only_the_end_has_no_way_on() -> None:
    assert {Phase.START, *PHASES.values()} == set(Phase)
    assert {phase for phase, _ in PHASES} == set(Phase) - {Phase.CLOSED}


# Plain sessions.


def test_a_plain_session_serves_one_request_and_closes() -> None:
    session = plain()
    (message,) = give(session, ask())
    assert message == messages.Generate(types.Request("a", prompt="x"))
    assert event(session.relay(types.Token("a", "he", 1))) == messages.TokenEvent("a", "he", 1)
    assert not session.flushed()
    assert isinstance(event(session.relay(finished())), messages.EosEvent)
    assert session.is_closing
    assert session.flushed()


def test_keep_alive_keeps_a_plain_session_open_for_another_request() -> None:
    session = plain()
    give(session, ask(keep_alive=True))
    session.relay(finished())
    assert not session.flushed()
    assert give(session, ask("b")) == [messages.Generate(types.Request("b", prompt="x"))]
    session.relay(finished("b"))
    assert session.flushed()


def test_the_next_request_may_come_before_the_writing_task_knows_that_the_eos_is_out() -> None:
    session = plain()
    give(session, ask(keep_alive=True))
    session.relay(finished())
    assert [type(message) for message in give(session, ask(keep_alive=True))] == [messages.Generate]
    assert not session.flushed()
    assert list(session.running) == ["a"]


@pytest.mark.parametrize(
    "message", [ask("b"), {"type": "metrics"}, {"type": "health"}, {"type": "tokenize", "id": "t", "prompt": "x"}]
)
def test_every_kind_of_second_request_finds_a_plain_session_busy_and_the_first_goes_on(message: dict[str, Any]) -> None:
    session = plain()
    give(session, ask())
    busy = refusal(session, message)
    assert (busy.event.code, busy.event.id, busy.is_fatal) == ("E_PROTO_BUSY", message.get("id"), False)
    assert event(session.relay(types.Token("a", "x", 1))) == messages.TokenEvent("a", "x", 1)


def test_an_error_never_carries_the_id_of_a_request_that_goes_on() -> None:
    session = plain()
    give(session, ask())
    assert refusal(session, ask()).event.id is None
    assert refusal(session, ask(max_tokens=-1)).event.id is None
    session = hello()
    give(session, ask())
    duplicate = refusal(session, ask())
    assert (duplicate.event.code, duplicate.event.id) == ("E_PROTO_BAD_REQUEST", None)
    assert "'a'" in duplicate.event.message


@pytest.mark.parametrize("kind", ["metrics", "health", "tokenize"])
def test_a_plain_session_closes_after_the_answer_to_a_query(kind: str) -> None:
    session = plain()
    (query,) = give(session, {"type": kind} | (ask() if kind == "tokenize" else {}))
    results: dict[str, Any] = {
        "metrics": {"queued": 1},
        "health": types.Health("ok", 1.0, 1),
        "tokenize": types.Tokenized((1, 2)),
    }
    assert isinstance(query, messages.MetricsQuery | messages.HealthQuery | messages.TokenizeQuery)
    assert session.answer(query, results[kind])
    assert session.flushed()


# Hello sessions.


def test_a_hello_session_carries_many_requests_and_stays_open() -> None:
    session = hello()
    give(session, ask("a"), ask("b"), ask("c"))
    assert list(session.running) == ["a", "b", "c"]
    for id in "cab":
        session.relay(finished(id))
    assert session.is_idle
    assert not session.flushed()
    assert not session.is_closing


def test_a_session_of_version_1_0_sees_what_it_always_saw() -> None:
    """The literal names are those that the first version of the protocol had."""
    session = ServerSession()
    give(session, HELLO)
    able = attrs.evolve(INFO.capabilities, echo=True, max_answers=8, sampling_params=("seed", "n", "grammar"))
    limits = attrs.evolve(INFO.limits, max_sequences=4, has_max_tokens=False)
    welcome = json.loads(session.welcome(attrs.evolve(INFO, capabilities=able, limits=limits))[HEADER_BYTES:])
    assert set(welcome) == {"event", "version", "server", "model", "capabilities", "limits"}
    known = "streaming chat cancel tokenize token_ids_input prefix_sharing kv_unified max_stop_sequences"
    assert set(welcome["capabilities"]) == {*known.split(), "sampling_params"}
    assert welcome["capabilities"]["sampling_params"] == ["seed"]
    known = "n_ctx max_tokens max_prompt_bytes max_frame_bytes max_sessions max_queue"
    assert set(welcome["limits"]) == set(known.split())
    (asked,) = give(session, {"id": "a", "prompt": "x", "n": 3, "grammar": "anything"})
    assert isinstance(asked, messages.Generate)
    assert asked.request.sampling == types.SamplingParams()
    assert sorted(asked.warnings) == ["grammar: unknown field, ignored", "n: unknown field, ignored"]
    end = finished("a", stop_string="x", text="y")
    metrics = attrs.evolve(end.metrics, speculation=types.Speculation(3, 2, 1.0))
    end = attrs.evolve(end, usage=attrs.evolve(end.usage, reasoning_tokens=1), metrics=metrics)
    last = json.loads(session.relay(end)[HEADER_BYTES:])
    assert set(last) == {"event", "id", "reason", "usage", "metrics", "seed", "text", "warnings"}
    assert set(last["usage"]) == {"prompt_tokens", "cached_tokens", "completion_tokens"}
    known = "queue_ms prefill_ms decode_ms ttft_ms batch_size tokens_per_second decode_iterations"
    assert set(last["metrics"]) == set(known.split())
    (asked,) = give(session, {"type": "tokenize", "id": "t", "token_ids": [1]})
    assert isinstance(asked, messages.TokenizeQuery)
    told = json.loads(session.answer(asked, types.Tokenized((1,), "x", 1))[HEADER_BYTES:])
    assert told == {"event": "tokenize", "id": "t", "token_ids": [1]}
    assert refusal(hello(), {"event": "answer", "id": "a"}).event.message == "event: expected 'cancel', not 'answer'"
    refused = refusal(hello(strict=True), ask(n=3))
    assert refused.event.message == "n: unknown field, and the session is strict"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_session_of_an_older_version_has_nothing_of_several_models(version: str) -> None:
    session, several = ServerSession(), attrs.evolve(INFO, models=("a", "b"))
    give(session, HELLO | {"versions": [version]})
    assert "models" not in json.loads(session.welcome(several)[HEADER_BYTES:])
    (asked,) = give(session, {"id": "a", "prompt": "x", "model": "b"})
    assert isinstance(asked, messages.Generate)
    assert (asked.request.model, asked.warnings) == (None, ("model: unknown field, ignored",))
    refused = refusal(session, {"type": "load", "id": "l", "model": "b"})
    assert "load" in refused.event.message and "load" not in refused.event.message.partition(", not ")[0]
    assert json.loads(encode_event(messages.LoadingEvent(5, "waits", "a"), version)[HEADER_BYTES:]) == {
        "event": "loading",
        "percent": 5,
    }


def test_a_session_of_version_1_2_has_several_models_and_all_fields() -> None:
    session, several = ServerSession(), attrs.evolve(INFO, models=("a", "b"))
    give(session, HELLO | {"versions": ["1.2"]})
    assert json.loads(session.welcome(several)[HEADER_BYTES:])["models"] == ["a", "b"]
    (asked,) = give(session, ask(model="b", n=3, grammar={"regex": "a+"}))
    assert isinstance(asked, messages.Generate)
    assert asked.request.model == "b"
    assert asked.request.sampling == types.SamplingParams(n=3, grammar=types.Grammar(regex="a+"))
    (query,) = give(session, {"type": "load", "id": "l", "model": "b"})
    assert isinstance(query, messages.LoadQuery)


def test_the_answer_to_hello_tells_which_server_answers_and_its_version() -> None:
    session = ServerSession()
    give(session, HELLO | {"strange": 1})
    answer = event(session.welcome(INFO))
    assert isinstance(answer, messages.HelloEvent)
    assert (answer.version, answer.info) == ("1.0", INFO)
    assert answer.warnings == ("strange: unknown field, ignored",)
    assert (session.client, session.version) == ("test/1", "1.0")


def test_no_common_version_closes_the_session() -> None:
    session = ServerSession()
    refused = refusal(session, HELLO | {"versions": ["2.0"]})
    assert (refused.event.code, refused.is_fatal) == ("E_PROTO_VERSION", True)
    assert session.flushed()


def test_a_hello_that_is_not_the_first_frame_is_a_bad_request() -> None:
    assert refusal(hello(), HELLO).event.code == "E_PROTO_BAD_REQUEST"
    session = plain()
    give(session, ask())
    assert not refusal(session, HELLO).is_fatal


def test_a_tokenize_query_takes_its_id_like_any_request_and_cannot_be_cancelled() -> None:
    session = hello()
    (query,) = give(session, {"type": "tokenize"} | ask())
    assert isinstance(query, messages.TokenizeQuery)
    assert refusal(session, ask()).event.code == "E_PROTO_BAD_REQUEST"
    assert give(session, {"event": "cancel", "id": "a"}) == []
    assert event(session.answer(query, types.Tokenized((1, 2)))) == messages.TokenizeEvent("a", (1, 2))
    assert not session.is_closing


def test_queries_without_an_id_can_run_side_by_side() -> None:
    session = hello()
    queries = give(session, {"type": "metrics"}, {"type": "health", "strange": 1}, {"type": "health", "id": "h"})
    assert len(session.running) == 3
    metrics, health, named = queries
    assert isinstance(metrics, messages.MetricsQuery)
    assert isinstance(health, messages.HealthQuery)
    assert isinstance(named, messages.HealthQuery)
    ill = errors.DecodeFailed("no")
    assert event(session.fail_query(named, ill)) == messages.ErrorEvent(ill.code, "no", "h")
    assert event(session.answer(metrics, {"queued": 1})) == messages.MetricsEvent({"queued": 1})
    warned = messages.HealthEvent("ok", 1.0, 1, warnings=("strange: unknown field, ignored",))
    assert event(session.answer(health, types.Health("ok", 1.0, 1))) == warned
    assert session.is_idle


# Cancels.


def test_a_cancel_comes_out_once_for_what_runs_and_its_id_is_free_after_the_eos() -> None:
    session = hello()
    cancel = {"event": "cancel", "id": "a"}
    assert give(session, cancel) == []
    give(session, ask())
    assert give(session, cancel, cancel) == [messages.Cancel("a")]
    assert isinstance(event(session.relay(finished(reason="cancelled"))), messages.EosEvent)
    assert give(session, cancel) == []
    assert [type(message) for message in give(session, ask())] == [messages.Generate]
    new = ServerSession()
    assert give(new, cancel) == []
    assert [type(message) for message in give(new, HELLO)] == [messages.Hello], "no plain session was made of it"


def test_thinking_is_ended_once_for_what_runs_and_not_after_a_cancel() -> None:
    session = ServerSession()
    give(session, HELLO | {"versions": ["1.1"]})
    session.welcome(INFO)
    answer, cancel = {"event": "answer", "id": "a"}, {"event": "cancel", "id": "a"}
    assert give(session, answer) == []
    give(session, ask())
    assert give(session, answer, answer, cancel, answer) == [messages.EndThinking("a"), messages.Cancel("a")]
    give(session, {"type": "embed", "id": "e", "texts": ["x"]})
    assert give(session, {"event": "answer", "id": "e"}) == []


# What events carry along.


def test_metadata_is_echoed_in_every_event_of_its_request() -> None:
    session = hello()
    give(session, ask(metadata={"k": [1]}), ask("b", metadata={"k": 2}))
    told = [
        event(session.relay(types.Token("a", "x", 1))),
        event(session.relay(finished())),
        event(session.fail(errors.DecodeFailed("no"), "b")),
    ]
    assert [getattr(each, "metadata", None) for each in told] == [{"k": [1]}, {"k": [1]}, {"k": 2}]


def test_metadata_is_echoed_also_where_the_request_is_refused() -> None:
    session = plain()
    give(session, ask("runs"))
    busy = refusal(session, ask("b", metadata={"k": 2}))
    assert (busy.event.code, busy.event.metadata) == ("E_PROTO_BUSY", {"k": 2})
    bad = refusal(hello(), ask(temperature=9, metadata={"k": [1]}))
    assert (bad.event.code, bad.event.metadata) == ("E_PROTO_BAD_REQUEST", {"k": [1]})


def test_what_was_ignored_is_told_in_the_eos_before_the_engines_own_warnings() -> None:
    session = plain()
    give(session, ask(strange=1))
    eos = event(session.relay(finished(warnings=("slow",))))
    assert isinstance(eos, messages.EosEvent)
    assert eos.warnings == ("strange: unknown field, ignored", "slow")


# Each row of the table of errors.


def test_every_code_of_the_protocol_has_its_row() -> None:
    assert AFTER_ERROR.keys() == errors.WIRE_ERRORS.keys()


def test_every_error_has_a_code_of_its_own_by_which_a_client_makes_its_class() -> None:
    classes = [found for found in vars(errors).values() if isinstance(found, type) and found.__module__ == "uma.errors"]
    as_another = {errors.Loading, errors.WrongValues, errors.WrongKind}  # for a peer: an overload, a bad request
    codes = [found.code for found in classes if issubclass(found, errors.UmaError) and found not in as_another]
    assert len(codes) == len(set(codes))
    assert {found.code for found in as_another} <= set(codes)
    assert all(type(errors.from_code(code, "x")) is found for code, found in errors.WIRE_ERRORS.items())


@pytest.mark.parametrize("length", [0, 101, 2**32 - 1])
@pytest.mark.parametrize("make", [plain, hello])
def test_an_oversize_frame_closes_the_session(make: Callable[..., ServerSession], length: int) -> None:
    session = make(max_frame_bytes=100)
    give(session, ask())
    session.receive(length.to_bytes(4, "little") + b"garbage")
    refused = session.next_message()
    assert isinstance(refused, Refused)
    assert (refused.event.code, refused.is_fatal) == ("E_PROTO_FRAME_TOO_LARGE", True)
    assert session.next_message() is None
    assert session.flushed()


@pytest.mark.parametrize("payload", [b"{", b"[]", b"\xff", b"[" * 1000])
@pytest.mark.parametrize("make", [plain, hello])
def test_invalid_json_closes_the_session(make: Callable[..., ServerSession], payload: bytes) -> None:
    session = make()
    give(session, ask())
    refused = refusal(session, payload)
    assert (refused.event.code, refused.is_fatal) == ("E_PROTO_INVALID_JSON", True)
    assert session.flushed()


def test_a_bad_request_closes_an_idle_plain_session() -> None:
    session = plain()
    refused = refusal(session, ask("b", max_tokens=-1))
    assert (refused.event.code, refused.event.id, refused.is_fatal) == ("E_PROTO_BAD_REQUEST", "b", True)
    assert session.flushed()


def test_a_bad_request_leaves_a_hello_session_and_a_running_request_alone() -> None:
    for session in (hello(), plain()):
        give(session, ask())
        assert not refusal(session, ask("b", max_tokens=-1)).is_fatal
        assert session.relay(types.Token("a", "x", 1))
        assert not session.flushed()


@pytest.mark.parametrize(
    "error", [errors.BadRequest("x"), errors.PromptTooLarge("x"), errors.DecodeFailed("x"), errors.UmaError("x")]
)
def test_a_requests_error_closes_a_plain_session_and_no_other(error: errors.UmaError) -> None:
    session = plain()
    give(session, ask(keep_alive=True))
    assert event(session.fail(error, "a")) == messages.ErrorEvent(error.code, "x", "a")
    assert session.flushed()
    session = hello()
    give(session, ask(), ask("b"))
    assert event(session.fail(error, "a")) == messages.ErrorEvent(error.code, "x", "a")
    assert not session.flushed()
    assert list(session.running) == ["b"]


@pytest.mark.parametrize("make", [plain, hello])
def test_an_overloaded_server_tells_when_to_come_again_and_keeps_the_session(
    make: Callable[..., ServerSession],
) -> None:
    session = make()
    give(session, ask())
    told = event(session.fail(errors.Overloaded("full", retry_after_ms=250), "a"))
    assert told == messages.ErrorEvent("E_LIMIT_OVERLOADED", "full", "a", 250)
    assert not session.flushed()
    assert [type(message) for message in give(session, ask())] == [messages.Generate]


@pytest.mark.parametrize("error", [errors.TooManySessions("x"), errors.IdleTimeout("x"), errors.ShuttingDown("x")])
@pytest.mark.parametrize("make", [plain, hello])
def test_a_sessions_error_closes_it(make: Callable[..., ServerSession], error: errors.UmaError) -> None:
    session = make()
    assert event(session.fail(error)) == messages.ErrorEvent(error.code, "x")
    assert session.is_closing
    assert give(session, ask()) == []
    assert session.flushed()


# The end of the server.


def test_draining_closes_an_idle_session_at_once() -> None:
    session = hello()
    told = event(session.drain())
    assert isinstance(told, messages.ErrorEvent)
    assert told.code == "E_RUNTIME_SHUTDOWN"
    assert session.flushed()


def test_draining_lets_what_runs_finish_and_refuses_what_comes() -> None:
    session = hello()
    give(session, ask("a"), ask("b"))
    assert session.drain() == b""
    refused = refusal(session, ask("c"))
    assert (refused.event.code, refused.event.id, refused.is_fatal) == ("E_RUNTIME_SHUTDOWN", "c", False)
    session.relay(finished("a"))
    assert not session.flushed()
    session.relay(finished("b"))
    assert session.flushed()


def test_a_request_that_the_stopping_engine_refuses_takes_no_other_with_it() -> None:
    session = hello()
    give(session, ask("a"), ask("b"))
    session.fail(errors.ShuttingDown("x"), "b")
    assert not session.is_closing
    session.relay(finished("a"))
    assert session.flushed()


def test_every_request_that_outlives_the_drain_gets_its_own_error() -> None:
    session = hello()
    give(session, ask("a"), ask("b"))
    session.drain()
    codes = [event(session.fail(errors.ShuttingDown("x"), id)) for id in "ab"]
    assert codes == [messages.ErrorEvent("E_RUNTIME_SHUTDOWN", "x", id) for id in "ab"]
    assert session.flushed()


# Late and wrong calls.


def test_after_closing_nothing_goes_out_and_nothing_comes_in() -> None:
    session = hello()
    (request, query) = give(session, ask(), {"type": "health"})
    assert isinstance(request, messages.Generate)
    assert isinstance(query, messages.HealthQuery)
    session.fail(errors.IdleTimeout("x"))
    late = [
        session.relay(types.Token("a", "x", 1)),
        session.relay(finished()),
        session.fail(errors.DecodeFailed("x"), "a"),
        session.fail(errors.DecodeFailed("x")),
        session.fail_query(query, errors.DecodeFailed("x")),
        session.answer(query, types.Health("ok", 1.0, 1)),
        session.welcome(INFO),
        session.drain(),
    ]
    assert late == [b""] * len(late)
    assert give(session, ask("b")) == []
    assert not session.is_mid_frame


def test_events_of_what_does_not_run_are_this_sides_own_mistake() -> None:
    session = hello()
    (query, other) = give(session, {"type": "health"}, {"type": "health"})
    assert isinstance(query, messages.HealthQuery) and isinstance(other, messages.HealthQuery)
    mistakes: list[Callable[[], bytes]] = [
        lambda: session.relay(types.Token("a", "x", 1)),
        lambda: session.relay(finished()),
        lambda: session.fail(errors.DecodeFailed("x"), "a"),
        lambda: session.answer(messages.MetricsQuery(id="m"), {}),
        lambda: plain().welcome(INFO),
    ]
    for mistake in mistakes:
        with pytest.raises(LocalProtocolError):
            mistake()
    assert session.answer(query, types.Health("ok", 1.0, 1))
    failed = event(session.fail_query(other, errors.DecodeFailed("no")))
    assert failed == messages.ErrorEvent("E_RUNTIME_DECODE", "no"), "it has no id"


def test_half_a_frame_is_told_whatever_runs() -> None:
    session = hello()
    give(session, ask())
    assert not session.is_mid_frame
    session.receive(frame(ask("b"))[:-1])
    assert session.next_message() is None
    assert session.is_mid_frame
    assert not session.is_idle


@given(st.lists(st.binary(max_size=40), max_size=10), st.booleans())
def test_random_bytes_end_a_session_or_wait_for_more(chunks: list[bytes], is_hello: bool) -> None:
    session = hello(max_frame_bytes=100) if is_hello else plain(max_frame_bytes=100)
    codes = []
    for chunk in chunks:
        session.receive(chunk)
        while (message := session.next_message()) is not None:
            assert isinstance(message, Refused)
            codes.append(message.event.code)
    data = b"".join(chunks)
    length = int.from_bytes(data[:4], "little")
    if len(data) >= 4 and not 1 <= length <= 100:
        assert codes == [errors.FrameTooLarge.code]
    elif len(data) < 4 + length:
        assert codes == []
    else:
        assert codes


@given(st.lists(st.integers(1, 200), max_size=10))
def test_any_split_of_the_bytes_gives_the_same_messages(cuts: list[int]) -> None:
    sent = [HELLO, ask("a"), ask("a"), {"event": "cancel", "id": "a"}, {}, {"type": "metrics"}, b"{", ask("b")]
    stream = b"".join(map(frame, sent))
    whole, split = ServerSession(), ServerSession()
    expected = give(whole, *sent)
    assert len(expected) == 7
    received = []
    for cut in [*cuts, len(stream)]:
        split.receive(stream[:cut])
        stream = stream[cut:]
        while (message := split.next_message()) is not None:
            received.append(message)
    assert received == expected


class AnySession(RuleBasedStateMachine):
    """Frames, engine events, errors and flushes in any order: each accepted request ends exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.session = ServerSession(max_frame_bytes=4096, n_vocab=N_VOCAB)
        self.accepted: list[str] = []
        self.ended: list[str] = []

    def take(self, data: bytes) -> None:
        for told in events(data):
            if isinstance(told, messages.EosEvent | messages.ErrorEvent) and told.id in self.accepted:
                self.accepted.remove(told.id)
                self.ended.append(told.id)

    @rule(strict=st.booleans())
    def greet(self, strict: bool) -> None:
        self.send(HELLO | {"strict": strict})

    @rule(id=st.sampled_from("abc"), keep_alive=st.booleans(), tokens=st.integers(0, 3))
    def request(self, id: str, keep_alive: bool, tokens: int) -> None:
        self.send(ask(id, keep_alive=keep_alive, max_tokens=tokens))

    @rule(id=st.sampled_from("abc"))
    def cancel(self, id: str) -> None:
        for message in give(self.session, {"event": "cancel", "id": id}):
            assert message == messages.Cancel(id)
            assert id in self.accepted

    @rule(payload=st.binary(min_size=1, max_size=5))
    def garbage(self, payload: bytes) -> None:
        self.send(payload)

    def send(self, fields: Any) -> None:
        running = set(self.session.running)
        for message in give(self.session, fields):
            if isinstance(message, messages.Generate):
                assert message.request.id not in running
                self.accepted.append(message.request.id)
            elif isinstance(message, Refused):
                assert message.event.id is None or message.event.id not in running
                assert message.is_fatal == self.session.is_closing

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def token(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.accepted))
        sent = self.session.relay(types.Token(id, "x", 1))
        assert bool(sent) != self.session.is_closing

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.take(self.session.relay(finished(data.draw(st.sampled_from(self.accepted)))))

    @precondition(lambda self: self.accepted)
    @rule(
        data=st.data(),
        kind=st.sampled_from([errors.DecodeFailed, errors.Overloaded, errors.PromptTooLarge, errors.ShuttingDown]),
    )
    def fail(self, data: st.DataObject, kind: type[errors.UmaError]) -> None:
        self.take(self.session.fail(kind("x"), data.draw(st.sampled_from(self.accepted))))

    @rule()
    def drain(self) -> None:
        self.take(self.session.drain())

    @rule()
    def flush(self) -> None:
        assert self.session.flushed() == (self.session.phase is Phase.CLOSED)

    @invariant()
    def what_runs_is_what_was_accepted_and_has_not_ended(self) -> None:
        if self.session.is_closing:
            assert self.session.is_idle
            self.accepted.clear()  # the end of the session was the end of them all
        assert sorted(map(str, self.session.running)) == sorted(self.accepted)

    @invariant()
    def a_plain_session_runs_one_request_at_a_time(self) -> None:
        if self.session.phase is not Phase.HELLO:
            assert len(self.session.running) <= 1


TestAnySession = AnySession.TestCase
TestAnySession.settings = settings(stateful_step_count=30)


# The client's side.


def talk(client: ClientSession, server: ServerSession) -> list[messages.ServerEvent]:
    """What a client hears from a server that greets, and answers each request with one token."""
    heard: list[messages.ServerEvent] = []
    while (message := server.next_message()) is not None:
        match message:
            case messages.Hello():
                client.receive(server.welcome(INFO))
            case messages.Generate():
                client.receive(server.relay(types.Token(message.request.id, "x", 1)))
            case messages.Cancel():
                client.receive(server.relay(finished(message.id, reason="cancelled")))
            case Refused():
                client.receive(message.data)
    while (told := client.next_event()) is not None:
        heard.append(told)
    return heard


def test_a_client_and_a_server_understand_each_other() -> None:
    client, server = ClientSession(client="test/1"), ServerSession()
    server.receive(client.hello(strict=True))
    assert [type(each) for each in talk(client, server)] == [messages.HelloEvent]
    assert (client.info, client.version) == (INFO, "1.2")
    server.receive(
        client.send(messages.Generate(types.Request("a", prompt="x", sampling=types.SamplingParams(seed=3))))
    )
    assert talk(client, server) == [messages.TokenEvent("a", "x", 1)]
    server.receive(client.send(messages.Cancel("a")))
    (eos,) = talk(client, server)
    assert isinstance(eos, messages.EosEvent)
    assert messages.carried(eos) == finished(reason="cancelled")


def test_a_client_uses_an_id_once_at_a_time() -> None:
    client, server = ClientSession(), ServerSession()
    server.receive(client.hello() + client.send(messages.Generate(types.Request("a", prompt="x"))))
    talk(client, server)
    with pytest.raises(errors.BadRequest, match="'a'"):
        client.send(messages.Generate(types.Request("a", prompt="y")))
    server.receive(client.send(messages.Cancel("a")))
    talk(client, server)
    assert client.send(messages.Generate(types.Request("a", prompt="y")))


@pytest.mark.parametrize(
    ("query", "result"),
    [
        (messages.MetricsQuery(id="a"), {"tokens_generated_total": 1}),
        (messages.ActivityQuery(id="a"), types.Activity((), 0, 0, 0)),
        (messages.EndQuery(1, id="a"), True),
        (messages.HealthQuery(id="a"), types.Health("ok", 0.0, 0)),
        (messages.PauseQuery(0, id="a"), types.Health("ok", 0.0, 0)),
        (messages.TokenizeQuery(types.Request("a", prompt="x")), types.Tokenized((1, 2))),
        (messages.RerankQuery(types.RerankRequest("a", "x", ("y",))), types.Ranking("a", (), 3)),
    ],
)
def test_an_id_can_be_used_again_once_its_question_is_answered(query: messages.Query, result: object) -> None:
    client, server = ClientSession(), ServerSession()
    server.receive(client.hello())
    talk(client, server)
    for _ in range(3):
        server.receive(client.send(query))
        assert server.next_message() is not None
        client.receive(server.answer(query, result))
        assert client.next_event() is not None
    assert client.send(messages.HealthQuery()) == client.send(messages.HealthQuery()), "none is no id"


def test_a_client_does_not_send_what_would_cost_it_the_session() -> None:
    client, server = ClientSession(), ServerSession()
    server.receive(client.hello())
    talk(client, server)
    with pytest.raises(errors.FrameTooLarge, match="65,536"):
        client.send(messages.Generate(types.Request("a", prompt="x" * 70_000)))
    assert client.send(messages.Generate(types.Request("a", prompt="x")))


def test_a_client_meets_what_is_no_server_with_a_typed_error() -> None:
    client = ClientSession(max_frame_bytes=100)
    client.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(errors.FrameTooLarge):
        client.next_event()
