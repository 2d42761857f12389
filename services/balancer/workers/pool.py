"""Rounds that want plans, and the worker processes that compute them. Lives on the event loop; never waits."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import structlog

from evenkeel.partitioning.rounds import RoundPlan
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.workers.arena import MessageError, read_result, write_round
from services.balancer.workers.estimates import Choice, Estimator, describe_cheaper
from services.balancer.workers.fairness import FairQueue, Quarantine
from services.balancer.workers.staff import Staff, Worker, Zygote
from services.balancer.workers.tasks import Busy, PoolObserver, PoolOptions, Task

log = structlog.get_logger(__name__)

SHORT_SECONDS = 0.03
"""Up to which a search counts as short: one worker takes nothing else."""

_INLINE_BYTES = 2 << 20  # above which rounds and plans are copied off the loop
_PATIENCE_SECONDS = 0.05  # and four times its estimate, after which a task no longer holds up others
_AT_ONCE_SECONDS = 1e-3  # within which nothing has changed about a task
_SHARE_OF_TIME = 0.9  # of what is left of a round's time may be planned with
_MAX_TRUSTED = 4096

Copied = TypeVar("Copied")


class WorkerPool:
    """Keeps workers at work; a round that ends its worker, or its worker's time, costs itself its plan.

    Every search is estimated before it is begun. One that cannot end in time is replaced by the cheapest, or refused.
    Short searches go before long ones and always find a worker; among both each job gets its share.
    """

    def __init__(self, options: PoolOptions, observer: PoolObserver, zygote: Zygote | None = None) -> None:
        """Prepares a pool.

        Args:
            options: What the operator has set.
            observer: Is told about workers.
            zygote: Where workers come from; started if None.
        """
        self._options = options
        self._observer = observer
        self._slots = options.workers + 1
        self._staff = Staff(self._slots, options.memory_bytes, self, zygote)
        self._short: FairQueue[Task] = FairQueue(options.queue_size, limit=self._limit)
        self._long: FairQueue[Task] = FairQueue(options.queue_size, limit=self._limit)
        self._estimator = Estimator()
        self._quarantine = Quarantine()
        self._trusted: dict[Hashable, None] = {}  # jobs whose last partition ended well
        self._busy: dict[int, Busy] = {}
        self._closed = False
        self._alarm: asyncio.TimerHandle | None = None  # for the first that is late or out of time
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="round-copier")

    @property
    def queued(self) -> int:
        """Rounds that wait for a worker."""
        return len(self._short) + len(self._long)

    @property
    def running(self) -> int:
        """Rounds that are being computed."""
        return len(self._busy)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return self._staff.pids

    async def start(self) -> None:
        """Returns when plans can be computed: all kernels are compiled.

        Raises:
            RuntimeError: If the process that compiles them ends.
        """
        await self._staff.start()

    def submit(self, task: Task) -> PlanFailure | None:
        """Takes a task, or says why not; the outcome of one that was taken comes later."""
        now = self._now()
        task.asked_at = now
        choice = self._choose(task, now)
        if isinstance(choice, PlanFailure):
            return choice
        task.choice = choice
        task.is_short = choice.seconds <= SHORT_SECONDS
        # A search that others have held up has an estimate that is too high for long: shares go by what is its own.
        task.share = self._estimator.usual_seconds(task.size, is_cheap=choice.is_cheap)
        dropped = self._queue_of(task).push(task.session.job, task, task.share)
        if dropped is not None:
            detail = f"{self.queued} rounds wait for a worker (queue_size), most of them of job {dropped.session.job!r}"
            failure = self._refuse(Reason.OVERLOADED, detail)
            if dropped is task:
                return failure
            dropped.done(failure)
        self._dispatch()
        return None

    def cancel(self, task: Task) -> None:
        """Nobody wants the plan any more: a task that waits is forgotten, the worker of one that runs is killed."""
        busy = task.busy
        if busy is None:
            self._queue_of(task).remove(task.session.job, task)
        elif busy.is_copying or not self._is_late(busy):
            busy.is_cancelled = True  # it may end any moment: that takes less than another worker, and tells its time
        else:
            self._overran(busy)
            self._kill(busy, "unwanted")

    def close(self) -> None:
        """Ends the workers; does not wait for them."""
        self._closed = True
        self._staff.close()
        if self._alarm is not None:
            self._alarm.cancel()
        for busy in self._busy.values():
            self._part(busy)
        self._copier.shutdown(wait=False)

    # ------------------------------------------------------------------ which task next

    def _dispatch(self) -> None:
        while self.queued and self._staff.is_ready and not self._closed:
            free = self._slots - sum(not busy.is_overdue for busy in self._busy.values())
            if free <= 0 or len(self._busy) >= 2 * self._slots:
                return
            num_long = sum(not (busy.task.is_short or busy.is_overdue) for busy in self._busy.values())
            taken = None
            if free > 1 or num_long or not self._long:  # one worker is for long searches, if any wait
                taken = self._short.pop()
            if taken is None and num_long < self._slots - 1:  # and one for short ones, whether any wait or not
                taken = self._long.pop()
            if taken is None:
                return
            self._begin(taken)

    def _begin(self, task: Task) -> None:
        now = self._now()
        choice: Choice | PlanFailure | None = None
        if task.is_wanted():
            choice = task.choice if now - task.asked_at < _AT_ONCE_SECONDS else self._choose(task, now)
        if not isinstance(choice, Choice):
            self._queue_of(task).done(task.session.job, -task.share)
            task.done(choice)
            return
        try:
            worker = self._staff.hire()
        except OSError as error:
            self._queue_of(task).done(task.session.job, -task.share)
            task.done(self._refuse(Reason.OVERLOADED, f"no worker can be started: {error}"))
            return
        self._observer.waited(now - task.asked_at)
        busy = Busy(worker, task, choice, self._available(task, now), now)
        task.busy = self._busy[worker.number] = busy
        inputs, arena = task.inputs, worker.rounds
        self._copy(busy, inputs.nbytes, lambda: write_round(arena, inputs), self._ask)

    def _choose(self, task: Task, now: float) -> Choice | PlanFailure:
        remaining = self._quarantine.remaining(now, task.session)
        if remaining:
            deaths = self._quarantine.strikes(task.session)
            detail = f"rounds of this session ended {deaths} worker(s); it gets no plans for another {remaining:.2g} s"
            return self._refuse(Reason.QUARANTINED, detail)
        size, available = task.size, self._available(task, now)
        choice = self._estimator.choose(task.session, size, available * _SHARE_OF_TIME)
        if choice is not None:
            return choice
        before = self._available(task, task.asked_at)
        if before > available and self._estimator.choose(task.session, size, before * _SHARE_OF_TIME) is not None:
            detail = f"no worker was free for {now - task.asked_at:.2g} s; {available:.2g} s are too few for the search"
            return self._refuse(Reason.QUEUED, detail)
        self._estimator.refused(task.session)
        remedy = "a smaller window" if size.window > 1 else "a longer timeout, or larger memory_caps if there are any"
        detail = (
            f"{size.samples} samples of {size.ranks} ranks in {size.window} batch(es) take longer to plan than the "
            f"{available:.2g} s that there are; use {remedy}"
        )
        return self._refuse(Reason.TOO_COSTLY, detail)

    def _available(self, task: Task, now: float) -> float:
        return max(0.0, min(self._options.budget, task.deadline - now))

    def _limit(self, job: Hashable) -> int:
        """Tasks of a job at a time: one until the job has shown that its rounds end well."""
        return max(1, self._slots - 1) if job in self._trusted else 1

    def _queue_of(self, task: Task) -> FairQueue[Task]:
        return self._short if task.is_short else self._long

    # ------------------------------------------------------------------ a task

    def _copy(
        self, busy: Busy, nbytes: int, copy: Callable[[], Copied], then: Callable[[Busy, Copied | BaseException], None]
    ) -> None:
        """Copies from or to the worker's memory, off the loop if it is much."""
        if nbytes <= _INLINE_BYTES:
            try:
                copied: Copied | BaseException = copy()
            except (OSError, MessageError) as error:
                copied = error
            then(busy, copied)
            return
        busy.is_copying = True

        def finish(future: asyncio.Future[Copied]) -> None:
            busy.is_copying = False
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            if busy.is_gone:
                busy.worker.close()
            elif busy.is_cancelled:
                self._release(busy)
            else:
                then(busy, future.result() if error is None else error)

        asyncio.get_running_loop().run_in_executor(self._copier, copy).add_done_callback(finish)

    def _ask(self, busy: Busy, nbytes: int | BaseException) -> None:
        task = busy.task
        if isinstance(nbytes, BaseException):
            self._release(busy)
            task.done(self._refuse(Reason.OVERLOADED, f"no memory for the round: {nbytes}"))
            return
        busy.since = self._now()
        busy.due = busy.since + min(_patience(busy), self._options.budget)
        self._wake(busy.due)
        with contextlib.suppress(OSError):  # it has just ended, of which the zygote will tell
            busy.worker.ask(nbytes, is_cheap=busy.choice.is_cheap)
        task.started()

    def worker_answered(self, worker: Worker, nbytes: int, seconds: float) -> None:
        """The worker has written its plan."""
        busy = self._busy[worker.number]
        busy.due = math.inf
        busy.used = max(0.0, min(seconds, self._now() - busy.since))  # whatever it says
        together = busy.task.inputs.together
        self._copy(busy, nbytes, lambda: read_result(worker.plans, nbytes, together), self._take)

    def _take(self, busy: Busy, result: RoundPlan | PlanFailure | BaseException) -> None:
        task, choice = busy.task, busy.choice
        if isinstance(result, BaseException):
            self._quarantine.strike(self._now(), task.session)
            self._kill(busy, "died")
            detail = f"the search's process wrote what is no plan: {result}"
            self._tell(busy, PlanFailure(reason=Reason.WORKER_DIED, detail=detail))
            return
        if isinstance(result, RoundPlan):
            self._estimator.learn(task.session, task.size, result.seconds, is_cheap=choice.is_cheap)
            if choice.is_cheap:
                self._observer.made_cheaper()
                result = replace(result, detail=describe_cheaper(task.size, choice, busy.available))
        elif result.trace:
            where = task.session
            log.error("partition failed", job=where.job, session=str(where), error=result.detail, trace=result.trace)
        self._quarantine.forgive(task.session)
        self._trusted[task.session.job] = None
        if len(self._trusted) > _MAX_TRUSTED:
            del self._trusted[next(iter(self._trusted))]
        self._release(busy)
        self._tell(busy, result)

    # ------------------------------------------------------------------ tasks that end badly

    def _wake(self, at: float) -> None:
        """One timer for all tasks, for the first that is due: when it rings, the next is asked for."""
        if self._alarm is None or at < self._alarm.when():
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = asyncio.get_running_loop().call_at(at, self._look)

    def _look(self) -> None:
        self._alarm = None
        for busy in [each for each in self._busy.values() if each.due <= self._now()]:
            if self._now() >= busy.since + self._options.budget:
                self._give_up(busy)
            else:
                busy.due = busy.since + self._options.budget
                self._let_others_pass(busy)
        due = min((busy.due for busy in self._busy.values()), default=math.inf)
        if due < math.inf:
            self._wake(due)

    def _let_others_pass(self, busy: Busy) -> None:
        """It takes longer than expected: it goes on, but no longer in the way of others, if anybody wants its plan."""
        if busy.is_cancelled:
            self._overran(busy)
            self._kill(busy, "unwanted")
            return
        busy.is_overdue = True
        self._staff.be_nice(busy.worker)
        self._dispatch()

    def _give_up(self, busy: Busy) -> None:
        ran = self._overran(busy)
        self._kill(busy, "stuck")
        detail = f"the search had not ended after {ran:.3g} s, and its process was killed"
        self._tell(busy, PlanFailure(reason=Reason.WORKER_STUCK, detail=detail))

    def _is_late(self, busy: Busy) -> bool:
        return self._now() - busy.since >= _patience(busy)

    def _overran(self, busy: Busy) -> float:
        task, choice, ran = busy.task, busy.choice, self._now() - busy.since
        self._estimator.overrun(task.session, task.size, ran, is_cheap=choice.is_cheap)
        if choice.is_cheap or ran > 10.0 * choice.seconds:  # more than an estimate that was too low
            self._quarantine.strike(self._now(), task.session)
        return ran

    def _kill(self, busy: Busy, cause: str) -> None:
        task, size = busy.task, busy.task.size
        log.warning(
            "partition worker killed", cause=cause, job=task.session.job, session=str(task.session),
            worker=self._staff.pid_of(busy.worker), expected_seconds=round(busy.choice.seconds, 4),
            ran_seconds=round(self._now() - busy.since, 4), ranks=size.ranks, samples=size.samples, window=size.window,
        )  # fmt: skip
        self._observer.worker_lost(cause)
        self._trusted.pop(task.session.job, None)
        self._forget(busy)
        self._staff.dismiss(busy.worker)
        self._dispatch()

    def worker_ended(self, worker: Worker, how: str) -> None:
        """The worker has ended by itself, with its task."""
        busy = self._busy[worker.number]
        task = busy.task
        self._part(busy)
        self._observer.worker_lost("died")
        self._trusted.pop(task.session.job, None)
        pause = self._quarantine.strike(self._now(), task.session)
        log.error(
            "partition worker died", how=how, job=task.session.job, session=str(task.session),
            no_plans_for_seconds=pause,
        )  # fmt: skip
        self._forget(busy)
        self._tell(busy, PlanFailure(reason=Reason.WORKER_DIED, detail=f"the search's process ended {how}"))
        self._dispatch()

    def worker_lost_idle(self) -> None:
        """A worker has ended that had no task."""
        self._observer.worker_lost("died")

    def staff_ready(self, speed: float) -> None:
        """Workers can be had."""
        self._estimator.speed = speed
        self._dispatch()

    # ------------------------------------------------------------------ inside

    def _release(self, busy: Busy) -> None:
        """The worker is free for another task."""
        self._forget(busy)
        if busy.is_overdue:
            self._staff.dismiss(busy.worker)  # it gives way to others
        else:
            self._staff.take_back(busy.worker)
        self._dispatch()

    def _forget(self, busy: Busy) -> None:
        del self._busy[busy.worker.number]
        task = busy.task
        task.busy = None
        used = self._now() - busy.since if busy.used is None else busy.used
        self._queue_of(task).done(task.session.job, used - task.share)

    def _part(self, busy: Busy) -> None:
        """Closes a worker that has ended, unless another thread is in its memory."""
        busy.is_gone = True
        if not busy.is_copying:
            busy.worker.close()

    def _tell(self, busy: Busy, result: RoundPlan | PlanFailure) -> None:
        if not busy.is_cancelled:
            busy.task.done(result)

    def _refuse(self, reason: Reason, detail: str) -> PlanFailure:
        self._observer.refused_partition(reason)
        return PlanFailure(reason=reason, detail=detail)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _patience(busy: Busy) -> float:
    """Seconds that a search may take until it is late."""
    return _PATIENCE_SECONDS + 4.0 * busy.choice.seconds
