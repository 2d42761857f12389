"""How a batch is taken apart: one walk over it, by its declarations; what is ambiguous is refused with a remedy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from trainer_client.balancing.batches.containers import Tree, container_of, is_list_of_objects
from trainer_client.balancing.batches.kinds import Contents, join, read_field, read_objects, read_rows
from trainer_client.balancing.batches.refusals import DERIVED, name_of, refusal, type_name
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Declarations
from trainer_client.balancing.batches.structure import Structure, structure_of

_MAX_STRUCTURES = 16  # that are remembered of a spec
_MOST_DECLARED = 8  # values of a list that are looked up by a pattern
_LISTS = (list, tuple)


class Reader:
    """Reads the batches of one spec: what a walk over a batch finds, and what is known of others like it."""

    def __init__(self, spec: BatchSpec) -> None:
        self._declared = Declarations(spec)
        self._known: list[tuple[Any, Structure]] = []  # by all that it follows from

    def read(self, batch: Any) -> Contents:
        """Takes a batch apart, wherever it is; refuses what is not understood, and batch sizes that disagree."""
        contents = Contents()
        tree = self._visit(contents, batch, "")
        if contents.has_empty_lists and not any(samples for _, samples in contents.sizes):
            contents = Contents(empty_lists_are_objects=True)  # those of no samples
            tree = self._visit(contents, batch, "")
        contents.structure = self._structure(contents, tree)
        contents.num_samples = _num_samples(contents)
        return contents

    def _structure(self, contents: Contents, tree: Tree | None) -> Structure:
        signature = tree, contents.fields, contents.leaves
        for known, structure in self._known:
            if known == signature:
                return structure
        structure = structure_of(contents, tree, self._declared)
        self._known = [(signature, structure), *self._known[: _MAX_STRUCTURES - 1]]
        return structure

    def _visit(self, contents: Contents, value: Any, path: str) -> Tree | None:
        declarations, declared = self._declared, self._declared.at(path)
        contents.paths.append(path)
        is_list = isinstance(value, _LISTS)
        field = read_field(contents, value, path, declared) if declared or type(value) is not dict else None
        if field is None and is_list and ("objects" in declared or self._holds_objects(contents, value, path)):
            field = read_objects(contents, value, path)
        if field is not None:
            contents.fields.append(field)
            return None
        container = container_of(value)
        if container is None:
            raise BatchError(refusal(value, path) + contents.hint())
        if is_list and path:
            contents.lists.append(path)
        values, names, context = container.flatten(value)
        begin = f"{path}." if path else ""
        children: list[Tree | None] = []
        for name, item in zip(names, values, strict=True):
            inner = f"{begin}{name}"
            is_tensor = type(item) is torch.Tensor and not item.is_nested
            if is_tensor and (rows := declarations.rows_at(inner)) is not None:  # most: without a detour
                contents.fields.append(read_rows(contents, item, inner, rows))
                children.append(None)
            else:
                children.append(self._visit(contents, item, inner))
        if is_list and path:
            contents.lists.pop()
        return Tree(type(value), context, tuple(children))

    def _holds_objects(self, contents: Contents, values: Any, path: str) -> bool:
        """Whether a list that is not declared holds one object for each sample: by what it holds."""
        if hasattr(values, "_fields") or self._declared.are_below(path, min(len(values), _MOST_DECLARED)):
            return False
        if not values:
            contents.has_empty_lists = True
            return contents.empty_lists_are_objects
        is_objects = is_list_of_objects(values)
        if is_objects is None:
            raise BatchError(
                f"{name_of(path)} is a {type_name(values)} with lists in it, which may mean two things: declare "
                f"objects={{{path!r}}} if it holds one entry for each sample, objects={{{join(path, '*')!r}}} if each "
                "of the lists in it does, or shared if it is the same for all samples"
            )
        return is_objects


@lru_cache(maxsize=64)
def reader_of(spec: BatchSpec) -> Reader:
    """The reader of a spec, which is the same as long as the spec is."""
    return Reader(spec)


def _num_samples(contents: Contents) -> int:
    """The number of samples, on which all must agree."""
    if not contents.sizes:
        raise BatchError(
            "the batch has no field with samples: all that it holds is None, shared or derived; at least one "
            "tensor, array or list must have one entry for each sample"
        )
    first_path, first = contents.sizes[0]
    for path, samples in contents.sizes:
        if samples != first:
            raise BatchError(
                f"batch sizes disagree: {name_of(first_path)} holds {first} samples, {name_of(path)} {samples}; "
                "declare rows_per_sample for a flattened tensor, objects for a list with one entry for each "
                f"sample, or shared for a value common to all samples{_offsets_hint(contents)}"
            )
    for path, size in contents.batch_sizes:
        if size != first:
            raise BatchError(
                f"batch_size names {path!r}, which is {size}, but the batch holds {first} samples; give their "
                f"number, or declare it in shared if it is the same on all ranks, {DERIVED}"
            )
    return first


def _offsets_hint(contents: Contents) -> str:
    """What to do about a tensor that says where samples begin, with one number more than there are samples."""
    for (path, *_), tensor in zip(contents.leaves, contents.tensors, strict=True):
        if tensor.dim() == 1 and tensor.numel() > 1 and not tensor.dtype.is_floating_point and not tensor.is_cuda:
            ends = {other.shape[0] for other in contents.tensors if other is not tensor}
            if not tensor[0] and (tensor.diff() >= 0).all() and int(tensor[-1]) in ends:
                return (
                    f"; {path!r} looks like offsets, which do not move: give the samples' lengths instead, "
                    f"{path}.diff(), and make offsets of those of the batch that is trained"
                )
    return ""
