"""The containers of a batch, taken apart and made again as pytrees are.

What is registered with torch's pytrees is taken from there: dicts, lists, tuples, named tuples, and what libraries and
users register. Known here besides are objects (dataclasses, attrs and pydantic classes, own classes that hold tensors)
and subclasses of dicts, which are made again without `__init__`, and `TensorDict`, which gets another batch size.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
_JAGGED = ("JaggedTensor", "KeyedJaggedTensor")


class Container(NamedTuple):
    """How one kind of containers is taken apart.

    Attributes:
        flatten: From a container to its values, their names in paths, and a context, which is equal for equal nesting.
        unflatten: From type, context, values, number of samples and device to the container.
    """

    flatten: Callable[[Any], tuple[Sequence[Any], Iterable[object], Any]]
    unflatten: Callable[[type, Any, Sequence[Any], int, torch.device | None], Any]


class Tree(NamedTuple):
    """Nested containers of a batch; None among the children is a leaf."""

    kind: Any
    context: Any
    children: tuple[Tree | None, ...]

    def unflatten(self, leaves: Iterator[Any], num_samples: int, device: torch.device | None) -> Any:
        """The containers around the leaves."""
        values = [next(leaves) if c is None else c.unflatten(leaves, num_samples, device) for c in self.children]
        container = _container_of_kind(self.kind) or _OBJECT
        return container.unflatten(self.kind, self.context, values, num_samples, device)


def join(path: str, part: str) -> str:
    """The path of a part of what is at `path`."""
    return f"{path}.{part}" if path else part


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
    if is_torchrec(kind, *_JAGGED, "KeyedTensor") or is_lazy_stack(kind) or issubclass(kind, PackedSequence):
        return None
    if tensordict is not None and (issubclass(kind, tensordict.TensorDictBase) or tensordict.is_tensorclass(kind)):
        return _TENSORDICT
    if pydantic is not None and issubclass(kind, pydantic.BaseModel):
        return Container(_flatten_pydantic, _unflatten_pydantic)
    if issubclass(kind, dict | UserDict) and node is None:
        return _OBJECT
    is_record = dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or issubclass(kind, SimpleNamespace)
    if is_record and not issubclass(kind, dict):
        return _OBJECT if _can_be_made(kind) else None
    if node is None:
        return _SEQUENCE if issubclass(kind, list | tuple) else None
    return _registered(node)


def _registered(node: pytree.NodeDef) -> Container:
    def flatten(value: Any) -> tuple[Sequence[Any], Iterable[object], Any]:
        values, context = node.flatten_fn(value)
        if type(value) in (dict, OrderedDict, defaultdict):  # whose values torch takes in their order
            return values, value, context
        if isinstance(value, list | tuple) or node.flatten_with_keys_fn is None:
            return values, getattr(value, "_fields", range(len(values))), context
        keys = (key for key, _ in node.flatten_with_keys_fn(value)[0])
        kinds = ("key", "idx", "name")  # of mappings, sequences and attributes
        return values, [next(getattr(key, kind) for kind in kinds if hasattr(key, kind)) for key in keys], context

    return Container(flatten, lambda _kind, context, values, *_: node.unflatten_fn(values, context))


_SEQUENCE = Container(
    lambda value: (list(value), getattr(value, "_fields", range(len(value))), None),
    lambda kind, _context, values, *_: getattr(kind, "_make", kind)(values),
)


# ------------------------------------------------------------------------------------------- objects


def _flatten_object(value: Any) -> tuple[list[Any], Sequence[Any], tuple[tuple[Any, ...], tuple[str, ...]]]:
    attributes, items = _attributes_of(value), value if isinstance(value, dict) else {}
    if isinstance(value, UserDict):
        items, attributes = value.data, {name: item for name, item in attributes.items() if name != "data"}
    if items:
        return [*items.values(), *attributes.values()], [*items, *attributes], (tuple(items), tuple(attributes))
    names = tuple(attributes)
    return list(attributes.values()), names, ((), names)


def _unflatten_object(kind: Any, context: tuple[Any, Any], values: Sequence[Any], *_: Any) -> Any:
    (keys, names), rest = context, iter(values)
    result = _blank(kind)
    if issubclass(kind, UserDict):
        object.__setattr__(result, "data", {})
    for key in keys:
        result[key] = next(rest)
    for name in names:
        object.__setattr__(result, name, next(rest))  # also where a class is frozen
    return result


_OBJECT = Container(_flatten_object, _unflatten_object)


def _flatten_pydantic(value: Any) -> tuple[list[Any], Sequence[str], tuple[Any, ...]]:
    fields = _attributes_of(value) | (value.__pydantic_extra__ or {})
    private = value.__pydantic_private__ or {}
    context = tuple(fields), tuple(private), frozenset(value.model_fields_set)
    return [*fields.values(), *private.values()], [*fields, *private], context


def _unflatten_pydantic(kind: Any, context: tuple[Any, ...], values: Sequence[Any], *_: Any) -> Any:
    names, private, fields_set = context
    result = kind.model_construct(set(fields_set), **dict(zip(names, values, strict=False)))
    for name, item in zip(private, values[len(names) :], strict=True):
        setattr(result, name, item)
    return result


def _is_own_with_tensors(value: Any) -> bool:
    """Whether it is of one's own class, with tensors in it: what else has attributes is no part of the batch."""
    kind: Any = type(value)
    if callable(value) or kind.__module__ == "builtins" or issubclass(kind, torch.Tensor | np.ndarray | list | tuple):
        return False
    if is_torchrec(kind, *_JAGGED, "KeyedTensor"):
        return False
    kinds = [type(one) for one in _attributes_of(value).values()]
    return any(issubclass(one, torch.Tensor) or is_torchrec(one, *_JAGGED) for one in kinds)


def _base_of(kind: type) -> Any:
    return next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)


def _can_be_made(kind: type) -> bool:
    """Whether instances can be made without arguments, which types written in C may want."""
    return _base_of(kind) in (object, dict, SimpleNamespace)


def _blank(kind: type) -> Any:
    """An object without its attributes: `object.__new__` refuses types that are written in C, and their subclasses."""
    return _base_of(kind).__new__(kind)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Everything in `__dict__` and slots but what Python and cached properties keep there; not to be written to."""
    kind, state = cast(Any, type(value)), cast(Any, object.__getstate__(value))
    if type(state) is tuple:
        state = {**(state[0] or {}), **state[1]}
    if missing := [name for name in _class_defaults(kind) if name not in (state or {})]:
        state = {**(state or {}), **{name: getattr(value, name) for name in missing}}
    if state and (computed := _computed(kind, tuple(state))):
        return {name: item for name, item in state.items() if name not in computed}
    return state or {}


@lru_cache(maxsize=1024)
def _class_defaults(kind: Any) -> tuple[str, ...]:
    """Fields of a dataclass whose values `__init__` leaves to the class."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(one.name for one in fields if not one.init and one.default is not dataclasses.MISSING)


@lru_cache(maxsize=1024)
def _computed(kind: Any, names: tuple[str, ...]) -> set[str]:
    computed = {name for name in names if isinstance(getattr(kind, name, None), property | cached_property)}
    return computed | {name for name in names if name.startswith("__") and name.endswith("__")}


# ------------------------------------------------------------------------- torchrec and tensordict


def is_torchrec(kind: type, *names: str) -> bool:
    """Whether a type is one of TorchRec's classes, which can be only if something has imported TorchRec."""
    return _is_torchrec(kind, names)


@lru_cache(maxsize=1024)
def _is_torchrec(kind: type, names: tuple[str, ...]) -> bool:
    module = sys.modules.get("torchrec.sparse.jagged_tensor")
    return module is not None and issubclass(kind, tuple(getattr(module, name) for name in names))


def is_keyed(value: Any) -> bool:
    """Whether a value is TorchRec's `KeyedJaggedTensor`."""
    return is_torchrec(type(value), "KeyedJaggedTensor")


def is_lazy_stack(kind: type) -> bool:
    """Whether values of a type are TensorDicts that are not stacked."""
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and issubclass(kind, tensordict.LazyStackedTensorDict)


def _flatten_tensordict(value: Any) -> tuple[list[Any], Sequence[str], Any]:
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
    return values, keys, (keys, dims, tuple(value.names), value.device is not None)


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


_TENSORDICT = Container(_flatten_tensordict, _unflatten_tensordict)

# ------------------------------------------------------------------------------------------- lists


def is_list_of_objects(values: Sequence[Any]) -> bool | None:
    """Whether a list that nothing is declared about holds one object for each sample; None if that is not clear.

    By what it holds, never by how long it is or which values: so the ranks of a job read it alike in every step.
    A list that holds tensors, however deep, is a container; one that holds lists may be either.
    """
    if all(map(_is_plain, set(map(type, values)))):
        return True
    may_be_lists = False
    for contents in map(_contents, values):
        if contents == "tensors":
            return False
        may_be_lists |= contents == "lists"
    return None if may_be_lists else True


@lru_cache(maxsize=1024)
def _is_plain(kind: Any) -> bool:
    """Whether values of a type hold nothing, such as strings, numbers, None and dates."""
    if issubclass(kind, torch.Tensor | np.ndarray) or _container_of_kind(kind) is not None:
        return False
    return kind.__dictoffset__ == 0 and not any(base.__dict__.get("__slots__") for base in kind.__mro__)


def _contents(value: Any) -> str:
    """What a value is or holds: tensors, else lists, each of which could have one entry for each sample, else objects.

    A container is lists if all that it holds is.
    """
    kind: Any = type(value)
    if _is_plain(kind):
        return "objects"
    if isinstance(value, torch.Tensor | np.ndarray) or is_torchrec(kind, *_JAGGED) or is_lazy_stack(kind):
        return "tensors"
    container = container_of(value)
    contents = {_contents(item) for item in container.flatten(value)[0] if item is not None} if container else set()
    if "tensors" in contents or container is _TENSORDICT:
        return "tensors"
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return "lists" if is_list or contents == {"lists"} else "objects"
