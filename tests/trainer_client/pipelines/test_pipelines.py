"""TorchRec's pipelines over sharded tables, on real Gloo ranks, against one process with the whole batch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.trainer_client.ranks import run_ranks
from trainer_client.balancing import BalancedLoader, Balancer
from trainer_client.costs import TokenCost
from trainer_client.datasets import Keys, LogNormalLengths, SequenceBatch, SyntheticSequences
from trainer_client.measurement import StepTimer
from trainer_client.pipelines import BalancedBatch, balanced_batches, make_pipeline, pipeline_names, register_pipeline

NAMES = ("base", "sparse_dist")  # TorchRec's prefetch pipeline raises on CPUs
STEPS, WORLD, ROWS, DIM = 12, 2, 200, 8


def _data(rank: int) -> SyntheticSequences:
    return SyntheticSequences(
        num_batches=STEPS - rank,  # rank 1 ends a step earlier
        batch_size=6,
        lengths=LogNormalLengths(mean=20, maximum=80),
        items=Keys(count=ROWS, exponent=1.0),
        rank=rank,
    )


class Head(nn.Module):
    """The dense part: TorchRec traces a model down to modules without sharded tables, which stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(DIM, 1)

    def forward(
        self, found: Any, labels: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, float]]:
        owners = torch.repeat_interleave(torch.arange(labels.shape[0]), found.lengths())
        pooled = torch.zeros(labels.shape[0], DIM).index_add(0, owners, found.values())
        logits = self.dense(pooled).squeeze(-1)
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return total * scale, (total.detach(), scale)


class Model(nn.Module):
    """Sharded embeddings of the history, a dense layer, the loss."""

    def __init__(self, sharded: nn.Module) -> None:
        super().__init__()
        self.sharded = sharded
        self.head = Head()

    def forward(self, batch: Any) -> Any:
        found = self.sharded(batch.batch["features"])
        return self.head(found["history"], batch.batch["labels"], batch.loss_scale)


def _features(batch: SequenceBatch) -> dict[str, Any]:
    from torchrec import KeyedJaggedTensor

    keyed = KeyedJaggedTensor(keys=["history"], values=batch.history, lengths=batch.num_history)
    return {"features": keyed, "labels": batch.labels, "sample": batch.sample}


def _initial() -> torch.Tensor:
    return torch.full((ROWS, DIM), 0.1)


def _train_all(rank: int) -> dict[str, Any]:
    return {name: _train(rank, name) for name in NAMES}


def _train(rank: int, name: str) -> dict[str, Any]:
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    device = torch.device("cpu")
    table = EmbeddingConfig(
        name="item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["history"],
        init_fn=lambda weight: weight.data.fill_(0.1),
    )  # fmt: skip
    tables = EmbeddingCollection(device=torch.device("meta"), tables=[table])
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.5})
    sharders: list[Any] = [EmbeddingCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=WORLD, compute_device="cpu"),
        constraints={"item": ParameterConstraints(sharding_types=["row_wise"])},
    )
    bare = Model(tables)
    plan = planner.collective_plan(bare, sharders, dist.group.WORLD)
    model = DistributedModelParallel(bare, device=device, plan=plan, sharders=sharders)
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "dense" in n], lr=0.5)
    balancer = Balancer.embedded()
    loader = BalancedLoader(
        [_features(batch) for batch in _data(rank)], balancer, cost=TokenCost(tokens="features.history")
    )
    pipeline = make_pipeline(name, model, optimizer, device)
    iterator = balanced_batches(loader)
    timer = StepTimer(device)
    timer.watch(bare.head.parameters())
    model.register_forward_pre_hook(lambda *_: timer.batch_ready())
    optimizer.register_step_pre_hook(lambda *_: timer.gradients_ready())
    losses: list[tuple[float, float]] = []
    while True:
        try:
            total, scale = pipeline.progress(iterator)
        except StopIteration:
            break
        timer.end_step()
        losses.append((float(total), scale))
    balancer.close()
    return {"losses": losses, "times": timer.finished(), "dense": bare.head.dense.weight.detach().clone()}


def _expected() -> tuple[list[float], torch.Tensor]:
    """The same training in one process, on the global batches."""
    weight = nn.Parameter(_initial())
    torch.manual_seed(1)
    dense = nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD([weight, *dense.parameters()], lr=0.5)
    losses = []
    ranks = [list(_data(rank)) for rank in range(WORLD)]
    for step in range(STEPS):
        batches = [rank[step] for rank in ranks if step < len(rank)]
        pooled = torch.cat(
            [
                torch.stack([weight[items].sum(0) for items in torch.split(batch.history, batch.num_history.tolist())])
                for batch in batches
            ]
        )
        labels = torch.cat([batch.labels for batch in batches])
        total = functional.binary_cross_entropy_with_logits(dense(pooled).squeeze(-1), labels, reduction="sum")
        optimizer.zero_grad()
        (total / len(labels)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, dense.weight.detach()


def test_pipelines_train_as_one_process_would() -> None:
    ranks = run_ranks(WORLD, _train_all)
    losses, dense = _expected()
    for name in NAMES:
        results = [rank[name] for rank in ranks]
        assert [len(result["losses"]) for result in results] == [STEPS, STEPS], name
        together = [sum(result["losses"][step][0] for result in results) for step in range(STEPS)]
        assert together == pytest.approx(losses, rel=1e-4), name
        for result in results:
            assert [times.step for times in result["times"]] == list(range(STEPS)), name
            assert all(min(t.data, t.compute, t.communication, t.optimizer) > 0 for t in result["times"]), name
            assert torch.allclose(result["dense"], dense, atol=1e-5), name
        # The last global batch is smaller: its scale must have travelled with it.
        assert results[0]["losses"][-1][1] == pytest.approx(WORLD / 6), name
        assert results[0]["losses"][0][1] == pytest.approx(WORLD / 12), name


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plain:
    """A dataclass without `to`."""

    pair: Pair


def test_a_batch_moves_with_all_it_holds() -> None:
    batch: Any = {
        "x": torch.arange(3),
        "y": [torch.ones(3)],
        "plain": Plain(Pair(torch.ones(3), torch.ones(3))),
        "default": defaultdict(list, x=torch.ones(3)),
    }
    loader = BalancedLoader([batch], Balancer.off(), cost=lambda _: torch.ones(3))
    (only,) = balanced_batches(loader)
    assert isinstance(only, BalancedBatch)
    assert only.mean_loss_scale == pytest.approx(1.0)
    moved = only.to("meta")
    assert moved.batch["x"].is_meta
    assert moved.batch["y"][0].is_meta
    assert moved.batch["plain"].pair.second.is_meta
    assert moved.batch["default"]["x"].is_meta
    assert moved.batch["default"]["new"] == []
    assert only.batch["x"].device.type == only.batch["plain"].pair.first.device.type == "cpu"
    assert moved.loss_scale == only.loss_scale


def test_pipelines_are_found_by_name() -> None:
    assert {"base", "sparse_dist", "prefetch"} <= set(pipeline_names())
    made: list[Any] = []
    register_pipeline("mine", lambda *args, **options: made.append((args, options)) or "pipeline")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert make_pipeline("mine", model, optimizer, torch.device("cpu"), depth=3) == "pipeline"
    assert made[0][1] == {"depth": 3}
    with pytest.raises(ValueError, match="'sparse_dist' is there already"):
        register_pipeline("sparse_dist", lambda: None)
    with pytest.raises(ValueError, match="no pipeline named 'unknown'; choose one of base,"):
        make_pipeline("unknown", model, optimizer, torch.device("cpu"))
