"""Tensors whose samples differ in length: jagged ones of TorchRec and torch, and those padded to the longest sample.

TorchRec is looked up among the modules already imported: a batch can hold its classes only if something imported it.

"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.nodes import Parts, Taken
from trainer_client.balancing.batches.spec import BatchError, Padded


def _torchrec_class(name: str) -> type[Any] | None:
    module = sys.modules.get("torchrec.sparse.jagged_tensor")
    return getattr(module, name, None)


def is_jagged_tensor(value: object) -> bool:
    """Whether it is TorchRec's `JaggedTensor`."""
    kind = _torchrec_class("JaggedTensor")
    return kind is not None and isinstance(value, kind)


def is_keyed_jagged_tensor(value: object) -> bool:
    """Whether it is TorchRec's `KeyedJaggedTensor`."""
    kind = _torchrec_class("KeyedJaggedTensor")
    return kind is not None and isinstance(value, kind)


def is_nested(value: object) -> bool:
    """Whether it is a nested tensor of torch, of any layout."""
    return isinstance(value, torch.Tensor) and value.is_nested


def jagged_lengths(value: Any) -> torch.Tensor:
    """Lengths of a `JaggedTensor` or `KeyedJaggedTensor`, on its device, without changing its caches."""
    lengths = value.lengths_or_none()
    return lengths if lengths is not None else torch.diff(value.offsets())


def check_keyed(value: Any, path: str) -> None:
    """Checks that every key has one length per sample.

    Raises:
        BatchError: If the batch size varies between keys.
    """
    if value.variable_stride_per_key() or value.inverse_indices_or_none() is not None:
        raise BatchError(
            f"{path!r} is a KeyedJaggedTensor with a variable batch size per feature; its rows are no samples: "
            "balance before deduplicating, or build it without stride_per_key_per_rank and inverse_indices"
        )


def nested_parts(value: torch.Tensor, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and offsets of a nested tensor.

    Raises:
        BatchError: If samples are not simply one after the other.
    """
    nested: Any = value
    holes = value.layout is not torch.jagged or nested.lengths() is not None
    if holes or getattr(nested, "_ragged_idx", 1) != 1:
        raise BatchError(
            f"{path!r} is a nested tensor of layout {value.layout}, with holes or another "
            "ragged dimension than 1; use layout=torch.jagged, ragged right after the batch, and .contiguous()"
        )
    return nested.values(), nested.offsets()


@dataclass(frozen=True, slots=True)
class JaggedNode:
    """TorchRec's `JaggedTensor`."""

    column: str
    values: int
    weights: int | None
    lengths_dtype: torch.dtype

    def build(self, parts: Parts) -> Any:
        """Makes it again, around the tensors of `parts`."""
        from torchrec.sparse.jagged_tensor import JaggedTensor

        return JaggedTensor(
            parts.tensor(self.values),
            weights=None if self.weights is None else parts.tensor(self.weights),
            lengths=parts.lengths((self.column,), self.lengths_dtype),
        )

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        return is_jagged_tensor(value) and _take(value, self, taken)


@dataclass(frozen=True, slots=True)
class KeyedNode:
    """TorchRec's `KeyedJaggedTensor`."""

    keys: tuple[str, ...]
    columns: tuple[str, ...]
    values: int
    weights: int | None
    lengths_dtype: torch.dtype

    def build(self, parts: Parts) -> Any:
        """Makes it again, around the tensors of `parts`."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        values, weights = parts.tensor(self.values), None if self.weights is None else parts.tensor(self.weights)
        lengths = parts.lengths(self.columns, self.lengths_dtype)
        totals = parts.totals(self.columns)
        begins = [0]
        for total in totals:
            begins.append(begins[-1] + total)
        return KeyedJaggedTensor(
            list(self.keys),
            values,
            weights=weights,
            lengths=lengths,
            stride=parts.num_samples,
            length_per_key=totals,  # else TorchRec would ask the device for them
            offset_per_key=begins,
            jt_dict=None if parts.num_samples else self._split_nothing(values, weights, lengths),
        )

    def _split_nothing(
        self, values: torch.Tensor, weights: torch.Tensor | None, lengths: torch.Tensor
    ) -> dict[str, Any]:
        """What `to_dict` gives without samples, for which TorchRec 1.8 raises an IndexError."""
        from torchrec.sparse.jagged_tensor import JaggedTensor

        start = lengths.new_zeros(1)
        return {key: JaggedTensor(values, weights=weights, lengths=lengths, offsets=start) for key in self.keys}

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        if not is_keyed_jagged_tensor(value) or tuple(value.keys()) != self.keys:
            return False
        if value.variable_stride_per_key() or value.inverse_indices_or_none() is not None:
            return False
        return _take(value, self, taken)


@dataclass(frozen=True, slots=True)
class NestedNode:
    """A nested tensor of torch in jagged layout.

    Attributes:
        column: Its lengths.
        values: The leaf of its values.
        alike: The column of an earlier one whose offsets it shares, without which torch does not compute with both.
    """

    column: str
    values: int
    alike: str | None = None

    def build(self, parts: Parts) -> torch.Tensor:
        """Makes it again, around the tensors of `parts`."""
        offsets = parts.offsets(self.column, self.alike)
        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(parts.tensor(self.values), offsets=offsets)
        return nested

    def take(self, _value: Any, _taken: Taken) -> bool:
        """Refuses, so that batches with nested tensors are always read by their declarations."""
        return False


def _take(value: Any, node: JaggedNode | KeyedNode, taken: Taken) -> bool:
    lengths, weights = jagged_lengths(value), value.weights_or_none()
    taken.tensors.append(value.values())
    if weights is not None:
        taken.tensors.append(weights)
    taken.lengths.append(lengths)
    return lengths.dtype is node.lengths_dtype and (weights is None) == (node.weights is None)


def without_padding(
    tensor: torch.Tensor, lengths: NDArray[np.int64], padding: Padded, path: str, column: str
) -> torch.Tensor:
    """(sum of lengths, …) values of a padded tensor (n, width, …), sample after sample.

    Raises:
        BatchError: If a sample is longer than the tensor is wide.
    """
    num_samples, width = tensor.shape[:2]
    if lengths.size and lengths.max() > width:
        sample = int(lengths.argmax())
        raise BatchError(
            f"{path!r} is {width} wide, but sample {sample} has length {lengths[sample]} by {column!r}; name the "
            f"lengths that belong to it in padded[{path!r}]"
        )
    if (lengths == width).all():
        return tensor.flatten(0, 1)
    starts = np.arange(num_samples) * width + (width - lengths if padding.side == "left" else 0)
    index = np.arange(int(lengths.sum())) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    rows = torch.from_numpy(index).to(tensor.device, non_blocking=True)
    return _bytes_if_small(tensor.flatten(0, 1)).index_select(0, rows).view(tensor.dtype)


@dataclass(frozen=True, slots=True)
class PaddedNode:
    """A padded tensor."""

    leaf: int
    column: str
    padding: Padded

    def build(self, parts: Parts) -> torch.Tensor:
        """Makes it again, around the tensors of `parts`."""
        values = parts.tensor(self.leaf)
        longest = max(parts.lengths_on_host(self.column), default=0)
        width = -(-longest // self.padding.multiple) * self.padding.multiple
        lengths = parts.lengths((self.column,), torch.int64)
        samples = torch.arange(parts.num_samples, device=values.device)
        starts = samples * width - (torch.cumsum(lengths, 0) - lengths)  # of each sample's rows, less those before it
        if self.padding.side == "left":
            starts += width - lengths
        # with the size given, a device is not waited for
        rows = torch.repeat_interleave(starts, lengths, output_size=values.shape[0])
        rows += torch.arange(values.shape[0], device=values.device)
        result = values.new_full((parts.num_samples * width, *values.shape[1:]), self.padding.value)
        _bytes_if_small(result).index_copy_(0, rows, _bytes_if_small(values))
        return result.view(parts.num_samples, width, *values.shape[1:])

    def take(self, value: Any, taken: Taken) -> bool:
        """Takes another of its kind apart."""
        taken.tensors.append(value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return False
        if self.padding.lengths is None:
            taken.lengths.append(torch.full(value.shape[:1], value.shape[1], dtype=torch.int64, device="cpu"))
        return True


def fits(value: float, dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can hold a number."""
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return value == value // 1 and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def _bytes_if_small(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes if its values are single bytes: indexing is not implemented for floating-point numbers of 8 bits."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
