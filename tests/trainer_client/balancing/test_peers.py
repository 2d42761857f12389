"""Ranks that train the same batches: whatever happens to whom, they take the same steps with the same samples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.proxy import TcpProxy
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, connect, cost_of, make_batch, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing import PeersDifferError, SchemaMismatchError
from trainer_client.balancing.groups import read_membership

PATIENT = timedelta(seconds=20)
STEPS = 24


def mesh_of(*sizes: int, names: str = "dp tp") -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names.split()))


def steps_of(loader: BalancedLoader[Any]) -> list[Any]:
    steps = []
    for batch in loader:
        assert batch["values"].tolist() == batch["id"].repeat_interleave(batch["count"]).tolist()
        report = loader.report
        steps.append((report.mode.value, report.reason.value, batch["id"].tolist(), loader.loss_scale))
    return steps


def check(results: list[list[Any]], loaded: list[list[int]]) -> None:
    """Peers 0, 1 and 2, 3 took equal steps, and each step trained what was loaded for it, once for each of them."""
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert len(results[0]) == len(results[2]) == len(loaded)
    for first, second, ids in zip(results[0], results[2], loaded, strict=True):
        assert first[:2] == second[:2]
        assert sorted(first[2] + second[2]) == sorted(ids)


def ids_of(step: int, sizes: tuple[int, int] = (6, 6)) -> list[int]:
    return [sample for dp, size in enumerate(sizes) for sample in make_batch(dp, step, size)["id"].tolist()]


def lose_the_service(rank: int, address: str) -> Any:
    """The lead's way to the service ends in the middle and comes back later."""
    mesh = mesh_of(2, 2)
    options = BalanceOptions(timeout=timedelta(seconds=1))
    with TcpProxy(int(address.rpartition(":")[2])) as proxy:

        def batches() -> Iterator[Any]:
            for step in range(STEPS):
                proxy.swallow = 6 <= step < 10
                time.sleep(0.05 if step >= 10 else 0)  # time to come back
                yield make_batch(mesh["dp"].get_local_rank(), step, 6)

        with connect(proxy.address, job="loss", process_group=mesh["dp"], options=options) as balancer:
            loader = BalancedLoader(batches(), balancer, cost=cost_of, spec=SPEC)
            steps = steps_of(loader)
        return steps, proxy.seen["swallowed"]


def test_peers_agree_when_the_lead_loses_the_service(balancer: ServiceProcess) -> None:
    results = run_ranks(4, lose_the_service, balancer.address)
    check([steps for steps, _ in results], [ids_of(step) for step in range(STEPS)])
    assert [swallowed > 0 for _, swallowed in results] == [True, False, False, False], "the lead alone asks"
    outcomes = [step[:2] for step in results[0][0]]
    assert ("service", "none") in outcomes[:6]
    assert ("embedded", "no_answer") in outcomes[6:10]


def many_ways(rank: int, address: str) -> list[Any]:
    """Each mode, with data that ends unevenly, a bad cost, caps that cannot be met, windows, and groups for meshes."""
    mesh = mesh_of(2, 2)
    dp = mesh["dp"].get_local_rank()
    batches = [make_batch(dp, step, 5 + dp) for step in range(3 + 2 * dp)]

    def odd_cost(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        costs = cost_of(batch).double()
        return costs / 0 if dp == 1 and int(batch["id"][0]) % 1_000_000 < 1000 else costs

    patient = BalanceOptions(timeout=PATIENT)
    balancers = {
        "service": connect(address, job="ways", process_group=mesh["dp"], options=patient),
        "embedded": Balancer.embedded(process_group=mesh.get_group("dp"), peers=mesh.get_group("tp")),
        "off": Balancer.off(process_group=mesh["dp"], peers=mesh["tp"]),
        "caps": Balancer.embedded(process_group=mesh["dp"], options=BalanceOptions(memory_caps=[1.0, 1.0])),
        "window": Balancer.embedded(process_group=mesh["dp"], options=BalanceOptions(window=2)),
    }
    found, pairs = [], []
    for balancer in balancers.values():
        with balancer:
            found.append(steps_of(BalancedLoader(batches, balancer, cost=odd_cost, spec=SPEC)))
            pairs.append(id(balancer.stream()._opened.communicators.up))  # type: ignore[union-attr]
    return [*found, pairs]


def test_peers_agree_in_every_mode(balancer: ServiceProcess) -> None:
    results = run_ranks(4, many_ways, balancer.address)
    loaded = [ids_of(step, (5 if step < 3 else 0, 6)) for step in range(5)]
    service_mode, embedded, off, caps, window = ([result[way] for result in results] for way in range(5))
    for way in (service_mode, embedded, off, caps):
        check(way, loaded)
    assert [step[:2] for step in service_mode[0]] == [("identity", "invalid_costs"), *[("service", "none")] * 4]
    assert [step[:2] for step in embedded[0]] == [("identity", "invalid_costs"), *[("embedded", "no_service")] * 4]
    assert {step[:2] for step in off[0]} == {("identity", "no_service")}
    assert ("identity", "partition_failed") in {step[:2] for step in caps[0]}
    assert window[0] == window[1]
    assert window[2] == window[3]
    trained = [sample for rank in (0, 2) for step in window[rank] for sample in step[2]]
    assert sorted(trained) == sorted(sample for step in loaded for sample in step)
    assert all(len(set(result[-1])) == 1 for result in results)  # balancers after each other share their communicators


def mistaken(rank: int, what: str) -> None:
    mesh = mesh_of(2, 2)
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    batches = [make_batch(dp, step, 4) for step in range(3)]
    if what == "values" and rank == 3:
        batches[0]["id"] = batches[0]["id"] + 1
    if what == "lengths" and rank == 3:
        batches[1] = make_batch(7, 1, 4)
    if what in ("steps", "first") and rank == 1:
        del batches[0 if what == "first" else 2 :]
    if what == "schemas" and dp == 1:
        batches[1]["more"] = torch.zeros(4)
    peers = mesh["tp"]
    if what == "grid":
        peers = [dist.new_group([0, 1]), dist.new_group([2, 3])][0 if rank < 2 else 1]
        mesh = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "tp"))
    assert tp in (0, 1)
    with Balancer.embedded(process_group=mesh["dp"], peers=peers) as balancer:
        list(BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC))


MISTAKES: dict[str, tuple[type[Exception], str]] = {
    "values": (PeersDifferError, "in round 0 rank 3 has other samples than rank 2"),
    "lengths": (PeersDifferError, "in round 1 rank 3 has other samples than rank 2"),
    "steps": (PeersDifferError, "in round 2 rank 1 has no batch where rank 0 has one"),
    "first": (PeersDifferError, "in round 0 rank 1 has no batch where rank 0 has one"),
    "schemas": (SchemaMismatchError, "more"),
    "grid": (ValueError, "do not fit those of others"),
}


def test_mistakes_are_the_same_error_on_all_ranks() -> None:
    by_job = run_in_turn(4, *((mistaken, what) for what in MISTAKES), check=False)
    for (error, words), each in zip(MISTAKES.values(), by_job, strict=True):
        for raised in each:
            assert isinstance(raised, error)
            assert words in str(raised)


def memberships(rank: int) -> Any:
    cube = mesh_of(1, 2, 2, names="pp dp tp")
    square = mesh_of(2, 2)
    hybrid = mesh_of(2, 2, 1, names="replicate shard tp")
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ways: list[tuple[Any, Any]] = [
        (None, None),
        (cube["dp"], None),
        (square["tp"], None),
        (hybrid["replicate", "shard"], None),
        (square["dp"].get_group(), None),
        (groups[rank // 2], None),
        (square["dp"], square["tp"].get_group()),
        (mesh_of(4, names="dp"), None),
    ]
    found = []
    for process_group, peers in ways:
        membership = read_membership(process_group, peers)
        found.append((membership.ranks, membership.peers, membership.group_name))
    refused = []
    for process_group, peers in [
        (square, None),
        (groups[1 - rank // 2], None),
        ("dp", None),
        (square["dp"], square["dp"]),
        (None, square["tp"]),
    ]:
        with pytest.raises(ValueError, match=r"process_group|peers") as error:
            Balancer.embedded(process_group=process_group, peers=peers)
        refused.append(str(error.value))
    return found, refused


def test_a_mesh_says_who_balances_and_who_trains_the_same() -> None:
    results = run_ranks(4, memberships)
    assert results[3][0] == [
        ((0, 1, 2, 3), (3,), "default"),
        ((1, 3), (2, 3), "default"),
        ((2, 3), (1, 3), "default"),
        ((0, 1, 2, 3), (3,), "default"),
        ((1, 3), (3,), "from-rank-1"),
        ((2, 3), (3,), "from-rank-2"),
        ((1, 3), (2, 3), "default"),
        ((0, 1, 2, 3), (3,), "default"),
    ]
    ambiguous, foreign, text, overlapping, alone = results[0][1]
    assert "dimensions dp (2), tp (2); say which" in ambiguous
    assert "pass mesh['dp']" in ambiguous
    assert "pass a process group that this rank is in" in foreign
    assert "process_group is 'dp'" in text
    assert "[2] are in both" in overlapping
    assert "peers is given without process_group" in alone


def two_groups(rank: int, address: str) -> list[str]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    options = BalanceOptions(timeout=PATIENT)
    with connect(address, job="two-groups", process_group=groups[rank // 2], options=options) as balancer:
        dist.barrier()
        loader = BalancedLoader([make_batch(rank, step, 5) for step in range(4)], balancer, cost=cost_of, spec=SPEC)
        modes = [loader.report.mode.value for _ in loader]
        dist.barrier()  # both sessions at the same time
    return modes


def test_two_groups_of_a_job_need_no_names(balancer: ServiceProcess) -> None:
    assert run_ranks(4, two_groups, balancer.address) == [["service"] * 4] * 4
