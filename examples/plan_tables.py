"""From a model to a plan that runs: keys are followed, tables placed, and TorchRec shards them by the plan.

    torchrun --nproc-per-node 2 -m examples.plan_tables

Needs no GPU: on CPUs TorchRec has one memory only, so the plan says where rows would live, and the tables are sharded
as it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from evenkeel.placement import Optimizer, PlanRequest, Runtime, Step, Topology
from evenkeel.placement.plan_file import PlanFile, dumps
from trainer_client.planning import KeyStatistics, PlannerClient, describe_model, sharding_plan, with_statistics

SAMPLES, HISTORY = 64, 50
ROWS = {"user": 400_000, "item": 50_000}


def batches(rank: int, count: int) -> Iterator[KeyedJaggedTensor]:
    """A user and a history of items for each sample; few items are popular."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        users = torch.randint(ROWS["user"], (SAMPLES,), generator=generator)
        items = (ROWS["item"] * torch.rand(SAMPLES * HISTORY, generator=generator) ** 4).long()
        lengths = torch.tensor([1] * SAMPLES + [HISTORY] * SAMPLES)
        yield KeyedJaggedTensor(keys=["user", "item"], values=torch.cat([users, items]), lengths=lengths)


class Model(nn.Module):
    """Two tables and a score."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        self.tables = EmbeddingCollection(device=torch.device("meta"), tables=tables)
        apply_optimizer_in_backward(RowWiseAdagrad, self.tables.parameters(), {"lr": 0.1})

    def forward(self, keys: KeyedJaggedTensor) -> torch.Tensor:
        """A loss, which falls as rows learn to add up to one."""
        found = self.tables(keys)
        return torch.stack([(found[name].values().sum(dim=1) - 1).pow(2).mean() for name in ROWS]).sum()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model: nn.Module = Model()

statistics = KeyStatistics(model)  # before the model is sharded
for keys in batches(rank, count=100):
    statistics.observe(keys)

tables = describe_model(
    model,
    optimizer=Optimizer.ROWWISE_ADAGRAD,
)
request = PlanRequest(
    tables=tables,
    topology=Topology(ranks=world_size, hbm_bytes=(2 << 30) + (64 << 20), host_bytes=64 << 30),
    hardware="h200",
    runtime=Runtime.TORCHREC,
    step=Step(samples_per_rank=SAMPLES),
)
request, curves = with_statistics(request, statistics.gather())
plan = PlannerClient().plan(request)  # or PlannerClient(url="http://planner:8080")
if rank == 0:
    Path("plan.json").write_text(dumps(PlanFile(request=request, plan=plan)))
    for placed in plan.placements:
        print(f"{placed.table:4}  {placed.mode.value:9}  {placed.ratio:4.0%} of its rows in HBM")

model = DistributedModelParallel(
    model, device=torch.device("cpu"), plan=sharding_plan(model, request, plan, device="cpu")
)
for step, keys in enumerate(batches(rank, count=3)):
    loss = model(keys)
    loss.backward()
    if rank == 0:
        print(f"step {step}  loss {loss.item():.3f}")
dist.destroy_process_group()
