"""The spans of one rank's rounds."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from evenkeel.tracing_guard import harmless

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
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
