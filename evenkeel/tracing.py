"""OpenTelemetry spans and where they go; imported only when asked for: it needs `pip install 'evenkeel[tracing]'`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import INVALID_SPAN_CONTEXT, Span, SpanContext, TraceFlags

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import SpanProcessor

_EXPORT_SECONDS = 3.0
_CLOSE_SECONDS = 2.0
_QUEUE = 8192
_MAX_LINKS = 4096  # the balancer's round links to every rank
_TRACES_PATH = "/v1/traces"


class RoundIds(RandomIdGenerator):
    """Random ids, but for root spans that `trace_of` gives a trace to: the ranks of a round share one."""

    def __init__(self) -> None:
        self._wanted = threading.local()

    def generate_trace_id(self) -> int:
        """The trace of the next root span on this thread."""
        return getattr(self._wanted, "trace_id", None) or super().generate_trace_id()

    @contextmanager
    def trace_of(self, trace_id: int) -> Iterator[None]:
        """Root spans that start within the block on this thread belong to this trace."""
        self._wanted.trace_id = trace_id
        try:
            yield
        finally:
            self._wanted.trace_id = None


def open_provider(
    service: str,
    *,
    endpoint: str | None = None,
    processor: SpanProcessor | None = None,
    attributes: Mapping[str, str | int] | None = None,
) -> TracerProvider:
    """A provider that never holds up who makes spans: they wait in a bounded queue, and are dropped beyond it.

    Args:
        service: The `service.name` of its spans.
        endpoint: URL of an OpenTelemetry collector that takes OTLP over HTTP, such as `http://collector:4318`. Headers
            and certificates come from OpenTelemetry's own `OTEL_EXPORTER_OTLP_…` variables.
        processor: What gets the spans instead.
        attributes: What spans are said to come from, beside the service's name.

    Raises:
        ValueError: If the endpoint is no URL.
    """
    if processor is None:
        exporter = OTLPSpanExporter(endpoint=traces_url(endpoint or ""), timeout=_EXPORT_SECONDS)
        processor = BatchSpanProcessor(exporter, max_queue_size=_QUEUE)
    provider = TracerProvider(
        resource=Resource.create({"service.name": service, **(attributes or {})}),
        id_generator=RoundIds(),
        span_limits=SpanLimits(max_links=_MAX_LINKS),
        shutdown_on_exit=False,  # it waits for half a minute where no collector answers
    )
    provider.add_span_processor(processor)
    return provider


def close_provider(provider: TracerProvider, seconds: float = _CLOSE_SECONDS) -> None:
    """Sends what is left, as far as that can be done in so many seconds."""
    closing = threading.Thread(target=provider.shutdown, name="evenkeel-tracing-close", daemon=True)
    closing.start()
    closing.join(seconds)


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to.

    Raises:
        ValueError: If the endpoint is no URL.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"trace_endpoint is {endpoint!r}; give the URL of a collector that takes OTLP over HTTP, "
            "for example http://collector:4318"
        )
    return endpoint if parts.path not in ("", "/") else endpoint.rstrip("/") + _TRACES_PATH


def round_trace_id(*names: str | int) -> int:
    """The trace of a round: a function of what names its session, and of its number, so that all ranks agree on it."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") or 1


def write_traceparent(span: Span) -> str:
    """The context of a span as W3C Trace Context writes it."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def read_traceparent(text: str) -> SpanContext:
    """The context that a traceparent names; an invalid one if it is none, or is not sampled."""
    parts = text.split("-")
    if len(text) != 55 or [len(part) for part in parts] != [2, 32, 16, 2]:
        return INVALID_SPAN_CONTEXT
    try:
        trace_id, span_id, flags = (int(part, 16) for part in parts[1:])
    except ValueError:
        return INVALID_SPAN_CONTEXT
    if not flags & TraceFlags.SAMPLED:
        return INVALID_SPAN_CONTEXT
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
