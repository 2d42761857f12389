"""Who balances with whom, and who trains the same; what happens to them: `test_programs`."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness.ranks import run_ranks
from trainer_client import Balancer
from trainer_client.balancing.groups import read_membership


def mesh_of(*sizes: int, names: str = "dp tp") -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names.split()))


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
