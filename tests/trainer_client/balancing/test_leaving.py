"""Ranks that leave their loops anywhere, with a ledger of every sample."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, STEPS, balancer_of, cost_of, failing, logged, run_in_turn, source
from tests.trainer_client.balancing.redistribution.pool import GlooRanks, group_of
from trainer_client import BalancedLoader
from trainer_client.balancing import ProgramOrderError

MOST = 6  # batches of a loop
BREAK, RAISE, SOURCE, COST, KEEP = range(5)
"""Ways to leave a loop: an exception in its body, in its source, in its cost; an iterator that stays alive."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What each rank does in one loop.

    Attributes:
        steps: Batches that it has.
        leaves: After how many batches it leaves; more than it gets: never.
        how: By which way.
        inner: After which of its first batches another loader is iterated, by all ranks; and how far by each.
        pauses: Milliseconds that a step takes.
    """

    steps: tuple[int, ...]
    leaves: tuple[int, ...]
    how: tuple[int, ...]
    inner: tuple[int, ...] | None
    pauses: tuple[int, ...]

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


def leave_and_fail(rank: int) -> list[str]:
    """A loop that one rank leaves, and one whose data fails on another; what is said of them."""
    said = logged("trainer_client.balancing", form="%(levelname)s %(message)s")
    with balancer_of(None) as balancer:
        for taken, _ in enumerate(BalancedLoader(source(rank, 0), balancer, cost=cost_of, spec=SPEC), 1):
            if taken == 2 and rank == 1:
                break
        batches: Any = source(rank, 1)
        data = failing(batches, 0) if rank == 0 else batches
        try:
            assert not list(BalancedLoader(data, balancer, cost=cost_of, spec=SPEC))
        except OSError:
            assert rank == 0
    return [line for line in said if "has left its loop" in line]


def test_one_rank_says_that_another_has_left_and_all_others_of_a_problem() -> None:
    told = [line for said in run_ranks(3, leave_and_fail) for line in said]
    assert [line.split("(")[1].split(")")[0] for line in told if "(" in line] == ["OSError: the disk is gone"] * 2
    assert sum("rank 1 has left its loop after 2 batches" in line for line in told if "(" not in line) == 1


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
    with balancer_of(None) as balancer:
        taken = 0
        for _ in BalancedLoader(source(rank, 0), balancer, cost=cost_of, spec=SPEC):
            taken += 1
            if rank == 0:
                break
            time.sleep(1.5)
        started = time.monotonic()
        dist.barrier()
        return taken, time.monotonic() - started


def meet_in_the_model(rank: int, fails: str, options: dict[str, Any]) -> tuple[list[int], str]:
    """Loops whose ranks meet in each step, as in backward; data or cost fail on one rank in the first."""
    steps, said = [], ""

    def cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if fails == "cost" and rank == 1 and not steps and len(trained) > 1:
            raise OSError("the disk is gone")
        return cost_of(batch)

    with balancer_of(None, **options) as balancer:
        for loop in range(2):
            trained: list[int] = []
            batches: Any = source(rank, loop, STEPS)
            fail = fails == "source" and rank == 1 and loop == 0
            data = failing(batches, STEPS - 2) if fail else batches
            try:
                for batch in BalancedLoader(data, balancer, cost=cost, spec=SPEC):
                    met = torch.tensor([1, len(batch["id"])])
                    dist.all_reduce(met)
                    assert met[0] == 3
                    trained += batch["id"].tolist()
            except OSError as error:
                said = str(error)
            steps.append(len(trained))
    return steps, said


def test_loops_end_at_one_step_where_the_data_of_a_rank_fails() -> None:
    options: tuple[dict[str, int], ...] = ({}, {"window": 3}, {"depth": 5})
    ways = itertools.product(("source", "cost"), options)
    for results in run_in_turn(3, *((meet_in_the_model, fails, each) for fails, each in ways)):
        assert [said for _, said in results] == ["", "the disk is gone", ""]
        first, second = (sum(steps[loop] for steps, _ in results) for loop in range(2))
        assert 0 < first < second


def test_a_rank_that_has_left_holds_nobody_up_from_where_it_waits() -> None:
    (first, waited), (second, _) = run_ranks(2, long_steps)
    assert first == 1
    assert 1 < second < STEPS
    assert waited > 0.5  # in the barrier, not in the loop


def after_the_end(rank: int) -> tuple[dict[str, int], list[str]]:
    balancer = balancer_of(None)
    loader = BalancedLoader(source(rank, 0, 3), balancer, cost=cost_of, spec=SPEC)
    empty = sum(loader.counters.rounds.values())
    for _ in loader:
        pass
    balancer.close()
    return {str(mode): count for (mode, _), count in loader.counters.rounds.items()} | {"before": empty}, [
        str(loader.breaker_open)
    ]


def test_counters_can_be_read_before_the_first_batch_and_after_close() -> None:
    assert run_ranks(2, after_the_end) == [({"embedded": 3, "end": 1, "before": 0}, ["False"])] * 2


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
