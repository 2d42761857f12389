from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from examples.hstu.flops import AttentionWork, ProductWork, peak_tflops
from examples.hstu.perf import PerfTracker
from trainer_client.balancing.costs import HSTUCost

HEADS, DIM = 2, 8


class Attention(nn.Module):
    """Attention whose offsets come last, after an argument that looks like them."""

    def forward(self, query: torch.Tensor, *, unrelated: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        parts = torch.split(query, torch.diff(offsets).tolist())
        heads = [part.transpose(0, 1).unsqueeze(0) for part in parts]
        mixed = [functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(0) for x in heads]
        return torch.cat([x.transpose(0, 1) for x in mixed])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        state = self.dense(tokens).view(-1, HEADS, DIM)
        for layer in self.layers:
            state = state + layer(state, unrelated=offsets + 1, offsets=offsets)
        return state


def _step(model: nn.Module, offsets: torch.Tensor) -> None:
    tokens = torch.randn(int(offsets[-1]), HEADS * DIM, requires_grad=True)
    model(tokens, offsets).square().mean().backward()


WORKS: dict[str, Any] = {
    "layers.*": AttentionWork(num_heads=HEADS, head_dim=DIM),
    "dense": ProductWork(weights=(HEADS * DIM) ** 2, rows="input"),
}


def test_each_module_gets_its_time_and_work() -> None:
    model = Model()
    tracker = PerfTracker(model, WORKS, device="cpu", peak=2.0)
    for _ in range(3):
        _step(model, torch.tensor([0, 3, 3, 10]))
        tracker.step()
    found = tracker.finished()
    assert [(perf.step, perf.module) for perf in found] == [
        (step, module) for step in range(3) for module in ("dense", "layers.0", "layers.1")
    ]
    for perf in found:
        assert perf.forward_ms > 0
        assert perf.backward_ms > 0
        assert perf.tflops == pytest.approx(perf.flops / (perf.forward_ms + perf.backward_ms) / 1e9)
        assert perf.mfu == pytest.approx(perf.tflops / 2.0)
    pairs = 3 * 4 / 2 + 7 * 8 / 2
    assert {perf.flops for perf in found if perf.module != "dense"} == {3.5 * 4 * HEADS * DIM * pairs}
    assert tracker.finished() == []


def test_inference_counts_the_forward_pass_alone() -> None:
    model = Model()
    tracker = PerfTracker(model, WORKS, device="cpu")
    with torch.no_grad():
        model(torch.randn(4, HEADS * DIM), torch.tensor([0, 4]))
    tracker.step()
    for perf in tracker.finished():
        assert perf.backward_ms == 0
        assert perf.mfu is None
    tracker.close()
    _step(model, torch.tensor([0, 4]))
    tracker.step()
    assert tracker.finished() == []


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


def test_work_of_a_layer_agrees_with_the_cost_of_its_samples() -> None:
    offsets, candidates = torch.tensor([0, 9, 9, 40]), torch.tensor([2, 0, 5])
    cost = HSTUCost(num_layers=1, width=16, num_heads=HEADS, head_dim=DIM, history="h", candidates="c")
    work = AttentionWork(num_heads=HEADS, head_dim=DIM, weights=5 * 16 * HEADS * DIM, candidates="candidates")
    lengths = torch.diff(offsets)
    wanted = cost.flops((lengths - candidates).double().numpy(), candidates.double().numpy()).sum()
    assert float(work.flops({"offsets": offsets, "candidates": candidates}).sum()) == pytest.approx(wanted)


def test_wrong_names_are_told() -> None:
    with pytest.raises(ValueError, match=r"no module is named 'attention\*'; the model has dense, layers"):
        PerfTracker(Model(), {"attention*": WORKS["dense"]}, device="cpu")
    model = Model()
    tracker = PerfTracker(model, {"layers.0": AttentionWork(num_heads=1, head_dim=1, offsets="starts")}, device="cpu")
    message = r"module 'layers\.0': called without a tensor 'starts'; its arguments are query, unrelated, offsets"
    with pytest.raises(ValueError, match=message):
        _step(model, torch.tensor([0, 2]))
    tracker.close()
    model.dense = torch.compile(model.dense)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"module 'dense' is a result of torch\.compile"):
        PerfTracker(model, {"dense": WORKS["dense"]}, device="cpu")
    with pytest.raises(ValueError, match="AttentionWork: head_dim is 0; give a whole number >= 1"):
        AttentionWork(num_heads=1, head_dim=0)


class Recomputed(nn.Module):
    """A wrapper of any arguments, as those of checkpointing are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


@pytest.mark.parametrize("pattern", ["layers.?", "layers.?.inner"])
def test_recomputed_activations_are_part_of_the_backward_pass(pattern: str) -> None:
    model, offsets = Model(), torch.tensor([0, 3, 10])
    plain = PerfTracker(model, {"layers.?": WORKS["layers.*"]}, device="cpu")
    _step(model, offsets)
    plain.step()
    plain.close()
    model.layers = nn.ModuleList(Recomputed(layer) for layer in model.layers)
    tracker = PerfTracker(model, {pattern: WORKS["layers.*"]}, device="cpu")
    _step(model, offsets)
    tracker.step()
    found = tracker.finished()
    assert [perf.flops for perf in found] == [perf.flops for perf in plain.finished()]
    assert all(perf.backward_ms > 0 for perf in found)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989.0), ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0),
     ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA GB200", 2500.0),
     ("NVIDIA B200", 2250.0), ("NVIDIA L40S", 362.0), ("NVIDIA A10G", 125.0),
     ("NVIDIA A10", 125.0), ("NVIDIA GeForce RTX 4090", None), ("NVIDIA H20", 148.0)],
)  # fmt: skip
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_tflops("cpu") is None
    assert peak_tflops(torch.device("cpu")) is None
