"""Averaged gradients of balanced batches are those of one process with the global batch, under FSDP2 too."""

from dataclasses import replace
from datetime import timedelta

import numpy as np
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
                averaged = model.at.grad.full_tensor()
            else:
                mean = values.mean() * loader.mean_loss_scale if len(values) else values.sum()
                found = [torch.autograd.grad(loss, model.at, retain_graph=True)[0] for loss in (summed, mean)]
                dist.all_reduce(both := torch.stack(found))
                averaged = both / dist.get_world_size()
            steps.append(averaged.numpy())
        check_served(loader, job.address)
    return steps


def reference(job: Job) -> list[NDArray[np.float64]]:
    """Each step's gradient of the mean over the global batch."""
    steps = []
    point = weights()
    per_rank = [list(job.batches(rank)) for rank in range(len(job.steps))]
    for step in range(max(job.steps)):
        parts = [batches[step] for batches in per_rank if step < len(batches)]
        batch = {key: torch.cat([part[key] for part in parts]) for key in ("id", "count")}
        (gradient,) = torch.autograd.grad(losses(point, batch).mean(), point)
        steps.append(gradient.numpy())
    return steps


def test_the_averaged_gradient_is_that_of_the_global_batch_whoever_plans(balancer: ServiceProcess) -> None:
    """That answers which are late, refused or wrong change nothing of who is trained with what, `tests/faults` says."""
    job = Job(steps=STEPS, options=BalanceOptions(counts="free", timeout=timedelta(seconds=20)), name="gradients")
    wanted = reference(job)
    jobs = [replace(job, address=address) for address in (None, "off", balancer.address)]
    for results in run_in_turn(3, *((gradients, one) for one in jobs), (gradients, jobs[0], True)):
        for steps in results:
            for step, expected in zip(steps, wanted, strict=True):
                assert abs(step - expected).max() < 1e-12  # only the order of sums is another
