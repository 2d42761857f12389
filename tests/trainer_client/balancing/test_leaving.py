"""Loops as they begin, and ranks that leave them anywhere, with a ledger of every sample."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import (
    SPEC,
    STEPS,
    balancer_of,
    cost_of,
    failing,
    run_in_turn,
    source,
)
from tests.trainer_client.balancing.redistribution.pool import GlooRanks, group_of
from trainer_client import BalancedLoader
from trainer_client.balancing import ProgramOrderError, kernels, stream

MOST = 6  # batches of a loop
BREAK, RAISE, SOURCE, COST, KEEP = range(5)
"""Ways to leave a loop: an exception in its body, in its source, in its cost; an iterator that stays alive."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What each rank does in one loop."""

    steps: tuple[int, ...]  # batches that it has
    leaves: tuple[int, ...]  # after how many batches it leaves; more than it gets: never
    how: tuple[int, ...]  # by which way
    # after which of its first batches another loader is iterated, by all ranks; and how far by each
    inner: tuple[int, ...] | None
    pauses: tuple[int, ...]  # milliseconds that a step takes

    @property
    def ranks_meet(self) -> bool:
        """Whether no rank leaves by itself: then all take the same steps, and may meet in each, as in backward."""
        return all(
            how in (SOURCE, COST) or leaves > max(self.steps) for how, leaves in zip(self.how, self.leaves, strict=True)
        )

    @property
    def ranks_nest_alike(self) -> bool:
        """Whether all ranks come to the inner loop, which a program must see to itself."""
        return self.inner is None or (
            min(self.steps) > 0 and min(self.leaves) > 0 and not {SOURCE, COST}.intersection(self.how)
        )


@dataclass(frozen=True, slots=True)
class Program:
    """Loops, one after the other."""

    ranks: int
    address: str | None
    options: dict[str, int]
    loops: list[Loop]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = draw(st.integers(2, 3))

    def each(values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[values] * ranks)

    loops = st.builds(
        Loop, each(st.integers(0, MOST)), each(st.integers(0, MOST + 3)), each(st.integers(BREAK, KEEP)),
        st.none() | each(st.integers(0, 4)), each(st.sampled_from([0, 0, 1, 5])),
    ).filter(lambda loop: loop.ranks_nest_alike)  # fmt: skip
    return Program(
        ranks, draw(st.sampled_from([None, "service", "off"])),
        {"depth": draw(st.integers(1, 5)), "window": draw(st.integers(1, 3))},
        draw(st.lists(loops, min_size=1, max_size=4)),
    )  # fmt: skip


Ledger = dict[int, list[list[int]]]
"""Ids that a rank got, batch by batch, by loop; inner loops have numbers of their own."""


def run(rank: int, program: Program, address: str) -> Ledger:
    """In a rank: what it gets."""
    ledger: Ledger = {}
    held = []
    group = group_of(program.ranks)
    where = address if program.address == "service" else program.address

    def take(number: int, batch: dict[str, torch.Tensor]) -> None:
        assert batch["values"].tolist() == batch["id"].repeat_interleave(batch["count"]).tolist()
        ledger[number].append(batch["id"].tolist())

    with balancer_of(where, "leaving", process_group=group, **program.options) as balancer:

        def loader(number: int, steps: int, name: str = "train", fails: int | None = None, how: int = SOURCE) -> Any:
            ledger[number] = []
            batches: Any = source(rank, number % 1000, steps)
            costs = [0]

            def cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
                costs[0] += 1
                if how == COST and fails is not None and costs[0] > fails:
                    raise OSError("the disk is gone")
                return cost_of(batch)

            data = batches if fails is None or how == COST else failing(batches, fails)
            return BalancedLoader(data, balancer, cost=cost, spec=SPEC, name=name)

        for number, loop in enumerate(program.loops):
            leaves, how = loop.leaves[rank], loop.how[rank]
            fails = leaves if how in (SOURCE, COST) and leaves < loop.steps[rank] else None
            iterator = iter(loader(number, loop.steps[rank], fails=fails, how=how))
            try:
                for taken, batch in enumerate(iterator, 1):
                    time.sleep(loop.pauses[rank] / 1000)
                    take(number, batch)
                    if loop.ranks_meet:
                        dist.all_reduce(torch.ones(1), group=group)
                    if loop.inner is not None and taken == 1:
                        inner = iter(loader(1000 + number, 3, name="inner"))
                        for nested, _ in zip(inner, range(loop.inner[rank]), strict=False):
                            take(1000 + number, nested)
                        del inner
                    if taken >= leaves and how not in (SOURCE, COST):
                        held += [iterator] if how == KEEP else []
                        if how == RAISE:
                            raise KeyError("out of memory, say")
                        break
            except KeyError:
                pass
            except OSError:
                assert fails is not None
            del iterator
    return ledger


def check(program: Program, results: list[Ledger]) -> None:
    """No sample twice or in another loop; and where all ranks got a batch, all of its samples."""
    window = program.options["window"]
    for number, loop in enumerate(program.loops):
        batches = [result[number] for result in results]
        trained = [sample for steps in batches for ids in steps for sample in ids]
        assert len(trained) == len(set(trained)), "a sample was trained twice"
        assert {sample % 1_000_000 // 100_000 for sample in trained} <= {number}, "a sample of another loop"
        common = min(map(len, batches)) // window * window
        for step in range(0, common, window):
            got = sorted(sample for steps in batches for ids in steps[step : step + window] for sample in ids)
            assert got == sorted(_loaded(program, number, range(step, step + window))), "a sample was lost"
        if loop.ranks_meet:
            assert len({len(steps) for steps in batches}) == 1
        if all(leaves > max(loop.steps) for leaves in loop.leaves):
            assert {len(steps) for steps in batches} == {max(loop.steps)}
            assert sorted(trained) == sorted(_loaded(program, number, range(MOST)))


def _loaded(program: Program, number: int, steps: range) -> Iterator[int]:
    for rank, count in enumerate(program.loops[number].steps):
        for step in steps:
            if step < count:
                yield from source(rank, number, count)[step]["id"].tolist()


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(program=programs())
def test_programs_that_leave_their_loops_anywhere(ranks: GlooRanks, balancer: ServiceProcess, program: Program) -> None:
    arguments = [(rank, program, balancer.address) for rank in range(program.ranks)]
    check(program, ranks.call(run, arguments))


def by_hand(rank: int, address: str | None, steps: tuple[int, ...]) -> list[list[list[int]]]:
    """The loop of the docs over uneven data: to its end, left by one rank, and to its end again."""
    ledger = []
    with balancer_of(address) as balancer:
        for loop in range(3):
            got: list[list[int]] = []
            batches = iter(source(rank, loop, steps[rank]))
            batch = next(batches, None)
            ticket = balancer.submit(batch, cost=cost_of, spec=SPEC)
            while True:
                following = next(batches, None)
                next_ticket = balancer.submit(following, cost=cost_of, spec=SPEC)
                balanced = balancer.redistribute(batch, ticket, spec=SPEC)
                if balanced is None:
                    break
                assert balanced["values"].tolist() == balanced["id"].repeat_interleave(balanced["count"]).tolist()
                assert ticket.report.mode.value == ("service" if address else "embedded")
                got.append(balanced["id"].tolist())
                assert got[-1] == sorted(got[-1])  # by (home, index at home)
                if loop == 1 and rank == 1 and len(got) == 2:
                    balancer.leave()
                    break
                batch, ticket = following, next_ticket
            ledger.append(got)
    return ledger


def no_data_by_hand(_: int) -> Any:
    with balancer_of(None) as balancer:
        ticket = balancer.submit(None, cost=cost_of)
        return balancer.redistribute(None, ticket)


def test_loops_of_ones_own_over_uneven_data_and_over_none(balancer: ServiceProcess) -> None:
    steps = (2, 5, 0)
    jobs = [(by_hand, address, steps) for address in (None, balancer.address)]
    *both, nothing = run_in_turn(3, *jobs, (no_data_by_hand,))
    for results in both:
        for loop in (0, 2):
            assert [len(result[loop]) for result in results] == [5] * 3
            for step in range(5):
                assert sorted(i for result in results for i in result[loop][step]) == sorted(
                    int(i) for rank in range(3) if step < steps[rank] for i in source(rank, loop)[step]["id"]
                )
        assert len(results[1][1]) == 2
        assert {len(result[1]) for result in results} <= {2, 3}
    assert nothing == [None] * 3


def out_of_turn(rank: int) -> int:
    got = 0
    with balancer_of(None) as balancer:
        batches = source(rank, 0)
        tickets = [balancer.submit(batch, cost=cost_of, spec=SPEC) for batch in batches[:4]]
        order = [0, 2, 1, 3] if rank == 1 else [0, 1, 2, 3]
        for step in order:
            balancer.redistribute(batches[step], tickets[step], spec=SPEC)
            got += 1
        for batch in batches[4:]:
            balancer.redistribute(batch, balancer.submit(batch, cost=cost_of, spec=SPEC), spec=SPEC)
            got += 1
    return got


def other_loaders(rank: int) -> None:
    with balancer_of(None) as balancer:
        for _ in BalancedLoader(source(rank, 0), balancer, cost=cost_of, spec=SPEC, name=("train", "eval")[rank]):
            pass


def interleaved(rank: int) -> None:
    with balancer_of(None) as balancer:
        pair = [BalancedLoader(source(rank, loop), balancer, cost=cost_of, spec=SPEC) for loop in range(2)]
        for _ in zip(*pair, strict=True):
            pass


MISTAKES = {
    out_of_turn: "rank 1 redistributes a batch out of turn: redistribute the batches of a loader in the order",
    other_loaders: "rank 1 begins the loader 'eval' while rank 0 begins 'train'",
    interleaved: "a newer loop over 'train' has begun",
}


def test_programs_that_cannot_be_reconciled_raise_the_same_error_on_all_ranks() -> None:
    by_job = run_in_turn(2, *((job,) for job in MISTAKES), check=False)
    for text, errors in zip(MISTAKES.values(), by_job, strict=True):
        assert [type(error) for error in errors] == [ProgramOrderError] * 2, errors
        assert all(str(error).startswith(text) for error in errors), errors
        assert len({str(error) for error in errors}) == 1


def long_steps(rank: int) -> tuple[int, float]:
    """Rank 0 leaves while rank 1 is busy for longer than a rank that leaves waits; both meet after their loops."""
    stream.LEAVE_SECONDS = 0.1  # of this process
    with balancer_of(None) as balancer:
        taken = 0
        for _ in BalancedLoader(source(rank, 0), balancer, cost=cost_of, spec=SPEC):
            taken += 1
            if rank == 0:
                break
            time.sleep(0.4)
        started = time.monotonic()
        dist.barrier()
        return taken, time.monotonic() - started


def test_a_rank_that_has_left_holds_nobody_up_from_where_it_waits() -> None:
    read, ((first, waited), (second, _)) = run_in_turn(2, (after_the_end,), (long_steps,))
    assert read == [({"embedded": 3, "end": 1, "before": 0}, ["False"])] * 2
    assert first == 1
    assert 1 < second < STEPS
    assert waited > 0.1  # in the barrier, not in the loop


def after_the_end(rank: int) -> tuple[dict[str, int], list[str]]:
    """Counters, which can be read before the first batch and after `close`."""
    balancer = balancer_of(None)
    loader = BalancedLoader(source(rank, 0, 3), balancer, cost=cost_of, spec=SPEC)
    empty = sum(loader.counters.rounds.values())
    for _ in loader:
        pass
    balancer.close()
    return {str(mode): count for (mode, _), count in loader.counters.rounds.items()} | {"before": empty}, [
        str(loader.breaker_open)
    ]


def peers_leave(rank: int, address: str | None) -> list[list[list[int]]]:
    """Ranks 0 and 1, and 2 and 3, train the same batches, and leave their loops at steps of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loops = []
    with balancer_of(address, "peers-leave", process_group=mesh["dp"]) as balancer:
        for loop in range(4):
            batches = source(mesh["dp"].get_local_rank(), loop)
            got: list[list[int]] = []
            for batch in BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC):
                got.append(batch["id"].tolist())
                if len(got) == (rank + 1, 99, 4 - rank, 99)[loop]:
                    break
            loops.append(got)
    return loops


def test_peers_that_leave_at_different_steps_get_the_same_batches(balancer: ServiceProcess) -> None:
    for results in run_in_turn(4, *((peers_leave, address) for address in (None, balancer.address))):
        for first, second in ((0, 1), (2, 3)):
            for loop in range(4):
                pairs = zip(results[first][loop], results[second][loop], strict=loop in (1, 3))
                assert all(one == other for one, other in pairs)
        for loop in (1, 3):
            for step in range(STEPS):
                got = sorted(results[0][loop][step] + results[2][loop][step])
                assert got == sorted(int(i) for dp in range(2) for i in source(dp, loop)[step]["id"])


class Gone:
    """A dataset that is not there."""

    def __iter__(self) -> Iterator[Any]:
        raise OSError("the disk is gone")


def fail_at_once(rank: int, bad: Any, ranks_that_fail: tuple[int, ...]) -> tuple[dict[str, list[list[int]]], list[str]]:
    """The very first batch of some ranks cannot be had; then all ranks train."""
    ledger: dict[str, list[list[int]]] = {}
    raised: list[str] = []
    good: Any = source(rank, 0)

    def trained(batches: Any, loop: str) -> None:
        for batch in BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC, name=loop[0]):
            ledger.setdefault(loop, []).append(batch["id"].tolist())

    started = time.monotonic()
    with balancer_of(None) as balancer:
        for loop in ("a first", "b first"):
            try:
                trained(bad if rank in ranks_that_fail else good, loop)
            except (OSError, ValueError) as error:
                raised.append(str(error))
        trained(good, "a again")
    assert time.monotonic() - started < 40, "a rank was waited for"
    return ledger, raised


def test_a_first_batch_that_fails_ends_the_loops_of_all_ranks() -> None:
    """A loader or a batch that cannot be read; of a source and a cost that fail tells `test_leaving`."""
    ways = list(itertools.product((Gone(), [{"id": "no tensor", "count": 3}]), ((1,), (0, 1, 2))))
    for (_, ranks_that_fail), results in zip(
        ways, run_in_turn(3, *((fail_at_once, *way) for way in ways)), strict=True
    ):
        for rank, (ledger, raised) in enumerate(results):
            assert len(raised) == (2 if rank in ranks_that_fail else 0)
            assert {"a first", "b first"}.isdisjoint(ledger)
        again = sorted(sample for ledger, _ in results for step in ledger["a again"] for sample in step)
        assert again == sorted(int(one) for rank in range(3) for batch in source(rank, 0) for one in batch["id"])


def submit_ahead_of_the_end(rank: int, address: str) -> list[tuple[str, int]]:
    """Submissions that run ahead of their end, and then a loop whose first round has the number of one of them."""
    batches = source(rank, 0, 3)
    told: list[tuple[str, int]] = []
    with balancer_of(address, depth=1) as balancer:
        for _ in range(2):
            waiting = []
            for step in range(STEPS):
                batch = batches[step] if step < len(batches) else None
                waiting.append((batch, balancer.submit(batch, cost=cost_of, spec=SPEC)))
                if step >= 3:
                    first, ticket = waiting.pop(0)
                    if balancer.redistribute(first, ticket, spec=SPEC) is None:
                        break
                    told.append((ticket.report.mode.value, len(first["id"]) if first else 0))
        loader = BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC)
        told += [(loader.report.mode.value, len(batch["id"])) for batch in loader]
    return told


def test_what_is_submitted_after_the_end_costs_the_next_loop_no_answer(balancer: ServiceProcess) -> None:
    for told in run_ranks(2, submit_ahead_of_the_end, balancer.address):
        assert [mode for mode, _ in told] == ["service"] * 9


def by_hand_after_an_iterator(rank: int, address: str | None) -> Any:
    """An iterator that has read everything and is kept, then a loop by hand over the same stream."""
    batches = source(rank, 0, 3)
    trained: list[list[int]] = []
    with balancer_of(address, depth=5) as balancer:
        kept = iter(BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC))
        next(kept)
        for batch in [*source(rank, 1, 3), None]:
            ticket = balancer.submit(batch, cost=cost_of, spec=SPEC)
            moved = balancer.redistribute(batch, ticket, spec=SPEC)
            trained += [] if moved is None else [moved["id"].tolist()]
        with pytest.raises(ProgramOrderError, match="a newer loop over 'train' has begun"):
            next(kept)
    return trained


def test_a_loop_by_hand_ends_an_iterator_that_is_kept(balancer: ServiceProcess) -> None:
    for results in run_in_turn(2, *((by_hand_after_an_iterator, address) for address in (None, balancer.address))):
        for step in range(3):
            found = sorted(sample for trained in results for sample in trained[step])
            assert found == sorted(int(one) for rank in range(2) for one in source(rank, 1, 3)[step]["id"])


class TooLongError(Exception):
    """What a program raises from a signal."""


def interrupted(rank: int, where: str) -> tuple[int, list[list[int]]]:
    """Rank 0's loop is interrupted twice while its stream opens, for which the other rank or the compiler is waited."""

    def ring(*_: object) -> None:
        raise TooLongError

    compiled = threading.Event()
    if where == "compiling":
        kernels._moves = lambda: SimpleNamespace(ready=False, wait=compiled.wait)  # type: ignore[assignment,return-value]
    attempts, loops = 0, []
    with balancer_of(None) as balancer:
        loader = BalancedLoader(source(rank, 0), balancer, cost=cost_of, spec=SPEC)
        if rank == 0:
            signal.signal(signal.SIGALRM, ring)
            for _ in range(2):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.4)
                    next(iter(loader))
                except TooLongError:
                    attempts += 1
        if where == "others":
            dist.barrier()
        compiled.set()
        for _ in range(2 if rank == 0 else 4):
            loops.append([sample for batch in loader for sample in batch["id"].tolist()])
    return attempts, loops


@pytest.mark.parametrize("where", ["others", "compiling"])
def test_a_loop_that_is_interrupted_while_its_stream_opens_has_been_left(where: str) -> None:
    """Else the loops that a rank begins after it would meet those that others began before theirs."""
    (attempts, first), (_, second) = run_ranks(2, interrupted, where)
    assert attempts == 2
    assert second[:2] == [[], []]  # ended with rank 0's
    second = second[2:]
    everything = sorted(int(one) for rank in range(2) for batch in source(rank, 0) for one in batch["id"])
    assert [sorted(one + other) for one, other in zip(first, second, strict=True)] == [everything] * 2
