"""What a walk over a batch finds: fields, the leaves that hold their tensors, lengths, and values without samples."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from trainer_client.balancing.batches.refusals import tensor_refusal
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Padded, declarations_of

OBJECTS = "objects"  # `declared_in` of the bytes of Python objects
_COUNTS = (torch.int32, torch.int64)


class Leaf(NamedTuple):
    """One tensor of a flat batch."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one row
    rows: int  # of each sample if fixed, 0 if jagged
    columns: tuple[int, ...]  # jagged columns whose values lie in it, one after the other; () if rows are fixed
    field_paths: tuple[str, ...]  # of what ranks compare: one per column, or one
    declared_in: str  # parameter of `BatchSpec` that says how it is read; "" if its type alone does
    on_host: bool  # it is in the host's memory wherever the batch is
    padding: Padded | None  # how it is padded outside of a `FlatBatch`

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def jagged_fields(self) -> list[tuple[str, int]]:
        """Path and column of all that lies in it; none if rows are fixed."""
        return list(zip(self.field_paths, self.columns, strict=False))

    @property
    def is_count(self) -> bool:
        """Whether it is an integer for each sample, which may be a length."""
        return self.rows == 1 and not self.shape and self.dtype in _COUNTS


Leaves = Iterator[tuple[Leaf, torch.Tensor]]
"""Those of a flat batch of which no field has been built yet."""
Field = tuple[Any, ...]
"""The function that builds a field, of a flat batch and its `Leaves`, and what else it is called with."""


class Contents:
    """What a walk over a batch has found."""

    def __init__(self) -> None:
        self.fields: list[Field] = []  # in the order of the walk
        self.leaves: list[tuple[Any, ...]] = []  # what makes the `Leaf` of each tensor, with paths of columns
        self.tensors: list[torch.Tensor] = []  # one per leaf; those that are padded with their padding
        self.lengths: list[tuple[torch.Tensor, tuple[str, ...]]] = []  # (columns × n) each, and paths of the columns
        self.named: list[tuple[str, str, str]] = []  # columns that fields name: parameter, path of the field, column
        self.offsets: list[tuple[int, torch.Tensor]] = []  # of nested tensors, by the number of their leaf
        self.reads_lengths = False  # whether building the batch does, on the host
        self.shared: list[Any] = []  # the values that all samples share
        self.derived: dict[int, Derived] = {}  # by the number of their field
        self.values: list[tuple[str, str]] = []  # fields without samples: parameter, "" for None, and path
        self.sizes: list[tuple[str, int]] = []  # who says how many samples there are
        self.batch_sizes: list[tuple[str, int]] = []  # the same of fields that are declared to be their number
        self.lists: list[str] = []  # undeclared ones around the value that is looked at

    def add(
        self,
        tensor: torch.Tensor,
        path: str,
        rows: int,
        columns: tuple[str, ...],
        field_paths: tuple[str, ...],
        declared_in: str = "",
        on_host: bool = False,
        padding: Padded | None = None,
    ) -> None:
        """Adds a tensor, see `Leaf`; refuses one whose rows cannot be moved."""
        size = tuple(tensor.shape)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        may_move = is_plain and not (tensor.is_meta or tensor.requires_grad or tensor.is_quantized)
        if not (may_move and size) and (reason := tensor_refusal(tensor, path)):
            raise BatchError(reason if size else f"{reason}{self.hint()}")
        shape = size[1:] if padding is None else size[2:]
        self.tensors.append(tensor)
        self.leaves.append((path, tensor.dtype, shape, rows, columns, field_paths, declared_in, on_host, padding))

    def hint(self) -> str:
        """What else to do about a value in a list that is read as a container."""
        return f"; if {self.lists[0]!r} holds one entry for each sample, declare it in objects" if self.lists else ""


class Derived(NamedTuple):
    """A value that a function gives, of a batch in which such values are None."""

    path: str
    function: Callable[[Any], Any]

    def compute(self, batch: Any, spec: BatchSpec | None) -> Any:
        """The value."""
        function: Any = self.function
        if isinstance(function, _Missing) and spec is not None:
            function = declarations_of(spec).at(self.path).get("derived", function)
        try:
            return function(batch)
        except Exception as error:
            error.add_note(f"in the function that gives {self.path!r}, declared in derived")
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """A function that cannot be pickled, such as a lambda, is replaced by what says so."""
        function: Any = self.function
        try:
            pickle.dumps(function)
        except Exception as error:
            function = _Missing(self.path, str(error))
        return Derived, (self.path, function)


class _Missing(NamedTuple):
    path: str
    why: str

    def __call__(self, _batch: Any) -> Any:
        raise BatchError(
            f"the function that gives {self.path!r} did not reach this rank, which has had no batch of its own: "
            f"{self.why}; declare a function of a module, or a MaxLength, in derived"
        )
