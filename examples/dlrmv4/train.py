"""Train the kit's ranker on ranks of this machine; go on from the newest checkpoint, on any number of them.

    torchrun --nproc-per-node 4 -m examples.dlrmv4.train --steps 30
    torchrun --nproc-per-node 2 -m examples.dlrmv4.train --steps 60

The tables are TorchRec's under our plan, with its keys bucketized by us, or with `--tables routed` ours, routed by
hash. Samples come in an order that does not depend on the ranks, and are balanced by the service that
EVENKEEL_BALANCER names, or by the ranks. On GPUs, layers compute in bfloat16.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from evenkeel.placement import Sharding
from examples.datasets import SequenceBatch
from examples.dlrmv4.model import keys_of, make_model, routed_tables, torchrec_tables
from examples.dlrmv4.stream import Scale, Stream
from examples.hstu.model import Ranker, loss_of
from examples.resume.checkpoints import newest, save
from examples.resume.job import make_device
from trainer_client import BalancedLoader, Balancer, GlobalBatchSampler
from trainer_client.balancing.adapters.job_state import JobState
from trainer_client.embedding import checkpoint
from trainer_client.embedding.routing import torchrec_uses_evenkeel
from trainer_client.planning import plan_model

SCALES = {  # both with a hundredth of the rows; wide ones have the reference's histories and widths
    "small": Scale(rows=100, history=32, width=16, layers=2, heads=2, samples=16),
    "wide": Scale(rows=100, samples=64),
}
SHARDINGS = (Sharding.ROW_WISE, Sharding.TABLE_WISE)  # row-wise Adagrad's state has other shapes by columns
PLANNED_FOR = 8  # batches of a rank


class Loading(DefaultLoadPlanner):
    """Loads on ranks that name only the tables of which they have a shard, as PyTorch before 2.4 did of others."""

    def create_local_plan(self) -> LoadPlan:
        """Everything that this rank names."""
        assert self.metadata is not None, "it was set up"
        return create_default_local_load_plan(self.state_dict, self.metadata)


class Training:
    """Model and optimizers of a rank, as far as `torch.distributed.checkpoint` divides them anew for other ranks."""

    def __init__(self, routed: bool, stream: Stream, device: torch.device) -> None:
        """The same weights on all ranks. Collective."""
        torch.manual_seed(0)
        self.stream, self.device = stream, device
        scale, self.tables = stream.scale, routed_tables(stream.scale, device) if routed else None
        bare = make_model(scale, self.tables or torchrec_tables(scale), device)
        self.layout, self.rows = {}, None
        if self.tables is not None:
            self.model: nn.Module = DistributedDataParallel(bare.to(device))
            self.layout = {table.name: str(table.resolved_routing) for table in self.tables.configs}
            self.rows = torch.optim.Adam(self.tables.parameters(), lr=1e-2)
        else:
            self.model = self._planned(bare)
        dense = {name: value for name, value in self.model.named_parameters() if "embeddings.tables." not in name}
        self.dense = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=3e-3))
        inside = [] if routed else [("tables", self.model.fused_optimizer)]
        self.optimizer = CombinedOptimizer([*inside, ("dense", self.dense)])

    def _planned(self, bare: Ranker) -> nn.Module:
        """The tables where our planner wants them, from the keys of some batches."""
        rank, ranks, stream = dist.get_rank(), dist.get_world_size(), self.stream
        size = ranks * stream.scale.samples
        begins = range(0, PLANNED_FOR * size, size)
        batches = (keys_of(stream.batch(range(at + rank, at + size, ranks)), stream.scale) for at in begins)
        plan = plan_model(bare, batches, sharding=SHARDINGS, device=self.device)
        self.layout = {placed.table: placed.sharding.value for placed in plan.plan.placements}
        sharders: list[Any] = [EmbeddingCollectionSharder()]
        sharded: nn.Module = DistributedModelParallel(bare, None, self.device, plan.sharding_plan, sharders)
        return sharded

    def step(self, batch: SequenceBatch, scale: float) -> torch.Tensor:
        """Trains a batch; returns the sum of its losses."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = loss_of(self.model(batch), batch)
        for optimizer in filter(None, (self.optimizer, self.rows)):
            optimizer.zero_grad()
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        for optimizer in filter(None, (self.optimizer, self.rows)):
            optimizer.step()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: its rows if TorchRec has them, and what all ranks have alike."""
        every = self.model.state_dict()
        kept = {name: value for name, value in every.items() if self.rows is None or "embeddings.tables." not in name}
        # A rank without a shard of a table has an empty state of it, and a group less: a checkpoint is for all ranks.
        state = {name: value for name, value in self.optimizer.state_dict()["state"].items() if value}
        return {"model": kept, "optimizer": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From them."""
        self.model.load_state_dict(state["model"], strict=self.rows is None)
        own = self.optimizer.state_dict()
        self.optimizer.load_state_dict(own | {"state": {name: {} for name in own["state"]} | state["optimizer"]})


def main(
    tables: Annotated[Literal["planned", "routed"], typer.Option(help="Who holds the tables.")] = "planned",
    scale: Annotated[Literal["small", "wide"], typer.Option(help="Wide ones are for a GPU.")] = "small",
    steps: Annotated[int, typer.Option(min=1, help="To train in all, of one day.")] = 30,
    global_batch: Annotated[int, typer.Option(min=1, help="Samples of a step, over all ranks.")] = 32,
    folder: Annotated[Path, typer.Option(help="Of checkpoints.")] = Path("out/dlrmv4"),
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
) -> None:
    """Trains, or goes on."""
    device = make_device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with Balancer.from_env() as balancer, torchrec_uses_evenkeel():
        training = Training(tables == "routed", Stream(SCALES[scale]), device)
        result = train(training, balancer, folder / tables, steps, global_batch)
    if dist.get_rank() == 0:
        print(json.dumps(result) if as_json else told(result))
    dist.destroy_process_group()


def train(training: Training, balancer: Balancer, folder: Path, steps: int, global_batch: int) -> dict[str, Any]:
    """Trains up to a step and saves; returns, by step, what all ranks did together."""
    stream, ranks = training.stream, dist.get_world_size()
    sampler = GlobalBatchSampler(len(stream), global_batch_size=global_batch, seed=0)
    data: Any = DataLoader(range(len(stream)), batch_sampler=sampler, collate_fn=stream.batch)  # type: ignore[arg-type]
    cost, spec = make_model(stream.scale, nn.Identity(), training.device).options.cost(), SequenceBatch.spec()
    loader = BalancedLoader(data, balancer, cost=cost, spec=spec, device=training.device)
    state, first = {"training": training, "loader": JobState(loader)}, 0
    if found := newest(folder):
        first = int(found.name.removeprefix("step-"))
        training.dense.init_state()  # else there is nowhere to load its moments to
        load_state(state, checkpoint_id=found, planner=Loading())
        if training.tables is not None:
            checkpoint.load(training.tables, found / "tables", optimizer=training.rows)
    done: list[dict[str, Any]] = []
    trained: list[Any] = [None] * ranks
    began = time.perf_counter()
    for _, batch in zip(range(first, steps), loader, strict=False):
        loss = float(training.step(batch, loader.loss_scale))
        seconds = time.perf_counter() - began
        dist.all_gather_object(trained, (loss, batch.sample.tolist()))
        samples = sorted(number for _, own in trained for number in own)
        loss = sum(loss for loss, _ in trained) / len(samples)
        done.append({"loss": loss, "load": loader.report.imbalance, "seconds": seconds, "samples": samples})
        began = time.perf_counter()
    step = first + len(done)
    if done:
        save(folder, state, step)
        if training.tables is not None:
            checkpoint.save(training.tables, folder / f"step-{step:06}" / "tables", optimizer=training.rows)
    return {"ranks": ranks, "to": step, "tables": training.layout, "steps": done}


def told(result: dict[str, Any]) -> str:
    """The result in words."""
    layout, steps = ", ".join(f"{table} {how}" for table, how in result["tables"].items()), result["steps"]
    losses = " to ".join(f"{step['loss']:.4f}" for step in steps[:1] + steps[-1:]) or "as it was"
    load = f"fullest rank at most {max((step['load'] for step in steps), default=1):.3f} of the mean load"
    return f"{layout}\nsteps up to {result['to']} on {result['ranks']} ranks: loss {losses}, {load}"


if __name__ == "__main__":
    typer.run(main)
