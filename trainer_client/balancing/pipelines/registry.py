"""Training pipelines by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn

PipelineFactory = Callable[..., Any]
ENTRY_POINTS = "evenkeel.pipelines"

# Classes of torchrec.distributed.train_pipeline.
_TORCHREC = {
    "base": "TrainPipelineBase",
    "sparse_dist": "TrainPipelineSparseDist",
    "prefetch": "PrefetchTrainPipelineSparseDist",
}
_registered: dict[str, PipelineFactory] = {}


@lru_cache(maxsize=1)
def _installed() -> dict[str, Any]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def pipeline_names() -> tuple[str, ...]:
    """All names: TorchRec's pipelines, registered ones, and those of installed packages."""
    return tuple(sorted({*_TORCHREC, *_registered, *_installed()}))


def register_pipeline(name: str, factory: PipelineFactory) -> None:
    """Makes a pipeline available under a name.

    An installed package does the same with an entry point in the group `evenkeel.pipelines`.

    Args:
        name: The name.
        factory: From model, optimizer, device and options to an object with `progress(iterator)`.

    Raises:
        ValueError: If the name is taken.
    """
    if name in pipeline_names() and _registered.get(name) is not factory:
        raise ValueError(f"a pipeline named {name!r} is there already; choose another name")
    _registered[name] = factory


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
    if name in _registered:
        return _registered[name](model, optimizer, device, **options)
    if name in _TORCHREC:
        from torchrec.distributed import train_pipeline

        return getattr(train_pipeline, _TORCHREC[name])(model, optimizer, device, **options)
    if name in _installed():
        return _installed()[name].load()(model, optimizer, device, **options)
    raise ValueError(f"there is no pipeline named {name!r}; choose one of {', '.join(pipeline_names())}")
