"""The training loops that are put under stress, each over a model as small as it can be."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.stress_data import ROWS, Ledger, Workload
from trainer_client.balancing import BalancedLoader, Balancer
from trainer_client.balancing.batches import BatchSpec
from trainer_client.balancing.pipelines import balanced_batches, make_pipeline

DIM = 32
LEARNING_RATE = 0.01
Beat = Callable[[int], None]
SPEC = BatchSpec(rows_per_sample={"values": "length"})
PIPELINES = {"torchrec_base": "base", "torchrec_sparse_dist": "sparse_dist", "torchrec_prefetch": "prefetch"}
LOOPS = ("ddp", "fsdp2", *PIPELINES)


def left_out(loop: str, device: torch.device) -> str | None:
    """Why a loop cannot run here, if it cannot."""
    try:
        if loop == "fsdp2":
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        elif loop in PIPELINES:
            import fbgemm_gpu  # noqa: F401
            import torchrec  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    if loop == "torchrec_prefetch" and device.type != "cuda":
        return "PrefetchTrainPipelineSparseDist fills caches of tables in host memory on CUDA streams; it needs GPUs"
    return None


def make_workload(loop: str, **sizes: Any) -> Workload:
    """The batches of a loop: of any size, but for TorchRec of one size, as its users' loaders make them."""
    keyed = loop in PIPELINES
    return Workload(features=4 if keyed else 1, uneven=True, **sizes)


class Head(nn.Module):
    """From pooled embeddings to the loss, and what the ledger wants to know."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(
        self, pooled: torch.Tensor, label: torch.Tensor, scale: float, noted: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The weighed sum of the samples' losses, and `noted` with it."""
        logits = self.layers(pooled).squeeze(-1)
        loss = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum") * scale
        return loss, (*noted, loss.detach())


def pool(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """(n, dim) sum of each sample's rows; waits for no device."""
    samples = torch.arange(lengths.shape[0], device=rows.device)
    owners = torch.repeat_interleave(samples, lengths, output_size=rows.shape[0])
    return rows.new_zeros(lengths.shape[0], rows.shape[1]).index_add(0, owners, rows)


class PlainModel(nn.Module):
    """One table on each rank, or sharded by FSDP2 as all else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.head = Head(DIM)

    def forward(self, batch: dict[str, torch.Tensor], scale: float) -> Any:
        """Loss and notes."""
        ids, values = batch["id"], batch["values"]
        pooled = pool(self.table(values), batch["length"])
        return self.head(pooled, batch["label"], scale, (ids, values, batch["check"]))


class ShardedModel(nn.Module):
    """Tables sharded by TorchRec, which traces this module down to them; the head stays as it is."""

    def __init__(self, tables: nn.Module, features: int) -> None:
        super().__init__()
        self.tables = tables
        self.head = PooledHead(features)

    def forward(self, batch: Any) -> Any:
        """Loss and notes."""
        return self.head(
            self.tables(batch.batch["features"]), batch.batch["features"], batch.batch["label"], batch.loss_scale,
            batch.batch["id"], batch.batch["check"],
        )  # fmt: skip


class PooledHead(Head):
    """The head over TorchRec's containers."""

    def __init__(self, features: int) -> None:
        super().__init__(features * DIM)
        self.keys = [f"f{feature}" for feature in range(features)]

    def forward(  # type: ignore[override]
        self, found: Any, features: Any, label: torch.Tensor, scale: float, ids: torch.Tensor, check: torch.Tensor
    ) -> Any:
        """Loss and notes."""
        pooled = torch.cat([pool(found[key].values(), found[key].lengths()) for key in self.keys], dim=1)
        return super().forward(pooled, label, scale, (ids, features.values(), check))


def run_loop(
    loop: str, workload: Workload, balancer: Balancer, device: torch.device, ledger: Ledger, beat: Beat
) -> tuple[BalancedLoader[Any], dict[str, Any]]:
    """Trains on all batches of all ranks.

    Args:
        loop: One of `LOOPS`.
        workload: Its batches.
        balancer: Of this rank.
        device: Of this rank.
        ledger: Gets every batch that was trained.
        beat: Called after each step with its number.

    Returns:
        The loader, and what there is to say about the model.
    """
    torch.manual_seed(0)
    keyed = loop in PIPELINES
    loader: BalancedLoader[Any] = BalancedLoader(
        workload.batches(dist.get_rank(), device, keyed=keyed),
        balancer,
        cost=_cost,
        spec=BatchSpec() if keyed else SPEC,
        device=device,
        name=loop,
    )
    if keyed:
        return loader, _run_pipeline(PIPELINES[loop], workload, loader, device, ledger, beat)
    return loader, _run_plain(loop, loader, device, ledger, beat)


def _cost(batch: dict[str, Any]) -> Any:
    return batch["cost"]


def _run_plain(
    loop: str, loader: BalancedLoader[Any], device: torch.device, ledger: Ledger, beat: Beat
) -> dict[str, Any]:
    bare = PlainModel().to(device)
    model: Any
    if loop == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        fully_shard(bare.head, mesh=mesh)
        model = fully_shard(bare, mesh=mesh)
    else:
        model = DistributedDataParallel(bare, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step, batch in enumerate(loader):
        loss, noted = model(batch, loader.loss_scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ledger.note(*noted)
        beat(step)
    if loop == "fsdp2":
        return {"parameters": "sharded"}
    return {"replicas_differ": _replicas_differ(bare)}


def _run_pipeline(
    name: str, workload: Workload, loader: BalancedLoader[Any], device: torch.device, ledger: Ledger, beat: Beat
) -> dict[str, Any]:
    model, tables = _sharded(workload, device, prefetch=name == "prefetch")
    dense = [parameter for name, parameter in model.named_parameters() if ".head." in f".{name}"]
    pipeline = make_pipeline(name, model, torch.optim.SGD(dense, lr=LEARNING_RATE), device)
    batches = balanced_batches(loader)
    step = 0
    while True:
        try:
            noted = pipeline.progress(batches)
        except StopIteration:
            break
        ledger.note(*noted)
        beat(step)
        step += 1
    return {"tables": tables, "replicas_differ": _replicas_differ(model, ".head.")}


def _sharded(workload: Workload, device: torch.device, *, prefetch: bool) -> tuple[nn.Module, dict[str, str]]:
    """The model under `DistributedModelParallel`, and the sharding and kernel of each table."""
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import CacheParams
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    on_gpu, world = device.type == "cuda", dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    # CPUs have no caches, so all tables are FUSED there.
    kernels = ("fused", "fused_uvm_caching") if on_gpu else ("fused", "fused")
    constraints, configs = {}, []
    for number in range(workload.features):
        name = f"t{number}"
        kernel = kernels[number // 2 % 2]
        constraints[name] = ParameterConstraints(
            sharding_types=[("row_wise", "table_wise")[number % 2]],
            compute_kernels=[kernel],
            cache_params=CacheParams(load_factor=0.3) if "caching" in kernel else None,
        )
        configs.append(
            EmbeddingConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=ROWS,
                feature_names=[f"f{number}"],
                init_fn=lambda weight: weight.data.fill_(0.1),
            )
        )
    tables = EmbeddingCollection(device=torch.device("meta"), tables=configs)
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": LEARNING_RATE})
    bare = ShardedModel(tables, workload.features)
    # the prefetching pipeline wants it of all tables, those without a cache too
    sharders: list[Any] = [EmbeddingCollectionSharder(fused_params={"prefetch_pipeline": True} if prefetch else None)]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=local, compute_device=device.type),
        constraints=constraints,
    )
    plan = planner.collective_plan(bare, sharders, dist.group.WORLD)
    model: nn.Module = DistributedModelParallel(bare, device=device, plan=plan, sharders=sharders)
    chosen = {
        name: f"{sharding.sharding_type} {sharding.compute_kernel}"
        for module in plan.plan.values()
        for name, sharding in module.items()
    }
    return model, chosen


def _replicas_differ(model: nn.Module, part: str = "") -> bool:
    """Whether any rank's copy of the dense parameters differs from the others' in a bit; collective."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if part in f".{name}":
            digest.update(parameter.detach().cpu().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) > 1
