"""Training pipelines by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from evenkeel.plugins import Plugins

PipelineFactory = Callable[..., Any]


def _torchrec(name: str, *arguments: Any, **options: Any) -> Any:
    from torchrec.distributed import train_pipeline

    return getattr(train_pipeline, name)(*arguments, **options)


_TORCHREC = {
    "base": partial(_torchrec, "TrainPipelineBase"),
    "sparse_dist": partial(_torchrec, "TrainPipelineSparseDist"),
    "prefetch": partial(_torchrec, "PrefetchTrainPipelineSparseDist"),
}
PIPELINES: Plugins[PipelineFactory] = Plugins("pipeline", _TORCHREC, group="evenkeel.pipelines")


def pipeline_names() -> tuple[str, ...]:
    """All names: TorchRec's pipelines, registered ones, and those of installed packages."""
    return PIPELINES.names


def register_pipeline(name: str, factory: PipelineFactory) -> None:
    """Makes a pipeline available under a name.

    An installed package does the same with an entry point in the group `evenkeel.pipelines`.

    Args:
        name: The name.
        factory: From model, optimizer, device and options to an object with `progress(iterator)`.

    Raises:
        ValueError: If the name is taken.
    """
    PIPELINES.register(name, factory)


def make_pipeline(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, **options: Any
) -> Any:
    """A pipeline; call its `progress(balanced_batches(loader))` once a step, with one iterator for all steps.

    Args:
        name: `base` copies the next batch while one trains; `sparse_dist` also exchanges its keys; `prefetch` also
            fills the caches of UVM_CACHING tables.
        model: Returns the loss and anything else; TorchRec's pipelines look for sharded modules in it.
        optimizer: Of the dense part.
        device: Of this rank.
        options: Of the pipeline.

    Raises:
        ValueError: If there is no such pipeline.
        ModuleNotFoundError: If it needs TorchRec and that is not installed.
    """
    return PIPELINES.find(name)(model, optimizer, device, **options)
