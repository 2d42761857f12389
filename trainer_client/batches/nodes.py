"""The containers of a batch, apart from its tensors: how to build the same nesting around other tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class DictNode:
    """A dict or a subclass of it, in insertion order."""

    kind: type[dict[Any, Any]]
    items: tuple[tuple[Any, Node], ...]
    default_factory: Any = None

    def build(self, parts: Parts) -> dict[Any, Any]:
        """See `Node`."""
        if issubclass(self.kind, defaultdict):
            result: dict[Any, Any] = self.kind(self.default_factory)
        else:
            result = self.kind.__new__(self.kind)
        for key, node in self.items:
            result[key] = node.build(parts)
        return result

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Node`."""
        if type(value) is not self.kind or len(value) != len(self.items):
            return False
        if getattr(value, "default_factory", None) is not self.default_factory:
            return False
        found = zip(self.items, value.items(), strict=True)
        return all(key == own and node.take(item, taken) for (key, node), (own, item) in found)


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """A list, tuple, or named tuple."""

    kind: type[Any]
    items: tuple[Node, ...]

    def build(self, parts: Parts) -> Any:
        """See `Node`."""
        values = [node.build(parts) for node in self.items]
        if hasattr(self.kind, "_fields"):
            return self.kind._make(values)
        return self.kind(values)

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Node`."""
        if type(value) is not self.kind or len(value) != len(self.items):
            return False
        return all(node.take(item, taken) for node, item in zip(self.items, value, strict=True))


@dataclass(frozen=True, slots=True)
class DataclassNode:
    """A dataclass; built without `__init__` and `__post_init__`, which may expect other arguments."""

    kind: type[Any]
    items: tuple[tuple[str, Node], ...]

    def build(self, parts: Parts) -> Any:
        """See `Node`."""
        result = object.__new__(self.kind)
        for name, node in self.items:
            object.__setattr__(result, name, node.build(parts))
        return result

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Node`."""
        if type(value) is not self.kind or len(self.items) != len(self.kind.__dataclass_fields__):
            return False
        try:
            return all(node.take(getattr(value, name), taken) for name, node in self.items)
        except AttributeError:  # a field that was never set
            return False


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
