"""Train the kit's ranker on ranks of this machine; go on from the newest checkpoint, on any number of them.

    torchrun --nproc-per-node 4 -m examples.dlrmv4.train --steps 30
    torchrun --nproc-per-node 2 -m examples.dlrmv4.train --steps 60

The tables are TorchRec's under our plan, with its keys bucketized by us, or with `--tables routed` ours, routed by
hash. Samples come in an order that does not depend on the ranks, and are balanced by the service that
EVENKEEL_BALANCER names, or by the ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from examples.resume.checkpoints import Progress, newest, save
from examples.resume.job import make_device
from trainer_client import BalancedLoader, Balancer, GlobalBatchSampler
from trainer_client.balancing.adapters.job_state import JobState
from trainer_client.embedding import checkpoint
from trainer_client.embedding.routing import torchrec_uses_evenkeel
from trainer_client.planning import plan_model

SMALL = Scale(rows=100, history=32, width=16, layers=2, heads=2, samples=16)
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
        scale, self.tables = stream.scale, routed_tables(stream.scale, device) if routed else None
        bare = make_model(scale, self.tables or torchrec_tables(scale), device)
        self.layout, self.rows = {}, None
        if self.tables is not None:
            self.model: nn.Module = DistributedDataParallel(bare.to(device))
            self.layout = {table.name: str(table.resolved_routing) for table in self.tables.configs}
            self.rows = torch.optim.Adam(self.tables.parameters(), lr=1e-2)
        else:
            self.model = self._planned(bare, stream, device)
        dense = {name: value for name, value in self.model.named_parameters() if "embeddings.tables." not in name}
        self.dense = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=3e-3))
        inside = [] if routed else [("tables", self.model.fused_optimizer)]
        self.optimizer = CombinedOptimizer([*inside, ("dense", self.dense)])

    def _planned(self, bare: Ranker, stream: Stream, device: torch.device) -> nn.Module:
        """The tables where our planner wants them, from the keys of some batches."""
        rank, ranks, samples = dist.get_rank(), dist.get_world_size(), stream.scale.samples
        batches = (
            keys_of(stream.batch(range(begin + rank, begin + ranks * samples, ranks)), stream.scale)
            for begin in range(0, PLANNED_FOR * ranks * samples, ranks * samples)
        )
        plan = plan_model(bare, batches, sharding=SHARDINGS, device=device)
        self.layout = {placed.table: placed.sharding.value for placed in plan.plan.placements}
        sharders: list[Any] = [EmbeddingCollectionSharder()]
        sharded: nn.Module = DistributedModelParallel(bare, device=device, plan=plan.sharding_plan, sharders=sharders)
        return sharded

    def step(self, batch: SequenceBatch, scale: float) -> torch.Tensor:
        """Trains a batch; returns its loss and samples."""
        loss = loss_of(self.model(batch), batch)
        for optimizer in filter(None, (self.optimizer, self.rows)):
            optimizer.zero_grad()
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        for optimizer in filter(None, (self.optimizer, self.rows)):
            optimizer.step()
        return torch.stack([loss.detach(), loss.new_tensor(batch.size)])

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


def main() -> None:
    """Trains, or goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", choices=("planned", "routed"), default="planned", help="who holds the tables")
    parser.add_argument("--steps", type=int, default=30, help="to train in all")
    parser.add_argument("--global-batch", type=int, default=32, help="samples of a step, over all ranks")
    parser.add_argument("--folder", type=Path, default=Path("out/dlrmv4"), help="of checkpoints")
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")
    options = parser.parse_args()
    for name in ("steps", "global_batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; use at least 1")
    device = make_device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with Balancer.from_env() as balancer, torchrec_uses_evenkeel():
        result = train(options, balancer, device)
    if dist.get_rank() == 0:
        print(json.dumps(result) if options.json else told(result))
    dist.destroy_process_group()


def train(options: argparse.Namespace, balancer: Balancer, device: torch.device) -> dict[str, Any]:
    """Trains up to a step and saves; returns the losses of all ranks together, and how even the loads were."""
    stream = Stream(SMALL)
    training, progress = Training(options.tables == "routed", stream, device), Progress()
    sampler = GlobalBatchSampler(len(stream), global_batch_size=options.global_batch, seed=0)
    data: Any = DataLoader(range(len(stream)), batch_sampler=sampler, collate_fn=stream.batch)  # type: ignore[arg-type]
    cost = make_model(SMALL, nn.Identity(), device).options.cost()
    loader = BalancedLoader(data, balancer, cost=cost, spec=SequenceBatch.spec(), device=device)
    state = {"training": training, "loader": JobState(loader), "progress": progress}
    if found := newest(options.folder / options.tables):
        training.dense.init_state()  # else there is nowhere to load its moments to
        load_state(state, checkpoint_id=found, planner=Loading())
        if training.tables is not None:
            checkpoint.load(training.tables, found / "tables", optimizer=training.rows)
    began, losses, loads = progress.step, [], []
    while progress.step < options.steps:
        loader.set_epoch(progress.epoch)
        for batch in loader:
            progress.step += 1
            lost = training.step(batch, loader.loss_scale)
            dist.all_reduce(lost)
            losses.append(float(lost[0] / lost[1]))
            loads.append(loader.report.imbalance)
            if progress.step == options.steps:
                break
        else:
            progress.epoch += 1
    if progress.step > began:
        save(options.folder / options.tables, state, progress.step)
        if training.tables is not None:
            tables = options.folder / options.tables / f"step-{progress.step:06}" / "tables"
            checkpoint.save(training.tables, tables, optimizer=training.rows)
    return {
        "ranks": dist.get_world_size(), "from": began, "to": progress.step, "losses": losses, "loads": loads,
        "tables": training.layout,
    }  # fmt: skip


def told(result: dict[str, Any]) -> str:
    """The result in words."""
    few = max(1, len(result["losses"]) // 5)
    first, last = (sum(part) / max(1, len(part)) for part in (result["losses"][:few], result["losses"][-few:]))
    layout = ", ".join(f"{table} {how}" for table, how in result["tables"].items())
    return (
        f"{layout}\nsteps {result['from']} to {result['to']} on {result['ranks']} ranks: loss {first:.4f} to "
        f"{last:.4f}, load of the fullest rank at most {max(result['loads'], default=1):.3f} of the mean"
    )


if __name__ == "__main__":
    main()
