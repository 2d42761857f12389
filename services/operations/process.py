"""What every service has: how it keeps memory, and metrics of what was built, what it uses, how late its loop is."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import platform
import time

from prometheus_client import CollectorRegistry, Gauge, GCCollector, Histogram, ProcessCollector

_LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_INTERVAL_SECONDS = 0.25

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES, _LARGEST_BYTES = 256 << 20, 32 << 20  # the most that glibc takes for the second


def keep_memory() -> None:
    """Has this process keep freed memory: fetching it anew took a third of the time of a round of 1,024 ranks."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)


def add_process_metrics(registry: CollectorRegistry, *, service: str, version: str) -> None:
    """Adds build information and what the process uses.

    Args:
        registry: Where to.
        service: `balancer` or `planner`.
        version: The software's version.
    """
    info = Gauge(
        "evenkeel_build_info", "What runs; always 1.", ("service", "version", "python"), registry=registry
    )  # fmt: skip
    info.labels(service, version, platform.python_version()).set(1)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)


class EventLoopLag:
    """Measures how much later than asked the event loop comes round: what every waiting request waits on top."""

    def __init__(self, registry: CollectorRegistry, *, service: str) -> None:
        self._lag = Histogram(
            f"evenkeel_{service}_event_loop_lag_seconds",
            "How much later than asked a timer of the event loop fires.",
            buckets=_LAG_BUCKETS,
            registry=registry,
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Measures until `stop`; must be called with the event loop running."""
        self._task = asyncio.create_task(self._run(), name="event-loop-lag")

    def stop(self) -> None:
        """Ends the measuring."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(_INTERVAL_SECONDS)
            self._lag.observe(max(0.0, time.perf_counter() - asked - _INTERVAL_SECONDS))
