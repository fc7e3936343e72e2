"""`--otel`: a span of each request for an OpenTelemetry collector, by the semantic conventions for GenAI.

The SDK is imported only here, and only with the switch. Its own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_EXPORTER_OTLP_PROTOCOL`, `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` ...) say where all goes and how; its threads
send it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import trio

from uma.config import RuntimeConfig
from uma.engine import Engine
from uma.engine.embeddings import Embedded
from uma.engine.submission import Over
from uma.errors import ConfigError
from uma.server.logs import log
from uma.types import EmbedRequest, RerankRequest, ServerInfo
from uma.version import __version__

logger = logging.getLogger("uma.server")

PROVIDER = "uma"
"""`gen_ai.provider.name`: the conventions have no name for a server of one's own."""
FLUSH_SEC = 5.0
"""Maximum time, at the server's end, for what has not been sent: a collector that is gone must not hold it up."""
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
"""Fields of `SamplingParams` that the conventions have an attribute for: `gen_ai.request.` and the same name."""
UNKNOWN = "_OTHER"
"""`error.type` where nothing more is known, as the conventions have it."""
EXPORTERS = {"http/protobuf": "http", "grpc": "grpc"}
"""OTLP's forms that Python's SDK has an exporter for, and the last part of its package's name."""


def check(config: RuntimeConfig) -> None:
    """Raise `ConfigError` where `--otel` is on and a package that it needs is missing."""
    if config.otel:
        try:
            import opentelemetry.sdk  # noqa: F401, PLC0415
        except ImportError:
            raise ConfigError.at("otel", "OpenTelemetry's SDK is missing: pip install 'uma-serve[otel]'") from None
        _exporter()


def _exporter() -> Any:
    """The class that sends spans, as the SDK's variables have it.

    Raises `ConfigError` for another form than those of `EXPORTERS`, and where the package is missing.
    """
    general, own = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    name = own if os.environ.get(own) else general
    form = os.environ.get(name) or "http/protobuf"
    if form not in EXPORTERS:
        raise ConfigError(f"{name}: {form!r} must be one of {', '.join(EXPORTERS)}")
    package = f"opentelemetry.exporter.otlp.proto.{EXPORTERS[form]}"
    try:
        return import_module(f"{package}.trace_exporter").OTLPSpanExporter
    except ImportError:
        raise ConfigError.at(
            "otel", f"OpenTelemetry's exporter for {form} is missing: pip install {package.replace('.', '-')}"
        ) from None


@asynccontextmanager
async def exporting(engine: Engine, config: RuntimeConfig) -> AsyncIterator[None]:
    """A block in which requests of `engine` are exported, if `--otel` is on; what is left is sent at its end."""
    if not config.otel:
        yield
        return
    telemetry = OtelTelemetry(engine.info, config)
    engine.on_request_over(telemetry.tell)
    engine.on_embedded(telemetry.tell_embedded)
    try:
        yield
    finally:
        with trio.move_on_after(FLUSH_SEC, shield=True) as patience:
            await trio.to_thread.run_sync(telemetry.close, abandon_on_cancel=True)
        if patience.cancelled_caught:
            log(logger, logging.WARNING, "otel.export_failed", seconds=FLUSH_SEC)


class OtelTelemetry:
    """One server's spans. `tell` belongs to one thread."""

    def __init__(self, info: ServerInfo, config: RuntimeConfig) -> None:
        # As late as possible: without the switch nothing of it is loaded.
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._model, self._config, self._api = info.model.name, config, trace
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "uma", "service.version": __version__}
        resource = Resource.create(named)  # OTEL_RESOURCE_ATTRIBUTES among it
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._traces.add_span_processor(BatchSpanProcessor(_exporter()()))
        self._tracer = self._traces.get_tracer("uma", __version__)
        self._parent = TraceContextTextMapPropagator().extract

    def tell(self, over: Over) -> None:
        """A request is over."""
        operation = "chat" if over.request.messages is not None else "text_completion"
        common = self._common(operation, over.origin)
        failed = {"error.type": over.error or UNKNOWN} if over.reason == "error" else {}
        self._span(common | failed | _attributes(over), over)

    def _span(self, attributes: dict[str, Any], over: Over | Embedded) -> None:
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model}",
            # Without one it begins a trace, whatever else runs in this process.
            context=self._parent({"traceparent": over.traceparent}),
            kind=self._api.SpanKind.SERVER,
            attributes=attributes,
            start_time=int(over.began_at * 1e9),
        )
        if "error.type" in attributes:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR))
        span.end(int(over.ended_at * 1e9))

    def tell_embedded(self, over: Embedded) -> None:
        """A request for embeddings, or for a ranking, is over."""
        request, tokens = over.request, over.prompt_tokens
        common = self._common("rerank" if isinstance(request, RerankRequest) else "embeddings", over.origin)
        common |= {} if tokens is not None else {"error.type": over.error or UNKNOWN}
        attributes: dict[str, Any] = {"uma.priority": request.priority, "uma.origin": over.origin}
        if tokens is not None:
            attributes["gen_ai.usage.input_tokens"] = tokens
        if isinstance(request, EmbedRequest) and request.dimensions is not None:
            attributes["gen_ai.embeddings.dimension.count"] = request.dimensions
        self._span(common | attributes, over)

    def close(self) -> None:
        """Send what has not been sent. Blocks."""
        self._traces.shutdown()

    def _common(self, operation: str, origin: str) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            **self._address(origin),
        }

    def _address(self, origin: str) -> dict[str, Any]:
        if "socket" in origin.split(" · ") or not self._config.http:
            return {"server.address": self._config.socket}
        host, _, port = self._config.http.rpartition(":")
        known = {"server.port": int(port)} if port.isdigit() and int(port) else {}
        return {"server.address": host.strip("[]"), **known}


def _attributes(over: Over) -> dict[str, Any]:
    """What a span has beside the metrics' attributes."""
    sampling, metrics = over.request.sampling, over.metrics
    asked = {f"gen_ai.request.{name}": getattr(sampling, name) for name in SAMPLING}
    found = {
        **{name: value for name, value in asked.items() if value is not None},
        "gen_ai.request.stream": over.request.stream,
        "gen_ai.response.id": over.request.id,
        "gen_ai.response.finish_reasons": (over.reason,),
        "gen_ai.usage.input_tokens": over.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": over.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": over.usage.cached_tokens,
        "uma.queue_ms": metrics.queue_ms,
        "uma.prefill_ms": metrics.prefill_ms,
        "uma.decode_ms": metrics.decode_ms,
        "uma.priority": over.request.priority,
        "uma.origin": over.origin,
    }
    if sampling.n != 1:
        found["gen_ai.request.choice.count"] = sampling.n
    if sampling.stop:
        found["gen_ai.request.stop_sequences"] = tuple(sampling.stop)
    if metrics.ttft_ms:
        found["gen_ai.response.time_to_first_chunk"] = metrics.ttft_ms / 1000
    return found
