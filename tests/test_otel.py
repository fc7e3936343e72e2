"""Spans of `uma run --otel`, sent by OpenTelemetry's SDK to a receiver of OTLP in this process."""

from __future__ import annotations

import gzip
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest
from http_server import running_gateway, running_http
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from harness import ask, run_to_end, running_server, short_directory
from models import write_encoder
from uma.config import RuntimeConfig
from uma.errors import ConfigError
from uma.server.otel import check

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@attrs.define(eq=False)
class Receiver:
    """What has come in: spans by the id of their request."""

    url: str = ""
    spans: dict[str, Any] = attrs.field(factory=dict)
    resources: list[dict[str, Any]] = attrs.field(factory=list)

    def take(self, path: str, body: bytes) -> None:
        """One export."""
        assert path == "/v1/traces"
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(plain(part.resource.attributes))
            for span in (each for scope in part.scope_spans for each in scope.spans):
                self.spans[plain(span.attributes).get("gen_ai.response.id") or span.span_id] = span


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as a dictionary."""
    found: dict[str, Any] = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver of OTLP over HTTP, on a port of the system's choice."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.take(self.path, gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def seen(tiny: Path) -> Iterator[Receiver]:
    """All that a server has sent of a few requests, up to its end."""
    with short_directory() as directory, receiving() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_SERVICE_NAME": "mine"}
        with running_http(directory, "--model", str(tiny), "--otel", **variables) as server:
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "ignore_eos": True}
            told = server.ask("POST", "/v1/chat/completions", body | {"temperature": 0.5}, traceparent=TRACEPARENT)
            assert told.status == 200
            receiver.url = told.headers["x-request-id"]
            with server.process.connect() as raw:
                raw.hello(versions=["1.1"])
                raw.send(
                    ask("socket", max_tokens=3, ignore_eos=True, metadata={"traceparent": TRACEPARENT}),
                    ask("alone", max_tokens=3, ignore_eos=True, metadata={"traceparent": 5}),
                    ask("several", max_tokens=3, ignore_eos=True, n=2),
                    ask("long", max_tokens=30_000, ignore_eos=True),
                )
                waiting = {"socket", "alone", "several"}
                while waiting:
                    event = raw.receive()
                    assert event is not None
                    waiting -= {event["id"]} if event["event"] == "eos" else set()
                raw.send({"event": "cancel", "id": "long"})
                assert raw.last_of("long")["reason"] == "cancelled"
                raw.send(ask("refused", grammar={"regex": "("}, metadata={"traceparent": TRACEPARENT}))
                assert raw.last_of("refused")["code"] == "E_PROTO_BAD_REQUEST"
            body = {"input": ["a", "b"], "dimensions": 4}
            assert server.ask("POST", "/v1/embeddings", body, traceparent=TRACEPARENT).status == 200
            assert server.ask("POST", "/v1/embeddings", {**body, "dimensions": 10_000}).status == 400
        yield receiver


def test_a_request_is_one_span_with_the_conventions_attributes(seen: Receiver) -> None:
    span = seen.spans[seen.url]
    assert span.name == "chat tiny"
    assert span.kind == 2  # SPAN_KIND_SERVER
    found = plain(span.attributes)
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "uma",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": 5,
        "server.address": "127.0.0.1",
    }
    assert {name: found.get(name) for name in wanted} == wanted
    assert found["gen_ai.usage.input_tokens"] > found["gen_ai.usage.cache_read.input_tokens"] >= 0
    assert 0 < found["gen_ai.response.time_to_first_chunk"] * 1e9 <= span.end_time_unix_nano - span.start_time_unix_nano
    assert sum(each.name != "embeddings tiny" for each in seen.spans.values()) == 6
    assert {each["service.name"] for each in seen.resources} == {"mine"}


def test_its_parent_is_the_header_s_or_the_metadata_s_traceparent(seen: Receiver) -> None:
    for id in (seen.url, "socket"):
        span = seen.spans[id]
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert seen.spans["alone"].parent_span_id == b""
    assert seen.spans["alone"].trace_id.hex() != TRACE


def test_several_answers_are_one_span_and_a_cancelled_request_says_so(seen: Receiver) -> None:
    several, ended = plain(seen.spans["several"].attributes), plain(seen.spans["long"].attributes)
    assert (several["gen_ai.request.choice.count"], several["gen_ai.usage.output_tokens"]) == (2, 6)
    assert several["server.address"].endswith("http.sock")
    assert several["gen_ai.operation.name"] == "text_completion"
    assert ended["gen_ai.response.finish_reasons"] == ["cancelled"]


def test_a_request_that_is_refused_before_it_is_queued_has_one_with_the_error_s_code(seen: Receiver) -> None:
    span = seen.spans["refused"]
    assert (span.trace_id.hex(), span.status.code) == (TRACE, 2)
    assert plain(span.attributes)["error.type"] == "E_PROTO_BAD_REQUEST"


def test_embeddings_have_spans_too(seen: Receiver) -> None:
    good, bad = sorted(
        (each for each in seen.spans.values() if each.name == "embeddings tiny"), key=lambda each: each.status.code
    )
    found = plain(good.attributes)
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.embeddings.dimension.count"]) == (4, 4)
    assert (good.trace_id.hex(), found["server.address"]) == (TRACE, "127.0.0.1")
    assert plain(bad.attributes)["error.type"] == "E_PROTO_BAD_REQUEST"


def test_the_header_s_parent_reaches_the_process_that_has_the_model(tiny: Path) -> None:
    """Behind a gateway, and where several models are served, each in a process of its own."""
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    with short_directory() as directory, receiving() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
        flags = ("--model", str(tiny), "--otel")
        with running_server(directory / "s", *flags, **variables) as server, running_gateway(server) as gateway:
            assert gateway.ask("POST", "/v1/completions", body, traceparent=TRACEPARENT).status == 200
        variables["UMA_MODELS"] = str(directory)
        (directory / tiny.name).symlink_to(tiny)
        write_encoder(directory / "judge.gguf", pooling="rank")
        ranking = {"query": "fox", "documents": ["a fox", "the end"]}
        with running_http(directory, "--models", f"{tiny.stem},judge", "--otel", **variables) as several:
            assert several.ask("POST", "/v1/completions", body, traceparent=TRACEPARENT).status == 200
            assert (
                several.ask("POST", "/v1/rerank", ranking | {"model": "judge"}, traceparent=TRACEPARENT).status == 200
            )
            several.process.signal(signal.SIGTERM)  # once: a second one would not let the models send what they have
            assert several.process.wait() == 0
        told = [(each.trace_id.hex(), each.parent_span_id.hex(), each.name) for each in receiver.spans.values()]
        assert sorted(told) == [(TRACE, PARENT, name) for name in ("rerank judge", *["text_completion tiny"] * 2)]
        (ranked,) = (plain(each.attributes) for each in receiver.spans.values() if each.name == "rerank judge")
        assert ranked["gen_ai.operation.name"] == "rerank"
        assert ranked["gen_ai.usage.input_tokens"] > 0


def test_without_the_switch_nothing_of_it_is_loaded_or_sent(tiny: Path) -> None:
    code = "import sys, uma.server, uma.cli.parser; print([each for each in sys.modules if 'opentelemetry' in each])"
    assert run_to_end(sys.executable, "-c", code).stdout.strip() == "[]"
    with short_directory() as directory, receiving() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
        with running_server(directory / "s", "--model", str(tiny), **variables) as server, server.connect() as raw:
            raw.send(ask("a", max_tokens=2))
            raw.last_of("a")
        assert receiver.spans == {}


@contextmanager
def receiving_calls() -> Iterator[Receiver]:
    """A receiver of OTLP by gRPC."""
    grpc = pytest.importorskip("grpc", reason="needs opentelemetry-exporter-otlp-proto-grpc")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    receiver = Receiver()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            receiver.take("/v1/traces", request.SerializeToString())
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


def test_a_collector_is_reached_by_grpc_where_the_variable_says_so(tiny: Path) -> None:
    with short_directory() as directory, receiving_calls() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
        with (
            running_server(directory / "s", "--model", str(tiny), "--otel", **variables) as server,
            server.connect() as raw,
        ):
            raw.send(ask("a", max_tokens=2))
            raw.last_of("a")
        assert "a" in receiver.spans


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "'http/json' must be one of http/protobuf, grpc"),
        (
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
            "carrier pigeon",
            "_TRACES_PROTOCOL: 'carrier pigeon'",
        ),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc", "pip install opentelemetry-exporter-otlp-proto-grpc"),
    ],
)
def test_a_way_to_a_collector_that_there_is_not_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str
) -> None:
    for module in (
        "grpc",
        "opentelemetry.exporter.otlp.proto.grpc",
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    ):
        monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=re.escape(told)):
        check(RuntimeConfig(otel=True))


def test_a_collector_that_is_gone_holds_nothing_up(tiny: Path) -> None:
    with short_directory() as directory:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
        with running_server(directory / "s", "--model", str(tiny), "--otel", **variables) as server:
            with server.connect() as raw:
                raw.send(ask("a", max_tokens=2))
                assert raw.last_of("a")["reason"] == "length"
            assert server.stop() == 0
