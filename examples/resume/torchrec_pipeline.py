"""Sharded tables in TorchRec's TrainPipelineSparseDist, which holds two batches that are not trained yet.

`torchrun --nproc-per-node 4 --max-restarts 1 -m examples.resume.torchrec_pipeline --kill-at 7`
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from examples.demo.histories import NUM_ITEMS
from examples.resume import job
from examples.resume.checkpoints import Progress, load, newest, save
from trainer_client import BalancedLoader, TokenCost
from trainer_client.balancing.adapters.job_state import JobState
from trainer_client.balancing.pipelines import PipelineSteps
from trainer_client.balancing.sampling import GlobalBatchSampler

WIDTH = 8


def collate(users: list[job.Batch]) -> dict[str, Any]:
    """A batch with its histories as a KeyedJaggedTensor."""
    batch = job.collate(users)
    history = KeyedJaggedTensor(keys=["history"], values=batch["items"], lengths=batch["num_items"])
    return {"id": batch["id"], "history": history, "label": batch["label"]}


class Head(nn.Module):
    """The dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, found: Any, label: torch.Tensor, scale: float) -> torch.Tensor:
        """The loss of the sums of histories, so weighed that averaged gradients are right."""
        users = torch.repeat_interleave(torch.arange(len(label), device=label.device), found.lengths())
        pooled = torch.zeros(len(label), WIDTH, device=label.device).index_add(0, users, found.values())
        logits = self.score(pooled).squeeze(-1)
        return binary_cross_entropy_with_logits(logits, label, reduction="sum") * scale


class Model(nn.Module):
    """Sharded tables and a dense layer."""

    def __init__(self, tables: EmbeddingCollection) -> None:
        super().__init__()
        self.tables = tables
        self.head = Head()

    def forward(self, balanced: Any) -> Any:
        """The loss, and what the ledger wants of the batch."""
        batch = balanced.batch
        loss = self.head(self.tables(batch["history"])["history"], batch["label"], balanced.loss_scale)
        return loss, (batch["id"], loss.detach())


def make_model(device: torch.device) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model with its table sharded by rows, and all of its optimizers as one."""
    torch.manual_seed(0)
    table = EmbeddingConfig(
        name="item", embedding_dim=WIDTH, num_embeddings=NUM_ITEMS, feature_names=["history"],
        init_fn=lambda weight: weight.data.fill_(0.1),
    )  # fmt: skip
    tables = EmbeddingCollection(device=torch.device("meta"), tables=[table])
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
    bare = Model(tables)
    sharders: list[Any] = [EmbeddingCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        constraints={"item": ParameterConstraints(sharding_types=["row_wise"])},
    )
    plan = planner.collective_plan(bare, sharders, dist.group.WORLD)
    model = DistributedModelParallel(bare, device=device, plan=plan, sharders=sharders)
    dense = {name: value for name, value in model.named_parameters() if "head" in name}
    adam = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
    return model, CombinedOptimizer([("tables", model.fused_optimizer), ("dense", adam)])


class Training:
    """Model and optimizers; `torch.distributed.checkpoint` divides the rows anew for another number of ranks."""

    def __init__(self, model: nn.Module, optimizer: CombinedOptimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: its rows, and what all ranks have alike."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From them."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


def main() -> None:
    """Trains, or goes on."""
    options = job.read_options(__doc__)
    device = job.make_device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with job.make_balancer(options) as balancer:
        users = job.Users(options.users)
        sampler = GlobalBatchSampler(users, global_batch_size=options.global_batch, seed=7)
        data_loader = DataLoader(users, batch_sampler=sampler, collate_fn=collate, num_workers=options.workers)
        loader = BalancedLoader(data_loader, balancer, cost=TokenCost(tokens="history.history"), device=device)
        model, optimizer = make_model(device)
        steps = PipelineSteps(TrainPipelineSparseDist(model, optimizer, device), loader)
        progress = Progress()
        state = {
            "training": Training(model, optimizer),
            "loader": JobState(loader, ahead=steps.ahead),  # without what the pipeline holds
            "progress": progress,
        }
        if found := newest(options.folder):
            dict(optimizer.optimizers)["dense"].init_state()  # else there is nowhere to load its moments to
            load(found, state)
        ledger = job.Ledger(options, step=progress.step)

        while progress.epoch < options.epochs:
            loader.set_epoch(progress.epoch)
            for ids, loss in steps:
                progress.step += 1
                ledger.trained(epoch=progress.epoch, step=progress.step, users=ids, loss=loss)
                if progress.step % options.save_every == 0:
                    save(options.folder, state, progress.step)
            progress.epoch += 1

        ledger.close(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
