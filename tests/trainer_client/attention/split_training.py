"""The example's model over batches that a loader splits, in ranks, and in one process over whole samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from evenkeel.partitioning.splits import SplitSample
from examples.datasets import Keys, SequenceBatch, SyntheticSequences
from examples.hstu.attention import Attention, choose_kernel
from examples.hstu.model import ModelOptions, Ranker
from tests.trainer_client.balancing.redistribution.pool import group_of
from trainer_client.attention import PieceGroup
from trainer_client.balancing import BalancedLoader, BalanceOptions, Balancer, SplitOptions
from trainer_client.balancing.pipelines import BalancedBatch, balanced_batches

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
    sharded: bool = False  # by FSDP2
    again: bool = False
    cap: float | None = None
    loop: str = "loader"
    node: int = 8  # ranks of a host
    prices: tuple[float, float] = (0.0, 0.0)  # of a position within a node and between two

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
        split = SplitOptions(above=0.02, within=self.prices[0], between=self.prices[1])
        return BalanceOptions(split=split, window=self.window, memory_caps=caps)


def loss_of(logits: Tensor, batch: SequenceBatch) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, batch.labels.double(), reduction="sum")


def gradients(model: torch.nn.Module) -> list[Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


def train_whole(case: Case) -> tuple[dict[int, float], list[Tensor]]:
    """Loss of each sample, and the gradient of their sum."""
    model, losses = case.model(), {}
    for rank in range(case.world_size):
        for batch in case.batches(rank):
            logits = model(batch)
            loss_of(logits, batch).backward()
            losses |= _by_sample(logits, batch)
    return losses, gradients(model)


_pieces: dict[tuple[int, int], PieceGroup] = {}


def train_split(case: Case) -> dict[str, Any]:
    """The same in a rank, of what it trains."""
    group = group_of(case.world_size)
    with mock.patch.dict(os.environ, EVENKEEL_NODE=f"host {dist.get_rank(group) // case.node}"):
        return _train_split(case, group)


def _train_split(case: Case, group: dist.ProcessGroup | None) -> dict[str, Any]:
    where = case.world_size, case.node
    if where not in _pieces:
        _pieces[where] = PieceGroup(group)
    model = case.model()
    run: Any = model
    if case.parallel:
        run = DistributedDataParallel(model, process_group=group)
    if case.sharded:
        assert group is not None
        mesh = DeviceMesh.from_group(group, "cpu")
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
    averaged = case.world_size if case.parallel or case.sharded else 1  # so many times, for a sum over ranks
    losses: dict[int, float] = {}
    seen: dict[str, Any] = {"splits": [], "scales": [], "sequences": []}

    def forward(batch: SequenceBatch, splits: tuple[SplitSample, ...], scale: float) -> Tensor:
        pieces = _pieces[where].pieces(splits, contextual=False)
        for layer in model.layers if case.causal_kernel else ():  # of whole samples PyTorch's needs a GPU
            layer._kernel = "dense" if pieces is None else "varlen"
        logits = checkpoint(run, batch, pieces, use_reentrant=False) if case.again else run(batch, pieces)
        losses.update(_by_sample(logits, batch))
        seen["splits"].append(splits)
        seen["scales"].append(scale)
        seen["sequences"].append(batch.size)
        return loss_of(logits, batch) * averaged

    with Balancer.embedded(options=case.balancing(), process_group=group) as balancer:
        batches = list(case.batches(dist.get_rank(group)))
        if case.loop == "torchrec":
            _by_pipeline(_loader(case, batches, balancer), Step(model, forward))
        else:
            for step in _by_loader(case, batches, balancer):
                forward(*step).backward()
    return seen | {"losses": losses, "gradients": gradients(model)}


Told = tuple[SequenceBatch, tuple[SplitSample, ...], float]


class Step(torch.nn.Module):
    """A model as TorchRec's pipelines call it: from a batch to its loss, and whatever else."""

    def __init__(self, model: torch.nn.Module, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self._run = model, run

    def forward(self, balanced: BalancedBatch[SequenceBatch]) -> tuple[Tensor, Tensor]:
        loss = self._run(balanced.batch, balanced.splits, balanced.loss_scale)
        return loss, loss.detach()


class Summing(torch.optim.SGD):
    """Leaves the parameters as they are, and their gradients to add up."""

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def _by_pipeline(loader: BalancedLoader[SequenceBatch], step: Step) -> None:
    from torchrec.distributed.train_pipeline import TrainPipelineBase  # takes seconds

    pipeline = TrainPipelineBase(step, Summing(step.parameters(), lr=0.0), CPU)
    batches = iter(balanced_batches(loader))
    with contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(batches)


def _loader(case: Case, batches: list[SequenceBatch], balancer: Balancer) -> BalancedLoader[SequenceBatch]:
    return BalancedLoader(
        batches, balancer, cost=case.options.cost(), memory=case.options.tokens(), spec=SequenceBatch.spec(),
        name=f"{case}",
    )  # fmt: skip


def _by_loader(case: Case, batches: list[SequenceBatch], balancer: Balancer) -> Iterator[Told]:
    loader = _loader(case, batches, balancer)
    for batch in loader:
        yield batch, loader.splits, loader.loss_scale


def _by_sample(logits: Tensor, batch: SequenceBatch) -> dict[int, float]:
    """Of samples that have candidates here, which are the last parts of split ones."""
    owners = torch.repeat_interleave(batch.sample, batch.num_candidates)
    each = functional.binary_cross_entropy_with_logits(logits, batch.labels.double(), reduction="none")
    found: dict[int, float] = {}
    for sample, loss in zip(owners.tolist(), each.tolist(), strict=True):
        found[sample] = found.get(sample, 0.0) + loss
    return found
