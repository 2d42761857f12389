"""Random programs of loops on real ranks, however they are left, with a ledger of every sample."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness.balancer_process import ServiceProcess
from tests.trainer_client.balancing.jobs import balancer_of, cost_of, failing, make_batch
from tests.trainer_client.balancing.redistribution.pool import GlooRanks, group_of
from trainer_client import BalancedLoader, Balancer, BatchSpec
from trainer_client.balancing.batches import BatchError

SPEC = BatchSpec(
    rows_per_sample={"values": "count"},
    derived={"total": lambda batch: int(batch["id"].sum())},  # which cannot be pickled
)
MOST = 6  # batches of a loop
BREAK, RAISE, SOURCE, COST, UNREADABLE, KEEP = range(6)
"""Ways to leave a loop: an exception in its body, source, cost or batch; an iterator that stays alive."""
FAILS = (SOURCE, COST, UNREADABLE)
INNER = 1000
"""What is added to a loop's number for the one within it."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What the ranks do in one loop; of each kind of data, and of each rank."""

    sizes: tuple[tuple[int, ...], ...]  # samples of each batch, by data
    leaves: tuple[int, ...]  # after how many batches each rank leaves; more than it gets: never
    how: tuple[int, ...]  # by which way
    inner: tuple[int, ...] | None  # batches that each rank takes of another loader within its first step
    ahead: int | None  # None: a `BalancedLoader`; else a loop by hand, which submits so many batches ahead
    drop_last: bool
    users: bool  # whether it says whose samples they are
    invalid: int  # the step at which the first data's costs cannot be used; below 0: none
    pauses: tuple[int, ...]  # milliseconds that a step takes

    @property
    def steps(self) -> int:
        """Batches of the data that has most."""
        return max(map(len, self.sizes))

    @property
    def stays(self) -> list[bool]:
        """Which ranks do not leave by themselves."""
        return [leaves > self.steps for leaves in self.leaves]

    @property
    def ranks_meet(self) -> bool:
        """Whether no rank leaves by itself: then all take the same steps, and may meet in each, as in backward."""
        return all(how in FAILS or stays for how, stays in zip(self.how, self.stays, strict=True))


@dataclass(frozen=True, slots=True)
class Program:
    """Loops, one after the other."""

    ranks: int
    peers: bool  # whether ranks 0 and 1 train the same data, and 2 and 3
    address: str | None
    options: dict[str, Any]  # of rank 0, which hold for all
    others: dict[str, Any]  # what the other ranks ask for
    loops: list[Loop]

    def data_of(self, rank: int) -> int:
        return rank // 2 if self.peers else rank

    @property
    def widens(self) -> bool:
        """Whether rows of later batches are wider, which those of one window may not be."""
        return self.options["window"] == 1

    def batches(self, data: int, number: int) -> list[dict[str, Any]]:
        """Ids tell loop, step and data; an empty batch has rows of length 0, as padding to the longest gives it."""
        found: list[dict[str, Any]] = []
        for step, size in enumerate(self.loops[number % INNER].sizes[data] if number < INNER else (3, 3, 3)):
            batch: dict[str, Any] = make_batch(data, step + 100 * number % 1000, size)
            width = (3 + 2 * step if size else 0) if self.widens else 3
            batch["rows"] = batch["id"][:, None].expand(size, width).contiguous()
            batch["name"] = [f"u{one}" for one in batch["id"].tolist()]
            batch["total"] = int(batch["id"].sum())
            if not size and self.widens and data % 2:
                batch["name"] = torch.zeros(0)  # of another kind than those of batches with samples
            found.append(batch)
        return found


NO, NONE, TAKEN = st.just(False), st.none(), st.integers(0, 4)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = draw(st.integers(2, 4))
    peers = ranks == 4 and draw(st.booleans())
    window = draw(st.sampled_from([1, 1, 2, 3]))

    def each(values: st.SearchStrategy[Any], count: int = ranks) -> st.SearchStrategy[tuple[Any, ...]]:
        return st.tuples(*[values] * count)

    def loops(hows: tuple[int, ...], *, least: int = 0, ahead: Any = NONE, inner: Any = NONE, drops: Any = NO) -> Any:
        sizes = st.lists(st.sampled_from([0, 1, 2, 5, 6, 6]), min_size=least, max_size=MOST).map(tuple)
        leaves = each(st.integers(least, MOST + 3)) | st.just((MOST + 1,) * ranks)
        pauses = each(st.sampled_from([0, 0, 1, 5]))
        how, invalid = each(st.sampled_from(hows)), st.integers(-4, 3)
        data = each(sizes, 2 if peers else ranks)
        return st.builds(Loop, data, leaves, how, inner, ahead, drops, st.booleans(), invalid, pauses)

    any_way = loops((BREAK, RAISE, *FAILS, KEEP), drops=st.booleans())
    kinds = [any_way, any_way, any_way, loops((BREAK, KEEP), least=1, inner=each(TAKEN))]
    if window == 1:
        kinds.append(loops((BREAK, RAISE), ahead=st.integers(0, 4)))
    options = {
        "depth": draw(st.integers(1, 5)), "window": window, "min_samples": draw(st.integers(0, 2)),
        "counts": draw(st.sampled_from(["equal", "free"])), "strategy": draw(st.sampled_from(["minimal_move", "lpt"])),
        "memory_caps": draw(st.sampled_from([None] * 5 + [[1.0] * (2 if peers else ranks)])),  # bytes
    }  # fmt: skip
    others = {"depth": draw(st.integers(1, 5)), "window": draw(st.integers(1, 3))}
    address = draw(st.sampled_from([None, "service", "off"]))
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    return Program(ranks, peers, address, options, others, [draw(kind) for kind in drawn])


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank got in a step."""

    ids: list[int]
    width: int  # of its rows
    reason: str
    scale: float  # of the loss
    mean_scale: float
    wrong: list[str]


Ledger = dict[int, list[Step]]
"""What a rank got, by loop; inner loops have numbers of their own."""


@cache
def mesh() -> DeviceMesh:
    """In a rank: all four, in pairs that train the same."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Gone:
    """A dataset that is not there."""

    def __iter__(self) -> Iterator[Any]:
        raise OSError("the disk is gone")


def data_that_fails(batches: list[Any], how: int, after: int) -> Any:
    if how == UNREADABLE:
        return [*batches[:after], {"id": "no tensor", "count": 3}]
    return failing(batches, after) if after else Gone()


def run(rank: int, program: Program, address: str) -> Ledger:
    """In a rank: what it gets."""
    ledger: Ledger = {}
    held: list[Any] = []
    group: Any = mesh()["dp"] if program.peers else group_of(program.ranks)
    where = address if program.address == "service" else program.address
    of_rank: Any = program.others if rank else program.options
    one, other = (balancer_of(where, "programs", process_group=group, **of_rank) for _ in range(2))
    with one, other:
        for number, loop in enumerate(program.loops):
            try:
                run_loop(rank, program, number, (one, other), ledger, held)
            except (KeyError, OSError, BatchError):
                assert loop.how[rank] in (*FAILS, RAISE)
    return ledger


def run_loop(
    rank: int, program: Program, number: int, balancers: tuple[Balancer, Balancer], ledger: Ledger, held: list[Any]
) -> None:
    loop, (balancer, other) = program.loops[number], balancers
    leaves, how = loop.leaves[rank], loop.how[rank]
    batches = program.batches(program.data_of(rank), number)
    fails = how in FAILS and leaves < len(batches)
    ledger[number] = []
    costs = 0

    def cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal costs
        costs += 1
        if how == COST and fails and costs > leaves:
            raise OSError("the disk is gone")
        is_invalid = program.data_of(rank) == 0 and costs - 1 == loop.invalid
        return cost_of(batch) - (1 << 40) if is_invalid else cost_of(batch)

    def steps() -> Iterator[Any]:
        if loop.ahead is None:
            data = data_that_fails(batches, how, leaves) if fails and how != COST else batches
            users = (lambda batch: batch["id"] // 3) if loop.users else None
            loader = BalancedLoader(data, balancer, cost=cost, users=users, spec=SPEC, drop_last=loop.drop_last)
            for batch in loader:
                yield batch, loader.report
        else:
            yield from by_hand(balancer, batches, cost, loop.ahead)

    iterator = steps()
    for taken, (batch, report) in enumerate(iterator, 1):
        time.sleep(loop.pauses[rank] / 1000)
        take(program, ledger[number], batch, report)
        if loop.ranks_meet:
            dist.all_reduce(torch.ones(1), group=group_of(program.ranks))
        if loop.inner is not None and taken == 1:
            inner = (balancer, "inner") if number % 2 else (other, "train")  # of which neither waits for the other
            run_inner(program, INNER + number, rank, inner, ledger, loop.inner[rank])
        if taken >= leaves and how not in FAILS:
            held += [iterator] if how == KEEP else []
            if loop.ahead is not None:
                balancer.leave()
            if how == RAISE:
                raise KeyError("out of memory, say")
            break


def by_hand(balancer: Balancer, batches: list[Any], cost: Any, ahead: int) -> Iterator[Any]:
    """The loop of the docs."""
    data, waiting = iter(batches), deque[Any]()
    while True:
        while len(waiting) <= ahead:
            batch = next(data, None)
            waiting.append((batch, balancer.submit(batch, cost=cost, spec=SPEC)))
        batch, ticket = waiting.popleft()
        moved = balancer.redistribute(batch, ticket, spec=SPEC)
        if moved is None:
            return
        yield moved, ticket.report


def run_inner(program: Program, number: int, rank: int, of: tuple[Balancer, str], ledger: Ledger, most: int) -> None:
    ledger[number], (balancer, name) = [], of
    batches = program.batches(program.data_of(rank), number)
    loader = BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC, name=name)
    for batch, _ in zip(loader, range(most), strict=False):
        take(program, ledger[number], batch, loader.report)


def take(program: Program, steps: list[Step], batch: dict[str, Any], report: Any) -> None:
    """What is wrong is told when all ranks are through, since others may wait for this one."""
    ids = batch["id"].tolist()
    width = batch["rows"].shape[1]
    load = float(cost_of(batch).sum())
    as_loaded = {
        "values": batch["values"].tolist() == batch["id"].repeat_interleave(batch["count"]).tolist(),
        "rows": batch["rows"].tolist() == [[one] * width for one in ids],
        "total": batch["total"] == sum(ids),
        "name": list(batch["name"]) == [f"u{one}" for one in ids],
        "order": ids == sorted(ids) or not program.widens,  # by home, and place at home
        "load": report.own_load == load or report.reason.value == "invalid_costs" or program.address == "off",
        "mode": report.mode.value in MODES.get(program.address, ()) or report.reason.value in UNPLANNED,
    }
    wrong = [name for name, is_so in as_loaded.items() if not is_so]
    steps.append(Step(ids, width, report.reason.value, report.loss_scale, report.mean_loss_scale, wrong))


UNPLANNED = ("invalid_costs", "partition_failed")
MODES = {None: ("embedded",), "service": ("service",), "off": ("identity", "spread")}


def windows_of(program: Program, loop: Loop) -> Iterator[list[int]]:
    """Steps of each window that are trained while no rank leaves: all, or what `drop_last` leaves."""
    window, ranks = program.options["window"], len(loop.sizes)
    least = max(1, program.options["min_samples"]) * ranks
    for first in range(0, loop.steps, window):
        kept = []
        for step in range(first, min(first + window, loop.steps)):
            sizes = [own[step] for own in loop.sizes if step < len(own)]
            if sum(sizes) >= least or not loop.drop_last:
                kept.append(step)
            elif len(sizes) < ranks:  # some rank's data has ended
                yield kept
                return
        yield kept


def check(program: Program, results: list[Ledger]) -> None:
    """No sample twice or in another loop; and where all ranks got a batch, all of its samples."""
    if program.peers:
        for one, other in ((results[0], results[1]), (results[2], results[3])):
            for number in one:
                assert all(mine == theirs for mine, theirs in zip(one[number], other[number], strict=False))
    for number in results[0]:
        loop = program.loops[number % INNER]
        got = [result[number] for result in results]
        common = min(map(len, got))
        if program.peers:
            got = [max(got[:2], key=len), max(got[2:], key=len)]
        assert [step for steps in got for step in steps if step.wrong] == []
        trained = [one for steps in got for step in steps for one in step.ids]
        assert len(trained) == len(set(trained)), "a sample was trained twice"
        if number >= INNER:
            windows: list[list[int]] = [[step] for step in range(3)] if program.widens else []
        else:
            windows = list(windows_of(program, loop))
        loaded = [program.batches(data, number) for data in range(len(got))]
        done = 0
        for steps in windows:
            if done + len(steps) > common:
                break
            taken = [[step[at] for at in range(done, done + len(steps))] for step in got]
            if steps:
                invalid = loop.invalid if number < INNER else -1
                check_window(program, steps, taken, loaded, invalid)
            done += len(steps)
        assert {one % 1_000_000 // 1000 // 100 for one in trained} <= {number % 10}, "a sample of another loop"
        if number < INNER and loop.ranks_meet:
            assert {len(steps) for steps in got} == {common}
        if number < INNER and all(loop.stays):
            assert common == done == sum(map(len, windows)), "all batches were trained"


def check_window(
    program: Program, steps: list[int], taken: list[list[Step]], loaded: list[list[dict[str, Any]]], invalid: int
) -> None:
    """All of a window's samples are there, no rank has too few, losses weigh samples; `invalid` is a step."""
    first = steps[0] - steps[0] % program.options["window"]
    of_window = [own[first : first + program.options["window"]] for own in loaded]
    found = [one for rank in taken for step in rank for one in step.ids]
    wanted = [one for own in of_window for batch in own for one in batch["id"].tolist()]
    dropped = sum(len(batch["id"]) for own in of_window for at, batch in enumerate(own, first) if at not in steps)
    assert set(found) <= set(wanted), "a sample came in another window"
    assert len(found) == len(wanted) - dropped, "a sample was lost"  # which ones are dropped is free
    reason = "partition_failed" if wanted and program.options["memory_caps"] else ""
    if 0 <= invalid - first < len(of_window[0]) and len(of_window[0][invalid - first]["id"]) > 0:
        reason = "invalid_costs"
    for at, step in enumerate(steps):
        ranks = [rank[at] for rank in taken]
        counts = [len(rank.ids) for rank in ranks]
        assert min(counts) >= min(program.options["min_samples"], sum(counts) // len(counts))
        for own, rank in zip(loaded, ranks, strict=True):
            batch = own[step] if step < len(own) else {"id": torch.zeros(0), "rows": torch.zeros(0, rank.width)}
            assert rank.scale == (len(ranks) / sum(counts) if sum(counts) else 0.0)
            assert rank.mean_scale == pytest.approx(rank.scale * len(rank.ids))
            assert program.address == "off" or (rank.reason if rank.reason in UNPLANNED else "") == reason
            at_home = (reason or program.address == "off") and not program.options["min_samples"]
            assert not at_home or rank.ids == batch["id"].tolist()
            wider = 3 + 2 * step if program.widens else 3
            assert rank.width == (wider if sum(counts) else batch["rows"].shape[1])


NOTHING = Loop(((), ()), (1, 1), (BREAK, BREAK), None, 1, drop_last=False, users=False, invalid=-1, pauses=(0, 0))
NO_DATA = Program(2, False, None, {"depth": 2, "window": 1, "min_samples": 0, "memory_caps": None}, {}, [NOTHING] * 2)


@example(program=NO_DATA)
@settings(max_examples=75, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(program=programs())
def test_programs(ranks: GlooRanks, balancer: ServiceProcess, program: Program) -> None:
    arguments = [(rank, program, balancer.address) for rank in range(program.ranks)]
    check(program, ranks.call(run, arguments))
