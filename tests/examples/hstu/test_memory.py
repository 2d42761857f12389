"""A cap on tokens keeps a job running that runs out of memory without it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.ranks import run_ranks
from examples.datasets import Keys, SequenceBatch, SyntheticSequences, ZipfLengths
from examples.hstu.model import ModelOptions
from examples.hstu.training import Trainer
from trainer_client.balancing import BalanceOptions, Balancer

OPTIONS = ModelOptions(
    num_layers=1, width=16, num_heads=2, head_dim=8, embedding_dim=8, num_items=50, max_tokens=48
)  # fmt: skip
PLENTY = 1 << 40


def _batches(rank: int) -> list[SequenceBatch]:
    lengths = ZipfLengths(exponent=1.2, maximum=48)
    return list(
        SyntheticSequences(num_batches=6, batch_size=8, lengths=lengths, items=Keys(count=50), rank=rank, seed=3)
    )


def _tokens(batches: list[SequenceBatch]) -> torch.Tensor:
    """(steps,) tokens of this rank in each step."""
    return torch.tensor([int(OPTIONS.tokens()(batch).sum()) for batch in batches])


def _cap(batches: list[SequenceBatch]) -> float:
    """A tenth above the even share of the step with the most tokens; some step must have a rank above it."""
    own = _tokens(batches)
    total, most = own.clone(), own.clone()
    dist.all_reduce(total)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    cap = 1.1 * float(total.max()) / dist.get_world_size()
    assert float(most.max()) > 1.1 * cap
    return cap


def _capped(batches: list[SequenceBatch]) -> Balancer:
    caps = [_cap(batches)] * dist.get_world_size()
    return Balancer.embedded(options=BalanceOptions(memory_caps=caps))


def _measure(rank: int) -> tuple[int, int, int, float]:
    """Bytes of the worst step without and with the cap, and the most tokens of a step with it beside the cap."""
    batches, device = _batches(rank), torch.device("cpu")
    peaks = []
    tokens = 0
    for balancer in (Balancer.off(), _capped(batches)):
        trainer = Trainer(OPTIONS, device, activation_budget=PLENTY)
        run = trainer.run(batches, balancer)
        assert trainer.budget is not None
        peaks.append(trainer.budget.peak)
        tokens = max(run.tokens)
        balancer.close()
    dist.barrier()
    return peaks[0], peaks[1], tokens, _cap(batches)


def _train(rank: int, limit: int, capped: bool) -> int:
    """Steps until the end, or until the budget is exceeded, which is negative."""
    batches = _batches(rank)
    trainer = Trainer(OPTIONS, torch.device("cpu"), activation_budget=limit)
    with _capped(batches) if capped else Balancer.off() as balancer:
        try:
            return len(trainer.run(batches, balancer).times)
        except MemoryError as error:
            return -1 if "cap the tokens of a rank" in str(error) else -2


def test_a_cap_on_tokens_keeps_a_job_within_its_memory() -> None:
    measured = run_ranks(2, _measure)
    off, capped = (max(rank[which] for rank in measured) for which in range(2))
    assert all(tokens <= cap for *_, tokens, cap in measured)
    assert capped < off
    limit = (off + capped) // 2
    assert -1 in run_ranks(2, _train, limit, False, check=False)  # the other rank ends with its peer
    assert run_ranks(2, _train, limit, True) == [6, 6]


@pytest.mark.parametrize("limit", [None, 1000])
def test_the_budget_counts_each_tensor_once(limit: int | None) -> None:
    from examples.hstu.budget import ActivationBudget

    weight = torch.ones(100, requires_grad=True)  # 400 bytes
    budget = ActivationBudget(limit)
    with budget:
        (weight * weight).sum().backward()
    assert budget.peak == 400
    if limit is not None:
        with pytest.raises(MemoryError, match="exceed the budget"), budget:
            (torch.ones(300) * torch.ones(300, requires_grad=True)).sum()
