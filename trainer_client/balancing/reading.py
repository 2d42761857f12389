"""What a rank knows of its own samples of a round: the user's costs and memory, and the lengths of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.problem import share_of_total
from evenkeel.partitioning.rounds import RankSamples
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.costs.base import Cost
from trainer_client.balancing.splitting import check_divides, divisible_samples
from trainer_client.balancing.windows import check_window

Costs = NDArray[np.int64] | NDArray[np.float64]


def read_costs(values: Any, num_samples: int, *, what: str = "cost", world_size: int = 1) -> tuple[Costs, str]:
    """A user's costs as int64 or float64, and what is wrong with them.

    A cost is a prediction: a bad one must not end a run. The round then stays unbalanced on all ranks, with a warning.

    Args:
        values: Numbers of any integer or floating type: an array, a tensor on the host, a list.
        num_samples: Samples of the batch.
        what: What the numbers are, for messages.
        world_size: Ranks among which the sum of all costs is shared; it must stay below 2^62, to be exact.

    Returns:
        (n,) costs, zeros where there is a problem, and the problem (empty: none).

    Raises:
        ValueError: If there is not one number for each sample, or the numbers are on a device.
    """
    device = getattr(values, "device", None)
    if device is not None and getattr(device, "type", "cpu") != "cpu":
        raise ValueError(
            f"{what} returned a tensor on {device}; compute it from the host's batch, "
            "so that nothing waits for the device"
        )
    if isinstance(values, torch.Tensor):
        values = values.detach()
        if values.is_floating_point():
            values = values.double()  # numpy knows no bfloat16
    try:
        array: NDArray[Any] = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} returned {type(values).__name__}, which is no list of numbers ({error}); return a tensor or an "
            "array with one number for each sample"
        ) from None
    if array.shape != (num_samples,):
        raise ValueError(
            f"{what} returned shape {array.shape} for {num_samples} samples; return one number for each sample"
        )
    if num_samples == 0 or array.dtype.kind in "biu":
        if array.dtype == np.uint64 and num_samples and int(array.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"{what} {int(array.max())} exceeds int64; use float64")
        array = array.astype(np.int64)
    elif array.dtype.kind == "f":
        array = array.astype(np.float64)
    else:
        raise ValueError(f"{what} returned {array.dtype} values; return integers or floating-point numbers")
    problem, bad = "", np.flatnonzero(~np.isfinite(array) | (array < 0))
    if len(bad):
        problem = (
            f"{what} of sample {bad[0]} is {array[bad[0]]}; all must be finite and at least 0 ({len(bad)} are not)"
        )
    elif (total := float(array.sum(dtype=np.float64))) > (limit := share_of_total(world_size)):
        problem = f"{what} adds up to {total:.4g}; all of a rank's must stay below {limit:.4g}: use larger units"
    return np.zeros(num_samples, np.int64) if problem else array, problem


def read_round(
    batches: Sequence[Any],
    flats: Sequence[FlatBatch],
    *,
    template: FlatBatch,
    cost: Cost,
    memory: Cost | None,
    caps: Sequence[float] | None,
    split: bool,
    shares: int,
) -> tuple[RankSamples, str]:
    """What a rank knows of its own samples of a round, and why its costs cannot be used (empty: they can).

    What all ranks' batches must have in common, the ranks check when they agree.

    Args:
        batches: The batches, on the host.
        flats: The same, flattened.
        template: An empty batch as the stream has known them so far.
        cost: From a batch to the predicted work of each sample.
        memory: From a batch to what each sample adds to the memory caps; None: its bytes.
        caps: The memory caps, if there are any.
        split: Whether samples may be split.
        shares: Ranks times batches among which the sum of all costs is shared.

    Raises:
        ValueError: If there is not one number for each sample, the batches' fields differ, or samples are to be split
            and nothing says where.
    """
    filled = [flat for flat in flats if flat.num_samples]
    check_window(filled)
    costs, memories, tables, problem, begin = [], [], [], "", 0
    for batch, flat in zip(batches, flats, strict=True):
        if split:
            check_divides(cost, flat)
        values, its_problem = read_costs(cost(batch), flat.num_samples, world_size=shares)
        flat.check_unchanged("cost")
        costs.append(values)
        problem = problem or its_problem
        if caps is not None:
            used: Costs = flat.sizes
            if memory is not None:
                used, its_problem = read_costs(memory(batch), flat.num_samples, what="memory", world_size=shares)
                problem = problem or its_problem
            flat.check_unchanged("memory")
            memories.append(used.astype(np.float64))
        if split and not problem and flat.num_samples:
            capped = {} if caps is None else {"memory": memories[-1], "largest_cap": max(caps)}
            table = divisible_samples(cost, batch, flat, values, **capped)  # type: ignore[arg-type]
            if table is not None:
                table[:, 0] += begin
                tables.append(table)
        begin += flat.num_samples
    # a batch without samples may be of other fields, as an empty list tells nothing of what it would hold
    samples = RankSamples(
        costs=_joined(costs),
        lengths=_joined([flat.lengths for flat in filled] or [template.lengths]),
        sizes=_joined([flat.sizes for flat in flats]),
        memory=_joined(memories) if memories else None,
        batch_sizes=tuple(flat.num_samples for flat in flats),
        divisible=_joined(tables) if tables and not problem else None,
    )
    return samples, problem


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
