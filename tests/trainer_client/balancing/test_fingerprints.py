"""Batches are told apart by the values that their tensors begin with, whatever their layout."""

from __future__ import annotations

import pytest
import torch

from tests.trainer_client.balancing.jobs import SPEC, cost_of, make_batch
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.batches import BatchError
from trainer_client.balancing.source import fingerprint

LAYOUTS = {
    "plain": torch.arange(6),
    "one value, expanded": torch.tensor(3).expand(1),
    "many values, expanded": torch.tensor([[3]]).expand(4, 5),
    "one number": torch.tensor(3.5),
    "transposed": torch.arange(6).reshape(2, 3).T,
    "sliced": torch.arange(12)[::3],
    "empty": torch.zeros(0, 4),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "booleans": torch.tensor([True, False]),
    "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
    "imaginary": torch.tensor([1 + 2j, 3j]).conj().imag,
    "wants a gradient": torch.ones(3, requires_grad=True),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_any_layout_has_a_fingerprint_of_its_values(layout: str) -> None:
    tensor = LAYOUTS[layout]
    same = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    assert fingerprint({"field": tensor}) == fingerprint({"field": same})
    if tensor.numel():
        assert fingerprint({"field": tensor}) != fingerprint({"field": torch.zeros_like(same)})


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_a_nested_tensor_without_sizes_leaves_the_refusal_to_who_reads_the_batch() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)])
    assert fingerprint({"id": torch.ones(2), "v": nested}) == fingerprint({"id": torch.ones(2)})
    with Balancer.embedded() as balancer:
        loader = BalancedLoader([{**make_batch(0, 0, 2), "v": nested}], balancer, cost=cost_of, spec=SPEC)
        with pytest.raises(BatchError, match=r"'v' is a nested tensor of layout torch.strided.*layout=torch.jagged"):
            list(loader)
