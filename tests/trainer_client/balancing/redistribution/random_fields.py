"""Fields of random kinds and the containers that hold them: how a part is drawn, and a batch made of parts."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.trainer_client.random_batches import DTYPES, SHAPES, random_tensor
from trainer_client import Padded


@dataclass(frozen=True, slots=True)
class Field:
    """A field: how a sample's part is drawn, and how a batch is made of the parts of some samples."""

    name: str
    draw: Callable[[np.random.Generator], Any]
    collate: Callable[[list[Any]], Any]
    declared: dict[str, Any]  # keyword of BatchSpec: what is declared at the field's path; "" + suffix by _SUFFIX


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    first: Any
    second: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    first: Any
    second: Any = None


@attrs.define
class Attributes:
    first: Any
    second: Any = None


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"first": a, "second": b},
    "ordered": lambda a, b: OrderedDict(first=a, second=b),
    "default": lambda a, b: defaultdict(list, first=a, second=b),
    "user dict": lambda a, b: UserDict(first=a, second=b),
    "list": lambda a, b: [{"first": a}, {"second": b}],
    "tuple": lambda a, b: ({"first": a}, {"second": b}),
    "named tuple": Pair,
    "dataclass": Record,
    "frozen": Frozen,
    "attrs": Attributes,
}
PATHS = {"list": ("0.first", "1.second"), "tuple": ("0.first", "1.second")}


def _stack(parts: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.stack(parts) if parts else torch.empty((0, *shape), dtype=dtype)


def _join(parts: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.empty((0, *shape), dtype=dtype), *parts])


def _pad(parts: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...], width: int, left: bool) -> torch.Tensor:
    result = torch.ones((len(parts), width, *shape)).to(dtype)
    for index, part in enumerate(parts):
        if part.numel():
            place = slice(width - len(part), width) if left else slice(0, len(part))
            _raw(result)[index, place] = _raw(part)
    return result


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _lengths(parts: list[torch.Tensor], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([len(part) for part in parts], dtype=dtype)


OBJECTS: list[Callable[[np.random.Generator], Any]] = [
    lambda rng: "s" * int(rng.integers(0, 9)),
    lambda rng: int(rng.integers(-(2**60), 2**60)),
    lambda rng: date.fromordinal(int(rng.integers(1, 9**6))),
    lambda rng: bytes(rng.integers(0, 256, int(rng.integers(0, 500)), dtype=np.uint8)),
    lambda rng: None if rng.random() < 0.3 else "x",
]


def make_field(rng: np.random.Generator, name: str) -> Field:
    """A field of a random kind."""
    kind = rng.choice(
        ["dense", "rows", "counted", "jagged", "keyed", "nested", "padded", "widths", "array", "texts", "objects",
         "declared objects", "shared", "size", "derived", "none"]
    )  # fmt: skip
    dtype, shape = DTYPES[rng.integers(len(DTYPES))], SHAPES[rng.integers(len(SHAPES))]

    def rows(count: int) -> Callable[[np.random.Generator], torch.Tensor]:
        return lambda rng: random_tensor(rng, count, shape, dtype)

    def some(rng: np.random.Generator) -> torch.Tensor:
        return random_tensor(rng, min(int(rng.zipf(1.6)), 30) * int(rng.random() > 0.2), shape, dtype)

    if kind == "dense":
        return Field(name, lambda rng: rows(1)(rng)[0], lambda parts: _stack(parts, dtype, shape), {})
    if kind == "rows":
        count = int(rng.integers(2, 4))
        declared = {"rows_per_sample": count}
        return Field(name, rows(count), lambda parts: _join(parts, dtype, shape), declared)
    if kind == "counted":
        return Field(
            name, some,
            lambda parts: {"v": _join(parts, dtype, shape), "n": _lengths(parts), "longest": _longest(parts)},
            {"rows_per_sample": (".v", ".n"), "derived": (".longest", ".n")},
        )  # fmt: skip
    if kind == "jagged":
        narrow = torch.int32 if rng.random() < 0.5 else torch.int64
        return Field(
            name, some, lambda parts: JaggedTensor(_join(parts, dtype, shape), lengths=_lengths(parts, narrow)), {}
        )
    if kind == "keyed":
        keys = ["z", "b", "k"][: int(rng.integers(1, 4))]
        weighted = bool(rng.random() < 0.5)

        def keyed(parts: list[list[torch.Tensor]]) -> KeyedJaggedTensor:
            columns = [[part[index] for part in parts] for index in range(len(keys))]
            values = torch.cat([_join(column, dtype, ()) for column in columns])
            lengths = torch.cat([_lengths(column) for column in columns])
            weights = torch.arange(len(values)) * 0 + len(keys) if weighted else None
            return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=len(parts))

        return Field(
            name, lambda rng: [random_tensor(rng, int(rng.integers(0, 5)), (), dtype) for _ in keys], keyed, {}
        )
    if kind == "nested":
        return Field(
            name,
            lambda rng: torch.from_numpy(rng.random((int(rng.integers(0, 5)), 2))),
            lambda parts: torch.nested.nested_tensor_from_jagged(
                _join(parts, torch.float64, (2,)), torch.nn.functional.pad(torch.cumsum(_lengths(parts), 0), (1, 0))
            ),
            {},
        )
    if kind == "padded":
        left = bool(rng.random() < 0.5)
        padded = Padded(lengths="{}.n", value=1, side="left" if left else "right")
        return Field(
            name, some,
            lambda parts: {
                "p": _pad(parts, dtype, shape, _longest(parts), left), "n": _lengths(parts), "longest": _longest(parts)
            },
            {"padded": (".p", padded), "derived": (".longest", ".n")},
        )  # fmt: skip
    if kind == "widths":  # all samples of a rank's batch are as wide as each other: `widen` sees to it
        return Field(
            name, lambda rng: random_tensor(rng, 6, shape, dtype),
            lambda parts: _pad(parts, dtype, shape, _longest(parts), False), {"padded": Padded(value=1)},
        )  # fmt: skip
    if kind == "array":
        numeric = rng.choice(["u2", "i8", "f4", "c8", "M8[s]", "?"])

        def draw(rng: np.random.Generator) -> Any:
            return np.array(int(rng.integers(0, 2)) if numeric == "?" else rng.integers(0, 100, 2)).astype(numeric)

        return Field(
            name, draw,
            lambda parts: np.stack(parts) if parts else np.empty((0,) if numeric == "?" else (0, 2), numeric), {},
        )  # fmt: skip
    if kind == "texts":
        return Field(name, lambda rng: "t" * int(rng.integers(0, 7)), lambda parts: np.array(parts, dtype="U"), {})
    if kind == "objects":
        kinds = [OBJECTS[rng.integers(len(OBJECTS))]] * 3 + [OBJECTS[0]]
        pack = list if rng.random() < 0.5 else tuple
        return Field(name, lambda rng: kinds[rng.integers(4)](rng), pack, {"objects": ""})
    if kind == "declared objects":
        return Field(name, lambda rng: {"a": [int(rng.integers(9))] * int(rng.integers(3))}, list, {"objects": ""})
    if kind == "shared":
        return Field(name, lambda _: None, lambda _: {"rate": 0.5, "names": ["a", "b"]}, {"shared": ""})
    if kind == "size":
        return Field(name, lambda _: None, len, {"batch_size": ""})
    if kind == "derived":
        return Field(
            name,
            lambda rng: int(rng.integers(100)),
            lambda parts: {"v": torch.tensor(parts, dtype=torch.int64), "sum": sum(parts)},
            {"derived function": ".sum"},
        )
    return Field(name, lambda _: None, lambda _: None, {"shared": ""} if rng.random() < 0.5 else {})


def _longest(parts: list[torch.Tensor]) -> int:
    return max(map(len, parts), default=0)
