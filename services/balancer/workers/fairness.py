"""Whose task is next: each job has its share of the workers' time, and one whose tasks end workers none for a while."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

_MAX_SESSIONS = 4096  # that are remembered
_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 60.0
_MAX_LANES = 2048  # beyond which idle jobs are forgotten with what they have had


class _Lane(Generic[Item]):
    __slots__ = ("costs", "items", "running", "stamp", "time")

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.costs: dict[Item, float] = {}
        self.time = 0.0  # virtual, up to which the job has had its share
        self.running = 0
        self.stamp = 0  # of its entry in the heap that counts


class FairQueue(Generic[Item]):
    """Start-time fair queueing: a lane for each job, first come first served inside it.

    A virtual clock goes forward with the work that is handed out. A lane's first task would end, had the job a worker
    of its own, at the lane's virtual time plus the task's cost; the lane where that is earliest is next. A job that
    asks for little never waits behind the backlog of one that asks for much, and one that has waited saves no claim up.
    What a task really took is settled when it has ended.
    """

    def __init__(self, size: int, *, limit: Callable[[Hashable], int]) -> None:
        """An empty queue.

        Args:
            size: Tasks that may wait; beyond it the job that has most of them loses its latest.
            limit: How many tasks of a job may be handed out at a time.
        """
        self._size = size
        self._limit = limit
        self._lanes: dict[Hashable, _Lane[Item]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._stamps = itertools.count(1)
        self._clock = 0.0
        self._waiting = 0

    def __len__(self) -> int:
        """Tasks that wait."""
        return self._waiting

    def push(self, job: Hashable, item: Item, cost: float) -> Item | None:
        """Lets a task wait; returns the one that has to go for it, which may be itself."""
        lane = self._lanes.get(job)
        if lane is None:
            if len(self._lanes) >= _MAX_LANES:
                self._lanes = {name: each for name, each in self._lanes.items() if each.items or each.running}
            lane = self._lanes[job] = _Lane()
        lane.items.append(item)
        lane.costs[item] = cost
        self._waiting += 1
        if len(lane.items) == 1:
            lane.time = max(lane.time, self._clock)
            self._offer(job, lane)
        if self._waiting <= self._size:
            return None
        longest = max(self._lanes, key=lambda name: len(self._lanes[name].items))
        dropped = self._lanes[longest].items[-1]
        self.remove(longest, dropped)
        return dropped

    def remove(self, job: Hashable, item: Item) -> bool:
        """Forgets a task that waits; False if it does not."""
        lane = self._lanes.get(job)
        if lane is None or item not in lane.costs:
            return False
        was_first = lane.items[0] == item
        lane.items.remove(item)
        del lane.costs[item]
        self._waiting -= 1
        if was_first:
            self._offer(job, lane)
        self._drop_if_idle(job, lane)
        return True

    def pop(self) -> Item | None:
        """Hands out the next task; `done` must follow. None if none waits whose job may have another."""
        while self._heap:
            _, stamp, job = heapq.heappop(self._heap)
            lane = self._lanes.get(job)
            if lane is None or lane.stamp != stamp or not lane.items:
                continue
            item = lane.items.popleft()
            self._clock = max(self._clock, lane.time)
            lane.time += lane.costs.pop(item)
            lane.running += 1
            self._waiting -= 1
            self._offer(job, lane)
            return item
        return None

    def done(self, job: Hashable, more: float = 0.0) -> None:
        """A task of the job that was handed out has ended, and has cost so much more, or less, than was said."""
        lane = self._lanes[job]
        lane.time += more
        if lane.running >= self._limit(job):  # it has waited for itself, not for others
            lane.time = max(lane.time, self._clock)
        lane.running -= 1
        self._offer(job, lane)
        self._drop_if_idle(job, lane)

    def _offer(self, job: Hashable, lane: _Lane[Item]) -> None:
        lane.stamp = next(self._stamps)
        if lane.items and lane.running < self._limit(job):
            ends = lane.time + lane.costs[lane.items[0]]
            heapq.heappush(self._heap, (ends, lane.stamp, job))

    def _drop_if_idle(self, job: Hashable, lane: _Lane[Item]) -> None:
        if not lane.items and not lane.running and lane.time <= self._clock:
            del self._lanes[job]


class Quarantine:
    """Backs off: from half a second after the first death, four times as long after each, up to a minute."""

    def __init__(self) -> None:
        self._strikes: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def strike(self, now: float, session: Hashable) -> float:
        """A round of the session has ended its process; returns for how many seconds it gets no plan."""
        strikes = self._strikes.pop(session, (0, 0.0))[0] + 1
        pause = min(_LONGEST_SECONDS, _FIRST_SECONDS * 4.0 ** min(strikes - 1, 8))
        self._strikes[session] = (strikes, now + pause)
        if len(self._strikes) > _MAX_SESSIONS:
            self._strikes.popitem(last=False)
        return pause

    def remaining(self, now: float, session: Hashable) -> float:
        """Seconds until the session gets a plan again; 0 if it does."""
        return max(0.0, self._strikes.get(session, (0, 0.0))[1] - now)

    def strikes(self, session: Hashable) -> int:
        """Deaths that are held against the session."""
        return self._strikes.get(session, (0, 0.0))[0]

    def forgive(self, session: Hashable) -> None:
        """A round of the session got its plan: one death less is held against it."""
        if session in self._strikes:
            strikes, until = self._strikes[session]
            if strikes > 1:
                self._strikes[session] = (strikes - 1, until)
            else:
                del self._strikes[session]
