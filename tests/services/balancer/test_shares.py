import asyncio

import pytest

from services.balancer.loop_turns import LoopTurns
from services.balancer.shares import Account, Shares


def test_a_caller_gets_half_and_whoever_comes_later_as_much_as_is_left_to_it() -> None:
    shares = Shares(1000)
    taken = [sum(shares.take((caller, ""), 1) for _ in range(1000)) for caller in ("first", "second", "third")]
    assert taken == [500, 250, 125]
    assert shares.used == 875
    assert shares.largest == 500


def test_a_job_gets_no_more_than_is_left_to_its_caller() -> None:
    shares = Shares(900)
    greedy = sum(shares.take(("team", "greedy"), 1) for _ in range(900))
    assert greedy == 300
    assert sum(shares.take(("team", "modest"), 1) for _ in range(900)) > 50


def test_there_is_always_room_for_a_newcomer() -> None:
    shares = Shares(10_000)
    for caller in range(10):
        while shares.take((f"caller{caller}", ""), 1):
            pass
    assert shares.take(("newcomer", ""), 1)


def test_what_was_taken_comes_back_also_from_what_outlives_its_account() -> None:
    class Thing:
        pass

    shares = Shares(100)
    account, thing = Account(shares, ("team", "job")), Thing()
    assert account.take(30)
    account.entrust(thing, 20)
    account.close()
    account.close()
    assert shares.held("team") == 20
    del thing
    assert shares.held("team") == 0
    assert shares.used == 0


class Loop:
    """A loop whose time goes by only as it is used, in slices of a second, and the jobs that have used it."""

    def __init__(self, memory_seconds: float) -> None:
        self.clock, self.order = 0.0, list[str]()
        self.turns = LoopTurns(slice_seconds=1.0, memory_seconds=memory_seconds, clock=lambda: self.clock)

    async def work(self, caller: str, job: str, seconds: float = 2.0) -> None:
        began = await self.turns.begin((caller, job))
        self.order.append(job)
        self.clock += seconds
        self.turns.end((caller, job), began)


async def test_who_has_used_the_loop_least_comes_first() -> None:
    loop = Loop(memory_seconds=1e9)
    names = [("greedy", "a"), ("greedy", "a"), ("greedy", "a"), ("greedy", "b"), ("modest", "modest")]
    await asyncio.gather(*(loop.work(*name) for name in names))  # each uses up its slice
    assert loop.order == ["a", "modest", "b", "a", "a"], "the least used caller first, of its jobs the least used"
    assert loop.turns.waiting == 0


async def test_a_job_of_many_callers_has_used_what_all_of_them_have() -> None:
    loop = Loop(memory_seconds=10.0)
    await loop.work("small node", "small")  # more than any node of the large job
    of_large = (loop.work(f"node {number}", "large", 1.5) for number in range(4))
    await asyncio.gather(*of_large, loop.work("small node", "small"))
    assert loop.order == ["small", "large", "large", "small", "large", "large"]
    loop.clock += 1e4  # after which nobody remembers
    await asyncio.gather(*(loop.work("node 0", "large") for _ in range(2)), loop.work("small node", "small"))
    assert loop.order[6:] == ["large", "small", "large"]


async def test_while_there_is_time_nobody_waits() -> None:
    turns = LoopTurns()
    for _ in range(3):
        began = await asyncio.wait_for(turns.begin(("team", "job")), 60)
        assert not turns.is_over(began)
        turns.end(("team", "job"), began)
    assert turns.waiting == 0


async def test_a_greedy_caller_gets_shorter_slices_while_others_come_and_go() -> None:
    clock = 0.0
    turns = LoopTurns(slice_seconds=0.004, memory_seconds=1.0, clock=lambda: clock)
    gaps: list[float] = []  # of the loop, in its own time
    working = True

    async def greedy() -> None:
        nonlocal clock
        for _ in range(4000):
            began = await turns.begin(("greedy", "job"))
            clock += 0.0005
            turns.end(("greedy", "job"), began)

    async def look() -> None:
        while working:
            before = clock
            await asyncio.sleep(0)
            gaps.append(clock - before)

    async def modest() -> None:
        while working:
            began = await turns.begin(("modest", "another job"))
            turns.end(("modest", "another job"), began)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await greedy()
    alone, gaps[:] = max(gaps[100:]), []
    beside = asyncio.create_task(modest())
    await greedy()
    working = False
    await asyncio.gather(looking, beside)
    assert alone == pytest.approx(0.004, rel=0.3)
    assert max(gaps[100:]) == pytest.approx(0.001, rel=0.6)
