"""Answering beside the event loop: processes that each solve one request at a time, a short queue before them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

import structlog
from pebble import ProcessExpired, ProcessPool

from evenkeel.placement import InvalidInputError, PlanRequest
from services.planner import answers
from services.planner.answers import Answer, AnyRequest
from services.planner.metrics import Metrics
from services.planner.problems import ServiceError, client_gone, time_is_up
from services.planner.settings import Settings

log = structlog.get_logger(__name__)
T = TypeVar("T")

_GRACE_SECONDS = 1.0
_LONGEST_RETRY = 60
_SMOOTHING = 0.1
_MAX_TASKS = 100
"""Of a worker, before a new one takes its place: what libraries leave behind goes with it."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Pool:
    """Processes, and the requests that wait for one."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._slots = asyncio.Semaphore(settings.workers)
        self._reader = ThreadPoolExecutor(1, "reader")  # one body at a time: parsed, it takes many times its size
        self._asked = 0  # of these so many as there are workers are being solved, and the others wait
        metrics.running.set_function(lambda: min(self._asked, settings.workers))
        metrics.waiting.set_function(lambda: max(self._asked - settings.workers, 0))
        self._mean_seconds = 0.2
        os.environ |= _ONE_THREAD  # for the processes that are forked from here on
        self._processes = self._new_processes()

    def _new_processes(self) -> ProcessPool:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([answers.__name__])
        return ProcessPool(
            max_workers=self._settings.workers,
            max_tasks=_MAX_TASKS,
            initializer=answers.begin_worker,
            context=context,
        )

    async def start(self) -> None:
        """Starts all processes, and waits until one can work."""
        first = [self._processes.schedule(os.getpid) for _ in range(self._settings.workers)]
        await asyncio.wrap_future(first[0])

    def close(self) -> None:
        """Ends all processes; requests that are being solved get no answer."""
        self._processes.stop()  # type: ignore[no-untyped-call]
        with contextlib.suppress(TimeoutError):
            self._processes.join(5)
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def read(self, parse: Callable[[], T]) -> tuple[T, float]:
        """What `parse` gives, in a thread beside the event loop, and the seconds that it took."""

        def timed() -> tuple[T, float]:
            began = time.monotonic()
            return parse(), time.monotonic() - began

        try:
            async with asyncio.timeout(self._settings.max_wait_seconds):
                return await asyncio.get_running_loop().run_in_executor(self._reader, timed)
        except TimeoutError:
            raise self._overloaded("requests before this one are still being read") from None

    async def solve(
        self, request: AnyRequest, limit: float, spent: float, gone: Callable[[], Awaitable[None]]
    ) -> Answer:
        """The answer to a request of which reading took some seconds, from a process."""
        if self._asked >= self._settings.workers + self._settings.queue_size:
            raise self._overloaded(f"{self._asked} requests are being solved or wait")
        left, longest = asyncio.ensure_future(gone()), self._settings.max_wait_seconds
        self._asked += 1
        try:
            late = partial(self._overloaded, f"no worker was free for {longest:g} s")
            await self._unless_gone(self._slots.acquire(), left, longest, late)
            try:
                return await self._solve(request, limit, spent, left)
            finally:
                self._slots.release()
        finally:
            self._asked -= 1
            left.cancel()

    async def _unless_gone(
        self, work: Awaitable[T], gone: asyncio.Future[None], seconds: float, late: Callable[[], ServiceError]
    ) -> T:
        """What is awaited; it is cancelled once the client goes away or the time is over."""
        task = asyncio.ensure_future(work)
        waited: set[asyncio.Future[Any]] = {task, gone}
        try:
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                self._metrics.cancelled.inc()
                raise client_gone()
            raise late()
        finally:
            task.cancel()  # ends the process, if it still works

    async def _solve(self, request: AnyRequest, limit: float, spent: float, gone: asyncio.Future[None]) -> Answer:
        began = time.monotonic() - spent
        arguments = [request, began + limit, self._settings.worker_memory_bytes, self._settings.plan_cache]
        if not self._processes.active:  # its processes ended, and could not be replaced
            log.error("planner pool ended")
            self._processes = self._new_processes()
        working = asyncio.wrap_future(self._processes.schedule(answers.answer, args=arguments))
        try:
            return await self._unless_gone(working, gone, limit + _GRACE_SECONDS - spent, partial(_too_slow, limit))
        except OverflowError as error:
            remedy = "give machines and tables that there can be"
            what = "has numbers whose product is out of range"
            raise InvalidInputError("request", str(error), what, remedy) from None
        except (MemoryError, SystemError) as error:  # extensions that have no memory left for an error raise the latter
            tell = log.error if isinstance(error, SystemError) else log.warning
            tell("planner worker out of memory, or wrong in an extension", error=repr(error))
            tables = len(request.tables) if isinstance(request, PlanRequest) else 1
            remedy = "send fewer tables, fewer solver.ratio_steps or histograms of fewer bins"
            wrong = InvalidInputError("tables", tables, "need more memory than a request may take", remedy)
            raise ServiceError(422, "Too costly", wrong) from None
        except (ProcessExpired, BrokenProcessPool) as error:  # the latter if none was left by then
            log.error("planner worker ended", error=repr(error), ran_seconds=time.monotonic() - began)
            detail = "the process that worked at this request ended; send fewer tables, or try again"
            raise ServiceError(503, "Worker ended", detail, headers={"Retry-After": "1"}) from None
        finally:
            self._mean_seconds += _SMOOTHING * (time.monotonic() - began - self._mean_seconds)

    def _overloaded(self, detail: str) -> ServiceError:
        seconds = self._mean_seconds * self._asked / self._settings.workers
        after = min(_LONGEST_RETRY, max(1, math.ceil(seconds)))
        text = f"{detail}; try again in {after} s"
        return ServiceError(503, "Overloaded", text, headers={"Retry-After": str(after)})


def _too_slow(limit: float) -> ServiceError:
    what = "was over before there was an answer, and the worker was ended"
    remedy = "give more time, fewer tables or a larger gap"
    return time_is_up(InvalidInputError("solver.time_limit_s", f"{limit:g}", what, remedy))
