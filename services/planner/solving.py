"""Solving beside the event loop: a few threads, a short queue, and giving up when nobody waits any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from evenkeel.placement import SolveCancelledError
from services.planner.metrics import Metrics
from services.planner.problems import ServiceError

T = TypeVar("T")

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0


class ClientGoneError(Exception):
    """The client closed the connection before the answer."""


class SolverPool:
    """Threads that solve, and the requests that wait for one."""

    def __init__(self, workers: int, queue_size: int, metrics: Metrics) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="solver")
        self._workers, self._queue_size, self._metrics = workers, queue_size, metrics
        self._slots = asyncio.Semaphore(workers)
        self._waiting = self._running = 0
        self._events: set[threading.Event] = set()

    async def run(
        self,
        work: Callable[[Callable[[], bool]], T],
        is_gone: Callable[[], Awaitable[bool]],
        time_limit_s: float,
    ) -> T:
        """Run `work` on a thread; it is given a function that tells it to stop.

        Raises:
            ServiceError: If too many requests wait, or the search did not end within its limit and a grace.
            ClientGoneError: If the client went away.
        """
        if self._waiting >= self._queue_size and self._running >= self._workers:
            detail = f"{self._running} requests are being solved and {self._waiting} wait; try again"
            raise ServiceError(503, "overloaded", "Overloaded", detail, {"Retry-After": "1"})
        stop = threading.Event()
        self._events.add(stop)
        try:
            self._count(waiting=1)
            try:
                await self._slots.acquire()
            finally:
                self._count(waiting=-1)
            try:
                return await self._solve(work, is_gone, time_limit_s, stop)
            finally:
                self._slots.release()
        finally:
            stop.set()
            self._events.discard(stop)

    async def _solve(
        self,
        work: Callable[[Callable[[], bool]], T],
        is_gone: Callable[[], Awaitable[bool]],
        time_limit_s: float,
        stop: threading.Event,
    ) -> T:
        deadline = time.monotonic() + time_limit_s + _GRACE_SECONDS
        future = asyncio.get_running_loop().run_in_executor(
            self._executor, work, lambda: stop.is_set() or time.monotonic() > deadline
        )
        self._count(running=1)
        gone = False
        try:
            while not future.done():
                done, _ = await asyncio.wait({future}, timeout=_POLL_SECONDS)
                if not done and not gone and await is_gone():
                    gone = True
                    self._metrics.cancelled.inc()
                    stop.set()
            return future.result()
        except SolveCancelledError:
            if gone:
                raise ClientGoneError from None
            detail = f"the search did not end within {time_limit_s:g} s; send fewer tables or a larger gap"
            raise ServiceError(503, "time-limit", "Time limit", detail) from None
        finally:
            self._count(running=-1)

    def _count(self, *, waiting: int = 0, running: int = 0) -> None:
        self._waiting, self._running = self._waiting + waiting, self._running + running
        self._metrics.waiting.set(self._waiting)
        self._metrics.running.set(self._running)

    def close(self) -> None:
        """Stops all searches and the threads."""
        for event in list(self._events):
            event.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
