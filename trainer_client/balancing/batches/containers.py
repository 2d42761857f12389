"""The containers of a batch, taken apart and made again as pytrees are.

What is registered with torch's pytrees is taken from there: dicts, lists, tuples, named tuples, and what libraries and
users register. Registered here are objects (dataclasses, attrs and pydantic classes, own classes that hold tensors) and
subclasses of dicts, which are made again without `__init__`, and `TensorDict`, whose batch size is another one then.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
_JAGGED = ("JaggedTensor", "KeyedJaggedTensor")
_NOTHING = object()


class Container(NamedTuple):
    """How one kind of containers is taken apart.

    Attributes:
        flatten: From a container to its values and a context, which is equal for equal nesting.
        unflatten: From type, context, values, number of samples and device to the container.
        names: From a container to the names of its values in paths.
    """

    flatten: Callable[[Any], tuple[Sequence[Any], Any]]
    unflatten: Callable[[type, Any, Sequence[Any], int, torch.device | None], Any]
    names: Callable[[Any], Sequence[object]]


@dataclass(frozen=True, slots=True)
class Tree:
    """Nested containers of a batch; None among the children is a leaf."""

    kind: Any
    context: Any
    children: tuple[Tree | None, ...]

    def leaves_of(self, batch: Any, leaves: list[Any]) -> bool:
        """Appends the leaves of another batch; whether that is nested alike."""
        kind: Any = type(batch)
        if kind is not self.kind:
            return False
        values, context = (_container_of_kind(kind) or _OBJECT).flatten(batch)
        if context != self.context or len(values) != len(self.children):
            return False
        for child, value in zip(self.children, values, strict=True):
            if child is None:
                leaves.append(value)
            elif not child.leaves_of(value, leaves):
                return False
        return True

    def unflatten(self, leaves: Iterator[Any], num_samples: int, device: torch.device | None) -> Any:
        """The containers around the leaves."""
        children = (next(leaves) if c is None else c.unflatten(leaves, num_samples, device) for c in self.children)
        container = _container_of_kind(self.kind) or _OBJECT
        return container.unflatten(self.kind, self.context, list(children), num_samples, device)


def container_of(value: Any) -> Container | None:
    """How a value is taken apart; None if it is no container."""
    kind: Any = type(value)
    return _container_of_kind(kind) or (_OBJECT if _is_own_with_tensors(value) and _can_be_made(kind) else None)


@lru_cache(maxsize=1024)
def _container_of_kind(kind: Any) -> Container | None:
    """How all values of a type are taken apart; None if they are no containers, or it depends on what they hold."""
    tensordict, pydantic = sys.modules.get("tensordict"), sys.modules.get("pydantic")
    nodes: dict[Any, pytree.NodeDef] = pytree.SUPPORTED_NODES
    node = nodes.get(namedtuple if pytree.is_namedtuple_class(kind) else kind)
    if tensordict is not None and (issubclass(kind, tensordict.TensorDictBase) or tensordict.is_tensorclass(kind)):
        return _TENSORDICT
    if kind in _torchrec_kinds(*_JAGGED, "KeyedTensor"):
        return None
    if pydantic is not None and issubclass(kind, pydantic.BaseModel):
        return _PYDANTIC
    if issubclass(kind, dict | UserDict) and node is None:
        return _MAPPING if _can_be_made(kind) else None
    is_record = dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or issubclass(kind, SimpleNamespace)
    if is_record and not issubclass(kind, dict):
        return _OBJECT if _can_be_made(kind) else None
    return _registered(node) or (_SEQUENCE if issubclass(kind, list | tuple) else None)


def _registered(node: pytree.NodeDef | None) -> Container | None:
    if node is None:
        return None

    def names(value: Any) -> Sequence[object]:
        if node.flatten_with_keys_fn is None:
            return range(len(node.flatten_fn(value)[0]))
        keys, _ = node.flatten_with_keys_fn(value)
        kinds = ("key", "idx", "name")  # of mappings, sequences and attributes
        return [next(getattr(key, kind) for kind in kinds if hasattr(key, kind)) for key, _ in keys]

    return Container(node.flatten_fn, lambda _kind, context, values, *_: node.unflatten_fn(values, context), names)


_SEQUENCE = Container(
    lambda value: (list(value), None),
    lambda kind, _context, values, *_: getattr(kind, "_make", kind)(values),
    lambda value: getattr(value, "_fields", range(len(value))),
)


# ------------------------------------------------------------------------------------------- objects


def _flatten_object(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    kind: Any = type(value)
    attributes = getattr(value, "__dict__", {})
    if attributes.keys() != _declared_names(kind).keys():
        attributes = dict(attributes_of(value))
    return list(attributes.values()), tuple(attributes)


def _unflatten_object(kind: type, names: tuple[str, ...], values: Sequence[Any], *_: Any) -> Any:
    result = _blank(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(result, name, value)
    return result


_OBJECT = Container(_flatten_object, _unflatten_object, lambda value: _flatten_object(value)[1])


def _flatten_mapping(value: Any) -> tuple[list[Any], tuple[tuple[Any, ...], tuple[str, ...]]]:
    attributes = {name: item for name, item in attributes_of(value) if name != "data" or isinstance(value, dict)}
    return [*value.values(), *attributes.values()], (tuple(value), tuple(attributes))


def _unflatten_mapping(kind: type, context: tuple[Any, Any], values: Sequence[Any], *_: Any) -> Any:
    (keys, names), items = context, iter(values)
    result = _blank(kind)
    if not issubclass(kind, dict):
        object.__setattr__(result, "data", {})
    for key, item in zip(keys, items, strict=False):
        result[key] = item
    for name, item in zip(names, items, strict=True):
        object.__setattr__(result, name, item)
    return result


_MAPPING = Container(
    _flatten_mapping, _unflatten_mapping, lambda value: [name for names in _flatten_mapping(value)[1] for name in names]
)


def _flatten_pydantic(value: Any) -> tuple[list[Any], tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]]:
    fields = dict(attributes_of(value)) | (value.__pydantic_extra__ or {})
    private = value.__pydantic_private__ or {}
    return [*fields.values(), *private.values()], (tuple(fields), tuple(private), frozenset(value.model_fields_set))


def _unflatten_pydantic(kind: Any, context: tuple[Any, Any, Any], values: Sequence[Any], *_: Any) -> Any:
    names, private, fields_set = context
    result = kind.model_construct(set(fields_set), **dict(zip(names, values, strict=False)))
    for name, item in zip(private, values[len(names) :], strict=True):
        setattr(result, name, item)
    return result


_PYDANTIC = Container(
    _flatten_pydantic,
    _unflatten_pydantic,
    lambda value: [*_flatten_pydantic(value)[1][0], *value.__private_attributes__],
)


def _is_own_with_tensors(value: Any) -> bool:
    """Whether it is of one's own class, with tensors in it: what else has attributes is no part of the batch."""
    kind: Any = type(value)
    if callable(value) or kind.__module__ == "builtins" or issubclass(kind, torch.Tensor | np.ndarray | list | tuple):
        return False
    if is_torchrec(value, *_JAGGED, "KeyedTensor"):
        return False
    return any(isinstance(one, torch.Tensor) or is_torchrec(one, *_JAGGED) for _, one in attributes_of(value))


def _blank(kind: type) -> Any:
    """An object without its attributes: `object.__new__` refuses types that are written in C, and their subclasses."""
    base: Any = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
    return base.__new__(kind)


@lru_cache(maxsize=1024)
def _can_be_made(kind: Any) -> bool:
    try:
        _blank(kind)
    except TypeError:
        return False
    return True


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Fields, slots and everything in `__dict__`, but for what Python and cached properties keep there."""
    kind: Any = type(value)
    declared = _declared_names(kind)
    more = [name for name in getattr(value, "__dict__", ()) if name not in declared]
    for name in (*declared, *(name for name in more if not _is_computed(kind, name))):
        if (item := getattr(value, name, _NOTHING)) is not _NOTHING:
            yield name, item


@lru_cache(maxsize=1024)
def _declared_names(kind: Any) -> dict[str, None]:
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    names += [attribute.name for attribute in getattr(kind, "__attrs_attrs__", ())]
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        private = f"_{base.__name__.lstrip('_')}"  # what Python puts before private names
        for slot in (slots,) if isinstance(slots, str) else slots:
            names.append(private + slot if slot.startswith("__") and not slot.endswith("__") else slot)
    return dict.fromkeys(name for name in names if not _is_computed(kind, name))


@lru_cache(maxsize=8192)
def _is_computed(kind: Any, name: str) -> bool:
    described = getattr(kind, name, None)
    return isinstance(described, property | cached_property) or (name.startswith("__") and name.endswith("__"))


# ------------------------------------------------------------------------- torchrec and tensordict


def is_torchrec(value: object, *names: str) -> bool:
    """Whether it is of one of TorchRec's classes, which can be only if something has imported TorchRec."""
    return isinstance(value, _torchrec_kinds(*names))


def _torchrec_kinds(*names: str) -> tuple[type, ...]:
    module = sys.modules.get("torchrec.sparse.jagged_tensor")
    return tuple(getattr(module, name) for name in names) if module is not None else ()


def is_keyed_jagged_tensor(value: object) -> bool:
    """Whether it is TorchRec's `KeyedJaggedTensor`."""
    return is_torchrec(value, "KeyedJaggedTensor")


def is_tensordict(value: object) -> bool:
    """Whether it is a `TensorDict`, or an instance of a tensorclass."""
    module = sys.modules.get("tensordict")
    return module is not None and bool(module.is_tensor_collection(value))


def _flatten_tensordict(value: Any) -> tuple[list[Any], Any]:
    from tensordict import NonTensorData, NonTensorStack

    keys, values = tuple(value.keys()), []
    for key in keys:
        item = value.get(key)
        if isinstance(item, NonTensorStack):  # strings and other objects, one for each sample
            item = item.tolist()
        elif isinstance(item, NonTensorData):
            item = item.data
        values.append(item)
    batch_size = tuple(value.batch_size)
    # the first batch dimension is the sample; there may be none
    dims = batch_size[1:] if batch_size else None
    return values, (keys, dims, tuple(value.names), value.device is not None)


def _unflatten_tensordict(
    kind: Any, context: Any, values: Sequence[Any], num_samples: int, device: torch.device | None
) -> Any:
    from tensordict import NonTensorStack, TensorDict, is_tensorclass

    keys, dims, names, has_device = context
    batch_size = () if dims is None else (num_samples, *dims)
    result = TensorDict({}, batch_size=batch_size, device=device if has_device else None)
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, list):
            result[key] = NonTensorStack.from_list(value) if value else NonTensorStack(stack_dim=0)
        elif value is not None:
            result[key] = value
    if any(names):
        result.names = list(names)
    return kind.from_tensordict(result) if is_tensorclass(kind) else result


_TENSORDICT = Container(_flatten_tensordict, _unflatten_tensordict, lambda value: list(value.keys()))


# ------------------------------------------------------------------------------------------- lists


def is_list_of_objects(values: Sequence[Any]) -> bool | None:
    """Whether a list that nothing is declared about holds one object for each sample; None if that is not clear.

    By what it holds, never by how long it is or which values: so the ranks of a job read it alike in every step.
    A list that holds tensors, however deep, is a container; one that holds lists may be either.
    """
    if all(map(_is_plain, set(map(type, values)))):
        return True
    if hasattr(values, "_fields") or any(map(_holds_tensors, values)):
        return False
    return None if any(map(_is_lists, values)) else True


@lru_cache(maxsize=1024)
def _is_plain(kind: Any) -> bool:
    """Whether values of a type hold nothing, such as strings, numbers, None and dates."""
    if issubclass(kind, torch.Tensor | np.ndarray) or _container_of_kind(kind) is not None:
        return False
    return kind.__dictoffset__ == 0 and not any(base.__dict__.get("__slots__") for base in kind.__mro__)


def _values_in(value: Any) -> Sequence[Any]:
    container = container_of(value)
    return () if container is None else container.flatten(value)[0]


def _holds_tensors(value: Any) -> bool:
    kind: Any = type(value)
    if _is_plain(kind):
        return False
    if isinstance(value, torch.Tensor | np.ndarray) or is_tensordict(value) or is_torchrec(value, *_JAGGED):
        return True
    return any(map(_holds_tensors, _values_in(value)))


def _is_lists(value: Any) -> bool:
    """Whether all that it holds, without tensors, is in lists, each of which could have one entry for each sample."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return True
    values = [item for item in _values_in(value) if item is not None]
    return bool(values) and all(map(_is_lists, values))
