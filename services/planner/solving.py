"""Answering beside the event loop: each request in a process of its own, a short queue, and no work for nobody.

A worker is forked for its request from a process that has imported everything, may take so much memory and no more, and
is killed when its client goes away or its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from services.operations.nursery import Ready, Zygote
from services.planner import worker
from services.planner.metrics import Metrics
from services.planner.problems import FieldProblem, ServiceError
from services.planner.settings import Settings
from services.planner.worker import FRAME, SECONDS, Facts, Job, frame

log = structlog.get_logger(__name__)

_READING_SECONDS = 5.0
"""For a worker to read its request, before its time limit is known."""
_GRACE_SECONDS = 0.8
_LIMIT = re.compile(rb'"time_limit_s"\s*:\s*(\d{1,4}(?:\.\d{1,18})?)\s*[,}]')
_RESTART_SECONDS = 0.5
_LONGEST_RETRY = 60
_SMOOTHING = 0.1


class ClientGoneError(Exception):
    """The client closed the connection before the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a worker answered.

    Attributes:
        facts: What is counted of it.
        document: The body of the response.
    """

    facts: Facts
    document: bytes


def _glimpse_limit(body: bytes) -> float | None:
    """The time limit in a body that nobody has read yet, if it is there as it is mostly written."""
    found = _LIMIT.search(body)
    return None if found is None else float(found[1])


def _heard(number: int, value: int) -> None:
    """That a worker was forked or has ended: its socket tells whoever waits for it."""
    del number, value


class _TimeIsOverError(Exception):
    def __init__(self, limit: float | None) -> None:
        super().__init__()
        self.limit = limit


class Solvers:
    """Workers, and the requests that wait for one."""

    def __init__(self, settings: Settings, metrics: Metrics, zygote: Zygote | None = None) -> None:
        self._settings, self._metrics = settings, metrics
        self._zygote = zygote
        self._slots = asyncio.Semaphore(settings.workers)
        self._numbers = itertools.count()
        self._ready = asyncio.Event()
        self._waiting = self._running = 0
        self._mean_seconds = 0.2
        self._closed = False

    def start(self) -> None:
        """Begins to start the process that workers are forked from."""
        self._attach(self._zygote or Zygote.begin(worker.__name__, worker.TRADE))

    @property
    def is_ready(self) -> bool:
        """Whether workers can be forked."""
        return self._ready.is_set()

    async def run(self, job: Job, body: bytes, gone: Callable[[], Awaitable[None]]) -> Answer:
        """The answer to a request, from a worker of its own.

        Args:
            job: What is asked for.
            body: The request's body.
            gone: What it gives ends when the client goes away; not called where the request is refused at once.

        Raises:
            ServiceError: If too many requests wait, none was answered in time, or the worker ended.
            ClientGoneError: If the client went away.
        """
        if self._waiting >= self._settings.queue_size and self._running >= self._settings.workers:
            raise self._overloaded(f"{self._running} requests are being solved and {self._waiting} wait")
        left = asyncio.ensure_future(gone())
        try:
            await self._turn(left)
            try:
                return await self._solve(job, body, left)
            finally:
                self._slots.release()
        finally:
            left.cancel()

    async def _turn(self, gone: asyncio.Future[None]) -> None:
        """Waits for a slot, in the order of arrival."""
        self._count(waiting=1)
        turn = asyncio.ensure_future(self._acquire())
        try:
            await asyncio.wait(
                {turn, gone}, timeout=self._settings.max_wait_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if gone.done() or not turn.done():
                if turn.done():
                    self._slots.release()
                if gone.done():
                    self._metrics.cancelled.inc()
                    raise ClientGoneError
                raise self._overloaded(f"no worker was free for {self._settings.max_wait_seconds:g} s")
        finally:
            turn.cancel()
            self._count(waiting=-1)

    async def _acquire(self) -> None:
        await self._ready.wait()
        await self._slots.acquire()

    async def _solve(self, job: Job, body: bytes, gone: asyncio.Future[None]) -> Answer:
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        began = time.monotonic()
        self._count(running=1)
        try:
            with theirs:
                assert self._zygote is not None
                self._zygote.send_fork(number, self._settings.worker_memory_bytes, [theirs.fileno()])
            talk = asyncio.ensure_future(self._talk(ours, job, body, began))
            waited: set[asyncio.Future[Any]] = {talk, gone}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not talk.done():
                talk.cancel()
                self._metrics.cancelled.inc()
                raise ClientGoneError
            return talk.result()
        except _TimeIsOverError as error:
            raise self._too_slow(error.limit) from None
        except (OSError, asyncio.IncompleteReadError) as error:
            log.error("planner worker ended", path=job.path, error=repr(error), ran_seconds=time.monotonic() - began)
            detail = "the process that worked at this request ended; send fewer tables, or try again"
            raise ServiceError(503, "worker-ended", "Worker ended", detail, {"Retry-After": "1"}) from None
        finally:
            self._mean_seconds += _SMOOTHING * (time.monotonic() - began - self._mean_seconds)
            if self._zygote is not None:
                self._zygote.kill(number)
            ours.close()
            self._count(running=-1)

    async def _talk(self, end: socket.socket, job: Job, body: bytes, began: float) -> Answer:
        end.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=end)
        limit = _glimpse_limit(body)
        facts: dict[str, Any] = {}
        try:
            writer.write(frame(b"J", json.dumps(asdict(job)).encode()))
            writer.write(frame(b"B", body))
            while True:
                allowed = _READING_SECONDS if limit is None else limit + _GRACE_SECONDS
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + began + allowed - time.monotonic()):
                    kind, size = FRAME.unpack(await reader.readexactly(FRAME.size))
                    content = await reader.readexactly(size)
                if kind == b"L":
                    (limit,) = SECONDS.unpack(content)
                elif kind == b"F":
                    facts = json.loads(content)
                else:
                    return Answer(facts=Facts(**facts), document=content)
        except TimeoutError:
            raise _TimeIsOverError(limit) from None
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    def _attach(self, zygote: Zygote) -> None:
        self._zygote = zygote
        zygote.attach(self._forkable, _heard, _heard, self._lost)

    def _forkable(self, ready: Ready) -> None:
        del ready
        self._ready.set()

    def _lost(self) -> None:
        """The process that workers come from has ended, and its workers with it: another one is started."""
        self._ready.clear()
        if not self._closed:
            log.error("planner zygote ended")
            asyncio.get_running_loop().call_later(_RESTART_SECONDS, self._restart)

    def _restart(self) -> None:
        if not self._closed:
            self._attach(Zygote.begin(worker.__name__, worker.TRADE))

    def _overloaded(self, detail: str) -> ServiceError:
        seconds = self._mean_seconds * (self._waiting + self._running) / self._settings.workers
        after = min(_LONGEST_RETRY, max(1, math.ceil(seconds)))
        text = f"{detail}; try again in {after} s"
        return ServiceError(503, "overloaded", "Overloaded", text, {"Retry-After": str(after)})

    def _too_slow(self, limit: float | None) -> ServiceError:
        value = "unread" if limit is None else f"{limit:g}"
        what = "was over before there was an answer, and the worker was ended"
        wrong = FieldProblem.of("solver.time_limit_s", value, what, "give more time, fewer tables or a larger gap")
        return ServiceError(503, "time-limit", "Time limit", wrong.sentence, {"Retry-After": "1"}, (wrong,))

    def _count(self, *, waiting: int = 0, running: int = 0) -> None:
        self._waiting, self._running = self._waiting + waiting, self._running + running
        self._metrics.waiting.set(self._waiting)
        self._metrics.running.set(self._running)

    def close(self) -> None:
        """Ends all workers; does not wait for them."""
        self._closed = True
        if self._zygote is not None:
            self._zygote.close()
