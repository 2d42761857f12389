"""The containers of a batch: how to build the same nesting around other values."""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from trainer_client.balancing.batches.nodes import Node, Parts, SharedNode, Taken, set_members
from trainer_client.balancing.batches.tensordicts import TensorDictNode, is_tensordict

Items = tuple[tuple[Any, Node], ...]
Walk = Callable[[Any, object], Node]
"""From a value and its name in its container to its node."""


class Container(Node, Protocol):
    """A value of the batch that holds others."""

    @property
    def items(self) -> Items:
        """What it holds, with the key of each."""

    def read(self, value: Any, key: Any) -> Any:
        """What another value of this kind holds under a key."""

    def replace(self, value: Any, changes: dict[Any, Any]) -> Any:
        """The container with other contents under some keys, in place where it can be changed."""


@dataclass(frozen=True, slots=True)
class DictNode:
    """A dict or a subclass of it, in insertion order; with its attributes, if it has any.

    Attributes:
        kind: Its type.
        items: Its contents.
        default_factory: That of a defaultdict.
        members: Attributes of the instance.
        aliases: Attributes that are items as well.
        own_dict: The items are the attributes (`self.__dict__ = self`).
    """

    kind: type[dict[Any, Any]]
    items: Items
    default_factory: Any = None
    members: ObjectNode | None = None
    aliases: tuple[str, ...] = ()
    own_dict: bool = False

    def build(self, parts: Parts) -> dict[Any, Any]:
        """Makes it again, around the tensors of `parts`."""
        if issubclass(self.kind, defaultdict):
            result: dict[Any, Any] = self.kind(self.default_factory)
        else:
            result = self.kind.__new__(self.kind)
        if self.own_dict:
            result.__dict__ = result
        for key, node in self.items:
            result[key] = node.build(parts)
        if self.members is not None:
            self.members.fill(result, parts)
            set_members(result, [(name, result[name]) for name in self.aliases])
        return result

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        if type(value) is not self.kind or len(value) != len(self.items):
            return False
        if getattr(value, "default_factory", None) is not self.default_factory:
            return False
        found = zip(self.items, value.items(), strict=True)
        if not all(key == own and node.take(item, taken) for (key, node), (own, item) in found):
            return False
        if self.members is None:
            return self.own_dict or not getattr(value, "__dict__", None)
        aliased = all(getattr(value, name, None) is value.get(name) for name in self.aliases)
        return aliased and self.members.take(value, taken)

    def read(self, value: Any, key: Any) -> Any:
        """The value at a key."""
        return value[key]

    def replace(self, value: Any, changes: dict[Any, Any]) -> Any:
        """The same with other values at some keys."""
        for key, item in changes.items():
            value[key] = item
        return value


@dataclass(frozen=True, slots=True)
class UserDictNode:
    """A `UserDict`, such as the BatchEncoding of transformers."""

    kind: type[UserDict[Any, Any]]
    items: Items
    members: ObjectNode

    def build(self, parts: Parts) -> UserDict[Any, Any]:
        """Makes it again, around the tensors of `parts`."""
        result = self.kind.__new__(self.kind)
        object.__setattr__(result, "data", {key: node.build(parts) for key, node in self.items})
        self.members.fill(result, parts)
        return result

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        if type(value) is not self.kind or len(value.data) != len(self.items):
            return False
        found = zip(self.items, value.data.items(), strict=True)
        same = all(key == own and node.take(item, taken) for (key, node), (own, item) in found)
        return same and self.members.take(value, taken)

    def read(self, value: Any, key: Any) -> Any:
        """The value at a key."""
        return value.data[key]

    def replace(self, value: Any, changes: dict[Any, Any]) -> Any:
        """The same with other values at some keys."""
        value.data.update(changes)
        return value


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """A list, tuple, or named tuple."""

    kind: type[Any]
    items: Items

    def build(self, parts: Parts) -> Any:
        """Makes it again, around the tensors of `parts`."""
        return self._made([node.build(parts) for _, node in self.items])

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        if type(value) is not self.kind or len(value) != len(self.items):
            return False
        taken.has_empty_lists |= not self.items
        return all(node.take(item, taken) for (_, node), item in zip(self.items, value, strict=True))

    def read(self, value: Any, key: Any) -> Any:
        """The value at a key."""
        return value[key]

    def replace(self, value: Any, changes: dict[Any, Any]) -> Any:
        """The same with other values at some keys."""
        values = [changes.get(index, item) for index, item in enumerate(value)]
        if isinstance(value, list):
            value[:] = values
            return value
        return self._made(values)

    def _made(self, values: Sequence[Any]) -> Any:
        return self.kind._make(values) if hasattr(self.kind, "_fields") else self.kind(values)


@dataclass(frozen=True, slots=True)
class ObjectNode:
    """The attributes of an object: a dataclass, an attrs or pydantic class, or a class of the user's.

    Objects are built without `__init__` and `__post_init__`, which may expect other arguments.

    Attributes:
        kind: Its type.
        items: Its attributes.
        stored: Names of all that is in its `__dict__`, also of what is left out.
    """

    kind: type[Any]
    items: Items
    stored: frozenset[str]

    def build(self, parts: Parts) -> Any:
        """Makes it again, around the tensors of `parts`."""
        result = _blank(self.kind)
        self.fill(result, parts)
        return result

    def fill(self, result: Any, parts: Parts) -> None:
        """Sets the attributes of an object."""
        for name, node in self.items:
            object.__setattr__(result, name, node.build(parts))

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        if type(value) is not self.kind or getattr(value, "__dict__", _NOTHING).keys() != self.stored:
            return False
        try:
            return all(node.take(getattr(value, name), taken) for name, node in self.items)
        except AttributeError:  # a field that was never set
            return False

    def read(self, value: Any, key: Any) -> Any:
        """The value at a key."""
        return getattr(value, key)

    def replace(self, value: Any, changes: dict[Any, Any]) -> Any:
        """The same with other values at some keys."""
        set_members(value, changes)
        return value


@dataclass(frozen=True, slots=True)
class ConstantNode:
    """What belongs to a container whatever it holds, and is equal in batches of one kind."""

    value: Any

    def build(self, _parts: Parts) -> Any:
        """Makes it again, around the tensors of `parts`."""
        return self.value

    def take(self, value: Any, _taken: Taken) -> bool:
        """Takes another of its kind apart."""
        return bool(value == self.value)


_NOTHING: dict[str, Any] = {}


def container(value: Any, walk: Walk) -> Node | None:
    """The node of a container; None if the value is none that is known."""
    if isinstance(value, dict):
        items = tuple((key, walk(item, key)) for key, item in value.items())
        factory = value.default_factory if isinstance(value, defaultdict) else None
        attributes = getattr(value, "__dict__", None)
        if not attributes or attributes is value:
            return DictNode(type(value), items, factory, own_dict=attributes is value and attributes is not None)
        aliases = tuple(name for name, item in attributes.items() if name in value and value[name] is item)
        members = _object(value, walk, leave=aliases)
        return DictNode(type(value), items, factory, members, aliases)
    if is_tensordict(value):
        return TensorDictNode.of(value, walk)
    if isinstance(value, UserDict):
        items = tuple((key, walk(item, key)) for key, item in value.data.items())
        return UserDictNode(type(value), items, _object(value, walk, leave=("data",)))
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        nodes = [walk(item, name) for name, item in zip(names, value, strict=True)]
        return SequenceNode(type(value), tuple(enumerate(nodes)))
    return _object(value, walk) if is_record(value) and _can_be_made(type(value)) else None


def _blank(kind: type[Any]) -> Any:
    """An object without its attributes: `object.__new__` refuses types that are written in C, and their subclasses."""
    own: Any = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
    return own.__new__(kind)


def _can_be_made(kind: type[Any]) -> bool:
    try:
        _blank(kind)
    except TypeError:
        return False
    return True


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


def is_record(value: Any) -> bool:
    """Whether it is an object whose attributes make up a part of the batch."""
    kind = type(value)
    if isinstance(value, type) or callable(value):
        return False
    if dataclasses.is_dataclass(value) or hasattr(kind, "__attrs_attrs__") or _is_pydantic(value):
        return True
    if isinstance(value, SimpleNamespace):
        return True
    # one's own class, if there are tensors in it: what else has attributes is not a part of the batch
    return not isinstance(value, torch.Tensor) and any(
        isinstance(item, torch.Tensor) or type(item).__name__ in ("JaggedTensor", "KeyedJaggedTensor")
        for _, item in attributes_of(value)
    )


def _is_pydantic(value: Any) -> bool:
    model = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    return model is not None and isinstance(value, model)


def _object(value: Any, walk: Walk, leave: Sequence[str] = ()) -> ObjectNode:
    items: list[tuple[str, Node]] = []
    for name, item in attributes_of(value):
        if name not in leave:
            items.append((name, _TOKENIZER[name](item) if _is_encoding(value, name) else walk(item, name)))
    if _is_pydantic(value):
        items.append(("__pydantic_fields_set__", ConstantNode(value.model_fields_set)))
        for name in ("__pydantic_extra__", "__pydantic_private__"):
            more = getattr(value, name, None)
            inner = None if more is None else tuple((key, walk(item, key)) for key, item in more.items())
            items.append((name, SharedNode(None) if inner is None else DictNode(dict, inner)))
    return ObjectNode(type(value), tuple(items), frozenset(getattr(value, "__dict__", ())))


# transformers.BatchEncoding: what the tokenizer knew about the texts of the batch does not fit another one's
_TOKENIZER: dict[str, Callable[[Any], Node]] = {
    "_encodings": lambda _: ConstantNode(None),
    "_n_sequences": ConstantNode,
}


def _is_encoding(value: Any, name: str) -> bool:
    return name in _TOKENIZER and type(value).__name__ == "BatchEncoding"


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Fields, slots and everything in `__dict__`, but for what Python and cached properties keep there."""
    kind = type(value)
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    names += [attribute.name for attribute in getattr(kind, "__attrs_attrs__", ())]
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        own = f"_{base.__name__.lstrip('_')}"  # what Python puts before private names
        slots = [slots] if isinstance(slots, str) else slots
        names += [own + slot if slot.startswith("__") and not slot.endswith("__") else slot for slot in slots]
    names += getattr(value, "__dict__", ())
    for name in dict.fromkeys(names):
        described = getattr(kind, name, None)
        computed = isinstance(described, property | cached_property)
        if not computed and not (name.startswith("__") and name.endswith("__")) and hasattr(value, name):
            yield name, getattr(value, name)
