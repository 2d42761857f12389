"""Who may use the event loop next: what has to be done for callers is done in short pieces, in turn.

While there is time, everybody goes on at once. Where there is more to do than there is time for, the one comes first
whose caller and whose job have used the loop least of late: neither a caller of many jobs gets more of it than others,
nor a job of a thousand ranks, from hundreds of addresses, more than one of eight. Who takes much of the loop while
others use it too gets it in shorter slices, between which the others' steps fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from services.balancer.shares import Holder

_Claim = tuple[float, float]
"""The more that caller or job has used, then what the job has: whose is least comes first."""


class LoopTurns:
    """Hands the event loop out in slices.

    Attributes:
        waiting: How many wait for a turn.
        longest: Seconds of the longest piece that anybody took.
    """

    def __init__(
        self,
        *,
        slice_seconds: float = 0.004,
        memory_seconds: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Must be called with the event loop running.

        Args:
            slice_seconds: Time that pieces may take together before the loop looks at everything else.
            memory_seconds: How long what was used counts: after it, a third of it.
            clock: Seconds.
        """
        self.waiting = 0
        self.longest = 0.0
        self._loop = asyncio.get_running_loop()
        self._slice, self._memory, self._clock = slice_seconds, memory_seconds, clock
        self._lanes: dict[Holder, deque[asyncio.Future[None]]] = {}
        # Those that wait, by claims of some time ago; claims only grow, so `_first` looks at few of them again.
        self._order: list[tuple[float, float, int, Holder]] = []
        self._places = itertools.count()
        # What was used, by caller and by job, counts less and less. What is added is made larger instead, by the time
        # since `_epoch`: so claims can be compared as they are.
        self._callers: dict[str, float] = {}
        self._jobs: dict[str, float] = {}
        self._total = 0.0
        self._epoch = clock()
        self._left = slice_seconds
        self._piece = slice_seconds / 4  # of who has the turn
        self._mean = 1e-4  # of a piece
        self._renewing = False

    def is_over(self, began: float) -> bool:
        """Whether who began a piece at that time should let others have a turn."""
        return self._clock() - began > self._piece

    async def begin(self, holder: Holder) -> float:
        """Waits for a turn; returns when it began, for `end`."""
        woken = False
        while self._left <= 0 or (not woken and self._order and self._claim(holder) >= self._first()[:2]):
            woken = True
            future: asyncio.Future[None] = self._loop.create_future()
            lane = self._lanes.get(holder)
            if lane is None:
                lane = self._lanes[holder] = deque()
                heapq.heappush(self._order, (*self._claim(holder), next(self._places), holder))
            lane.append(future)
            self.waiting += 1
            self._renew()
            await future
        if not self._renewing:
            self._renew()
        now = self._clock()
        # Others come back for each step of theirs, and find a greedy one's piece in their way.
        self._piece = self._slice / (16 if self._is_greedy(self._claim(holder)[0], now) else 4)
        return now

    @contextlib.asynccontextmanager
    async def taken(self, holder: Holder) -> AsyncIterator[None]:
        """Takes a turn for a block, which must not wait for anything."""
        began = await self.begin(holder)
        try:
            yield
        finally:
            self.end(holder, began)

    def end(self, holder: Holder, began: float | None) -> None:
        """Ends a turn; without one, none."""
        if began is None:
            return
        now = self._clock()
        took = now - began
        self._left -= took
        self._mean += (took - self._mean) / 64
        self.longest = max(self.longest, took)
        used = (took + _LEAST_SECONDS) * self._weight(now)
        self._total += used
        caller, job = holder
        self._callers[caller] = self._callers.get(caller, 0.0) + used
        if job:
            self._jobs[job] = self._jobs.get(job, 0.0) + used
        if len(self._callers) > _MOST or len(self._jobs) > _MOST:
            self._forget()

    # ------------------------------------------------------------------ inside

    def _claim(self, holder: Holder) -> _Claim:
        of_caller, of_job = self._callers.get(holder[0], 0.0), self._jobs.get(holder[1], 0.0)
        return (of_caller if of_caller > of_job else of_job), of_job

    def _weight(self, now: float) -> float:
        """By how much what is used now counts more than what was used at the epoch."""
        age = (now - self._epoch) / self._memory
        if age > _MOST_AGE:
            shrink = math.exp(-age)
            for used in (self._callers, self._jobs):
                for name in used:
                    used[name] *= shrink
            self._total *= shrink
            self._epoch = now
            self._forget()
            self._order = [(*self._claim(holder), place, holder) for *_, place, holder in self._order]
            heapq.heapify(self._order)
            return 1.0
        return math.exp(age)

    def _forget(self) -> None:
        """Keeps those who have used most."""
        for used in (self._callers, self._jobs):
            for name in sorted(used, key=used.__getitem__, reverse=True)[_MOST // 2 :]:
                del used[name]
        self._total = sum(self._callers.values())

    def _is_greedy(self, used: float, now: float) -> bool:
        """Whether who has used so much takes much of the loop, while others use it too."""
        weight = self._weight(now)
        return used > _GREEDY * self._memory * weight and self._total - used > _LEAST_SECONDS / 3 * weight

    def _renew(self) -> None:
        if not self._renewing:
            self._renewing = True
            self._loop.call_soon(self._next_slice)

    def _next_slice(self) -> None:
        """The loop has come round: wakes as many as the slice has time for."""
        self._renewing = False
        self._left = self._slice
        if not self._lanes:
            return
        now = self._clock()
        step = self._mean * self._weight(now)
        if self._is_greedy(self._first()[0], now):
            self._left = self._slice / 16
        order = self._order
        for _ in range(max(1, int(self._left / max(self._mean, 1e-5)))):
            if not order:
                break
            used, of_job, _, holder = self._first()
            self._wake_one(holder)
            if holder in self._lanes:
                heapq.heapreplace(order, (used + step, of_job + step, next(self._places), holder))
            else:
                heapq.heappop(order)
        self._renew()

    def _first(self) -> tuple[float, float, int, Holder]:
        """Of those that wait the one whose claim is least."""
        order = self._order
        while True:
            first = order[0]
            claim = self._claim(first[3])
            if claim <= first[:2]:
                return first
            heapq.heapreplace(order, (*claim, first[2], first[3]))

    def _wake_one(self, holder: Holder) -> None:
        lane = self._lanes[holder]
        future = lane.popleft()
        self.waiting -= 1
        if not lane:
            del self._lanes[holder]
        if not future.done():
            future.set_result(None)


_MOST = 4096  # callers, and jobs, of which it is known what they have used
_MOST_AGE = 20.0
_GREEDY = 0.25  # of the loop's time
_LEAST_SECONDS = 1e-6  # that a piece counts
