"""Ranks that leave their loops after different numbers of batches, with a ledger of every sample."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import (
    SPEC,
    STEPS,
    Ledger,
    balancer_of,
    check_served,
    cost_of,
    failing,
    logged,
    run_in_turn,
    source,
)
from trainer_client import BalancedLoader
from trainer_client.balancing import ProgramOrderError


def leave_in_many_ways(rank: int, address: str | None, options: dict[str, Any]) -> tuple[Ledger, list[str]]:
    """Loops over one name, each left in another way, at other steps on each rank."""
    ledger: Ledger = {}
    said = logged("trainer_client.balancing", form="%(levelname)s %(message)s")

    def take(batch: dict[str, torch.Tensor], loop: str) -> None:
        assert batch["values"].tolist() == batch["id"].repeat_interleave(batch["count"]).tolist()
        ledger.setdefault(loop, []).append(batch["id"].tolist())

    with balancer_of(address, **options) as balancer:

        def loader(loop: int, name: str = "train", steps: int = STEPS, fails: int | None = None) -> Any:
            batches: Any = source(rank, loop, steps)
            return BalancedLoader(
                batches if fails is None else failing(batches, fails), balancer, cost=cost_of, spec=SPEC, name=name
            )

        for i, batch in enumerate(loader(0)):  # left at different steps
            take(batch, "0 train")
            if i == 2 + rank:
                break
        for batch in loader(1):  # to the end
            take(batch, "1 train")
        for i, batch in enumerate(loader(2)):  # all at the same step
            take(batch, "2 train")
            if i == 3:
                break
        try:  # an exception in the body of one rank
            for i, batch in enumerate(loader(3)):
                take(batch, "3 train")
                if i == 1 and rank == 1:
                    raise KeyError("out of memory, say")
        except KeyError:
            pass
        try:  # a source that fails on one rank, before its first batch
            for batch in loader(4, fails=0 if rank == 0 else None):
                take(batch, "4 train")
        except OSError:
            assert rank == 0
        held = iter(loader(5))  # an iterator that stays alive
        for _ in range(1 + 2 * rank):
            if (batch := next(held, None)) is not None:
                take(batch, "5 train")
        for i, batch in enumerate(loader(6, steps=3 + rank)):  # ends on its own on some, with an evaluation inside
            take(batch, "6 train")
            if i % 2 == 0:
                for j, inner in enumerate(loader(i, name="eval")):
                    take(inner, f"{i} eval")
                    if j == (i + rank) % 3:
                        break
        if rank == 0:
            for batch in loader(7):  # no batch at all but on one rank
                take(batch, "7 train")
                break
        else:
            iterator = iter(loader(7))
            next(iterator, None)
            del iterator
        old = iter(loader(9))
        take(next(old), "9 train")
        for batch in loader(8):
            take(batch, "8 train")
        check_served(loader(9), address)
        with pytest.raises(ProgramOrderError, match=r"different names \(BalancedLoader\(name=…\)\)"):
            next(old)
    return ledger, said


def check(results: list[Ledger], *, window: int = 1) -> None:
    """No sample twice or in another loop; and where all ranks got a batch, all of its samples."""
    for loop in results[0].keys() | results[1].keys():
        number = int(loop.split(maxsplit=1)[0])
        batches = [result.get(loop, []) for result in results]
        trained = [sample for steps in batches for ids in steps for sample in ids]
        assert len(trained) == len(set(trained)), loop
        assert {sample % 1_000_000 // 100_000 for sample in trained} <= {number}, loop
        common = min(map(len, batches)) // window * window
        for step in range(0, common, window):
            got = sorted(sample for steps in batches for ids in steps[step : step + window] for sample in ids)
            assert got == sorted(
                sample
                for rank in range(len(results))
                for each in range(step, step + window)
                for sample in loaded(rank, loop, each)
            ), (loop, step)


def loaded(rank: int, loop: str, step: int) -> list[int]:
    steps = 3 + rank if loop == "6 train" else STEPS
    return source(rank, int(loop.split(maxsplit=1)[0]))[step]["id"].tolist() if step < steps else []


OPTIONS: dict[str, dict[str, Any]] = {
    "embedded": {}, "service": {}, "off": {}, "window": {"window": 3}, "depth": {"depth": 5}
}  # fmt: skip


@pytest.fixture(scope="module")
def left(balancer: ServiceProcess) -> dict[str, Any]:
    addresses = {"service": balancer.address, "off": "off"}
    jobs = ((leave_in_many_ways, addresses.get(how), options) for how, options in OPTIONS.items())
    return dict(zip(OPTIONS, run_in_turn(3, *jobs), strict=True))


@pytest.mark.parametrize("how", OPTIONS)
def test_ranks_that_leave_at_different_steps_lose_and_mix_nothing(how: str, left: dict[str, Any]) -> None:
    ledgers = [ledger for ledger, _ in left[how]]
    check(ledgers, window=OPTIONS[how].get("window", 1))
    for ledger in ledgers:
        assert len(ledger["1 train"]) == len(ledger["8 train"]) == STEPS
    assert len(ledgers[0]["0 train"]) == 3
    if how == "embedded":
        assert [len(ledger["0 train"]) for ledger in ledgers] == [3, 4, 5]
        assert [len(ledger["2 train"]) for ledger in ledgers] == [4, 4, 4]
    told = [line for _, said in left[how] for line in said if "has left its loop" in line]
    # One rank says that another has left; of a problem every rank tells.
    assert [line.split("(")[1].split(")")[0] for line in told if "(" in line] == ["OSError: the disk is gone"] * 2
    assert sum(line.startswith("WARNING") and "(" not in line for line in told) <= 1
    assert any("rank 1 has left its loop after 2 batches" in line for line in told)


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


@pytest.mark.parametrize("fails", ["source", "cost"])
def test_loops_end_at_one_step_where_the_data_of_a_rank_fails(fails: str) -> None:
    options: tuple[dict[str, int], ...] = ({}, {"window": 3}, {"depth": 5})
    for results in run_in_turn(3, *((meet_in_the_model, fails, each) for each in options)):
        assert [said for _, said in results] == ["", "the disk is gone", ""]
        first, second = (sum(steps[loop] for steps, _ in results) for loop in range(2))
        assert 0 < first < second
