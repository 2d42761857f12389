"""A round in flight on one rank: from the submission of its costs to what all ranks agreed on."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.ranges import share_of_total
from evenkeel.partitioning.windows import WindowSlice
from trainer_client.balancing.agreement import Verdict
from trainer_client.balancing.embedded import RoundData
from trainer_client.balancing.peers import Twin
from trainer_client.balancing.report import RoundReport
from trainer_client.batches import Schema
from trainer_client.tracing import RoundTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a round came to on this rank.

    Attributes:
        verdict: What all ranks do.
        piece: Which of the own samples go where, and in which batch of the window.
        reports: One per batch; as many as any rank has in the window.
    """

    verdict: Verdict
    piece: WindowSlice
    reports: tuple[RoundReport, ...]

    @property
    def report(self) -> RoundReport:
        """The report of the round's first batch."""
        return self.reports[0]


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A submitted round.

    Attributes:
        round: Round number in its stream.
        data: This rank's samples.
        schema: What the batch looks like.
        exhausted: This rank's data has ended.
        problem: Why the costs cannot be used; empty if they can.
        asked: The service was asked.
        twin: What the ranks that train the same batches must have submitted too; None without such ranks.
        deadline: Until when to wait for the service, `time.monotonic` seconds.
        future: Resolves to the outcome when all ranks have agreed.
        trace: The round's spans; None when it is not traced.
    """

    round: int
    data: RoundData
    schema: Schema
    exhausted: bool
    problem: str
    asked: bool
    deadline: float
    twin: Twin | None = None
    future: Future[Outcome] = field(default_factory=Future)
    trace: RoundTrace | None = None


def read_costs(
    values: Any, num_samples: int, *, what: str = "cost", world_size: int = 1
) -> tuple[NDArray[np.int64] | NDArray[np.float64], str]:
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
    if array.dtype.kind in "biu":
        if array.dtype == np.uint64 and num_samples and int(array.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"{what} {int(array.max())} exceeds int64; use float64")
        array = array.astype(np.int64)
    elif array.dtype.kind == "f":
        array = array.astype(np.float64)
    elif num_samples == 0:
        array = np.zeros(0, dtype=np.int64)
    else:
        raise ValueError(f"{what} returned {array.dtype} values; return integers or floating-point numbers")
    bad = np.flatnonzero(~np.isfinite(array) | (array < 0))
    if len(bad):
        problem = (
            f"{what} of sample {bad[0]} is {array[bad[0]]}; all must be finite and at least 0 ({len(bad)} are not)"
        )
        return np.zeros(num_samples, dtype=np.int64), problem
    total, limit = float(array.sum(dtype=np.float64)), share_of_total(world_size)
    if total > limit:
        problem = f"{what} adds up to {total:.4g}; all of a rank's must stay below {limit:.4g}: use larger units"
        return np.zeros(num_samples, dtype=np.int64), problem
    return array, ""
