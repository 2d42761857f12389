"""Under FSDP2 the gradients of balanced batches are those of the batches as loaded, and of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.harness.ranks import run_ranks
from examples.datasets import Keys, LogNormalLengths, SequenceBatch, SyntheticSequences
from trainer_client.balancing import BalancedLoader, Balancer
from trainer_client.balancing.costs import TokenCost

WORLD, STEPS, ROWS, DIM = 2, 5, 50, 6
ROUNDING = 2.0**-53


def _batches(rank: int) -> list[SequenceBatch]:
    lengths = LogNormalLengths(mean=12, maximum=60)
    number = STEPS - rank  # rank 1 ends a step earlier
    data = SyntheticSequences(num_batches=number, batch_size=5, lengths=lengths, items=Keys(count=ROWS), rank=rank)
    return list(data)


class Model(nn.Module):
    """A table and two layers, in float64, so that only the order of summation tells two runs apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, DIM, dtype=torch.float64)
        self.layers = nn.Sequential(nn.Linear(DIM, 16), nn.Tanh(), nn.Linear(16, 1)).double()

    def forward(self, batch: SequenceBatch) -> torch.Tensor:
        """The sum of the samples' losses."""
        owners = torch.repeat_interleave(torch.arange(batch.size), batch.num_history.long())
        pooled = torch.zeros(batch.size, DIM, dtype=torch.float64).index_add(0, owners, self.table(batch.history))
        logits = self.layers(pooled).squeeze(-1)
        return functional.binary_cross_entropy_with_logits(logits, batch.labels.double(), reduction="sum")


def _gradients(rank: int, balancer: Balancer) -> tuple[list[torch.Tensor], float]:
    """The whole gradient of each step, and the largest share of samples that moved."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in (model.layers[0], model.layers[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    cost = TokenCost(tokens="num_history")
    loader = BalancedLoader(_batches(rank), balancer, cost=cost, spec=SequenceBatch.spec())
    found, moved = [], 0
    for batch in loader:
        model.zero_grad()
        (model(batch) * loader.loss_scale).backward()
        found.append(torch.cat([p.grad.full_tensor().reshape(-1) for p in model.parameters()]))  # type: ignore[union-attr]
        moved += loader.report.moved_samples
    balancer.close()
    return found, moved


def _run(rank: int) -> dict[str, Any]:
    off, _ = _gradients(rank, Balancer.off())
    balanced, moved = _gradients(rank, Balancer.embedded())
    dist.barrier()
    return {"off": off, "balanced": balanced, "moved": moved}


def _alone() -> list[torch.Tensor]:
    """The gradients of the mean over each global batch, in one process."""
    model, found = Model(), []
    ranks = [_batches(rank) for rank in range(WORLD)]
    for step in range(STEPS):
        batches = [rank[step] for rank in ranks if step < len(rank)]
        model.zero_grad()
        (sum(model(batch) for batch in batches) / sum(batch.size for batch in batches)).backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))  # type: ignore[union-attr]
    return found


def test_gradients_do_not_depend_on_who_trains_what() -> None:
    expected = _alone()
    # Sums of some hundred terms of size one at most, each rounded a few times.
    bound = 2000 * ROUNDING
    for rank in run_ranks(WORLD, _run):
        assert rank["moved"] > 0
        for name in ("off", "balanced"):
            assert len(rank[name]) == STEPS
            for found, wanted in zip(rank[name], expected, strict=True):
                assert float((found - wanted).abs().max()) <= bound * max(1.0, float(wanted.abs().max()))
