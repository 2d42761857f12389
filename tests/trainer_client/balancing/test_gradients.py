"""Averaged gradients of balanced batches are those of one process with the global batch, under FSDP2 too."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.harness.balancer_process import ServiceProcess
from tests.trainer_client.balancing.jobs import SPEC, Job, JobData, check_served, cost_of, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions

WIDTH = 6
STEPS = (26, 20, 15)
UNIT = 2.0**-53


def weights() -> torch.Tensor:
    return torch.linspace(-1, 1, WIDTH, dtype=torch.float64, requires_grad=True)


class Model(nn.Module):
    """The losses of samples, as a module whose weights are shards under FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(weights().detach())

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return losses(self.at, batch)


def features(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.sin(ids.double() * (k + 1)) for k in range(WIDTH)], dim=1)


def losses(at: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(samples,) losses that depend non-linearly on weights and samples, in float64."""
    scores = features(batch["id"]) @ at + torch.log1p(batch["count"].double())
    return torch.nn.functional.softplus(scores) ** 2


def gradients(rank: int, job: Job, sharded: bool = False) -> list[NDArray[np.float64]]:
    """The averaged gradient of each step, from sums and from means over the rank's samples; or by FSDP2, from sums."""
    steps = []
    model = Model()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with job.balancer() as balancer:
        loader = BalancedLoader(JobData(job, rank), balancer, cost=cost_of, spec=SPEC)
        for batch in loader:
            model.zero_grad()
            values = model(batch)
            summed = values.sum() * loader.loss_scale
            if sharded:
                summed.backward()
                averaged = model.at.grad.full_tensor()  # type: ignore[union-attr]
            else:
                mean = values.mean() * loader.mean_loss_scale if len(values) else values.sum()
                found = [torch.autograd.grad(loss, model.at, retain_graph=True)[0] for loss in (summed, mean)]
                dist.all_reduce(both := torch.stack(found))
                averaged = both / dist.get_world_size()
            steps.append(averaged.numpy())
        check_served(loader, job.address)
    return steps


def reference(job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each step's gradient of the mean over the global batch, and how far two orders of computing it may be apart.

    A sum of n terms in floating point is off by at most γ(n-1) = (n-1)u / (1 - (n-1)u) times the sum of the terms'
    absolute values, whatever the order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2); each
    rounding before or after the sum adds one to the count. A sample's term is l'(s)·x with the score s a sum of
    WIDTH + 1 terms: an error d of s changes l' by at most max|l''|·d, and |l''| is below 3 for l = softplus². The
    elementary functions are taken to be exact to 4 units in the last place, which is 8u: sin and log1p enter the score
    (weights are at most 1), softplus, its derivative and sin again the term, with five products between them.
    """
    steps = []
    point = weights()
    per_rank = [list(job.batches(rank)) for rank in range(len(job.steps))]
    for step in range(max(job.steps)):
        parts = [batches[step] for batches in per_rank if step < len(batches)]
        batch = {key: torch.cat([part[key] for part in parts]) for key in ("id", "count")}
        num_samples = len(batch["id"])
        (gradient,) = torch.autograd.grad(losses(point, batch).mean(), point)
        with torch.no_grad():
            x, offset = features(batch["id"]), torch.log1p(batch["count"].double())
            score = x @ point + offset
            slope = 2 * torch.nn.functional.softplus(score) * torch.sigmoid(score)
            score_error = gamma(WIDTH + 1) * ((x * point).abs().sum(1) + offset) + 8 * UNIT * (x.abs().sum(1) + offset)
            term_error = (3 * score_error + (3 * 8 + 5) * UNIT * slope)[:, None] * x.abs()
            # Roundings beside the sum over samples and ranks: the scale, its product, the product l'·x, the division.
            sum_error = gamma(num_samples + len(job.steps) + 6) * (slope[:, None] * x).abs()
            bound = 2 * (term_error + sum_error).sum(0) / num_samples  # both of the two computations are off
        steps.append((gradient, bound))
    return steps


def gamma(count: int) -> float:
    return count * UNIT / (1 - count * UNIT)


def check(results: list[list[NDArray[np.float64]]], wanted: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for steps in results:
        assert len(steps) == len(wanted)
        for number, (step, (expected, bound)) in enumerate(zip(steps, wanted, strict=True)):
            assert (abs(step - expected.numpy()) <= bound.numpy()).all(), (number, step, expected, bound)


@pytest.fixture(scope="module")
def job() -> Job:
    return Job(steps=STEPS, options=BalanceOptions(counts="free", timeout=timedelta(seconds=20)), name="gradients")


def test_the_bound_is_tight_enough_to_notice_a_lost_sample(job: Job) -> None:
    wanted = reference(job)
    without = replace(job, steps=(STEPS[0], STEPS[1] - 10, STEPS[2]))  # one rank's part is missing in ten steps
    differing = [
        bool(((gradient - other).abs() > bound).any())
        for (gradient, bound), (other, _) in zip(wanted, reference(without), strict=True)
    ]
    assert sum(differing) == 11  # and the last batch of the shorter data is smaller
    assert max(float((bound / gradient.abs().max()).max()) for gradient, bound in wanted) < 1e-12


def test_the_averaged_gradient_is_that_of_the_global_batch_whoever_plans(job: Job, balancer: ServiceProcess) -> None:
    """That answers which are late, refused or wrong change nothing of who is trained with what, `tests/faults` says."""
    wanted = reference(job)
    jobs = [replace(job, address=address) for address in (None, "off", balancer.address)]
    for results in run_in_turn(3, *((gradients, one, sharded) for one in jobs for sharded in (False, True))):
        check(results, wanted)
