"""What samples cost, by index: of an array, of a function, or measured while the data set is read."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from trainer_client.balancing.membership import Ranks
from trainer_client.checks import check_whole

T = TypeVar("T")
_SHARED_AT_ONCE = 1 << 24  # samples whose costs the ranks exchange in one collective


class MeasuredCosts:
    """The costs of a data set's samples, noted while ranks and their `DataLoader` workers read them.

    `watch` wraps the data set; each sample that is read leaves its cost in memory that the workers share with their
    rank, 4 bytes a sample. After an epoch `share` brings the ranks' costs together. `values` is then an array to save
    and to give to a sampler of a later job.
    """

    def __init__(self, data: Sized | int) -> None:
        """Knows no cost yet.

        Args:
            data: The data set, or its number of samples.
        """
        self.num_samples = data if isinstance(data, int) else len(data)
        check_whole(self, num_samples=0)
        self._values: NDArray[np.float32] | None = None  # when they were shared
        self._noted = torch.full((self.num_samples,), -1.0)
        self._noted.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def shared(self) -> bool:
        """Whether all ranks know what any of them has read."""
        return self._values is not None

    @property
    def values(self) -> NDArray[np.float32]:
        """(n,) the costs, as they were shared; the mean of the others for samples that nobody had read."""
        if self._values is not None:
            return self._values
        noted = self._noted.numpy()
        known = noted[noted >= 0]
        mean = known.mean(dtype=np.float64) if known.size else 0.0
        return np.where(noted >= 0, noted, np.float32(mean))

    def watch(self, data: Dataset[T], cost: Callable[[T], float]) -> Dataset[T]:
        """The data set, map-style, with an eye on what is read.

        Args:
            data: The data set.
            cost: From a sample to a number, 0 or more.
        """
        return _Watched(data, cost, self._noted)

    def share(self, process_group: Ranks | None = None) -> None:
        """Brings the costs of all ranks together. Collective: all ranks call it, in the same order.

        Args:
            process_group: The ranks that share the data; default: all.
        """
        if dist.is_available() and dist.is_initialized():
            group = process_group.get_group() if isinstance(process_group, DeviceMesh) else process_group
            device = "cpu" if "gloo" in dist.get_backend(group) else "cuda"
            for begin in range(0, self.num_samples, _SHARED_AT_ONCE):
                piece = self._noted[begin : begin + _SHARED_AT_ONCE]
                there = piece.to(device)
                dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
                piece.copy_(there)
        self._values = self.values


class _Watched(Dataset[T], Generic[T]):
    """A data set whose samples leave their costs when they are read."""

    def __init__(self, data: Dataset[T], cost: Callable[[T], float], noted: torch.Tensor) -> None:
        self._data = data
        self._cost = cost
        self._noted = noted

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> T:
        sample = self._data[index]
        cost = float(self._cost(sample))
        if not 0 <= cost < float("inf"):
            raise ValueError(f"the cost of sample {index} is {cost}; use finite numbers, 0 or more")
        self._noted[index] = cost
        return sample

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_data":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._data, name)


Costs = ArrayLike | torch.Tensor | Callable[[int], float] | str | MeasuredCosts
"""Costs of samples as a sampler takes them."""


class CostTable:
    """Costs by index, asked for a batch at a time: never all of them."""

    def __init__(self, field: str, costs: Costs, data: Sized | int, num_samples: int) -> None:
        """Takes what the user gave for an argument.

        Args:
            field: Its name, for errors.
            costs: (n,) numbers, a function from an index to a number, the name of an attribute of the data set that is
                one of them, or costs that are being measured.
            data: The data set, or its number of samples.
            num_samples: Its number of samples.

        Raises:
            ValueError: If it is none of them, or of another length.
        """
        if isinstance(costs, str):
            if not hasattr(data, costs):
                raise ValueError(f"{field} is {costs!r}, which {type(data).__name__} lacks; name one of its attributes")
            costs = getattr(data, costs)
        self._field = field
        self._function: Callable[[int], float] | None = None
        self._array: NDArray[Any] = np.empty(0)
        self.measured = costs if isinstance(costs, MeasuredCosts) else None
        if callable(costs):
            self._function = costs
            return
        if isinstance(costs, MeasuredCosts):
            shape: tuple[int, ...] = (costs.num_samples,)
            kind = "f"
        else:
            array = costs.detach().cpu().numpy() if isinstance(costs, torch.Tensor) else np.asarray(costs)
            self._array, shape, kind = array, array.shape, array.dtype.kind
        if shape != (num_samples,) or kind not in "iuf":
            found = f"{self._array.dtype} of shape {shape}" if self.measured is None else f"of shape {shape}"
            raise ValueError(f"{field} is {found}; give one number for each of the {num_samples} samples")

    @property
    def is_called(self) -> bool:
        """Whether a function is asked for each sample."""
        return self._function is not None

    @property
    def known(self) -> bool:
        """Whether they are known, which those that are measured are not in the first epoch."""
        if self.measured is not None and self.measured.shared and not self._array.size:
            self._array = self.measured.values
        return self.measured is None or self.measured.shared

    def of(self, indexes: NDArray[np.int64]) -> NDArray[Any]:
        """The costs of some samples, int64 or float64.

        Raises:
            ValueError: If one is negative or not finite.
        """
        if self._function is not None:
            found = np.array([self._function(index) for index in indexes.tolist()])
        else:
            found = self._array[indexes]
        found = found.astype(np.int64 if found.dtype.kind in "iu" and found.size else np.float64)
        bad = np.flatnonzero(~((found >= 0) & (found < np.inf)))
        if bad.size:
            index, value = indexes[bad[0]], found[bad[0]]
            raise ValueError(f"{self._field}[{index}] is {value}; use finite numbers, 0 or more")
        return found
