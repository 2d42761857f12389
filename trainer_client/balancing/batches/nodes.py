"""The values of a batch, apart from its tensors: how to build the same around other tensors, derived values last."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Declarations, Derive, MaxLength


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

    def offsets(self, column: str, alike: str | None) -> torch.Tensor:
        """(samples + 1,) where samples begin in a column; the tensor of `alike`, if that has the same lengths."""

    def lengths_on_host(self, column: str) -> Sequence[int]:
        """(samples,) lengths of one column."""

    def totals(self, columns: Sequence[str]) -> list[int]:
        """Sum of the lengths of each column."""


@dataclass(slots=True)
class Taken:
    """What is taken out of a batch.

    Attributes:
        tensors: Its tensors in the order of the leaves.
        lengths: The lengths of each jagged tensor.
        sizes: What it says that its number of samples is.
        has_empty_lists: It has lists that hold nothing, which may be those of no samples.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    lengths: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    has_empty_lists: bool = False


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
        """Makes it again, around the tensors of `parts`."""
        return parts.tensor(self.leaf)

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        taken.tensors.append(value)
        return isinstance(value, torch.Tensor)


@dataclass(frozen=True, slots=True)
class SharedNode:
    """A value that stays as it is; None is one."""

    value: Any

    def build(self, parts: Parts) -> Any:
        """Makes it again, around the tensors of `parts`."""
        return _moved(self.value, parts.device)

    def take(self, value: Any, _taken: Taken) -> bool:
        """Accepts None for None only: other shared values may differ from batch to batch."""
        return value is None and self.value is None


@dataclass(frozen=True, slots=True)
class BatchSizeNode:
    """The number of samples, as a Python integer (dtype None) or a 0-d tensor."""

    dtype: torch.dtype | None

    def build(self, parts: Parts) -> int | torch.Tensor:
        """Makes it again, around the tensors of `parts`."""
        if self.dtype is None:
            return parts.num_samples
        return torch.full((), parts.num_samples, dtype=self.dtype, device=parts.device)

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        if type(value) is not int or self.dtype is not None:
            return False
        taken.sizes.append(value)
        return True


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


@dataclass(frozen=True, slots=True)
class DerivedNode:
    """A value that follows from the samples; `settle` puts it in place when the rest is built.

    Attributes:
        path: Where it is.
        function: What gives it.
        column: The column of a `MaxLength`.
    """

    path: str
    function: Derive
    column: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """A function that cannot be pickled, such as a lambda, is replaced by what says so."""
        function = self.function
        try:
            pickle.dumps(function)
        except Exception as error:
            function = _Missing(self.path, str(error))
        return DerivedNode, (self.path, function, self.column)

    def build(self, _parts: Parts) -> None:
        """Makes it again, around the tensors of `parts`."""

    def take(self, _value: Any, _taken: Taken) -> bool:
        """Accepts any value, since it is computed anew."""
        return True


def derived_nodes(node: Node) -> Iterator[DerivedNode]:
    """All derived values below a node."""
    if isinstance(node, DerivedNode):
        yield node
    for _, child in getattr(node, "items", ()):
        yield from derived_nodes(child)
    if (members := getattr(node, "members", None)) is not None:
        yield from derived_nodes(members)


def settle(root: Node, batch: Any, parts: Parts, spec: BatchSpec | None = None) -> Any:
    """The batch with its derived values, which were None in it until now."""
    own = None if spec is None else Declarations(spec)
    return _place(root, batch, {node.path: _compute(node, batch, parts, own) for node in derived_nodes(root)})


def _compute(node: DerivedNode, batch: Any, parts: Parts, own: Declarations | None) -> Any:
    function = node.function
    if isinstance(function, MaxLength):
        return max(parts.lengths_on_host(node.column), default=0)
    if isinstance(function, _Missing) and own is not None:
        declared = own.derive(node.path)
        function = declared if callable(declared) else function
    return function(batch)


def _place(node: Any, value: Any, found: dict[str, Any]) -> Any:
    if isinstance(node, DerivedNode):
        return found[node.path]
    changes = {}
    for key, child in getattr(node, "items", ()):
        if next(derived_nodes(child), None) is not None:
            changes[key] = _place(child, node.read(value, key), found)
    if (members := getattr(node, "members", None)) is not None:
        _place(members, value, found)
    return node.replace(value, changes) if changes else value


@dataclass(frozen=True, slots=True)
class _Missing:
    path: str
    why: str

    def __call__(self, _batch: Any) -> Any:
        raise BatchError(
            f"the function that gives {self.path!r} did not reach this rank, which has had no batch of its own: "
            f"{self.why}; declare a function of a module, or a MaxLength, in derived"
        )
