"""The example's model over batches that a loader splits, in ranks, and in one process over whole samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from examples.datasets import Keys, SequenceBatch, SyntheticSequences
from examples.hstu.attention import Attention, choose_kernel
from examples.hstu.model import ModelOptions, Ranker
from tests.trainer_client.balancing.redistribution.pool import group_of
from trainer_client.attention import PieceGroup
from trainer_client.balancing import BalancedLoader, BalanceOptions, Balancer, SplitOptions

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Short ones, and giants."""

    giants: float
    maximum: int = 120

    def draw(self, rng: np.random.Generator, count: int) -> Any:
        giant = rng.random(count) < self.giants
        return np.where(giant, rng.integers(60, self.maximum + 1, count), rng.integers(1, 24, count))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all ranks train."""

    world_size: int
    seed: int
    attention: Attention = "softmax"
    candidates: int = 1
    samples: int = 3
    steps: int = 4
    giants: float = 0.3
    window: int = 1
    causal_kernel: bool = False  # the fused one of causal attention, in plain PyTorch
    parallel: bool = False
    again: bool = False
    cap: float | None = None

    @property
    def options(self) -> ModelOptions:
        kernel = choose_kernel("auto", CPU, self.candidates, attention=self.attention)
        return ModelOptions(
            num_layers=2, width=8, num_heads=2, head_dim=4, embedding_dim=6, num_items=50, num_context_values=1024,
            max_tokens=128, kernel=kernel,
        )  # fmt: skip

    def model(self) -> Ranker:
        torch.manual_seed(self.seed)
        return Ranker(self.options).double()

    def batches(self, rank: int) -> Iterator[SequenceBatch]:
        steps = self.steps + rank % 2  # some have one more batch than others
        return iter(
            SyntheticSequences(
                num_batches=steps, batch_size=self.samples, lengths=Lengths(giants=self.giants), seed=self.seed,
                rank=rank, num_candidates=self.candidates, items=Keys(count=50, exponent=1.05),
            )
        )  # fmt: skip

    def balancing(self) -> BalanceOptions:
        caps = [self.cap] * self.world_size if self.cap is not None else None
        return BalanceOptions(split=SplitOptions(above=0.02), window=self.window, memory_caps=caps)


def loss_of(logits: Tensor, batch: SequenceBatch) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, batch.labels.double(), reduction="sum")


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def train_whole(case: Case) -> tuple[dict[int, float], list[Tensor]]:
    """Loss of each sample, and the gradient of their sum."""
    model, losses = case.model(), {}
    for rank in range(case.world_size):
        for batch in case.batches(rank):
            logits = model(batch)
            loss_of(logits, batch).backward()
            losses |= _by_sample(logits, batch)
    return losses, gradients(model)


_pieces: dict[int, PieceGroup] = {}


def train_split(case: Case) -> dict[str, Any]:
    """The same in a rank, of what it trains."""
    group = group_of(case.world_size)
    if case.world_size not in _pieces:
        _pieces[case.world_size] = PieceGroup(group)
    model = case.model()
    run: Any = model
    if case.parallel:
        run = DistributedDataParallel(model, process_group=group)
    losses: dict[int, float] = {}
    seen: dict[str, Any] = {"splits": [], "modes": [], "sequences": []}
    with Balancer.embedded(options=case.balancing(), process_group=group) as balancer:
        loader = BalancedLoader(
            list(case.batches(dist.get_rank(group))), balancer, cost=case.options.cost(),
            memory=case.options.tokens(), spec=SequenceBatch.spec(), name=f"{case}",
        )  # fmt: skip
        for batch in loader:
            pieces = _pieces[case.world_size].pieces(loader.splits, contextual=False)
            for layer in model.layers if case.causal_kernel else ():  # of whole samples PyTorch's needs a GPU
                layer._kernel = "dense" if pieces is None else "varlen"
            logits = checkpoint(run, batch, pieces, use_reentrant=False) if case.again else run(batch, pieces)
            scale = 1 if run is model else case.world_size  # DDP averages
            (loss_of(logits, batch) * scale).backward()
            losses |= _by_sample(logits, batch)
            seen["splits"].append(loader.splits)
            seen["modes"].append(loader.report.mode.value)
            seen["sequences"].append(batch.size)
    return seen | {"losses": losses, "gradients": gradients(model)}


def _by_sample(logits: Tensor, batch: SequenceBatch) -> dict[int, float]:
    """Of samples that have candidates here, which are the last parts of split ones."""
    owners = torch.repeat_interleave(batch.sample, batch.num_candidates)
    each = functional.binary_cross_entropy_with_logits(logits, batch.labels.double(), reduction="none")
    found: dict[int, float] = {}
    for sample, loss in zip(owners.tolist(), each.tolist(), strict=True):
        found[sample] = found.get(sample, 0.0) + loss
    return found
