"""Taken apart and made again, a batch is the same, however its fields of all kinds are nested."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pydantic
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.trainer_client.random_batches import as_bytes
from trainer_client.balancing.batches import BatchSpec, flatten

N = 3
Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    left: Any
    right: Any = None


@dataclass(slots=True)
class Slotted:
    left: Any
    right: Any = None


@attrs.define
class Attributes:
    left: Any
    right: Any


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow")
    left: Any
    _right: Any = pydantic.PrivateAttr(default=None)


class Bag(dict[str, Any]):
    """A dict with an attribute."""


class Rows(list[Any]):
    """A list of a type of its own."""


class Registered:
    """A container that its user has registered with torch's pytrees."""

    def __init__(self, *items: Any) -> None:
        self.items = list(items)


torch.utils._pytree.register_pytree_node(Registered, lambda one: (one.items, None), lambda items, _: Registered(*items))


def model(left: Any, right: Any) -> Model:
    made = Model(left=left, more=right)
    made._right = torch.arange(N)
    return made


def bag(left: Any, right: Any) -> Bag:
    made = Bag(left=left)
    made.right = right  # type: ignore[attr-defined]
    return made


CONTAINERS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: {"b": a, 7: b},
    lambda a, b: OrderedDict(y=a, x=b),
    lambda a, b: defaultdict(list, left=a, right=b),
    lambda a, b: UserDict(left=a, right=b),
    lambda a, b: SimpleNamespace(left=a, right=b),
    lambda a, b: [a, {"tensor": torch.arange(N), "right": b}],
    lambda a, b: (a, torch.arange(N), b),
    lambda a, b: deque([a, b]),
    lambda a, b: Rows([a, torch.arange(N), b]),
    Pair, Registered, Frozen, Slotted, Attributes, model, bag,
]  # fmt: skip
LENGTHS = torch.tensor([2, 0, 1], dtype=torch.int32)
FIELDS: list[Callable[[], Any]] = [
    lambda: torch.rand(N, 2),
    lambda: torch.arange(N).to(torch.bfloat16),
    lambda: np.arange(N, dtype=">i4"),
    lambda: np.array(["2026-01-01", "NaT", "2026-03-03"], dtype=">M8[D]"),
    lambda: np.array(["a", "long", ""]),
    lambda: ["a", None, "c"],
    lambda: None,
    lambda: JaggedTensor(torch.rand(3), lengths=LENGTHS, weights=torch.rand(3)),
    lambda: KeyedJaggedTensor(["z", "a"], torch.arange(5), torch.rand(5), lengths=torch.tensor([1, 0, 1, 0, 1, 2])),
    lambda: KeyedJaggedTensor(["z", "a"], torch.arange(5), offsets=torch.tensor([0, 1, 1, 2, 2, 3, 5])),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1), torch.ones(5)], layout=torch.jagged),
    lambda: TensorDict({"x": torch.rand(N), "inner": TensorDict({"y": torch.rand(N, 2)}, [N, 2])}, [N]),
]  # fmt: skip

nests = st.recursive(
    st.sampled_from(FIELDS).map(lambda make: make()),
    lambda inner: st.tuples(st.sampled_from(CONTAINERS), inner, inner).map(lambda drawn: drawn[0](*drawn[1:])),
    max_leaves=12,
)


def parts(value: Any) -> Any:
    """What there is in a value, in plain containers and bytes."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [value.layout, parts(value.values()), value.offsets().tolist()]
        return [value.dtype, tuple(value.shape), as_bytes(value)]
    if isinstance(value, np.ndarray):
        return [value.dtype, value.shape, value.tobytes()]
    if isinstance(value, JaggedTensor | KeyedJaggedTensor):
        keys = value.keys() if isinstance(value, KeyedJaggedTensor) else None
        weights = value.weights_or_none()
        return [keys, value.lengths().tolist(), parts(value.values()), None if weights is None else parts(weights)]
    if isinstance(value, TensorDict):
        return [value.batch_size, value.names, {key: parts(item) for key, item in value.items()}]
    found: list[Any] = [type(value)]
    if isinstance(value, dict | UserDict):
        found.append([(key, parts(item)) for key, item in value.items()])
    if isinstance(value, list | tuple | deque):
        found += map(parts, value)
    if isinstance(value, pydantic.BaseModel):
        found += [parts(value.model_extra), parts(value._right)]
    names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
    found += [(name, parts(getattr(value, name))) for name in names if name not in ("data", "__weakref__")]
    return found if len(found) > 1 else [type(value), value]


@settings(max_examples=60, deadline=None)
@given(nest=nests)
def test_a_nest_comes_back_as_it_was(nest: Any) -> None:
    batch, spec = {"id": torch.arange(N), "nest": nest}, BatchSpec()
    for _ in range(2):  # by its declarations, and as one like the one before
        flat = flatten(batch, spec)
        assert flat.num_samples == N
        assert parts(flat.unflatten()) == parts(batch)
    assert parts(pickle.loads(pickle.dumps(flat)).unflatten()) == parts(batch)
    empty = pickle.loads(pickle.dumps(flat.empty()))
    assert empty.schema.hash == flat.schema.hash == flatten(empty.unflatten(), BatchSpec()).schema.hash
