"""Whether this process traces its steps, which of them, and where the spans go."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING

from trainer_client.balancing.tracing.rounds import StreamTracer

if TYPE_CHECKING:  # OpenTelemetry is imported only when tracing is started
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

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
