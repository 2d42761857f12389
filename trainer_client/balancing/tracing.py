"""Traces of the steps of each rank: off unless started, `pip install 'evenkeel[tracing]'`.

tracing.start("http://collector:4318", every=100)  # before the first batch; or EVENKEEL_TRACE_ENDPOINT
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from evenkeel.tracing_guard import harmless

if TYPE_CHECKING:  # OpenTelemetry is imported only when tracing is started
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span, Tracer

    from trainer_client.balancing.report import RoundReport


class StreamTracer:
    """Begins the traces of one stream's rounds."""

    def __init__(
        self, provider: TracerProvider, *, every: int, job: str, group: str, loader: str, run: str, rank: int
    ) -> None:
        self._tracer = provider.get_tracer("evenkeel")
        self._ids = provider.id_generator
        self._every = every
        self._names = (job, group, loader, run)
        self._attributes: dict[str, str | int] = {
            "evenkeel.job": job, "evenkeel.session": f"{job}/{group}/{loader}", "evenkeel.run": run,
            "evenkeel.rank": rank,
        }  # fmt: skip

    def begin(self, round_number: int) -> RoundTrace | None:
        """The trace of a round that begins now; None if this one is not traced, on all ranks alike."""
        if round_number % self._every:
            return None
        from opentelemetry.context import Context

        from evenkeel.tracing import RoundIds, round_trace_id

        assert isinstance(self._ids, RoundIds)
        attributes = {**self._attributes, "evenkeel.step": round_number}
        with self._ids.trace_of(round_trace_id(*self._names, round_number)):
            span = self._tracer.start_span("step", context=Context(), attributes=attributes)
        return RoundTrace(self._tracer, span, attributes)


class RoundTrace:
    """The spans of one round on one rank: `step` around `submit`, `wait`, `agree`, `partition` and `redistribute`.

    Spans are made when their part has ended, from whichever thread did it. They hold the host's times: what a GPU does
    goes on behind them.

    Attributes:
        traceparent: What the submission carries, so that the balancer's spans are of the same trace.
    """

    def __init__(self, tracer: Tracer, span: Span, attributes: dict[str, str | int]) -> None:
        from opentelemetry.trace import set_span_in_context

        from evenkeel.tracing import write_traceparent

        self._tracer, self._span, self._attributes = tracer, span, attributes
        self._context: Context = set_span_in_context(span)
        self._began = time.time_ns()
        self._moving: deque[int] = deque()  # of a window, several batches move at a time; they land in order
        self.traceparent = write_traceparent(span)

    @harmless
    def part(self, name: str, started: int, ended: int | None = None, **more: str | int | float) -> None:
        """A part of the round; times are `time.time_ns()`, the end is now if not given."""
        attributes = {**self._attributes, **{f"evenkeel.{key}": value for key, value in more.items()}}
        span = self._tracer.start_span(name, context=self._context, start_time=started, attributes=attributes)
        span.end(time.time_ns() if ended is None else ended)

    @harmless
    def agreed(self, report: RoundReport) -> None:
        """The ranks have agreed: what they do, and how even that is."""
        self._span.set_attributes(
            {
                "evenkeel.mode": report.mode.value, "evenkeel.reason": report.reason.value,
                "evenkeel.imbalance_before": report.imbalance_before, "evenkeel.imbalance": report.imbalance,
                "evenkeel.own_load": report.own_load, "evenkeel.moved_bytes": report.moved_size,
            }
        )  # fmt: skip

    @harmless
    def submitted(self) -> None:
        """The costs are computed and on their way, since the trace began."""
        self.part("submit", self._began)

    @harmless
    def moving(self) -> None:
        """The samples begin to move."""
        self._moving.append(time.time_ns())

    @harmless
    def moved(self) -> None:
        """A batch that this rank trains is there: the first one of the round ends its trace."""
        self.part("redistribute", self._moving.popleft())
        self.end()

    @harmless
    def end(self) -> None:
        """Ends the trace of the round, if it has not ended."""
        if self._span.is_recording():
            self._span.end()


ENDPOINT, EVERY = "EVENKEEL_TRACE_ENDPOINT", "EVENKEEL_TRACE_EVERY"

_lock = threading.Lock()
_provider: TracerProvider | None = None
_every = 1


def start(endpoint: str | None = None, *, every: int = 1, processor: SpanProcessor | None = None) -> None:
    """Traces the steps of streams that open from now on, in this process; call it on every rank alike.

    Nothing waits for a collector: spans that it does not take in time are dropped.

    Args:
        endpoint: URL of an OpenTelemetry collector that takes OTLP over HTTP, such as `http://collector:4318`.
        every: Trace every so many steps; all ranks trace the same ones.
        processor: What gets the spans, instead of a collector.

    Raises:
        ValueError: If the endpoint is no URL, or `every` is below 1.
        ModuleNotFoundError: If OpenTelemetry is not installed.
    """
    global _provider, _every
    if every < 1:
        raise ValueError(f"every is {every}; trace every 1 or more steps")
    try:
        from evenkeel.tracing import open_provider
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; tracing needs it: pip install 'evenkeel[tracing]'") from error
    opened = open_provider("evenkeel-trainer", endpoint=endpoint, processor=processor)
    stop()
    with _lock:
        _provider, _every = opened, every


def stop() -> None:
    """Sends what is left, within 2 seconds, and traces no more."""
    global _provider
    with _lock:
        provider, _provider = _provider, None
    if provider is not None:
        from evenkeel.tracing import close_provider

        close_provider(provider)


def tracer_of(*, job: str, group: str, loader: str, run: str, rank: int) -> StreamTracer | None:
    """The tracer of a stream that opens; None when tracing is off.

    Started by `start`, else by `EVENKEEL_TRACE_ENDPOINT` (a collector's URL) and `EVENKEEL_TRACE_EVERY` (default 1).

    Args:
        job: The training job.
        group: The data-parallel group.
        loader: The stream of batches.
        run: Its incarnation; with the names above the same on all ranks.
        rank: This rank.

    Raises:
        ValueError: If a variable holds something that cannot be used.
    """
    if _provider is None:
        endpoint = os.environ.get(ENDPOINT, "").strip()
        if not endpoint:
            return None
        every = os.environ.get(EVERY, "").strip() or "1"
        if not every.isdecimal() or int(every) < 1:
            raise ValueError(f"{EVERY} is {every!r}; give a number of steps, 1 or more")
        start(endpoint, every=int(every))
    assert _provider is not None
    return StreamTracer(_provider, every=_every, job=job, group=group, loader=loader, run=run, rank=rank)


def _forget() -> None:
    global _provider  # noqa: PLW0603
    _provider = None


atexit.register(stop)
# A forked loader's worker is no rank: it neither traces nor sends what the rank has yet to send.
os.register_at_fork(after_in_child=_forget)
