"""Containers of the tensordict package, which is looked up among the modules already imported."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer_client.balancing.batches.nodes import DerivedNode, Node, Parts, Taken

if TYPE_CHECKING:
    from trainer_client.balancing.batches.containers import Walk


def is_tensordict(value: object) -> bool:
    """Whether it is a `TensorDict`, or an instance of a tensorclass."""
    module = sys.modules.get("tensordict")
    return module is not None and bool(module.is_tensor_collection(value))


@dataclass(frozen=True, slots=True)
class TensorDictNode:
    """A `TensorDict` or a tensorclass whose first batch dimension is the sample.

    Attributes:
        kind: The tensorclass; None: a TensorDict, also for what was another implementation of it.
        items: Its contents; of strings and other objects the values themselves.
        batch_dims: The batch dimensions behind the samples; None if it has no batch dimensions at all.
        names: Names of the dimensions.
        placed: It knows its device.
    """

    kind: type[Any] | None
    items: tuple[tuple[str, Node], ...]
    batch_dims: tuple[int, ...] | None
    names: tuple[str | None, ...]
    placed: bool

    @staticmethod
    def of(value: Any, walk: Walk) -> TensorDictNode:
        """The node of a TensorDict or tensorclass."""
        items = tuple((key, walk(item, key)) for key, item in _items(value))
        return TensorDictNode(_kind(value), items, *_properties(value))

    def build(self, parts: Parts) -> Any:
        """Makes it again, around the tensors of `parts`."""
        from tensordict import NonTensorStack, TensorDict

        batch_size = () if self.batch_dims is None else (parts.num_samples, *self.batch_dims)
        result = TensorDict({}, batch_size=batch_size, device=parts.device if self.placed else None)
        for key, node in self.items:
            value = node.build(parts)
            if isinstance(value, list):
                value = NonTensorStack.from_list(value) if value else NonTensorStack(stack_dim=0)
            if not isinstance(node, DerivedNode):
                result[key] = value
        if any(self.names):
            result.names = list(self.names)
        return result if self.kind is None else self.kind.from_tensordict(result)

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        if not is_tensordict(value) or _kind(value) is not self.kind:
            return False
        if _properties(value) != (self.batch_dims, self.names, self.placed):
            return False
        found = _items(value)
        if len(found) != len(self.items):
            return False
        return all(
            key == own and node.take(item, taken) for (key, node), (own, item) in zip(self.items, found, strict=True)
        )

    def read(self, value: Any, key: str) -> Any:
        """The value at a key."""
        return value.get(key, None)

    def replace(self, value: Any, changes: dict[str, Any]) -> Any:
        """The same with other values at some keys."""
        for key, item in changes.items():
            value.set(key, item)
        return value


def _kind(value: Any) -> type[Any] | None:
    from tensordict import is_tensorclass

    return type(value) if is_tensorclass(value) else None


def _properties(value: Any) -> tuple[tuple[int, ...] | None, tuple[str | None, ...], bool]:
    batch_size = tuple(value.batch_size)
    return batch_size[1:] if batch_size else None, tuple(value.names), value.device is not None


def _items(value: Any) -> list[tuple[str, Any]]:
    """Contents by key; strings and other objects as they are, a stack of them as a list with one for each sample."""
    from tensordict import NonTensorData, NonTensorStack

    result = []
    for key in value.keys():  # noqa: SIM118 - not a dict
        item = value.get(key)
        if isinstance(item, NonTensorStack):
            item = item.tolist()
        elif isinstance(item, NonTensorData):
            item = item.data
        result.append((key, item))
    return result
