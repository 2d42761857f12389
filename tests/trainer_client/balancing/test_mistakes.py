"""Programs whose ranks cannot train together: whoever is told, it is by name and with a remedy, and nobody hangs."""

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, balancer_of, cost_of, make_batch, run_in_turn, source
from tests.trainer_client.balancing.test_splits import HSTU, Splits
from tests.trainer_client.balancing.test_splits import SPEC as SPLIT_SPEC
from trainer_client import BalancedLoader, BalanceOptions, Balancer, BatchSpec, SplitOptions
from trainer_client.balancing import PeersDifferError, ProgramOrderError, SchemaMismatchError
from trainer_client.balancing.batches import BatchError
from trainer_client.balancing.errors import ServiceRequiredError

IMPATIENT = {"timeout": timedelta(seconds=1), "group_timeout": timedelta(seconds=2)}


def first(batch: Any) -> Any:
    """A cost: what the first field holds."""
    return next(iter(batch.values())) + 1 if isinstance(batch, dict) else batch + 1


def loop(batches: Any, address: str | None = None, *, cost: Any = first, spec: Any = None, **more: Any) -> None:
    """A loop over batches; what is no argument of the loader is an option of the balancer."""
    of_loader = {key: more.pop(key) for key in ("name", "users") if key in more}
    with balancer_of(address, **more) as balancer:
        for _ in BalancedLoader(batches, balancer, cost=cost, spec=spec, **of_loader):
            pass


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def out_of_turn(rank: int) -> None:
    with balancer_of(None) as balancer:
        batches = source(rank, 0)
        tickets = [balancer.submit(batch, cost=cost_of, spec=SPEC) for batch in batches[:4]]
        for step in [0, 2, 1, 3] if rank == 1 else [0, 1, 2, 3]:
            balancer.redistribute(batches[step], tickets[step], spec=SPEC)
        for batch in batches[4:]:
            balancer.redistribute(batch, balancer.submit(batch, cost=cost_of, spec=SPEC), spec=SPEC)


def interleaved(rank: int) -> None:
    with balancer_of(None) as balancer:
        pair = [BalancedLoader(source(rank, number), balancer, cost=cost_of, spec=SPEC) for number in range(2)]
        for _ in zip(*pair, strict=True):
            pass


def by_hand_beside_an_iterator(rank: int) -> None:
    with balancer_of(None) as balancer:
        kept = iter(BalancedLoader(source(rank, 0), balancer, cost=cost_of, spec=SPEC))
        next(kept)
        for batch in [*source(rank, 1), None]:
            balancer.redistribute(batch, balancer.submit(batch, cost=cost_of, spec=SPEC), spec=SPEC)
        next(kept)


def other_batches_under_one_name(rank: int, name: str = "train") -> None:
    """The first batches of all have no sample."""
    plain = [{"id": ids()}, {"id": ids(*range(4))}]
    jagged = [{"count": torch.arange(size), "values": torch.arange(size * (size - 1) // 2)} for size in (0, 3)]
    with balancer_of(None) as balancer:
        for batches, spec, each in (
            (plain, None, "train"),
            (jagged, BatchSpec(rows_per_sample={"values": "count"}), name),
        ) * 2:
            assert len(list(BalancedLoader(batches, balancer, cost=first, spec=spec, name=each))) == 2


def not_submitted(rank: int) -> None:
    with balancer_of(None) as balancer:
        batch = {"id": ids(1, 2), "n": ids(2, 1), "v": torch.zeros(3)}
        spec = BatchSpec(rows_per_sample={"v": "n"})
        ticket = balancer.submit(batch, cost=first, spec=spec)
        balancer.redistribute(batch if rank else batch | {"id": ids(1, 2, 3)}, ticket, spec=spec)
        assert balancer.redistribute(None, balancer.submit(None, cost=len), spec=spec) is None


def writes_to_the_batch(batch: Any) -> Any:
    batch["id"] += 1
    return batch["id"]


def closes_within(_: int) -> None:
    with balancer_of(None) as balancer:
        loader = BalancedLoader([torch.arange(4)] * 5, balancer, cost=first)
        try:
            for step, _batch in enumerate(loader):
                if step == 1:
                    balancer.close()
        finally:
            assert step == 1
            assert len(list(loader)) == 5


def begins_alone(rank: int) -> None:
    with balancer_of(None, **IMPATIENT) as balancer:
        train, test = (
            BalancedLoader([torch.arange(4)] * 5, balancer, cost=first, name=name) for name in ("train", "test")
        )
        for step, _ in enumerate(train):
            if step == 1 and rank == 0:
                list(test)


def goes_on_alone(rank: int) -> None:
    """The other rank's process ends."""
    with balancer_of(None) as balancer:
        for _ in range(1 + rank):
            list(BalancedLoader([torch.arange(4)], balancer, cost=first))


def splits(rank: int, what: str) -> None:
    batch = Splits("without", None).batch(rank, 0)
    spec = SPLIT_SPEC if what == "cost" else BatchSpec(rows_per_sample=dict(SPLIT_SPEC.rows_per_sample))
    if what == "lengths":
        spec = replace(SPLIT_SPEC, sequence={"items", "tags"})
        if rank:  # whose tags happen to be as many
            batch |= {"num_tags": batch["count"], "tags": batch["items"]}
    cost: Any = (lambda one: one["count"]) if what == "cost" else HSTU
    loop([batch], cost=cost, spec=spec, split=SplitOptions())


def padded(widths: Iterable[int]) -> Iterator[dict[str, torch.Tensor]]:
    for width in widths:
        yield {"id": ids(*range(4)), "rows": torch.zeros(4, width, dtype=torch.int64)}


def of_a_class_of_its_own(_: int) -> None:
    class Pair(NamedTuple):
        id: torch.Tensor

    loop([Pair(ids(1))], cost=lambda pair: pair.id)


class Mistake(NamedTuple):
    """What each rank runs; what is raised, with which text, and by whom; the others' loops end with it."""

    program: Callable[[int], None]
    error: type[Exception]
    text: str
    ranks: tuple[int, ...] = (0, 1)


MISTAKES = {
    "out of turn": Mistake(out_of_turn, ProgramOrderError, "rank 1 redistributes a batch out of turn: "),
    "other loaders": Mistake(
        lambda rank: loop([{"id": ids(1)}] * 3, name=("train", "eval")[rank]),
        ProgramOrderError, "rank 1 begins the loader 'eval' while rank 0 begins 'train'",
    ),
    "interleaved": Mistake(interleaved, ProgramOrderError, "a newer loop over 'train' has begun"),
    "by hand beside an iterator": Mistake(
        by_hand_beside_an_iterator, ProgramOrderError, "a newer loop over 'train' has begun"
    ),
    "other fields under one name": Mistake(
        other_batches_under_one_name, SchemaMismatchError,
        "values: int64[], jagged by count; give loaders of different batches different names (BalancedLoader(name=…))",
    ),
    "rows of other widths in a window": Mistake(
        lambda rank: loop(padded((3, 5)), window=2),
        ValueError, "another has rows: int64[5], 1 rows per sample; use window=1, or pad them alike",
    ),
    "padding that is not declared": Mistake(
        lambda rank: loop(padded([(9, 2)[rank]])), SchemaMismatchError, "declare it in BatchSpec.padded",
    ),
    "not submitted": Mistake(not_submitted, ValueError, "batch sizes disagree", ranks=(0,)),
    "users that are none": Mistake(
        lambda rank: loop([{"id": ids(1, 2)}], users=lambda batch: batch["id"] * (0.5 if rank else 1)),
        ValueError, "users returned float64 values; return whole numbers", ranks=(1,),
    ),
    "a cost that writes": Mistake(
        lambda _: loop([{"id": ids(1, 2)}], cost=writes_to_the_batch),
        ValueError, "the cost function writes to 'id'",
    ),
    "a batch that is None": Mistake(lambda _: loop([None, ids(1)]), BatchError, "the batch is None"),
    "a class that only its function knows": Mistake(
        of_a_class_of_its_own, BatchError, "of a class that other ranks cannot make"
    ),
    "speeds of a smaller world": Mistake(
        lambda _: loop([ids(1)], speeds=[1.0]), ValueError, "speeds has 1 entries for 2 ranks; give one for each rank"
    ),
    "caps of a larger world": Mistake(
        lambda _: loop([ids(1)], memory_caps=[1.0] * 3), ValueError, "memory_caps has 3 entries for 2 ranks"
    ),
    "a cost without positions": Mistake(
        lambda rank: splits(rank, "cost"), ValueError, "does not say what positions cost"
    ),
    "no sequence": Mistake(lambda rank: splits(rank, "sequence"), ValueError, "no field is declared as the sequence"),
    "sequences of other lengths": Mistake(
        lambda rank: splits(rank, "lengths"), ValueError, "both of which sequence declares", ranks=(0,)
    ),
    "closed within": Mistake(closes_within, RuntimeError, "the balancer was closed while a loop over 'train' went on"),
}  # fmt: skip


def make(rank: int, name: str) -> None:
    """In a rank: one mistake."""
    MISTAKES[name].program(rank)


def test_mistakes_are_named_with_their_remedy() -> None:
    by_job = run_in_turn(2, *((make, name) for name in MISTAKES), (other_batches_under_one_name, "eval"), check=False)
    assert by_job.pop() == [None, None], "under a name of its own"
    for (name, mistake), outcomes in zip(MISTAKES.items(), by_job, strict=True):
        for rank, outcome in enumerate(outcomes):
            if rank not in mistake.ranks:
                assert outcome is None, (name, outcome)
                continue
            assert isinstance(outcome, mistake.error), (name, outcome)
            assert mistake.text in str(outcome), name
        texts = {re.sub("0x[0-9a-f]+", "", str(outcome)) for outcome in outcomes}  # addresses of functions
        assert len(texts) == 1 or len(mistake.ranks) == 1, name


@pytest.mark.parametrize("program", [begins_alone, goes_on_alone])
def test_a_loop_that_one_rank_alone_begins_is_named(program: Callable[[int], None]) -> None:
    told = run_ranks(2, program, check=False)
    for error in told if program is begins_alone else told[1:]:
        lines = "".join(traceback.format_exception(error))
        assert "did not begin this loop within BalanceOptions.group_timeout" in lines
    assert program is begins_alone or told[0] is None


def without_a_service(_: int) -> None:
    options = BalanceOptions(require_service=True, group_timeout=timedelta(seconds=6))
    loop([ids(1)], "127.0.0.1:9", options=options)


def test_a_service_that_is_required_and_not_there_is_an_error_on_all_ranks_in_time() -> None:
    errors = run_ranks(2, without_a_service, check=False)
    assert [type(error) for error in errors] == [ServiceRequiredError] * 2, errors
    assert "127.0.0.1:9 does not serve" in str(errors[1])


def of_peers(rank: int, what: str) -> None:
    """Pairs of ranks that should train the same batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, peers = mesh["dp"].get_local_rank(), mesh["tp"]
    batches = [make_batch(dp, step, 4) for step in range(3)]
    if what == "values" and rank == 3:
        batches[0]["id"] = batches[0]["id"] + 1
    if what == "grid":
        peers = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        mesh = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "tp"))
    with Balancer.embedded(process_group=mesh["dp"], peers=peers) as balancer:
        list(BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC))


OF_PEERS: dict[str, tuple[type[Exception], str]] = {
    "values": (PeersDifferError, "in round 0 rank 3 has other samples than rank 2"),
    "grid": (ValueError, "do not fit those of others"),
}


def test_peers_that_differ_are_the_same_error_on_all_ranks() -> None:
    by_job = run_in_turn(4, *((of_peers, what) for what in OF_PEERS), check=False)
    for (error, words), each in zip(OF_PEERS.values(), by_job, strict=True):
        for raised in each:
            assert isinstance(raised, error)
            assert words in str(raised)
