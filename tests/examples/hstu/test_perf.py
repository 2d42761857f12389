import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from examples.hstu.flops import AttentionWork, ProductWork

HEADS, DIM = 2, 8


@pytest.mark.parametrize("length", [1, 64, 257])
def test_work_agrees_with_torch_counting(length: int) -> None:
    """PyTorch counts all pairs of the two products; causal attention needs (length + 1) / (2 length) of them."""
    query = torch.randn(1, HEADS, length, DIM)
    with FlopCounterMode(display=False) as counter:
        scores = torch.matmul(query, query.transpose(2, 3))
        torch.matmul(scores.softmax(-1), query)
    work = AttentionWork(num_heads=HEADS, head_dim=DIM).flops({"offsets": torch.tensor([0, length])})
    assert float(work[0]) == pytest.approx(counter.get_total_flops() * (length + 1) / (2 * length))
    inputs = torch.randn(length, 5)
    layer = nn.Linear(5, 3, bias=False)
    with FlopCounterMode(display=False) as counter:
        layer(inputs.requires_grad_()).sum().backward()
    products = ProductWork(weights=15, rows="input").flops({"input": inputs})
    assert float(products.sum()) == counter.get_total_flops()
