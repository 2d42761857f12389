"""The containers of a batch, taken apart and made again as pytrees are.

What is registered with torch's pytrees is taken from there: dicts, lists, tuples, named tuples, and what libraries and
users register. Registered here are objects (dataclasses, attrs and pydantic classes, subclasses of dicts, own classes
that hold tensors), which are made again without `__init__`, and `TensorDict`, whose batch size is another one then.
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
        values, context = (_container_of_kind(kind) or _RECORD).flatten(batch)
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
        container = _container_of_kind(self.kind) or _RECORD
        return container.unflatten(self.kind, self.context, list(children), num_samples, device)


def container_of(value: Any) -> Container | None:
    """How a value is taken apart; None if it is no container."""
    kind: Any = type(value)
    container = _container_of_kind(kind)
    if container is None and _is_own_with_tensors(value) and _can_be_made(kind):
        return _RECORD
    return container


@lru_cache(maxsize=1024)
def _container_of_kind(kind: Any) -> Container | None:
    """How all values of a type are taken apart; None if they are no containers, or it depends on what they hold."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and (issubclass(kind, tensordict.TensorDictBase) or tensordict.is_tensorclass(kind)):
        return _TENSORDICT
    if _is_record(kind):
        has_items = issubclass(kind, dict) or _mappings(kind)
        return (_OBJECT if has_items else _RECORD) if _can_be_made(kind) else None
    nodes: dict[Any, pytree.NodeDef] = pytree.SUPPORTED_NODES
    node = nodes.get(namedtuple if pytree.is_namedtuple_class(kind) else kind)
    if kind in _torchrec_kinds("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"):
        return None
    if node is not None:
        return _registered(node)
    return _SEQUENCE if issubclass(kind, list | tuple) else None


# ------------------------------------------------------------------------------- registered with torch


def _registered(node: pytree.NodeDef) -> Container:
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


class _State(NamedTuple):
    """The context of an object that has items, too.

    Attributes:
        names: Of its values: where they are ("" in the object as a dict, the attribute that is a dict, None for an
            attribute), and their name there.
        mappings: Attributes that are dicts whose items are values.
        constants: Attributes that stay as they are.
        aliases: Attributes that are items as well.
        is_own_dict: The items are the attributes (`self.__dict__ = self`).
        factory: That of a defaultdict.
    """

    names: tuple[tuple[str | None, Any], ...]
    mappings: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    aliases: tuple[str, ...]
    is_own_dict: bool
    factory: Any


def _flatten_record(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    kind: Any = type(value)
    attributes = getattr(value, "__dict__", _NO_ATTRIBUTES)
    if attributes.keys() != _declared_names(kind).keys():
        attributes = dict(attributes_of(value))
    return list(attributes.values()), tuple(attributes)


def _unflatten_record(kind: type, names: tuple[str, ...], values: Sequence[Any], *_: Any) -> Any:
    result = _blank(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(result, name, value)
    return result


_NO_ATTRIBUTES: dict[str, Any] = {}
_RECORD = Container(_flatten_record, _unflatten_record, lambda value: _flatten_record(value)[1])


def _flatten_object(value: Any) -> tuple[list[Any], _State]:
    kind: Any = type(value)
    names: list[tuple[str | None, Any]] = []
    values: list[Any] = []
    constants: list[tuple[str, Any]] = []
    aliases: list[str] = []
    mappings = _mappings(kind)
    is_dict, is_encoding = isinstance(value, dict), kind.__name__ == "BatchEncoding"
    for where in ("", *mappings) if is_dict else mappings:
        entries = getattr(value, where, None) if where else value
        if entries is None:
            constants.append((where, None))
            continue
        names += [(where, name) for name in entries]
        values += entries.values()
    if mappings is _PYDANTIC:
        constants.append(("__pydantic_fields_set__", value.model_fields_set))
    is_own_dict = is_dict and getattr(value, "__dict__", None) is value
    for name, item in () if is_own_dict else attributes_of(value):
        if is_dict and value.get(name, _NOTHING) is item:
            aliases.append(name)
        elif is_encoding and name in ("_encodings", "_n_sequences"):
            # what the tokenizer knew about the texts of this batch does not fit another one's
            constants.append((name, None if name == "_encodings" else item))
        elif name not in mappings:
            names.append((None, name))
            values.append(item)
    factory = getattr(value, "default_factory", None)
    return values, _State(tuple(names), mappings, tuple(constants), tuple(aliases), is_own_dict, factory)


_PYDANTIC = ("__pydantic_extra__", "__pydantic_private__")


@lru_cache(maxsize=1024)
def _mappings(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, UserDict):
        return ("data",)
    return _PYDANTIC if _is_pydantic(kind) else ()


def _unflatten_object(kind: type, state: _State, values: Sequence[Any], *_: Any) -> Any:
    result = _blank(kind)
    if state.factory is not None:
        result.default_factory = state.factory
    if state.is_own_dict:
        result.__dict__ = result
    mappings: dict[str | None, Any] = {"": result, **{name: {} for name in state.mappings}}
    for name in state.mappings:
        object.__setattr__(result, name, mappings[name])
    for (where, name), item in zip(state.names, values, strict=True):
        if where is None:
            object.__setattr__(result, name, item)
        else:
            mappings[where][name] = item
    for name, item in (*state.constants, *((name, result[name]) for name in state.aliases)):
        object.__setattr__(result, name, item)
    return result


_OBJECT = Container(
    _flatten_object, _unflatten_object, lambda value: [name for _, name in _flatten_object(value)[1].names]
)
_NOTHING = object()


def _is_own_with_tensors(value: Any) -> bool:
    """Whether it is of one's own class, with tensors in it: what else has attributes is no part of the batch."""
    kind: Any = type(value)
    if callable(value) or kind.__module__ == "builtins" or issubclass(kind, torch.Tensor | np.ndarray | list | tuple):
        return False
    if is_torchrec(value, "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"):
        return False
    return any(isinstance(one, torch.Tensor) or is_torchrec(one, *_JAGGED) for _, one in attributes_of(value))


@lru_cache(maxsize=1024)
def _is_record(kind: Any) -> bool:
    return (
        (issubclass(kind, dict) and kind not in pytree.SUPPORTED_NODES)
        or issubclass(kind, UserDict | SimpleNamespace)
        or dataclasses.is_dataclass(kind)
        or hasattr(kind, "__attrs_attrs__")
        or _is_pydantic(kind)
    )


def _is_pydantic(kind: type) -> bool:
    model = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    return model is not None and issubclass(kind, model)


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
    kinds = set(map(type, values))
    if all(map(_is_plain, kinds)):
        return True
    if hasattr(values, "_fields") or any(map(_holds_tensors, values)):
        return False
    return None if any(map(_is_lists, values)) else True


@lru_cache(maxsize=1024)
def _is_plain(kind: Any) -> bool:
    """Whether values of a type hold nothing, such as strings, numbers, None and dates."""
    if issubclass(kind, torch.Tensor | np.ndarray) or _container_of_kind(kind) is not None:
        return False
    slots = any(base.__dict__.get("__slots__") for base in kind.__mro__)
    return kind.__dictoffset__ == 0 and not slots


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


_JAGGED = ("JaggedTensor", "KeyedJaggedTensor")


def _is_lists(value: Any) -> bool:
    """Whether all that it holds, without tensors, is in lists, each of which could have one entry for each sample."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return True
    values = [item for item in _values_in(value) if item is not None]
    return bool(values) and all(map(_is_lists, values))
