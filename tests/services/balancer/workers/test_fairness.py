"""Whose task is next."""

from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from services.balancer.workers.fairness import FairQueue


def queue(size: int = 1000, limit: int = 1000) -> FairQueue[tuple[str, int]]:
    return FairQueue(size, limit=lambda _job: limit)


def test_a_job_that_asks_for_little_does_not_wait_behind_anothers_backlog() -> None:
    tasks = queue()
    for number in range(60):
        tasks.push("greedy", ("greedy", number), 1.0)
    assert tasks.pop() == ("greedy", 0)
    tasks.push("modest", ("modest", 0), 0.001)
    assert tasks.pop() == ("modest", 0)
    assert tasks.pop() == ("greedy", 1)


def test_jobs_that_ask_for_the_same_take_turns() -> None:
    tasks = queue()
    for number in range(4):
        for job in "abc":
            tasks.push(job, (job, number), 0.5)
    order = [tasks.pop() for _ in range(12)]
    for begin in range(0, 12, 3):
        assert {item[0] for item in order[begin : begin + 3] if item} == set("abc")


def test_a_job_whose_tasks_cost_more_than_was_said_has_its_share_of_time_and_no_more() -> None:
    tasks = queue(limit=1)
    served = {"modest": 0.0, "heavy": 0.0}
    for job in served:
        tasks.push(job, (job, 0), 1.0)
    for number in range(1, 400):
        item = tasks.pop()
        assert item is not None
        job = item[0]
        took = 5.0 if job == "heavy" else 0.5
        served[job] += took
        tasks.done(job, took - 1.0)
        tasks.push(job, (job, number), 1.0)
    assert abs(served["modest"] - served["heavy"]) <= 10.0


def test_a_full_queue_drops_the_latest_of_the_job_with_most() -> None:
    tasks = queue(size=4)
    for number in range(4):
        assert tasks.push("greedy", ("greedy", number), 1.0) is None
    assert tasks.push("modest", ("modest", 0), 1.0) == ("greedy", 3)
    assert tasks.push("greedy", ("greedy", 4), 1.0) == ("greedy", 4)
    assert len(tasks) == 4


def test_a_job_at_its_limit_waits_for_its_own_tasks_only() -> None:
    tasks = queue(limit=1)
    for job in "ab":
        for number in range(2):
            tasks.push(job, (job, number), 1.0)
    assert {tasks.pop(), tasks.pop()} == {("a", 0), ("b", 0)}
    assert tasks.pop() is None
    tasks.done("b")
    assert tasks.pop() == ("b", 1)


_Step = tuple[str, str, int]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["push", "pop", "done", "remove"]), st.sampled_from("abcd"), st.integers(1, 50)),
        max_size=80,
    ),
    limit=st.integers(1, 3),
    size=st.integers(1, 12),
)
def test_nothing_is_lost_doubled_or_out_of_order(steps: list[_Step], limit: int, size: int) -> None:
    tasks = queue(size, limit)
    waiting: dict[Hashable, list[tuple[str, int]]] = {job: [] for job in "abcd"}
    running = dict.fromkeys("abcd", 0)
    for number, (kind, job, cost) in enumerate(steps):
        if kind == "push":
            item = (job, number)
            waiting[job].append(item)
            dropped = tasks.push(job, item, float(cost))
            if dropped is not None:
                assert len(waiting[dropped[0]]) == max(map(len, waiting.values()))
                assert waiting[dropped[0]].pop() == dropped
        elif kind == "pop":
            popped = tasks.pop()
            able = [name for name in waiting if waiting[name] and running[str(name)] < limit]
            assert (popped is None) == (not able)
            if popped is not None:
                assert waiting[popped[0]].pop(0) == popped
                running[popped[0]] += 1
        elif kind == "done" and running[job]:
            running[job] -= 1
            tasks.done(job)
        elif kind == "remove" and waiting[job]:
            item = waiting[job].pop(cost % len(waiting[job]))
            assert tasks.remove(job, item)
            assert not tasks.remove(job, item)
        assert len(tasks) == sum(map(len, waiting.values())) <= size


@given(costs=st.lists(st.floats(0.001, 5.0), min_size=2, max_size=5))
def test_jobs_with_a_backlog_get_the_same_time(costs: list[float]) -> None:
    tasks = queue(size=10_000)
    served = [0.0] * len(costs)
    for job, cost in enumerate(costs):
        for number in (-2, -1):
            tasks.push(job, (str(job), number), cost)
    for turn in range(400):
        item = tasks.pop()
        assert item is not None
        job = int(item[0])
        served[job] += costs[job]
        tasks.done(job)
        tasks.push(job, (item[0], turn), costs[job])
    assert max(served) - min(served) <= 2 * max(costs) + 1e-6
