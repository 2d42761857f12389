"""Flattening another batch of a kind that was flattened before, without reading the declarations again.

A training loop flattens one batch after the other of the same containers, dtypes and row shapes, on the thread that
launches the step. Whatever differs from the batch before is not recalled, and goes the long way with all its checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.nodes import Taken
from trainer_client.balancing.batches.spec import BatchSpec
from trainer_client.balancing.batches.structure import Leaf, Structure

_MOST_KINDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How batches of one kind are taken apart.

    Attributes:
        spec: The declarations, kept alive: recipes are found by its identity.
        structure: Containers, leaves and schema.
        lengths: Where the lengths of jagged columns are, and in which columns of the table they belong: those of a
            leaf's values, or of the i-th jagged tensor as -1 - i, one column after the other.
    """

    spec: BatchSpec
    structure: Structure
    lengths: tuple[tuple[int, list[int]], ...]


_recipes: dict[tuple[int, type], Recipe] = {}


def remember(batch: Any, recipe: Recipe) -> None:
    """Keeps the latest recipe for batches of this type under this spec."""
    if len(_recipes) >= _MOST_KINDS:
        _recipes.clear()
    _recipes[id(recipe.spec), type(batch)] = recipe


def recall(batch: Any, spec: BatchSpec) -> tuple[Structure, list[torch.Tensor], NDArray[np.int64]] | None:
    """Structure, tensors and (n, num_jagged) lengths of a batch like one before; None if it is not like it.

    The lengths are not compared with anything yet but the number of samples.
    """
    found = match(batch, spec)
    if found is None or any(tensor.device.type != "cpu" for tensor, _ in found.lengths):
        return None
    table = np.empty((found.num_samples, len(found.structure.columns)), dtype=np.int64)
    for tensor, columns in found.lengths:
        table[:, columns] = tensor.numpy().reshape(len(columns), found.num_samples).T
    return found.structure, found.tensors, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A batch that is like one before, taken apart.

    Attributes:
        structure: That of both.
        tensors: One per leaf.
        lengths: Tensors of lengths, (columns × n,) each, and in which columns of the table they belong.
        num_samples: Number of samples n.
    """

    structure: Structure
    tensors: list[torch.Tensor]
    lengths: list[tuple[torch.Tensor, list[int]]]
    num_samples: int


def match(batch: Any, spec: BatchSpec) -> Match | None:
    """A batch like one before, wherever it is; None if it is not like it."""
    recipe = _recipes.get((id(spec), type(batch)))
    taken = Taken()
    if recipe is None or not recipe.structure.root.take(batch, taken):
        return None
    tensors, leaves = taken.tensors, recipe.structure.leaves
    if not all(map(_alike, leaves, tensors)):
        return None
    lengths = [(tensors[at] if at >= 0 else taken.lengths[-1 - at], columns) for at, columns in recipe.lengths]
    rows = [(leaf.rows, tensor.shape[0]) for leaf, tensor in zip(leaves, tensors, strict=True) if leaf.rows]
    num_samples = rows[0][1] // rows[0][0] if rows else lengths[0][0].shape[0] // len(lengths[0][1])
    if any(found != each * num_samples for each, found in rows):
        return None
    if any(tensors[index].shape[0] != num_samples for index in recipe.structure.padded):
        return None
    if any(tensor.shape != (len(columns) * num_samples,) for tensor, columns in lengths):
        return None
    return Match(structure=recipe.structure, tensors=tensors, lengths=lengths, num_samples=num_samples)


def _alike(leaf: Leaf, tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is leaf.dtype
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and (
            tensor.shape[1:] == leaf.shape and tensor.dim() > 0
            if leaf.padding is None
            else tensor.dim() > 1 and tensor.shape[2:] == leaf.shape
        )
    )
