"""The training loop on real Gloo ranks: balancing changes who computes, not what is learnt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from examples.datasets import Keys, SyntheticSequences, ZipfLengths
from examples.hstu.model import ModelOptions
from examples.hstu.training import Trainer
from trainer_client.balancing import BalanceOptions, Balancer

OPTIONS = ModelOptions(
    num_layers=1, width=16, num_heads=2, head_dim=8, embedding_dim=8, num_items=50, max_tokens=48
)  # fmt: skip


def _train(rank: int) -> dict[str, Any]:
    device = torch.device("cpu")
    batches = list(
        SyntheticSequences(
            num_batches=8, batch_size=4, lengths=ZipfLengths(maximum=48), items=Keys(count=50), rank=rank
        )
    )
    trainer = Trainer(OPTIONS, device)
    found = {}
    settings = {
        "off": Balancer.off(),
        "karmarkar_karp": Balancer.embedded(options=BalanceOptions(strategy="karmarkar_karp")),
        "embedded": Balancer.embedded(options=BalanceOptions(counts="free")),
    }
    for name, balancer in settings.items():
        trainer.reset()
        run = trainer.run(batches, balancer)
        found[name] = {
            "losses": run.losses.tolist(),
            "steps": len(run.times),
            "before": sum(report.imbalance_before for report in run.reports),
            "after": sum(report.imbalance for report in run.reports),
        }
        balancer.close()
    for storage, routing in (("routed", "hash_roundrobin"), ("routed", "continuous")):
        run = Trainer(OPTIONS, device, storage=storage, dist_type=routing).run(batches, Balancer.off())
        found[routing] = {"losses": run.losses.tolist()}
    dist.barrier()
    return found


def test_all_settings_learn_the_same() -> None:
    first, second = run_ranks(2, _train)
    for name in ("karmarkar_karp", "embedded"):
        assert first[name]["losses"] == pytest.approx(first["off"]["losses"], rel=1e-4)
        assert first[name]["steps"] == second[name]["steps"] == 8
        assert first[name]["after"] < first[name]["before"]
    assert first["off"]["after"] == first["off"]["before"]
    for routing in ("hash_roundrobin", "continuous"):  # sharded tables begin with the same values as whole ones
        assert first[routing]["losses"] == pytest.approx(first["off"]["losses"], rel=1e-4)
