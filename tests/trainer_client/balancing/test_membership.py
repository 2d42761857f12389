"""Ranks of two nodes, each with one stream, in a real job against a real balancer."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import grpc
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader
from trainer_client.balancing.service import frames

from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.ranks import run_ranks
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol import balancer_pb2_grpc as pb_grpc
from tests.trainer_client.balancing.test_forked_workers import SAMPLES, Samples
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing import membership
from trainer_client.balancing.groups import Groups

OPTIONS = BalanceOptions(timeout=timedelta(seconds=10), node_leader=True)


def iterate(rank: int, address: str) -> dict[str, Any]:
    """Torchrun's variables, forked workers, and a second epoch that forks while the node's threads run."""
    os.environ.update(EVENKEEL_NODE=f"node{rank // 2}", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    data: DataLoader[Any] = DataLoader(
        Samples(rank), batch_size=16, num_workers=1, multiprocessing_context="fork", timeout=60
    )
    modes, epochs, streams = [], [], 0
    with Balancer.connect(address, job="two-nodes", options=OPTIONS) as balancer:
        loader = BalancedLoader(data, balancer, cost=lambda ids: ids % 7)
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1] += batch.tolist()
                modes.append(loader.report.mode.value)
            if rank == 0:
                with grpc.insecure_channel(address) as channel:
                    stub = pb_grpc.BalancerServiceStub(channel)  # type: ignore[no-untyped-call]
                    streams = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30).streams
            dist.barrier()
    return {"modes": set(modes), "epochs": epochs, "streams": streams}


@pytest.mark.timeout(240)
def test_two_nodes_of_two_ranks_have_two_streams() -> None:
    with running_balancer() as balancer:
        results = run_ranks(4, iterate, balancer.address)
    assert results[0]["streams"] == 2
    for result in results:
        assert result["modes"] == {"service"}
    for epoch in range(2):
        samples = sorted(sample for result in results for sample in result["epochs"][epoch])
        assert samples == list(range(4 * SAMPLES))


def seat(rank: int, wanted: Any, where: tuple[str, ...], lonely: int) -> Any:
    """The seat that a rank takes; `lonely` cannot reach anybody."""
    os.environ["EVENKEEL_NODE"] = where[rank]
    if rank == lonely:
        frames.connect = _unreachable  # type: ignore[assignment]
    groups = Groups.create(None, timedelta(seconds=60))
    taken = membership.take_seat(groups, BalanceOptions(node_leader=wanted))
    if taken is None:
        return None
    assert taken.rank == rank
    assert (taken.listener is not None) == taken.leads
    return taken.ranks


def _unreachable(_address: bytes, _seconds: float) -> Any:
    raise ConnectionRefusedError("nobody there")


@pytest.mark.parametrize(
    ("wanted", "where", "lonely", "expected"),
    [
        (True, ("a", "b", "a"), -1, [(0, 2), None, (0, 2)]),
        (False, ("a", "a", "a"), -1, [None, None, None]),
        ("auto", ("a", "a", "a"), -1, [None, None, None]),  # too few ranks to be worth it
    ],
)
def test_seats(wanted: Any, where: tuple[str, ...], lonely: int, expected: list[Any]) -> None:
    assert run_ranks(3, seat, wanted, where, lonely) == expected


def test_a_node_that_cannot_meet_has_a_stream_for_each_rank() -> None:
    assert run_ranks(3, seat_from_two_ranks_on, ("a", "a", "b"), 1) == [None, None, None]
    errors = run_ranks(3, seat, True, ("a", "a", "b"), 1, check=False)
    assert all("rank 1 and the leader of its node cannot meet: nobody there" in str(error) for error in errors)


def seat_from_two_ranks_on(rank: int, where: tuple[str, ...], lonely: int) -> Any:
    membership.AUTO_RANKS = 2
    return seat(rank, "auto", where, lonely)


def test_options_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"node_leader is 'yes'; use 'auto', True or False"):
        BalanceOptions(node_leader="yes")  # type: ignore[arg-type]
