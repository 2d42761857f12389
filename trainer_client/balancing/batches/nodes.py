"""The values of a batch, apart from its tensors: how to build the same around other tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Parts(Protocol):
    """What a batch is built from."""

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""

    @property
    def device(self) -> torch.device | None:
        """Where the batch is; None without tensors."""

    def tensor(self, leaf: int) -> torch.Tensor:
        """The tensor of a leaf."""

    def lengths(self, columns: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """Lengths of jagged columns, one column after the other: (columns × samples,)."""

    def lengths_on_host(self, column: str) -> Sequence[int]:
        """(samples,) lengths of one column."""

    def totals(self, columns: Sequence[str]) -> list[int]:
        """Sum of the lengths of each column."""


@dataclass(slots=True)
class Taken:
    """What is taken out of a batch: its tensors in the order of the leaves, and the lengths of each jagged tensor."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    lengths: list[torch.Tensor] = field(default_factory=list)


class Node(Protocol):
    """A value of the batch, without its tensors."""

    def build(self, parts: Parts) -> Any:
        """The value around the tensors of `parts`."""

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another value apart; whether it is of the same kind, but for what its tensors are."""


@dataclass(frozen=True, slots=True)
class TensorNode:
    """A tensor."""

    leaf: int

    def build(self, parts: Parts) -> torch.Tensor:
        """See `Node`."""
        return parts.tensor(self.leaf)

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Node`."""
        taken.tensors.append(value)
        return isinstance(value, torch.Tensor)


@dataclass(frozen=True, slots=True)
class SharedNode:
    """A value that stays as it is; None is one."""

    value: Any

    def build(self, parts: Parts) -> Any:
        """See `Node`."""
        return _moved(self.value, parts.device)

    def take(self, value: Any, _taken: Taken) -> bool:
        """See `Node`; a shared value may be another one in each batch."""
        return value is None and self.value is None


@dataclass(frozen=True, slots=True)
class BatchSizeNode:
    """The number of samples, as a Python integer (dtype None) or a 0-d tensor."""

    dtype: torch.dtype | None

    def build(self, parts: Parts) -> int | torch.Tensor:
        """See `Node`."""
        if self.dtype is None:
            return parts.num_samples
        return torch.full((), parts.num_samples, dtype=self.dtype, device=parts.device)

    def take(self, value: Any, _taken: Taken) -> bool:
        """See `Node`."""
        return type(value) is int and self.dtype is None


def set_members(value: Any, members: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> None:
    """Sets attributes of an object that may be frozen."""
    for name, member in members.items() if isinstance(members, Mapping) else members:
        object.__setattr__(value, name, member)


def _moved(value: Any, device: torch.device | None) -> Any:
    """A shared value with its tensors on `device`."""
    if device is None or value is None:
        return value
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    if callable(getattr(value, "to", None)):
        return value.to(device, non_blocking=True)
    return value
