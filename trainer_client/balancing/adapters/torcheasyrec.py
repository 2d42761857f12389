"""Evenkeel between the data loader of TorchEasyRec and its training loop: batches are balanced, nothing else changes.

Nothing of TorchEasyRec is imported before `balance_training` is called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.balancer import Balancer
from trainer_client.balancing.batches import BatchError
from trainer_client.balancing.batches.containers import is_keyed
from trainer_client.balancing.costs.base import Cost
from trainer_client.balancing.loader import BalancedLoader
from trainer_client.balancing.options import BalanceOptions

DENSE = "dense_features"
TRAVEL = ("sparse_features", "sequence_mulval_lengths", "sequence_dense_features", "labels", "jagged_labels",
          "sample_weights", "additional_infos")  # fmt: skip  # fields of its `Batch` that belong to samples, too
PER_SAMPLE = 16  # what a sample costs beside its keys, in keys, where no cost is given


def balance_training(
    *, balancer: Balancer | None = None, options: BalanceOptions | None = None, cost: Cost | None = None
) -> None:
    """Balances the training of `tzrec.main` in this process: its loaders of training data hand out balanced batches.

    Call it before `train_and_evaluate`. Loaders for evaluation and prediction stay as they are.

    Args:
        balancer: See `balance_dataloader`, also for `options` and `cost`.

    Raises:
        ModuleNotFoundError: If TorchEasyRec is not installed.
        ValueError: From `train_and_evaluate`: if the job has a sampler of negatives, or as `balance_dataloader`.
    """
    main: Any = importlib.import_module("tzrec.main")
    theirs: Callable[..., Any] = inspect.unwrap(main.create_dataloader)
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def create_dataloader(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        is_training = given.arguments["mode"].name == "TRAIN"
        if is_training and given.arguments["data_config"].HasField("sampler"):  # before theirs starts its servers
            raise ValueError(
                "data_config has a sampler: the negatives that it adds to a rank's batch belong to no sample of it, so "
                "such batches cannot be shared out; train this job without Evenkeel"
            )
        dataloader = theirs(*args, **kwargs)
        if is_training:
            balance_dataloader(dataloader, balancer=balancer, options=options, cost=cost)
        return dataloader

    main.create_dataloader = create_dataloader


def balance_dataloader(
    dataloader: Any,
    *,
    balancer: Balancer | None = None,
    options: BalanceOptions | None = None,
    cost: Cost | None = None,
    name: str = "train",
) -> BalancedLoader[Any]:
    """Lets `dataloader.get_iterator()` hand out balanced batches; the process group exists.

    A batch is still TorchEasyRec's `Batch`. Where this rank's data stand (`checkpoint_info`, `data_timestamp`) stays
    with it: all ranks train the samples of their batches of one number in one step.

    Args:
        dataloader: Of its `create_dataloader`.
        balancer: What balances; default: what the environment says (`Balancer.from_env`).
        options: How, where there is no `balancer`; default: as `BalanceOptions`, and no rank gets an empty batch.
        cost: From a batch to one number for each sample. It sees a dict of the batch's fields, such as
            `sparse_features.__BASE__.click_seq__item_id`. Default: the keys of a sample, and `PER_SAMPLE`.
        name: Of the stream of batches; loaders that are in use at the same time need different ones.

    Returns:
        What balances, for its `report` and `counters`.

    Raises:
        ValueError: If several batches are to be balanced together, across which its checkpoints could not tell what is
            trained, or options are given for a balancer that has its own.
    """
    if balancer is not None and options is not None:
        raise ValueError("options are given beside a balancer, which has its own; give one of them")
    balancer = balancer or Balancer.from_env(options=options or BalanceOptions(min_samples=1))
    if balancer.options.window > 1:
        raise ValueError(
            f"window is {balancer.options.window}: the checkpoints of TorchEasyRec hold the rows up to a batch, and in "
            "a window samples of later batches are trained before; use window=1"
        )
    source = _Source(dataloader.get_iterator)
    loader = BalancedLoader(source, balancer, cost=cost or count_keys, name=name, drop_last=True)
    dataloader.get_iterator = lambda: source.restore(loader)
    return loader


def count_keys(batch: dict[str, Any]) -> NDArray[np.int64]:
    """(n,) keys of each sample over all sparse and sequence features, and `PER_SAMPLE`.

    The batch is a dict of its fields, as a cost sees them.
    """
    total: Any = torch.full((_samples(batch),), PER_SAMPLE)
    for value in batch.get("sparse_features", {}).values():
        total = total + value.lengths().cpu().view(len(value.keys()), -1).sum(0)
    for value in batch.get("sequence_dense_features", {}).values():
        total = total + value.lengths().cpu()
    return np.asarray(total, dtype=np.int64)


class _Source:
    """This rank's batches, taken apart for the balancer, and put together again afterwards."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self._batches = batches
        self._latest: Any = None
        self._homes: deque[dict[str, Any]] = deque()  # what stays at home, of the batches under way

    def __iter__(self) -> Iterator[dict[str, Any]]:
        homes = self._homes = deque()
        for batch in self._batches():
            parts, self._latest = take_apart(batch), batch
            homes.append({"checkpoint_info": batch.checkpoint_info, "data_timestamp": batch.data_timestamp})
            yield parts

    def restore(self, loader: BalancedLoader[Any]) -> Iterator[Any]:
        """Batches of TorchEasyRec's class. After the end of this rank's own data they tell of no rows of it."""
        for parts in loader:
            home = self._homes.popleft() if self._homes else {"checkpoint_info": None, "data_timestamp": -1.0}
            template = self._latest
            fields: dict[str, Any] = {name: parts.get(name, {}) for name in TRAVEL if hasattr(template, name)}
            fields[DENSE] = {}
            for group, values in parts.get(DENSE, {}).items():
                one = template.dense_features[group]
                fields[DENSE][group] = type(one)(
                    keys=one.keys(), length_per_key=one.length_per_key(), values=values, key_dim=one.key_dim()
                )
            yield replace(template, **fields, **home)


def take_apart(batch: Any) -> dict[str, Any]:
    """The fields of a `Batch` that belong to samples.

    Raises:
        BatchError: If a field has not one row for each sample.
    """
    parts = {name: dict(getattr(batch, name)) for name in TRAVEL if getattr(batch, name, None)}
    if batch.dense_features:
        parts[DENSE] = {group: value.values() for group, value in batch.dense_features.items()}
    if not parts:
        raise BatchError("the batch has no features and no labels; there is nothing to balance")
    samples = _samples(parts)
    for name, fields in parts.items():
        for key, value in fields.items():
            if (rows := _rows(value)) != samples:
                raise BatchError(
                    f"{name}[{key!r}] has {rows} rows in a batch of {samples} samples; rows that belong to no sample, "
                    "such as sampled negatives, cannot be shared out: train this job without Evenkeel"
                )
    return parts


def _rows(value: Any) -> int:
    if is_keyed(value):
        return int(value.lengths().numel() // len(value.keys()))
    return len(value) if isinstance(value, torch.Tensor) else int(value.lengths().numel())


def _samples(parts: dict[str, Any]) -> int:
    """Samples of a batch: labels have one row each, else the first field says it."""
    fields = parts.get("labels") or next(iter(parts.values()))
    return _rows(next(iter(fields.values())))
