"""The kinds of fields, each a pair of functions: one reads a user's value, the other builds it for another batch.

A field is one value of a user's batch, a leaf one tensor of a flat batch: most fields have one leaf, values without
samples none. Here are rows, objects and values without samples; padded and jagged fields have files of their own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.contents import OBJECTS, Contents, Derived, Field, Leaves
from trainer_client.balancing.batches.refusals import name_of, type_name
from trainer_client.balancing.batches.spec import BatchError, MaxLength

if TYPE_CHECKING:
    from trainer_client.balancing.batches.flat import FlatBatch


def read_rows(
    found: Contents, tensor: torch.Tensor, path: str, rows: int | str, array: np.dtype[Any] | None = None
) -> Field:
    """A tensor, or an array of a dtype, with as many rows for each sample, or as many as the lengths at a path say."""
    if isinstance(rows, str):
        found.add(tensor, path, 0, (rows,), (path,), "rows_per_sample", array is not None)
        found.named.append(("rows_per_sample", path, rows))
    else:
        found.add(tensor, path, rows, (), (path,), "rows_per_sample", array is not None)
        count = tensor.shape[0]
        if count % rows:
            raise BatchError(f"{name_of(path)} has {count} rows, which rows_per_sample = {rows} does not divide")
        found.sizes.append((path, count // rows))
    return build_rows, array


def build_rows(_flat: FlatBatch, leaves: Leaves, array: np.dtype[Any] | None) -> Any:
    """The tensor as it is, or an array of a dtype, in its own byte order."""
    values = next(leaves)[1]
    return values if array is None else values.numpy().astype(array, copy=False)


def read_array(found: Contents, array: NDArray[Any], path: str, declared: Mapping[str, Any]) -> Field | None:
    """An array of numbers as a tensor, another one as Python objects; None if it has no samples."""
    if not array.ndim:
        return None
    is_numeric = array.dtype.kind in "biufc" and array.dtype.itemsize <= (16 if array.dtype.kind == "c" else 8)
    if "objects" in declared or not is_numeric:  # which no tensor can hold
        return read_objects(found, array, path)
    if "padded" in declared:
        raise BatchError(f"{path!r} is in padded, which is for tensors; convert it with torch.from_numpy")
    plain = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if not plain.flags.writeable or any(stride < 0 for stride in plain.strides):  # torch cannot read its memory
        plain = plain.copy()
    return read_rows(found, torch.from_numpy(plain), path, declared.get("rows_per_sample", 1), array.dtype)


def read_objects(found: Contents, values: Sequence[Any] | NDArray[Any], path: str) -> Field:
    """A list, tuple or array with one Python object for each sample: a jagged field of the bytes of their pickles."""
    pickles = []
    for sample, value in enumerate(values):
        try:
            pickles.append(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        except Exception as error:
            raise BatchError(
                f"sample {sample} of {path!r} is a {type(value).__qualname__} that cannot be sent to another rank "
                f"({error}); drop it from the batch, or replace it by what can be pickled"
            ) from error
    data = b"".join(pickles)
    on_host = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    found.add(on_host, path, 0, (path,), (path,), OBJECTS, True)
    found.lengths.append((torch.tensor([len(one) for one in pickles], dtype=torch.int64, device="cpu"), (path,)))
    found.sizes.append((path, len(values)))
    found.reads_lengths = True
    dtype, shape = (values.dtype, values.shape[1:]) if isinstance(values, np.ndarray) else (None, ())
    return build_objects, type(values), dtype, shape


def build_objects(
    flat: FlatBatch, leaves: Leaves, kind: type[Any], dtype: np.dtype[Any] | None, shape: tuple[int, ...]
) -> Any:
    """A list or tuple, or an array of a dtype, with a shape for each sample."""
    leaf, values = next(leaves)
    data, ends = values.numpy().data, accumulate(flat.lengths[:, leaf.columns[0]].tolist(), initial=0)
    objects = [pickle.loads(data[since:until]) for since, until in pairwise(ends)]
    if dtype is None:
        return kind(objects)
    if dtype == np.object_:
        array = np.empty((len(objects), *shape), dtype=object)
        for index, one in enumerate(objects):
            array[index] = one
        return array
    if dtype.kind in "US" and objects:  # strings of other ranks may need a wider one
        widest = np.array(objects, dtype=dtype.kind).dtype
        dtype = dtype if widest.itemsize <= dtype.itemsize else widest.newbyteorder(dtype.byteorder)
    return np.array(objects, dtype=dtype).reshape(len(objects), *shape)


def read_none(found: Contents, path: str) -> Field:
    """None, which need not be declared."""
    found.values.append(("", path))
    return (build_none,)


def build_none(_flat: FlatBatch, _leaves: Leaves, *_: Any) -> None:
    """None, also for values that `FlatBatch.unflatten` derives from the others."""


def read_shared(found: Contents, value: Any, path: str) -> Field:
    """A value that stays as it is, of the batch that it comes from."""
    found.shared.append(value)
    found.values.append(("shared", path))
    return build_shared, len(found.shared) - 1


def build_shared(flat: FlatBatch, _leaves: Leaves, number: int) -> Any:
    """A shared value with its tensors on the batch's device."""
    return _moved(flat.shared[number], flat.device)


def _moved(value: Any, device: torch.device | None) -> Any:
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value.to(device, non_blocking=True) if device and callable(getattr(value, "to", None)) else value


def read_batch_size(found: Contents, value: Any, path: str) -> Field:
    """An integer that says how many samples there are; on a device, which would have to be waited for, any."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    is_tensor = isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point
    if not (is_number or is_tensor):
        raise BatchError(f"batch_size names {path!r}, which is {type_name(value)}; give an int or a 0-d integer tensor")
    if is_number or value.device.type == "cpu":
        found.batch_sizes.append((path, int(value)))
    found.values.append(("batch_size", path))
    return build_batch_size, value.dtype if is_tensor else None


def build_batch_size(flat: FlatBatch, _leaves: Leaves, dtype: torch.dtype | None) -> Any:
    """The number of samples, as a tensor of a dtype if there is one."""
    return flat.num_samples if dtype is None else torch.full((), flat.num_samples, dtype=dtype, device=flat.device)


def read_derived(found: Contents, path: str, function: Callable[[Any], Any] | MaxLength) -> Field:
    """A value that follows from the batch that is trained: a longest length, or what a function gives."""
    found.values.append(("derived", path))
    if isinstance(function, MaxLength):
        found.reads_lengths = True
        found.named.append(("derived", path, function.path))
        return build_longest, function.path
    found.derived[len(found.fields)] = one = Derived(path, function)
    return build_none, one


def build_longest(flat: FlatBatch, _leaves: Leaves, column: str) -> int:
    """The longest length of a column."""
    return int(flat.lengths[:, flat.structure.order[column]].max(initial=0))
