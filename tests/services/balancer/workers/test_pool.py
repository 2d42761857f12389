"""Real workers, forked from a real zygote: what happens to rounds when they crash, hang, or are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from evenkeel.partitioning.rounds import RoundOptions, RoundPlan
from services.balancer.decisions import PlanFailure, Reason
from services.balancer.effects import PlanInput
from services.balancer.submissions import SessionKey
from services.balancer.workers.pool import WorkerPool
from services.balancer.workers.tasks import PoolOptions, Task
from tests.services.balancer.samples import submission
from tests.services.balancer.strategies import start_zygote

Result = RoundPlan | PlanFailure | None
SECONDS = 60.0


class Told:
    """What a pool tells."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.refused: list[Reason] = []
        self.cheaper = 0

    def worker_lost(self, cause: str) -> None:
        self.lost.append(cause)

    def waited(self, seconds: float) -> None:
        assert seconds >= 0

    def refused_partition(self, reason: Reason) -> None:
        self.refused.append(reason)

    def made_cheaper(self) -> None:
        self.cheaper += 1


class Pool:
    """A pool, with rounds as coroutines."""

    def __init__(self, **options: Any) -> None:
        self.told = Told()
        self.pool = WorkerPool(PoolOptions(**options), self.told, start_zygote())

    def task(
        self, strategy: str = "lpt", *, job: str = "job", seconds: float = 10.0, costs: list[float] | None = None
    ) -> tuple[Task, asyncio.Future[Result]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        submissions = (submission(*(costs or [5, 3, 2])), submission(1, 1))
        inputs = PlanInput(
            parts=tuple(each.samples for each in submissions), options=RoundOptions(strategy=strategy), nodes=("", "")
        )
        task = Task(
            session=SessionKey(job, "", ""), inputs=inputs, deadline=loop.time() + seconds,
            started=lambda: None, done=future.set_result,
        )  # fmt: skip
        return task, future

    def submit(self, strategy: str = "lpt", **more: Any) -> asyncio.Future[Result]:
        task, future = self.task(strategy, **more)
        failure = self.pool.submit(task)
        if failure is not None:
            future.set_result(failure)
        return future

    async def plan(self, strategy: str = "lpt", **more: Any) -> Result:
        return await asyncio.wait_for(self.submit(strategy, **more), SECONDS)

    async def plans_again(self, job: str) -> None:
        """Until a job gets its plan, another one each time: a starved machine may need more than a small budget."""
        deadline, number = time.monotonic() + SECONDS, 0
        while not isinstance(await self.plan(job=f"{job} {number}"), RoundPlan):
            assert time.monotonic() < deadline
            number += 1

    async def running(self, count: int = 1) -> None:
        await self.until(lambda: self.pool.running >= count)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


Start = Callable[..., Awaitable[Pool]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    pools = []

    async def make(**options: Any) -> Pool:
        made = Pool(**options)
        pools.append(made)
        await made.pool.start()
        await made.until(lambda: len(made.pool.pids) == made.pool._slots)
        return made

    yield make
    for each in pools:
        pids = each.pool.pids
        each.pool.close()
        await each.until(lambda pids=pids: not any(map(is_alive, pids)))  # type: ignore[misc]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def reason(result: Result) -> Reason:
    assert isinstance(result, PlanFailure)
    return result.reason


async def test_plans_come_back(start: Start) -> None:
    pool = await start()
    plan = await pool.plan("minimal_move")
    assert isinstance(plan, RoundPlan)
    assert sorted(plan.loads_after[0].tolist()) == [6.0, 6.0]
    assert not plan.detail
    plans = await asyncio.gather(*(pool.plan(job=f"job{i % 5}") for i in range(40)))
    assert all(isinstance(each, RoundPlan) for each in plans)
    assert pool.told.lost == []


async def test_a_search_that_was_held_up_once_costs_its_job_no_turns(start: Start) -> None:
    pool = await start()
    task, _ = pool.task(job="unlucky")
    pool.pool._estimator.learn(task.session, task.size, 0.025, is_cheap=False)  # a hundred times what it takes
    others = [f"job{i}" for i in range(6)]
    rounds = dict.fromkeys(("unlucky", *others), 0)

    async def go(job: str) -> None:
        while min(rounds[other] for other in others) < 20:
            assert isinstance(await pool.plan(job=job), RoundPlan)
            rounds[job] += 1

    await asyncio.gather(*map(go, rounds))
    assert rounds["unlucky"] >= 8, rounds


async def test_a_segmentation_fault_costs_its_round_and_nobody_elses(start: Start) -> None:
    pool = await start()
    for _ in range(4):  # it is kept out for longer each time: for half a second first, which a starved machine may miss
        result = await pool.plan("segfault", job="bad")
        assert reason(result) is Reason.WORKER_DIED
        assert "SIGSEGV" in result.detail  # type: ignore[union-attr]
        lost = ["died"] * len(pool.told.lost)
        again = await pool.plan("segfault", job="bad")
        if reason(again) is Reason.QUARANTINED:
            break
    assert "no plans for another" in again.detail  # type: ignore[union-attr]
    assert pool.told.lost == lost
    assert isinstance(await pool.plan(job="good"), RoundPlan)
    await pool.until(lambda: len(pool.pool.pids) == 2)
    deadline = time.monotonic() + SECONDS
    while not isinstance(await pool.plan(job="bad"), RoundPlan):
        assert time.monotonic() < deadline, "it is tried again"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
async def test_a_worker_that_is_killed_mid_partition_costs_its_round(start: Start, number: int) -> None:
    pool = await start()
    before = set(pool.pool.pids)
    future = pool.submit("hang", job="bad")
    await pool.running()
    for pid in before:
        os.kill(pid, number)
    if number in (signal.SIGTERM, signal.SIGINT):
        assert isinstance(await pool.plan(job="good"), RoundPlan)
        assert set(pool.pool.pids) == before, "signals for the service are not for its workers"
        assert reason(await future) is Reason.WORKER_STUCK
        return
    assert reason(await asyncio.wait_for(future, SECONDS)) is Reason.WORKER_DIED
    assert isinstance(await pool.plan(job="good"), RoundPlan)
    await pool.until(lambda: not before & set(pool.pool.pids))  # a process that aborts takes its time


async def test_a_stopped_worker_is_killed_at_its_budget(start: Start) -> None:
    pool = await start(budget=0.3)
    stopped = pool.pool.pids
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    results = await asyncio.gather(pool.plan(job="any"), pool.plan(job="other"))
    assert {reason(result) for result in results} == {Reason.WORKER_STUCK}
    await pool.plans_again("third")
    await pool.until(lambda: not any(map(is_alive, stopped)))
    assert set(pool.told.lost) == {"stuck"}


async def test_memory_that_a_partition_may_not_take_fails_its_round(start: Start) -> None:
    pool = await start(memory_bytes=96 << 20, budget=SECONDS)
    result = await pool.plan("gorge")
    assert reason(result) is Reason.PARTITION_FAILED
    assert "worker_memory_bytes" in result.detail  # type: ignore[union-attr]
    assert isinstance(await pool.plan(), RoundPlan)


async def test_jobs_that_hang_hold_nobody_up(start: Start) -> None:
    pool = await start(workers=1, budget=60.0)
    hanging = [pool.task("spin", job=f"bad{i % 2}", seconds=60) for i in range(6)]
    for task, _ in hanging:
        assert pool.pool.submit(task) is None
    await pool.running(2)
    for _ in range(10):
        assert isinstance(await pool.plan(job="good"), RoundPlan)
    assert not any(done.done() for _, done in hanging), "long before the others are killed"
    assert pool.told.lost == []
    for task, _ in hanging:
        pool.pool.cancel(task)


async def test_a_session_that_hangs_is_not_tried_again_and_again(start: Start) -> None:
    pool = await start(workers=1, budget=0.3)
    hanging = [pool.submit("spin", job=f"bad{i % 2}") for i in range(6)]
    reasons = {reason(result) for result in await asyncio.gather(*hanging)}
    assert reasons <= {Reason.WORKER_STUCK, Reason.QUARANTINED}
    assert len(pool.told.lost) <= 4


async def test_a_task_that_is_cancelled_gives_its_worker_back(start: Start) -> None:
    pool = await start(budget=60.0)
    running, done = pool.task("hang", job="bad", seconds=60)
    waiting, _ = pool.task("hang", job="bad", seconds=60)
    assert pool.pool.submit(running) is None
    assert pool.pool.submit(waiting) is None
    await pool.running()
    pool.pool.cancel(waiting)
    assert pool.pool.queued == 0
    pool.pool.cancel(running)
    await pool.until(lambda: pool.pool.running == 0)
    assert isinstance(await pool.plan(job="good"), RoundPlan)
    assert not done.done()
    assert pool.told.lost == ["unwanted"]


async def test_a_plan_that_comes_a_little_late_costs_no_worker(start: Start) -> None:
    pool = await start()
    for _ in range(30):
        task, done = pool.task("minimal_move")
        assert pool.pool.submit(task) is None
        pool.pool.cancel(task)
        await pool.until(lambda: pool.pool.running == 0)
        assert not done.done()
    assert pool.told.lost == []
    assert isinstance(await pool.plan(), RoundPlan)


async def test_what_nobody_waits_for_is_not_computed(start: Start) -> None:
    pool = await start()
    task, future = pool.task("segfault")
    task.is_wanted = lambda: False
    assert pool.pool.submit(task) is None
    assert await future is None
    assert pool.told.lost == []


async def test_a_round_that_cannot_end_in_time_is_refused_or_gets_the_cheapest_search(start: Start) -> None:
    pool = await start()
    assert reason(await pool.plan(seconds=0.0)) is Reason.TOO_COSTLY
    assert pool.told.refused == [Reason.TOO_COSTLY]
    pool.pool._estimator.overrun(SessionKey("job", "", ""), pool.task()[0].size, 100.0, is_cheap=False)
    plan = await pool.plan("minimal_move")
    assert isinstance(plan, RoundPlan)
    assert plan.detail.startswith("planned by lpt instead of minimal_move, which would take about")
    assert pool.told.cheaper == 1


async def test_a_round_that_waited_too_long_is_said_to_have_waited(start: Start) -> None:
    pool = await start(budget=6.0)
    size, session = pool.task()[0].size, SessionKey("job", "", "")
    for is_cheap in (False, True):
        pool.pool._estimator.learn(session, size, 1.5, is_cheap=is_cheap)
    first, _ = pool.task("hang", seconds=60)
    assert pool.pool.submit(first) is None
    second = pool.submit(seconds=2.0)
    await asyncio.sleep(0.7)
    pool.pool.cancel(first)
    late = await second
    assert reason(late) is Reason.QUEUED
    assert "no worker was free for" in late.detail  # type: ignore[union-attr]


async def test_large_rounds_go_there_and_back(start: Start) -> None:
    pool = await start()
    costs = np.random.default_rng(3).integers(1, 1000, 300_000).tolist()
    plan, small = await asyncio.gather(pool.plan(job="large", costs=costs), pool.plan(job="small"))
    assert isinstance(plan, RoundPlan)
    assert isinstance(small, RoundPlan)
    assert len(plan.slices.destinations) == 300_002
    assert plan.loads_after.sum() == sum(costs) + 2


async def test_workers_come_back_after_their_zygote_has_died(start: Start) -> None:
    pool = await start()
    before = pool.pool.pids
    zygote = int(Path(f"/proc/{before[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    hanging = pool.submit("hang", job="bad")
    await pool.running()
    os.kill(zygote, signal.SIGKILL)
    assert reason(await asyncio.wait_for(hanging, SECONDS)) is Reason.WORKER_DIED
    await pool.until(lambda: not any(map(is_alive, before)))
    waiting = pool.submit(job="good", seconds=60)
    assert isinstance(await asyncio.wait_for(waiting, 60), RoundPlan), "from a Python of its own"
