"""What a pool of workers is asked for, and what it tells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from evenkeel.partitioning.rounds import RoundPlan
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.effects import PlanInput
from services.balancer.submissions import SessionKey
from services.balancer.workers.estimates import Choice, Size
from services.balancer.workers.staff import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What an operator decides about workers.

    Attributes:
        workers: Long searches at a time; one more process takes short ones only.
        queue_size: Rounds that may wait.
        budget: Seconds that a partition may take.
        memory_bytes: Memory that a partition may take.
    """

    workers: int = 1
    queue_size: int = 1024
    budget: float = 2.0
    memory_bytes: int = 2 << 30


class PoolObserver(Protocol):
    """What is told about workers."""

    def worker_lost(self, cause: str) -> None:
        """A worker `died`, or was killed: it was `stuck`, or nobody waited for its plan any more (`unwanted`)."""

    def waited(self, seconds: float) -> None:
        """A round waited this long for a worker."""

    def refused_partition(self, reason: Reason) -> None:
        """A round gets no plan because of how it would have been computed."""

    def made_cheaper(self) -> None:
        """A round got a cheaper search than it asked for."""


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """A round that wants a plan.

    Attributes:
        session: Whose it is.
        inputs: What the plan is computed from.
        deadline: Time of the loop after which nobody wants the plan.
        started: Is called when a worker begins with it.
        done: Is called with its outcome, unless it is cancelled; with None if nobody waited for it any more.
        is_wanted: Whether somebody waits for it; asked when a worker is free for it.
    """

    session: SessionKey
    inputs: PlanInput
    deadline: float
    started: Callable[[], None]
    done: Callable[[RoundPlan | PlanFailure | None], None]
    is_wanted: Callable[[], bool] = lambda: True
    size: Size = field(init=False)
    asked_at: float = 0.0
    choice: Choice | None = None
    is_short: bool = True
    share: float = 0.0
    busy: Busy | None = None

    def __post_init__(self) -> None:
        self.size = Size.of(self.inputs)


@dataclass(slots=True, eq=False)
class Busy:
    """A worker with a task.

    Attributes:
        worker: The worker.
        task: Its task.
        choice: The search.
        available: Seconds that there were for it.
        since: When the search began.
        used: Seconds of the processor that it took; None until it has ended.
        due: When it is to be looked at: it may be late then, or out of time; infinity while its search does not run.
        is_copying: Another thread reads or writes the worker's memory.
        is_overdue: Others need no longer wait for it.
        is_cancelled: Nobody waits for its task any more.
        is_gone: The worker is, while its memory was copied.
    """

    worker: Worker
    task: Task
    choice: Choice
    available: float
    since: float
    due: float = math.inf
    used: float | None = None
    is_copying: bool = False
    is_overdue: bool = False
    is_cancelled: bool = False
    is_gone: bool = False
