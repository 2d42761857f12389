"""Batches of any nesting, as functions of their samples: to know what a batch of others must be, one makes it."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from datetime import date, timedelta
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import attrs
import numpy as np
import pydantic
import torch
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, tensorclass
from torch.utils._pytree import MappingKey
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from trainer_client.balancing.batches import BatchSpec, MaxLength, Padded, lookup

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
SHAPES = ((), (1,), (3,), (2, 5), (0,), (7, 1))
T = TypeVar("T")
Pair = namedtuple("Pair", "left right")
Samples = list[int]


@dataclass(frozen=True)
class Frozen(Generic[T]):
    left: T
    right: Any = None


@dataclass(slots=True)
class Slots:
    left: Any
    right: Any = None


@dataclass
class Computed:
    """Attributes that only `__post_init__` sets, a field that is none of its arguments, and a cached property."""

    left: Any
    right: Any
    ids: torch.Tensor
    scale: InitVar[float] = 2.0
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.doubled, self.tripled = self.ids * scale, self.ids * 3
        assert self.total >= 0

    @cached_property
    def total(self) -> int:
        return int(self.ids.sum())


@attrs.define
class Attributes:
    left: Any
    right: Any


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, extra="allow", frozen=True)
    left: Any
    _ids: Any = pydantic.PrivateAttr(default=None)


class Own:
    """An own class that holds a tensor behind a property without a setter."""

    def __init__(self, left: Any, right: Any, ids: torch.Tensor) -> None:
        self.left, self.right, self.__ids = left, right, ids

    @property
    def ids(self) -> torch.Tensor:
        return self.__ids


class Hidden:
    __slots__ = ("__ids", "left", "right")

    def __init__(self, left: Any, right: Any, ids: torch.Tensor) -> None:
        self.left, self.right, self.__ids = left, right, ids


class Bag(dict[str, Any]):
    """A dict with an attribute."""


class Encoding(UserDict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Rows(list[Any]):
    """A list of a type of its own."""


class Registered:
    """A container that its user has registered with torch's pytrees."""

    def __init__(self, *items: Any) -> None:
        self.items = list(items)


class Reversed(dict[str, Any]):
    """A dict that its user has registered with its values from the last to the first."""


torch.utils._pytree.register_pytree_node(Registered, lambda one: (one.items, None), lambda items, _: Registered(*items))
torch.utils._pytree.register_pytree_node(
    Reversed,
    lambda one: ([*reversed(one.values())], tuple(one)),
    lambda items, keys: Reversed(zip(keys, reversed([*items]), strict=True)),
    flatten_with_keys_fn=lambda one: ([(MappingKey(k), one[k]) for k in reversed(one)], tuple(one)),
)


@tensorclass
class Row:
    ids: torch.Tensor
    label: Any
    absent: Any = None


def _model(left: Any, right: Any, ids: torch.Tensor) -> Model:
    made = Model(left=left, more=right)
    made._ids = ids
    return made


def _bag(left: Any, right: Any, _: torch.Tensor) -> Bag:
    made = Bag(left=left)
    made.right = right  # type: ignore[attr-defined]
    return made


def as_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def random_bits(samples: Samples, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, NaNs and all, which follow from the samples; every second row of a tensor."""
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    rows = [np.random.default_rng(sample).integers(0, 2 if dtype is torch.bool else 256, size) for sample in samples]
    table = torch.from_numpy(np.array(rows, np.uint8).reshape(len(samples), 1, size)).repeat(1, 2, 1)
    flat = table.view(dtype) if size else torch.empty(len(samples), 2, 0, dtype=dtype)
    return flat.view(len(samples), 2, *shape)[:, 0]


class Container(NamedTuple):
    """Makes a container of two values and the ids of its samples; where the values are in it."""

    make: Callable[[Any, Any, torch.Tensor], Any]
    left: str = "left"
    right: str = "right"


CONTAINERS = {
    "dict": Container(lambda a, b, _: {"b": a, 7: b}, "b", "7"),
    "ordered": Container(lambda a, b, _: OrderedDict(y=a, x=b), "y", "x"),
    "default": Container(lambda a, b, _: defaultdict(list, left=a, right=b)),
    "encoding": Container(lambda a, b, _: Encoding(left=a, right=b)),
    "namespace": Container(lambda a, b, ids: SimpleNamespace(left=a, right=b, ids=ids)),
    "list": Container(lambda a, b, ids: [a, {"ids": ids, "right": b}], "0", "1.right"),
    "tuple": Container(lambda a, b, ids: (a, ids, b), "0", "2"),
    "deque": Container(lambda a, b, _: deque([a, b]), "0", "1"),
    "rows": Container(lambda a, b, ids: Rows([a, ids, b]), "0", "2"),
    "pair": Container(lambda a, b, _: Pair(a, b)),
    "registered": Container(lambda a, b, _: Registered(a, b), "0", "1"),
    "reversed": Container(lambda a, b, _: Reversed(left=a, right=b)),
    "frozen": Container(lambda a, b, _: Frozen(a, b)),
    "slots": Container(lambda a, b, _: Slots(a, b)),
    "computed": Container(Computed),
    "attrs": Container(lambda a, b, _: Attributes(a, b)),
    "pydantic": Container(_model, "left", "more"),
    "own": Container(Own),
    "hidden": Container(Hidden),
    "bag": Container(_bag),
}


class Kind(NamedTuple):
    """Makes a field of some samples; what is declared at which path behind its own."""

    make: Callable[[Samples], Any]
    declared: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


def _ids(samples: Samples) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.int64)


def _counts(samples: Samples) -> Samples:
    return [sample * 7 % 5 for sample in samples]


def _lengths(samples: Samples, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(_counts(samples), dtype=dtype)


def _values(samples: Samples) -> torch.Tensor:
    return _ids(samples).repeat_interleave(_lengths(samples))


def _offsets(samples: Samples) -> torch.Tensor:
    return torch.nn.functional.pad(_lengths(samples).cumsum(0), (1, 0))


def _padded(samples: Samples, *, left: bool) -> dict[str, Any]:
    counts, tokens = _counts(samples), _values(samples)
    rows = [torch.flip(one, [0]) if left else one for one in tokens.split(counts)]
    shape = (len(samples), max(counts, default=0))
    padded = torch.nn.utils.rnn.pad_sequence(rows, True, -1) if samples else torch.zeros(shape, dtype=torch.int64)
    return {"n": _lengths(samples), "p": torch.flip(padded, [1]) if left else padded, "longest": shape[1]}


def _keyed(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([_values(samples)] * 2), torch.cat([_lengths(samples, torch.int32)] * 2)


def _deduplicated(samples: Samples) -> KeyedJaggedTensor:
    """Of samples that are alike in a key, one is stored."""
    rows = {key: sorted({sample % size for sample in samples}) for key, size in {"z": 3, "a": 4}.items()}
    positions = [[rows["a"].index(one % 4) for one in samples], [rows["z"].index(one % 3) for one in samples]]
    values, stored = _values([*rows["z"], *rows["a"]]), [[len(of_key)] for of_key in rows.values()]
    return KeyedJaggedTensor(
        ["z", "a"],
        values,
        values / 3,
        lengths=_lengths([*rows["z"], *rows["a"]], torch.int32),
        stride_per_key_per_rank=stored,
        inverse_indices=(["a", "z"], torch.tensor(positions, dtype=torch.int32)),
    )


def _with_all_samples(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Of one that is deduplicated, what TorchRec's modules give for it."""
    if kjt.inverse_indices_or_none() is None:
        return kjt
    names, positions = kjt.inverse_indices()
    begins = np.cumsum([0, *kjt.stride_per_key()])
    picks = [begins[i] + row for i, key in enumerate(kjt.keys()) for row in positions[names.index(key)].tolist()]
    values, weights = ([one[:0], *one.split(kjt.lengths().tolist())] for one in (kjt.values(), kjt.weights()))
    values, weights = (torch.cat([one[0], *(one[1 + pick] for pick in picks)]) for one in (values, weights))
    return KeyedJaggedTensor(kjt.keys(), values, weights, kjt.lengths()[picks], stride=positions.shape[1])


def _tensordict(samples: Samples) -> TensorDict:
    ids = _ids(samples)
    inner = TensorDict({"deep": torch.stack([ids, ids * 2], 1)}, [len(samples), 2], names=["sample", "step"])
    stack = NonTensorStack.from_list([f"t{i}" for i in samples]) if samples else NonTensorStack(stack_dim=0)
    return TensorDict({"ids": ids, "inner": inner, "texts": stack}, [len(samples)])


@dataclass(frozen=True)
class Total:
    """Adds up what is at a path."""

    path: str

    def __call__(self, batch: Any) -> int:
        return int(lookup(batch, self.path).sum())


def _odd(samples: Samples) -> dict[str, Any]:
    """Jagged rows of as many bytes as nothing is aligned by."""
    owners = _values(samples).tolist()
    rows = {f"v{at}": random_bits(owners, SHAPES[at % len(SHAPES)], dtype) for at, dtype in enumerate(DTYPES)}
    return rows | {"n": _lengths(samples)}


_PADDING = {"derived": {".longest": MaxLength(".n")}}
KINDS = {
    "bits": Kind(lambda s: [random_bits(s, SHAPES[at % len(SHAPES)], dtype) for at, dtype in enumerate(DTYPES * 3)]),
    "odd rows": Kind(_odd, {"rows_per_sample": {f".v{at}": ".n" for at in range(len(DTYPES))}}),
    "floats": Kind(lambda s: _ids(s).to(torch.bfloat16)[:, None].expand(-1, 2)),
    "conjugates": Kind(lambda s: torch.complex(_ids(s).float(), torch.ones(len(s))).conj()),
    "negated": Kind(lambda s: torch.complex(torch.ones(len(s)), _ids(s).float()).conj().imag),
    "columns": Kind(lambda s: _ids(s)[:, None].expand(-1, 4)[:, ::2]),
    "parameter": Kind(lambda s: torch.nn.Parameter(_ids(s) / 2, requires_grad=False)),
    "two rows": Kind(lambda s: _ids(s).repeat_interleave(2), {"rows_per_sample": {"": 2}}),
    "counted": Kind(
        lambda s: {"v": _values(s), "n": _lengths(s), "longest": max(_counts(s), default=0)},
        {"rows_per_sample": {".v": ".n"}} | _PADDING,
    ),
    "counted arrays": Kind(
        lambda s: {"v": _values(s).numpy() / 2, "n": _lengths(s).numpy()}, {"rows_per_sample": {".v": ".n"}}
    ),
    "jagged": Kind(lambda s: JaggedTensor(_values(s), lengths=_lengths(s, torch.int32), weights=_values(s) / 7)),
    "offsets": Kind(lambda s: JaggedTensor(_values(s)[:, None].expand(-1, 3), offsets=_offsets(s))),
    "keyed": Kind(
        lambda s: KeyedJaggedTensor(["z", "a"], _keyed(s)[0], _keyed(s)[0] / 3, lengths=_keyed(s)[1], stride=len(s))
    ),
    "deduplicated": Kind(_deduplicated),
    "nested": Kind(lambda s: torch.nested.nested_tensor_from_jagged(_values(s) / 2, offsets=_offsets(s))),
    "right": Kind(lambda s: _padded(s, left=False), {"padded": {".p": Padded(lengths=".n", value=-1)}} | _PADDING),
    "left": Kind(
        lambda s: _padded(s, left=True), {"padded": {".p": Padded(lengths=".n", value=-1, side="left")}} | _PADDING
    ),
    "reversed array": Kind(lambda s: np.array(s[::-1], dtype="i8")[::-1]),
    "read-only array": Kind(lambda s: np.broadcast_to(np.array(s, dtype="i8")[:, None], (len(s), 3))),
    "long doubles": Kind(lambda s: np.array(s, dtype=np.longdouble)),
    "big-endian": Kind(lambda s: np.array(s, dtype=">i4")),
    "times": Kind(lambda s: np.array([f"2026-01-{1 + i % 28:02}" for i in s], dtype=">M8[D]")),
    "text array": Kind(lambda s: np.array([["x" * (i % 9)] for i in s], dtype="U").reshape(len(s), 1)),
    "records": Kind(lambda s: np.array([(i, 1.5) for i in s], dtype=[("a", "i4"), ("b", "f8")])),
    "object array": Kind(lambda s: np.array([str(i) if i % 2 else i for i in s], dtype=object)),
    "texts": Kind(lambda s: [f"sample {i}" * (i % 3) for i in s]),
    "dates": Kind(lambda s: tuple(date(2026, 1, 1) + timedelta(i) if i % 3 else None for i in s)),
    "all None": Kind(lambda s: [None] * len(s)),
    "some None": Kind(lambda s: [None if i % 2 else f"c{i}" for i in s]),
    "empty dicts": Kind(lambda s: [{} for _ in s]),
    "dicts": Kind(lambda s: [{"id": i, "tags": ["a"] * (i % 3)} for i in s]),
    "dataclasses": Kind(lambda s: [Slots(f"{i}", ["a"]) for i in s]),
    "named tuples": Kind(lambda s: [Pair(i, "b") for i in s]),
    "namespaces": Kind(lambda s: [SimpleNamespace(name=str(i)) for i in s]),
    "numbers of NumPy": Kind(lambda s: [np.float32(i) for i in s]),
    "sets": Kind(lambda s: [{i} for i in s]),
    "lists": Kind(lambda s: [[i] * (i % 3) for i in s], {"objects": {"": True}}),
    "images": Kind(lambda s: [{"image": np.full(i % 4, i)} for i in s], {"objects": {"": True}}),
    "tensordict": Kind(_tensordict),
    "row": Kind(lambda s: Row(ids=_ids(s), label=_ids(s) * 2, batch_size=[len(s)])),
    "shared": Kind(lambda _: {"rate": 0.5, "names": ["a", "b"]}, {"shared": {"": True}}),
    "size": Kind(lambda s: (len(s), torch.tensor(len(s), dtype=torch.int16)), {"batch_size": {".0": True, ".1": True}}),
    "sum": Kind(lambda s: {"v": _ids(s), "total": sum(s)}, {"derived": {".total": Total(".v")}}),
    "none": Kind(lambda _: None),
}

Shape = Any
"""Name of a kind, or a name of a container and the shapes of two values."""

nests: st.SearchStrategy[Shape] = st.recursive(
    st.sampled_from(list(KINDS)),
    lambda inner: st.tuples(st.sampled_from(list(CONTAINERS)), inner, inner),
    max_leaves=12,
)


def make(shape: Shape, samples: Samples) -> dict[str, Any]:
    """A batch of some samples, whose numbers are its `id`."""
    return {"id": _ids(samples), "nest": _make(shape, samples)}


def _make(shape: Shape, samples: Samples) -> Any:
    if isinstance(shape, str):
        return KINDS[shape].make(samples)
    container, left, right = shape
    return CONTAINERS[container].make(_make(left, samples), _make(right, samples), _ids(samples))


def spec_of(shape: Shape) -> BatchSpec:
    """What must be declared of it."""
    declared: dict[str, dict[str, Any]] = {}
    _declare(shape, "nest", declared)
    paths: dict[str, Any] = {
        name: [*declared.pop(name)] for name in ("shared", "batch_size", "objects") if name in declared
    }
    return BatchSpec(**paths, **declared)


def _declare(shape: Shape, path: str, declared: dict[str, dict[str, Any]]) -> None:
    if not isinstance(shape, str):
        container = CONTAINERS[shape[0]]
        _declare(shape[1], f"{path}.{container.left}", declared)
        _declare(shape[2], f"{path}.{container.right}", declared)
        return
    for name, values in KINDS[shape].declared.items():
        for below, value in values.items():
            declared.setdefault(name, {})[path + below] = _placed(value, path)


def _placed(value: Any, path: str) -> Any:
    """A declaration with the path before the paths in it."""
    if isinstance(value, str):
        return path + value
    if isinstance(value, Padded):
        return Padded(lengths=path + (value.lengths or ""), value=value.value, side=value.side)
    return type(value)(path + value.path) if isinstance(value, MaxLength | Total) else value


def parts(value: Any) -> Any:
    """What there is in a value, in plain containers and bytes, so that equal batches are equal."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [value.layout, parts(value.values()), value.offsets().tolist()]
        return [value.dtype, tuple(value.shape), as_bytes(value.cpu())]
    if isinstance(value, np.ndarray):
        # of strings, the dtype is as wide as its batch asks for
        return [value.dtype.kind if value.dtype.kind in "US" else value.dtype, value.shape, value.tolist()]
    if isinstance(value, JaggedTensor | KeyedJaggedTensor):
        keys = value.keys() if isinstance(value, KeyedJaggedTensor) else None
        value = value if keys is None else _with_all_samples(value)
        weights = value.weights_or_none()
        return [keys, parts(value.lengths()), parts(value.values()), None if weights is None else parts(weights)]
    if isinstance(value, TensorDict | Row):
        items = [(key, parts(item)) for key, item in value.items() if not isinstance(item, NonTensorStack)]
        texts = [item.tolist() for item in map(value.get, value.keys()) if isinstance(item, NonTensorStack)]
        return [type(value), value.batch_size, value.names, items, texts]
    found: list[Any] = [type(value)]
    if isinstance(value, dict | UserDict):
        found.append([(key, parts(item)) for key, item in value.items()])
    if isinstance(value, list | tuple | deque):
        found += map(parts, value)
    if isinstance(value, pydantic.BaseModel):
        found += [parts(value.model_extra), parts(value._ids), value.model_fields_set]
    if isinstance(value, Hidden):
        found.append(parts(value._Hidden__ids))  # type: ignore[attr-defined]
    names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
    skipped = ("data", "__weakref__", "total", "__ids")  # what is looked at above, and cached properties
    found += [(name, parts(getattr(value, name))) for name in names if name not in skipped]
    return found if len(found) > 1 else [type(value), value]
