"""Ranks that train the same batches: whatever happens to whom, they take the same steps with the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, cost_of, make_batch
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing.groups import read_membership


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


def groups_and_caps(rank: int) -> list[Any]:
    """Groups in place of a mesh, and caps that cannot be met; and the communicators that were used."""
    mesh = mesh_of(2, 2)
    dp = mesh["dp"].get_local_rank()
    batches = [make_batch(dp, step, 5 + dp) for step in range(3 + 2 * dp)]
    balancers = (
        Balancer.embedded(process_group=mesh.get_group("dp"), peers=mesh.get_group("tp")),
        Balancer.embedded(process_group=mesh["dp"], options=BalanceOptions(memory_caps=[1.0, 1.0])),
    )
    found, pairs = [], []
    for balancer in balancers:
        with balancer:
            found.append(steps_of(BalancedLoader(batches, balancer, cost=cost_of, spec=SPEC)))
            pairs.append(id(balancer.stream()._rounds.communicators.up))  # type: ignore[union-attr]
    return [*found, pairs]


def test_peers_agree_by_groups_too_and_where_nothing_can_be_planned() -> None:
    """In every other mode, `test_programs` says."""
    results = run_ranks(4, groups_and_caps)
    loaded = [ids_of(step, (5 if step < 3 else 0, 6)) for step in range(5)]
    groups, caps = ([result[way] for result in results] for way in range(2))
    check(groups, loaded)
    check(caps, loaded)
    assert {step[:2] for step in groups[0]} == {("embedded", "no_service")}
    assert ("identity", "partition_failed") in {step[:2] for step in caps[0]}
    assert all(len(set(result[-1])) == 1 for result in results)  # balancers after each other share their communicators


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
