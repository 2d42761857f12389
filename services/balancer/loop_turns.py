"""Who may use the event loop next: what has to be done for callers is done in short pieces, in turn.

While there is time, everybody goes on at once. Where there is more to do than there is time for, the caller that has
used the loop least of late comes first, and under one caller its jobs take turns. Who takes much of the loop while
others use it too gets it in shorter slices, between which the others' steps fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable

from services.balancer.shares import Holder

_Waiting = OrderedDict[str, deque["asyncio.Future[None]"]]


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
            memory_seconds: How long what a caller used counts: after it, a third of it.
            clock: Seconds.
        """
        self.waiting = 0
        self.longest = 0.0
        self._loop = asyncio.get_running_loop()
        self._slice, self._memory, self._clock = slice_seconds, memory_seconds, clock
        self._callers: dict[str, _Waiting] = {}
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()
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
        while self._left <= 0 or (not woken and self._callers and not self._is_first(holder[0])):
            woken = True
            future: asyncio.Future[None] = self._loop.create_future()
            jobs = self._callers.setdefault(holder[0], OrderedDict())
            jobs.setdefault(holder[1], deque()).append(future)
            self.waiting += 1
            self._renew()
            await future
        self._renew()
        now = self._clock()
        # Others come back for each step of theirs, and find a greedy caller's piece in their way.
        greedy = self._used_by(holder[0], now) > _GREEDY * self._memory and self._are_others(holder[0], now)
        self._piece = self._slice / (16 if greedy else 4)
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
        self._used[holder[0]] = (self._used_by(holder[0], now) + took, now)
        self._used.move_to_end(holder[0])
        if len(self._used) > _MOST_CALLERS:
            self._used.popitem(last=False)

    # ------------------------------------------------------------------ inside

    def _used_by(self, caller: str, now: float) -> float:
        used, at = self._used.get(caller, (0.0, now))
        return used * math.exp((at - now) / self._memory)

    def _is_first(self, caller: str) -> bool:
        now = self._clock()
        mine = self._used_by(caller, now)
        return all(mine < self._used_by(other, now) for other in self._callers)

    def _renew(self) -> None:
        if not self._renewing:
            self._renewing = True
            self._loop.call_soon(self._next_slice)

    def _next_slice(self) -> None:
        """The loop has come round: wakes as many as the slice has time for."""
        self._renewing = False
        self._left = self._slice
        if not self._callers:
            return
        now = self._clock()
        order = [(self._used_by(caller, now), caller) for caller in self._callers]
        heapq.heapify(order)
        least, first = order[0]
        if least > _GREEDY * self._memory and self._are_others(first, now):
            self._left = self._slice / 16
        for _ in range(max(1, int(self._left / max(self._mean, 1e-5)))):
            if not order:
                break
            used, caller = order[0]
            self._wake_one(caller)
            if caller in self._callers:
                heapq.heapreplace(order, (used + self._mean, caller))
            else:
                heapq.heappop(order)
        self._renew()

    def _are_others(self, greedy: str, now: float) -> bool:
        """Whether callers that do not wait now have used the loop of late, other than the one that is greedy."""
        for caller, (_, at) in reversed(self._used.items()):
            if now - at >= self._memory:
                return False
            if caller != greedy and caller not in self._callers:
                return True
        return False

    def _wake_one(self, caller: str) -> None:
        jobs = self._callers[caller]
        job, futures = jobs.popitem(last=False)
        future = futures.popleft()
        self.waiting -= 1
        if futures:
            jobs[job] = futures  # behind the caller's other jobs
        if not jobs:
            del self._callers[caller]
        if not future.done():
            future.set_result(None)


_MOST_CALLERS = 4096
_GREEDY = 0.25  # of the loop's time
