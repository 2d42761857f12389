"""How a batch is taken apart: one walk over it, by its declarations; what is ambiguous is refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from trainer_client.balancing.batches.containers import Tree, container_of, is_list_of_objects, is_torchrec, join
from trainer_client.balancing.batches.contents import Contents, Field
from trainer_client.balancing.batches.fields import (
    read_array,
    read_batch_size,
    read_derived,
    read_none,
    read_objects,
    read_rows,
    read_shared,
)
from trainer_client.balancing.batches.jagged import read_jagged
from trainer_client.balancing.batches.padding import read_padded
from trainer_client.balancing.batches.refusals import DERIVED, name_of, refusal, type_name
from trainer_client.balancing.batches.spec import WANTED, BatchError, BatchSpec, Declarations, declarations_of
from trainer_client.balancing.batches.structure import Structure, structure_of

_MAX_STRUCTURES = 16  # that are remembered of a spec
_MOST_DECLARED = 8  # values of a list that are looked up by a pattern
Declared = Mapping[str, Any]


class Reading(Contents):
    """A batch that is taken apart, wherever it is."""

    structure: Structure  # what it has in common with others like it
    num_samples: int  # on which all fields agree

    def __init__(self, declared: Declarations, *, empty_lists_are_objects: bool = False) -> None:
        super().__init__()
        self._declared, self._empty_lists_are_objects = declared, empty_lists_are_objects
        self.has_empty_lists = False
        self.paths: list[str] = []  # but those of most tensors

    @property
    def all_lengths(self) -> list[torch.Tensor]:
        """(columns × n) each, of the columns of `Structure.lengths`."""
        return [tensor for tensor, _ in self.lengths] + [self.tensors[leaf] for leaf in self.structure.counts]

    def visit(self, value: Any, path: str) -> Tree | None:
        """Takes a value apart; its containers, None for a field."""
        declared, rows_at, is_list = self._declared.at(path), self._declared.rows_at, isinstance(value, list | tuple)
        self.paths.append(path)
        field = self._field(value, path, declared) if declared or type(value) is not dict else None
        if field is None and is_list and ("objects" in declared or self._holds_objects(value, path)):
            field = read_objects(self, value, path)
        if field is not None:
            self.fields.append(field)
            return None
        container = container_of(value)
        if container is None:
            misused = "".join(f"; {name} names it, {WANTED[name]}" for name in declared if name in WANTED)
            raise BatchError(f"{refusal(value, path)}{self.hint()}{misused}")
        if is_list and path:
            self.lists.append(path)
        values, names, context = container.flatten(value)
        begin = f"{path}." if path else ""
        children: list[Tree | None] = []
        for name, item in zip(names, values, strict=True):
            inner = f"{begin}{name}"
            is_tensor = type(item) is torch.Tensor and not item.is_nested
            if is_tensor and (rows := rows_at(inner)) is not None:  # most: without a detour
                self.fields.append(read_rows(self, item, inner, rows))
                children.append(None)
            else:
                children.append(self.visit(item, inner))
        if is_list and path:
            self.lists.pop()
        return Tree(type(value), context, tuple(children))

    def _field(self, value: Any, path: str, declared: Declared) -> Field | None:
        """The field of a value, by what is declared, or by its type; None: it may be a container."""
        if "shared" in declared:
            return read_shared(self, value, path)
        if "derived" in declared:
            return read_derived(self, path, declared["derived"])
        if value is None and path:
            return read_none(self, path)
        if "batch_size" in declared:
            return read_batch_size(self, value, path)
        kind: Any = type(value)
        read = _reader_of(kind)
        return None if read is None else read(self, value, path, declared)

    def _holds_objects(self, values: Any, path: str) -> bool:
        """Whether a list that is not declared holds one object for each sample: by what it holds."""
        if hasattr(values, "_fields") or self._declared.are_below(path, min(len(values), _MOST_DECLARED)):
            return False
        if not values:
            self.has_empty_lists = True
            return self._empty_lists_are_objects
        is_objects = is_list_of_objects(values)
        if is_objects is None:
            raise BatchError(
                f"{name_of(path)} is a {type_name(values)} with lists in it, which may mean two things: declare "
                f"objects={{{path!r}}} if it holds one entry for each sample, objects={{{join(path, '*')!r}}} if each "
                "of the lists in it does, or shared if it is the same for all samples"
            )
        return is_objects


def _read_tensor(found: Contents, tensor: torch.Tensor, path: str, declared: Declared) -> Field:
    if tensor.is_nested:
        return read_jagged(found, tensor, path, declared)
    if "padded" in declared:
        return read_padded(found, tensor, path, declared["padded"])
    return read_rows(found, tensor, path, declared.get("rows_per_sample", 1))


@lru_cache(maxsize=1024)
def _reader_of(kind: type) -> Callable[[Contents, Any, str, Declared], Field | None] | None:
    """How all values of a type are read; None: as containers, if at all."""
    if issubclass(kind, torch.Tensor):
        return _read_tensor
    if kind is np.ndarray:
        return read_array
    return read_jagged if is_torchrec(kind, "JaggedTensor", "KeyedJaggedTensor") else None


def read(batch: Any, spec: BatchSpec) -> Reading:
    """Takes a batch apart, wherever it is; refuses what is not understood, and batch sizes that disagree."""
    declared = declarations_of(spec)
    reading = Reading(declared)
    try:
        tree = reading.visit(batch, "")
    except RecursionError:
        raise BatchError("the batch holds itself, or too much in itself; pass what is trained alone") from None
    if reading.has_empty_lists and not any(samples for _, samples in reading.sizes):
        reading = Reading(declared, empty_lists_are_objects=True)  # those of no samples
        tree = reading.visit(batch, "")
    signature = tree, reading.fields, reading.leaves, reading.values  # from which the structure follows
    structure = next((structure for known, structure in declared.structures if known == signature), None)
    if structure is None:
        structure = structure_of(reading, tree, reading.paths, declared)
        declared.structures = [(signature, structure), *declared.structures[: _MAX_STRUCTURES - 1]]
    reading.structure = structure
    reading.num_samples = _num_samples(reading)
    return reading


def _num_samples(reading: Reading) -> int:
    """The number of samples, on which all must agree."""
    if not reading.sizes:
        raise BatchError(
            "the batch has no field with samples: all that it holds is None, shared or derived; at least one "
            "tensor, array or list must have one entry for each sample"
        )
    first_path, first = reading.sizes[0]
    for path, samples in reading.sizes:
        if samples != first:
            raise BatchError(
                f"batch sizes disagree: {name_of(first_path)} holds {first} samples, {name_of(path)} {samples}; "
                "declare rows_per_sample for a flattened tensor, objects for a list with one entry for each "
                f"sample, or shared for a value common to all samples{_offsets_hint(reading)}"
            )
    for path, size in reading.batch_sizes:
        if size != first:
            raise BatchError(
                f"batch_size names {path!r}, which is {size}, but the batch holds {first} samples; give their "
                f"number, or declare it in shared if it is the same on all ranks, {DERIVED}"
            )
    return first


def _offsets_hint(reading: Reading) -> str:
    """What to do about a tensor that says where samples begin, with one number more than there are samples."""
    for leaf, tensor in zip(reading.structure.leaves, reading.tensors, strict=True):
        if tensor.dim() == 1 and tensor.numel() > 1 and not tensor.dtype.is_floating_point and not tensor.is_cuda:
            ends = {other.shape[0] for other in reading.tensors if other is not tensor}
            if not tensor[0] and (tensor.diff() >= 0).all() and int(tensor[-1]) in ends:
                return (
                    f"; {leaf.path!r} looks like offsets, which do not move: give the samples' lengths instead, "
                    f"{leaf.path}.diff(), and make offsets of those of the batch that is trained; else declare it "
                    + DERIVED
                )
    return ""
