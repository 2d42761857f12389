"""Jagged tensors: TorchRec's, also where a `KeyedJaggedTensor` stores equal samples of a key once, and torch's."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from trainer_client.balancing.batches.containers import is_keyed, join
from trainer_client.balancing.batches.contents import Contents, Field, Leaves
from trainer_client.balancing.batches.padding import take_rows
from trainer_client.balancing.batches.refusals import name_of, type_name
from trainer_client.balancing.batches.spec import BatchError

if TYPE_CHECKING:
    from trainer_client.balancing.batches.flat import FlatBatch


def read_jagged(found: Contents, value: Any, path: str, _declared: Any) -> Field:
    """A `JaggedTensor`, `KeyedJaggedTensor` or nested tensor, wherever it is."""
    lengths, (values, weights) = jagged_lengths(value, path), _values_of(value, path)
    number, keys = len(found.leaves), tuple(value.keys()) if is_keyed(value) else None
    columns, weight_paths = _paths_of(path, keys)
    found.add(values, path, 0, columns, columns)
    if weights is not None:
        found.add(weights, join(path, "weights"), 0, columns, weight_paths)
    if columns:
        found.lengths.append((lengths, columns))
        found.sizes.append((columns[0], lengths.shape[-1]))
    if not isinstance(value, torch.Tensor):
        return build_jagged, keys, weights is not None, lengths.dtype
    offsets = value.offsets()  # type: ignore[attr-defined]
    alike = next((leaf for leaf, earlier in found.offsets if earlier is offsets), None)
    found.offsets.append((number, offsets))
    found.reads_lengths |= alike is not None
    return build_nested, alike


@lru_cache(maxsize=256)
def _paths_of(path: str, keys: tuple[str, ...] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of the keys of a `KeyedJaggedTensor` or of a `JaggedTensor`, and of their weights."""
    columns = (path,) if keys is None else tuple(join(path, key) for key in keys)
    return columns, tuple(join(column, "weights") for column in columns)


def build_nested(flat: FlatBatch, leaves: Leaves, alike: int | None) -> torch.Tensor:
    """A nested tensor, with the offsets of an earlier leaf if those are alike: torch wants to compute with both."""
    leaf, values = next(leaves)
    column = None if alike is None else flat.structure.leaves[alike].columns[0]
    return torch.nested.nested_tensor_from_jagged(values, offsets=flat.offsets_at(leaf.columns[0], column))


def build_jagged(
    flat: FlatBatch, leaves: Leaves, keys: tuple[str, ...] | None, has_weights: bool, dtype: torch.dtype
) -> Any:
    """A `JaggedTensor`, or with keys a `KeyedJaggedTensor`, with lengths of a dtype."""
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

    leaf, values = next(leaves)
    weights, lengths = next(leaves)[1] if has_weights else None, flat.lengths_at(leaf.columns, dtype)
    if keys is None:
        return JaggedTensor(values, weights=weights, lengths=lengths)
    totals = flat.totals[list(leaf.columns)].tolist()
    empty = None
    if not flat.num_samples:  # for which TorchRec 1.8's `to_dict` raises an IndexError
        begin = lengths.new_zeros(1)
        empty = {key: JaggedTensor(values, weights=weights, lengths=lengths, offsets=begin) for key in keys}
    return KeyedJaggedTensor(
        list(keys),
        values,
        weights=weights,
        lengths=lengths,
        stride=flat.num_samples,
        length_per_key=totals,  # else TorchRec would ask the device for them
        offset_per_key=list(accumulate(totals, initial=0)),
        jt_dict=empty,
    )


def jagged_lengths(value: Any, path: str) -> torch.Tensor:
    """(n,) lengths of a `JaggedTensor` or nested tensor, (keys, n) of a `KeyedJaggedTensor`, wherever they are."""
    if isinstance(value, torch.Tensor):
        ragged = getattr(value, "_ragged_idx", 1)
        if value.layout is not torch.jagged or value.lengths() is not None or ragged != 1:  # type: ignore[attr-defined]
            raise BatchError(
                f"{name_of(path)} is a nested tensor of layout {value.layout}, with holes or another ragged dimension "
                "than 1; use layout=torch.jagged, ragged right after the batch, and .contiguous()"
            )
    lengths = _stored_lengths(value)
    if not is_keyed(value):
        return lengths
    if (rows := _stored_rows(value, path)) is not None:
        return lengths[rows]
    keys, n = len(value.keys()), value.stride()
    if lengths.numel() != keys * n:
        raise BatchError(
            f"{name_of(path)} has {lengths.numel()} lengths for {keys} keys of {n} samples; give one for each key and "
            "sample"
        )
    return lengths.reshape(keys, n)


def _values_of(value: Any, path: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values of all samples, key after key, and their weights, if they have some."""
    try:
        values = value.values()
    except Exception as error:
        raise BatchError(
            f"{name_of(path)} is a {type_name(value)} that gives no values ({error}); if it is packed, pass "
            f"{path}.materialize()"
        ) from error
    weights = None if isinstance(value, torch.Tensor) else value.weights_or_none()
    if not is_keyed(value) or (rows := _stored_rows(value, path)) is None:
        return values, weights
    lengths = _stored_lengths(value).long()
    counts, begins = lengths[rows].flatten(), (lengths.cumsum(0) - lengths)[rows].flatten()
    shifts = begins - (counts.cumsum(0) - counts)
    places = torch.arange(int(counts.sum()), device="cpu") + shifts.repeat_interleave(counts)
    return take_rows(values, places), None if weights is None else take_rows(weights, places)


def _stored_lengths(value: Any) -> torch.Tensor:
    """On their device, without changing its caches."""
    lengths: torch.Tensor | None = None if isinstance(value, torch.Tensor) else value.lengths_or_none()
    return lengths if lengths is not None else torch.diff(value.offsets())


def _stored_rows(kjt: Any, path: str) -> torch.Tensor | None:
    """(keys, n) the stored row of each sample; None: each has its own."""
    inverse, name = kjt.inverse_indices_or_none(), name_of(path)
    if inverse is None:
        if not kjt.variable_stride_per_key():
            return None
        raise BatchError(
            f"{name} is a KeyedJaggedTensor with a variable batch size per feature; which of its rows a sample has is "
            "not known: give it inverse_indices, or balance before deduplicating"
        )
    (names, positions), keys, values, lengths = inverse, kjt.keys(), kjt.values(), _stored_lengths(kjt)
    if not (lengths.is_cpu and positions.is_cpu and values.is_cpu):
        raise BatchError(
            f"{name} is a deduplicated KeyedJaggedTensor on {values.device}, for whose samples the host would have to "
            "wait; balance the host's batch, before the copy"
        )
    strides = torch.tensor(kjt.stride_per_key(), dtype=torch.int64, device="cpu")[:, None]
    is_whole = positions.dtype in (torch.int64, torch.int32)
    fits = is_whole and positions.dim() == 2 and len(positions) == len(names) and {*keys} <= {*names}
    rows = positions[[names.index(key) for key in keys]].long() if fits else strides
    fits &= bool(((rows >= 0) & (rows < strides)).all() and (lengths >= 0).all())
    if not fits or lengths.numel() != strides.sum() or lengths.sum() != len(values):
        raise BatchError(
            f"{name} is a KeyedJaggedTensor that contradicts itself; give for each key and sample in inverse_indices "
            "the number of one of the key's rows, to each row its length, and as many values as these add up to"
        )
    return rows + strides.cumsum(0) - strides
