"""Batches are told apart by the values that their tensors begin with, whatever their layout."""

from __future__ import annotations

import pytest
import torch

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
