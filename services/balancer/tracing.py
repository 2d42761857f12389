"""Spans of the rounds that ranks trace, made when a round is decided: one round, linked to all its ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from evenkeel.tracing_guard import harmless
from services.balancer.decisions import Reason
from services.balancer.effects import Decided

if TYPE_CHECKING:  # OpenTelemetry is imported only when tracing is on
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider


class RoundTracer:
    """Makes the spans of decided rounds: `round` around `gather`, `partition` and `answer`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("evenkeel")

    @harmless
    def decided(self, event: Decided, answered_at: float) -> None:
        """A round that ranks trace was decided; one that nobody trained is none.

        Its span belongs to the trace of its lowest rank (with ranks of the same version, all share one) and links to
        the submissions of all ranks; a link tells how long after the first its rank came. `answer` ends when the
        answers are handed to the ranks' streams.

        Args:
            event: The round.
            answered_at: When all answers had been handed out, on the clock of the event's times.
        """
        from opentelemetry.trace import Link, NonRecordingSpan, set_span_in_context

        from evenkeel.tracing import read_traceparent

        timeline, decision = event.timeline, event.decision
        assert timeline is not None
        if decision.reason is Reason.NOT_TRAINED:
            return
        contexts = {rank: read_traceparent(text) for rank, (_, text) in sorted(timeline.arrivals.items())}
        links = [
            Link(context, {"evenkeel.rank": rank, "evenkeel.late_seconds": _since(event, rank)})
            for rank, context in contexts.items()
            if context.is_valid
        ]
        if not links:
            return
        epoch = time.time_ns() - round(answered_at * 1e9)
        attributes: dict[str, str | int | float] = {
            "evenkeel.job": event.session.key.job, "evenkeel.session": str(event.session.key),
            "evenkeel.run": f"{event.session.run_id}:{event.session.restart}", "evenkeel.step": event.round,
        }  # fmt: skip
        outcome: dict[str, str | int | float] = {
            "evenkeel.outcome": decision.outcome.name.lower(), "evenkeel.reason": decision.reason.label,
            "evenkeel.missing_ranks": len(decision.missing_ranks),
        }  # fmt: skip
        if decision.plan is not None:
            figures = decision.plan.figures
            outcome["evenkeel.imbalance_before"] = figures.imbalance_before
            outcome["evenkeel.imbalance"] = figures.imbalance_after
            outcome["evenkeel.moved_bytes"] = figures.moved_size

        def at(seconds: float) -> int:
            return epoch + round(seconds * 1e9)

        parent = set_span_in_context(NonRecordingSpan(links[0].context))
        span = self._tracer.start_span(
            "round",
            context=parent,
            links=links,
            start_time=at(timeline.opened_at),
            attributes={**attributes, **outcome},
        )
        inside = set_span_in_context(span)
        gathered = timeline.decided_at if timeline.gathered_at is None else timeline.gathered_at
        parts = [("gather", timeline.opened_at, gathered), ("answer", timeline.decided_at, answered_at)]
        if timeline.gathered_at is not None:
            parts.insert(1, ("partition", gathered, timeline.decided_at))
        for name, started, ended in parts:
            part = self._tracer.start_span(name, context=inside, start_time=at(started), attributes=attributes)
            part.end(at(ended))
        span.end(at(answered_at))

    def close(self) -> None:
        """Sends what is left, within 2 seconds."""
        from evenkeel.tracing import close_provider

        close_provider(self._provider)


def open_tracer(endpoint: str | None, *, instance: int, processor: SpanProcessor | None = None) -> RoundTracer | None:
    """The tracer that the settings ask for; None when tracing is off.

    Args:
        endpoint: URL of a collector.
        instance: The number of this balancer process.
        processor: What gets the spans instead.

    Raises:
        ValueError: If the endpoint is no URL, or OpenTelemetry is not installed.
    """
    if endpoint is None and processor is None:
        return None
    try:
        from evenkeel.tracing import open_provider
    except ModuleNotFoundError as error:
        raise ValueError(f"trace_endpoint is set and {error}; install the packages of evenkeel[tracing]") from error
    attributes = {"service.instance.id": f"{instance:x}"}
    return RoundTracer(
        open_provider("evenkeel-balancer", endpoint=endpoint, processor=processor, attributes=attributes)
    )


def _since(event: Decided, rank: int) -> float:
    assert event.timeline is not None
    return event.timeline.arrivals[rank][0] - event.timeline.opened_at
