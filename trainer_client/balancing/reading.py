"""What a rank has to contribute: costs, memory and users, lengths, a digest of copies, and what it measured."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.problem import share_of_total
from evenkeel.partitioning.rounds import RankSamples
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.batches.schema import bytes_of
from trainer_client.balancing.contribution import NO_MEASURE, Contribution, Measure
from trainer_client.balancing.costs.base import Cost
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.source import ask
from trainer_client.balancing.splitting import Costs, check_divides, divisible_in_round

_SPREAD = np.uint64(0x9E3779B1)  # odd, and without a pattern: numbers that only differ far up differ in the low bits
_MOST_ROWS = 1000
_FIRST_ROWS = 10  # batches with times until the lead first hears of them, and then as many as the fit's options say


def read_costs(values: Any, num_samples: int, *, what: str = "cost", world_size: int = 1) -> tuple[Costs, str]:
    """A user's costs as int64 or float64, zeros where they cannot be used, and why they cannot (empty: they can).

    A cost is a prediction: a bad one must not end a run. The round then stays unbalanced on all ranks, with a warning.
    The sum of all costs, shared among `world_size` ranks, must stay below 2^62, to be exact.

    Raises:
        ValueError: If there is not one number for each sample, or the numbers are on a device.
    """
    array = _read_values(values, num_samples, what)
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


def read_users(values: Any, num_samples: int) -> NDArray[np.uint32]:
    """(n,) whose each sample is: numbers below 2^32 as they are, others as ones of 32 bits that rarely meet.

    Raises:
        ValueError: If there is not one whole number for each sample, or the numbers are on a device.
    """
    array = _read_values(values, num_samples, "users")
    if num_samples and array.dtype.kind not in "iu":
        raise ValueError(f"users returned {array.dtype} values; return whole numbers, such as the ids of users")
    bits = array.astype(np.int64).view(np.uint64)
    return (bits ^ ((bits >> np.uint64(32)) * _SPREAD)).astype(np.uint32)


def _read_values(values: Any, num_samples: int, what: str) -> NDArray[Any]:
    """(n,) what a user's function has returned, on the host."""
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
        given = f"shape {array.shape}" if array.ndim else repr(values)
        raise ValueError(f"{what} returned {given} for {num_samples} samples; return one number for each sample")
    return array


def read_round(
    batches: Sequence[Any],
    flats: Sequence[FlatBatch],
    *,
    template: FlatBatch,
    cost: Cost,
    memory: Cost | None,
    users: Cost | None,
    options: BalanceOptions,
    num_ranks: int,
) -> tuple[RankSamples, str]:
    """What a rank knows of its own samples of a round, and why its costs cannot be used (empty: they can).

    `template` is an empty batch as the stream has known them so far. What all ranks' batches must have in common, the
    lead checks.

    Raises:
        ValueError: If there is not one number for each sample, or samples are to be split and nothing says where.
    """
    costs: list[Costs] = []
    memories: list[NDArray[np.float64]] = []
    numbers: list[NDArray[np.uint32]] = []
    problem, caps, split = "", options.memory_caps, options.split is not None
    shares = num_ranks * len(batches)  # sums over all ranks and batches stay exact
    for batch, flat in zip(batches, flats, strict=True):
        if split:
            check_divides(cost, flat)
        values, its_problem = read_costs(ask(cost, batch), flat.num_samples, world_size=shares)
        flat.check_unchanged("cost")
        costs.append(values)
        problem = problem or its_problem
        if caps is not None:
            used: Costs = flat.sizes
            if memory is not None:
                used, its_problem = read_costs(ask(memory, batch), flat.num_samples, what="memory", world_size=shares)
                problem = problem or its_problem
            flat.check_unchanged("memory")
            memories.append(used.astype(np.float64))
        if users is not None:
            numbers.append(read_users(ask(users, batch), flat.num_samples))
            flat.check_unchanged("users")
    # a batch without samples may be of other fields, as an empty list tells nothing of what it would hold
    samples = RankSamples(
        costs=_joined(costs),
        lengths=_joined([flat.lengths for flat in flats if flat.num_samples] or [template.lengths]),
        sizes=_joined([flat.sizes for flat in flats]),
        memory=_joined(memories) if memories else None,
        users=_joined(numbers) if numbers else None,
        batch_sizes=tuple(flat.num_samples for flat in flats),
        divisible=divisible_in_round(cost, batches, flats, costs, memories, caps) if split and not problem else None,
    )
    return samples, problem


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def digest_of_copy(flats: Sequence[FlatBatch], contribution: Contribution, *, values: bool) -> int:
    """64 bits of what peers must have alike: lengths, and values where asked for."""
    digest = hashlib.blake2b(np.ascontiguousarray(contribution.samples.lengths).tobytes(), digest_size=8)
    for flat in flats if values else ():
        for tensor in flat.tensors:
            if tensor.device.type == "cpu":
                digest.update(bytes_of(tensor).data)
    return int.from_bytes(digest.digest(), "little") or 1


class Measured:
    """The batches of this rank whose time is known, since the lead last heard of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.batches, self._sums = 0, Measure()
        self._rows: deque[NDArray[np.float64]] = deque(maxlen=_MOST_ROWS)
        self._enough = _FIRST_ROWS
        self.learns: LearnedCost | None = None  # the cost that is learned from them; None: it is given

    def add(
        self,
        load: float,
        seconds: float,
        late: float = 0.0,
        loading: float = 0.0,
        loop: float = 0.0,
        *,
        terms: NDArray[np.float64] | None = None,
    ) -> None:
        """Notes a batch, as `BalancedLoader.took`; nothing of one without load, or with a time that is none."""
        values = (load, seconds, late, loading, loop)
        try:
            if not (min(values[:2]) > 0 and min(values[2:]) >= 0 and all(map(math.isfinite, values))):
                return
        except (TypeError, ValueError, RuntimeError):  # no numbers, or tensors of several
            return
        new = Measure(*map(float, values))
        with self._lock:
            self.batches += 1
            self._sums = Measure(*(before + more for before, more in zip(self._sums, new, strict=True)))
            if terms is not None:
                self._rows.append(np.append(terms, 1e3 * new.seconds))

    def take(self) -> Measure:
        """The mean of the batches noted since the last call; zeros if there were none."""
        if not self.batches:
            return NO_MEASURE
        with self._lock:
            number, sums = self.batches, self._sums
            self.batches, self._sums = 0, Measure()
        return Measure(*(value / number for value in sums))

    def take_rows(self) -> NDArray[np.float64] | None:
        """(batches, terms + 1) summed terms and milliseconds of enough batches; None while there are fewer."""
        if self.learns is None or len(self._rows) < self._enough:
            return None
        with self._lock:
            rows, self._rows = np.stack(list(self._rows)), deque(maxlen=_MOST_ROWS)
        self._enough = self.learns.options.every
        return rows
