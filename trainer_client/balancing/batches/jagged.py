"""Jagged tensors: TorchRec's `JaggedTensor` and `KeyedJaggedTensor`, torch's nested tensors in jagged layout.

TorchRec is looked up among the modules already imported: a batch can hold its classes only if something imported it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from trainer_client.balancing.batches.nodes import Parts, Taken
from trainer_client.balancing.batches.spec import BatchError


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
        """See `Node`."""
        from torchrec.sparse.jagged_tensor import JaggedTensor

        return JaggedTensor(
            parts.tensor(self.values),
            weights=None if self.weights is None else parts.tensor(self.weights),
            lengths=parts.lengths((self.column,), self.lengths_dtype),
        )

    def take(self, value: Any, taken: Taken) -> bool:
        """See `Node`."""
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
        """See `Node`."""
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
        """See `Node`."""
        if not is_keyed_jagged_tensor(value) or tuple(value.keys()) != self.keys:
            return False
        if value.variable_stride_per_key() or value.inverse_indices_or_none() is not None:
            return False
        return _take(value, self, taken)


@dataclass(frozen=True, slots=True)
class NestedNode:
    """A nested tensor of torch in jagged layout."""

    column: str
    values: int

    def build(self, parts: Parts) -> torch.Tensor:
        """See `Node`."""
        lengths = parts.lengths((self.column,), torch.int64)
        offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(parts.tensor(self.values), offsets=offsets)
        return nested

    def take(self, _value: Any, _taken: Taken) -> bool:
        """See `Node`; nested tensors always go the long way."""
        return False


def _take(value: Any, node: JaggedNode | KeyedNode, taken: Taken) -> bool:
    lengths, weights = jagged_lengths(value), value.weights_or_none()
    taken.tensors.append(value.values())
    if weights is not None:
        taken.tensors.append(weights)
    taken.lengths.append(lengths)
    return lengths.dtype is node.lengths_dtype and (weights is None) == (node.weights is None)
