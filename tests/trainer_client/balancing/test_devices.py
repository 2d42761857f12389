"""Batches that are on a device already, and programs that have chosen a default device of their own."""

from typing import Any

import pytest
import torch
from torchrec import JaggedTensor, KeyedJaggedTensor

from benchmarks.harness.balancer_process import ServiceProcess
from tests.trainer_client.balancing.batches.helpers import OnDevice
from tests.trainer_client.balancing.jobs import SPEC, balancer_of, check_served, cost_of, make_batch, run_in_turn
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing import source as incoming
from trainer_client.balancing.batches import Arriving, BatchError, BatchSpec, flatten, is_on_device
from trainer_client.balancing.costs import TokenCost


def some_batch() -> dict[str, Any]:
    lengths = torch.tensor([2, 0, 3, 1, 1, 1], dtype=torch.int32)
    return {
        "keyed": KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(8), lengths=lengths),
        "jagged": JaggedTensor(values=torch.rand(4), lengths=torch.tensor([4, 0, 0])),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(1), torch.ones(5)], layout=torch.jagged),
        "count": torch.tensor([1, 0, 2]),
        "flat": torch.arange(3) * 10,
        "label": torch.rand(3),
    }


def test_numbers_of_a_batch_arrive_as_they_are_read_on_the_host() -> None:
    spec = BatchSpec(rows_per_sample={"flat": "count"})
    for _ in range(2):  # by its declarations, and recalled
        batch = some_batch()
        flat, (cost,) = Arriving(batch, spec, [torch.tensor([0.5, 1, 2], dtype=torch.bfloat16)]).get()
        expected = flatten(batch, spec)
        assert flat.schema == expected.schema
        assert flat.lengths.tolist() == expected.lengths.tolist()
        assert flat.lengths_of("count").tolist() == [1, 0, 2]
        assert cost.tolist() == [0.5, 1, 2]
        assert flatten(flat, spec) is flat
    wrong = {**some_batch(), "count": torch.tensor([1, 0, 1])}
    with pytest.raises(BatchError, match="'flat' holds 3 values, but its lengths add up to 2"):
        Arriving(wrong, spec).get()
    assert not is_on_device(batch, spec)
    assert is_on_device({"x": JaggedTensor(torch.arange(3), lengths=torch.ones(3).long().as_subclass(OnDevice))}, None)


def test_a_cost_that_needs_the_host_is_told_so_and_others_are_given_what_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(incoming, "is_on_device", lambda *_: True)

    def on_the_host(batch: Any) -> Any:
        if isinstance(batch, dict):
            raise BatchError("'count' is on cuda:0")
        return batch.lengths_of("count")

    def on_the_host_only(batch: Any) -> Any:
        return on_the_host(batch) if isinstance(batch, dict) else batch["count"]

    batches = [make_batch(0, step, 3) for step in range(4)]
    with Balancer.embedded() as balancer:
        loader = BalancedLoader(batches, balancer, cost=cost_of, memory=on_the_host, spec=SPEC)
        assert [batch["id"].tolist() for batch in loader] == [batch["id"].tolist() for batch in batches]
        loader = BalancedLoader(batches, balancer, cost=on_the_host_only, spec=SPEC)
        with pytest.raises(BatchError, match="'count' is on cuda:0; compute it with torch on the device"):
            list(loader)


def train(rank: int, address: str | None, arriving: bool, default: str | None) -> Any:
    if default is not None:
        torch.set_default_device(default)
    incoming.is_on_device = (lambda *_: True) if arriving else is_on_device
    with torch.device("cpu"):
        batches = [make_batch(rank, step, 4 + rank) for step in range(4 + rank)]
    with balancer_of(address, f"devices-{default}", window=2) as balancer:
        loader = BalancedLoader(batches, balancer, cost=TokenCost(tokens="count"), spec=SPEC)
        ids = [batch["id"].tolist() for batch in loader]
        check_served(loader, address)
    return ids


def test_batches_that_arrive_and_a_default_device_of_the_program_change_nothing(balancer: ServiceProcess) -> None:
    """Whatever the library makes without saying where would be on a device that has no memory."""
    ways = ((None, False, None), (None, True, None), (balancer.address, False, "meta"))
    plain, *others = run_in_turn(2, *((train, *way) for way in ways))
    assert others == [plain] * 2
