"""What each of TorchRec's train pipelines holds after each step, and that a loop goes on from there.

`torchrun --nproc-per-node 2 -m tests.trainer_client.balancing.pipelines.held_checks --device cuda` runs them all, on
GPUs; those that run on the host are part of the tests.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torchrec.distributed.train_pipeline import train_pipelines

from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.pipelines import BalancedBatch, PipelineSteps
from trainer_client.balancing.sampling import GlobalBatchSampler

SAMPLES, STEPS, SIZE = 18, 5, 4  # the last global batch is smaller, and so its loss scale larger
HELD = {
    "TrainPipelinePT2": 0,
    "TrainPipelineBase": 1,
    "TrainPipelineSparseDistLite": 1,
    "TrainPipelineSparseDist": 2,
    "TrainPipelineFusedSparseDist": 2,
    "PrefetchTrainPipelineSparseDist": 2,
    "TrainPipelineSemiSync": 3,
}
STAGES = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "TrainPipelinePT2": {"compile_configs": train_pipelines.TorchCompileConfig(compile_on_iter=-1)},
    "TrainPipelineSemiSync": {"start_batch": 0},
}


class Model(nn.Module):
    """A dense layer; returns the loss, and what was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(1, 1)

    def forward(self, balanced: Any) -> Any:
        return self.dense(balanced.batch.float()[:, None]).sum(), balanced


def make_loader(device: torch.device, balancer: Balancer) -> BalancedLoader[torch.Tensor]:
    """Five global batches."""
    data = DataLoader(range(SAMPLES), batch_sampler=GlobalBatchSampler(SAMPLES, global_batch_size=SIZE, seed=3))
    return BalancedLoader(data, balancer, cost=lambda batch: torch.ones(len(batch)), device=device)


def _staged(device: torch.device) -> Any:
    def moved(batch: BalancedBatch[torch.Tensor]) -> BalancedBatch[torch.Tensor]:
        return batch.to(device, non_blocking=True)

    stages = [
        train_pipelines.PipelineStage(name=str(number), runnable=moved, stream=torch.cuda.Stream(device))
        for number in range(STAGES)
    ]
    return train_pipelines.StagedTrainPipeline(stages)


def _ids(output: BalancedBatch[torch.Tensor]) -> list[int]:
    ids: list[int] = output.batch.tolist()
    return ids


def check(name: str, held: int, device: torch.device, balancer: Balancer) -> None:
    """Two epochs, a loop that is left, and one that goes on from a state of each step.

    Raises:
        AssertionError: If it holds something else than `held` batches, or trains other samples.
    """
    model = Model().to(device)

    def make() -> Any:
        if name == "StagedTrainPipeline":
            return _staged(device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        return getattr(train_pipelines, name)(model, optimizer, device, **OPTIONS.get(name, {}))

    loader, pipeline = make_loader(device, balancer), make()
    steps = PipelineSteps(pipeline, loader)
    whole, states = [], []
    for number, output in enumerate(steps, 1):
        assert steps.ahead() == min(held, STEPS - number), (name, number, steps.ahead())
        samples = min(SIZE, SAMPLES - SIZE * (number - 1))
        assert output.loss_scale == dist.get_world_size() / samples, (name, number, output.loss_scale)
        whole.append(_ids(output))
        states.append(loader.state_dict(ahead=steps.ahead()))
    assert len(whole) == STEPS, (name, whole)
    assert [_ids(output) for output in steps] == whole, name  # in another epoch
    for _ in steps:
        break  # what it has fetched is not trained in the next loop
    steps = PipelineSteps(pipeline, loader)  # others, of the same pipeline
    assert [_ids(output) for output in steps] == whole, name
    assert [_ids(output) for output in PipelineSteps(pipeline, loader)] == whole, name
    for number, state in enumerate(states[:-1], 1):
        again = make_loader(device, balancer)
        again.load_state_dict(state)
        assert [_ids(output) for output in PipelineSteps(make(), again)] == whole[number:], (name, number)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, whole)
    assert sorted(one for rank in everybody for batch in rank for one in batch) == list(range(SAMPLES)), name


def pipelines(device: torch.device) -> Iterator[tuple[str, int]]:
    """The pipelines that run on a device, with what they hold."""
    yield from HELD.items()
    if device.type == "cuda":
        yield "StagedTrainPipeline", STAGES


def main() -> None:
    """Checks them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    with Balancer.embedded() as balancer:
        for name, held in pipelines(device):
            check(name, held, device, balancer)
            if dist.get_rank() == 0:
                print(f"{name}: {held} batches held", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
