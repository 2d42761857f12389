"""A batch taken apart into tensors whose rows belong to samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import string_at
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.contents import OBJECTS
from trainer_client.balancing.batches.schema import Schema, SharedValues, bytes_of, describe
from trainer_client.balancing.batches.spec import BatchError, BatchSpec
from trainer_client.balancing.batches.structure import Structure, as_range

_WATCHED_BYTES = 64
_WATCHED_TENSORS = 4
LENGTHS_DTYPE = torch.int32  # on the wire and on devices; flatten() refuses longer samples


class FlatBatch:
    """A batch as tensors (leaves) and the lengths of its jagged columns; made by `flatten`, never changed.

    Attributes:
        structure: Containers, fields, leaves and schema.
        tensors: One per leaf; the first dimension counts rows.
        num_samples: Number of samples n.
        totals: (num_jagged,) int64, values of each jagged column over all samples, on the host.
        shared: The values that all samples share.
        counts: Host copies of integer tensors (n,) that are on a device, by path, for `lengths_of`.
        answers: Users' functions, and what each has said of the batch when it arrived on its device.
    """

    def __init__(
        self,
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        lengths: NDArray[np.int64] | None = None,
        *,
        shared: Sequence[Any] = (),
        totals: NDArray[np.int64] | None = None,
        lengths_tensor: torch.Tensor | None = None,
    ) -> None:
        assert len(tensors) == len(structure.leaves)
        if lengths is not None:
            self.num_samples, self.totals = len(lengths), lengths.sum(axis=0) if totals is None else totals
        else:  # only the device has them
            assert totals is not None
            assert lengths_tensor is not None
            self.num_samples, self.totals = lengths_tensor.shape[1], totals
        self.structure, self.tensors, self.shared = structure, tuple(tensors), tuple(shared)
        self.counts: Mapping[str, NDArray[np.int64]] = {}
        self.answers: Sequence[tuple[Any, Any]] = ()
        self._lengths, self._lengths_tensor = lengths, lengths_tensor
        self._lengths_coming: torch.Tensor | None = None  # see `read_back`
        self._watched: tuple[list[int], dict[int, bytes]] | None = None
        self._offsets: dict[int, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"FlatBatch({self.num_samples} samples on {self.device}: {'; '.join(self.schema.lines)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles host copies of the tensors as plain bytes: torch's own way fails for some dtypes."""
        tensors = [(bytes_of(tensor), tensor.dtype, tensor.shape) for tensor in self.tensors]
        lengths = self._lengths
        if lengths is None:  # only a device has them, or they are on their way
            lengths = self.lengths_tensor.t().to("cpu", torch.int64).contiguous().numpy()
        return _unpickled, (tensors, self.structure, self.shared, lengths)

    @property
    def schema(self) -> Schema:
        """The fields, sorted by path."""
        return self.structure.schema

    @property
    def num_jagged(self) -> int:
        """Number of jagged columns: fields that share their lengths (values and weights) count once."""
        return len(self.structure.columns)

    @property
    def roles(self) -> NDArray[np.int64] | None:
        """(num_jagged,) what each column is to a sample in parts, as `Structure.roles`; None without a sequence."""
        return np.array(self.structure.roles, np.int64) if self.structure.roles else None

    @property
    def device(self) -> torch.device | None:
        """Where the tensors are but for those that stay on the host; None without tensors.

        Raises:
            BatchError: If they are on several devices.
        """
        devices = {tensor.device for tensor in self.tensors}
        if len(devices) > 1:
            pairs = zip(self.structure.leaves, self.tensors, strict=True)
            paths = {tensor.device: leaf.path for leaf, tensor in pairs if not leaf.on_host}
            if len(paths) == 1:
                return next(iter(paths))
            where = ", ".join(f"{path!r} on {device}" for device, path in paths.items())
            raise BatchError(f"the batch is on several devices: {where}; move it to one, for example with .to(device)")
        return next(iter(devices), None)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n, num_jagged) int64, values of each sample in each jagged column, from the host's copy.

        Raises:
            BatchError: If only a device has them: the result of a redistribution on a device.
        """
        if self._lengths is None and self._lengths_coming is not None:
            self._lengths = self._lengths_coming.t().to(torch.int64).contiguous().numpy()
        if self._lengths is None:
            raise BatchError(
                "the lengths of this batch are only on its device; take them before the redistribution, or read "
                "lengths_tensor, which waits for nothing"
            )
        return self._lengths

    @property
    def lengths_tensor(self) -> torch.Tensor:
        """(num_jagged, n) int32, the same on the batch's device."""
        if self._lengths_tensor is None:
            assert self._lengths is not None
            # through torch, not numpy: its pinned copy below must not be of memory that numpy frees
            on_host = torch.from_numpy(self._lengths).to(LENGTHS_DTYPE).t().contiguous()
            device = self.device
            if device is not None and device.type == "cuda":
                on_host = on_host.pin_memory().to(device, non_blocking=True)
            self._lengths_tensor = on_host
        return self._lengths_tensor

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(n,) int64, bytes that moving each sample takes."""
        fixed = self.structure.sample_bytes + LENGTHS_DTYPE.itemsize * self.num_jagged
        return self.lengths @ np.array(self.structure.value_bytes, np.int64) + fixed

    def lengths_of(self, path: str) -> NDArray[np.int64]:
        """(n,) int64: lengths of the jagged field at `path`, or the values of an integer tensor (n,) on the host.

        Raises:
            BatchError: If there is neither at that path.
        """
        pairs = zip(self.structure.leaves, self.tensors, strict=True)
        leaf, tensor = next((pair for pair in pairs if pair[0].path == path), (None, None))
        if leaf is not None and leaf.declared_in == OBJECTS:
            raise BatchError(f"{path!r} is a list of Python objects; make it an int32 or int64 tensor (n,)")
        if path in self.structure.order:
            return self.lengths[:, self.structure.order[path]]
        if path in self.counts:
            return self.counts[path]
        if leaf is None or tensor is None or leaf.rows != 1 or leaf.shape or leaf.dtype.is_floating_point:
            jagged = ", ".join(self.structure.columns) or "none"
            raise BatchError(f"{path!r} is no jagged field nor an integer per sample; jagged fields: {jagged}")
        if tensor.device.type != "cpu":
            raise BatchError(f"{path!r} is on {tensor.device}; costs are read from the host's batch")
        return tensor.numpy().astype(np.int64)

    def describe_shared(self) -> SharedValues:
        """What the shared values are, by path, for other ranks to compare."""
        return describe(zip(self.structure.shared, self.shared, strict=True))

    # ------------------------------------------------------------------------- what fields are built from

    def lengths_at(self, columns: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """(columns × n,) lengths of some jagged columns on the batch's device, one column after the other."""
        table, following = self.lengths_tensor, as_range(columns)
        if isinstance(following, range):
            return table[following.start : following.stop].reshape(-1).to(dtype)
        # an index list would travel to the device and make the host wait for it
        return torch.cat([table[column] for column in columns]).to(dtype)

    def offsets_at(self, column: int, alike: int | None) -> torch.Tensor:
        """(n + 1,) where samples begin in a column; the tensor of column `alike`, if that has the same lengths."""
        if alike is not None and np.array_equal(self.lengths[:, alike], self.lengths[:, column]):
            column = alike
        if column not in self._offsets:
            ends = torch.cumsum(self.lengths_at((column,), torch.int64), 0)
            self._offsets[column] = torch.nn.functional.pad(ends, (1, 0))
        return self._offsets[column]

    def unflatten(self, spec: BatchSpec | None = None) -> Any:
        """The batch again: the same containers and types around these tensors.

        Args:
            spec: The declarations that the batch was flattened with, on a rank that has got its structure from another
                one: functions in it need no pickling then.
        """
        self._offsets = {}
        leaves = zip(self.structure.leaves, self.tensors, strict=True)
        values = [build(self, leaves, *known) for build, known in self.structure.fields]
        batch = self._nested(values)
        if not self.structure.derived:
            return batch
        for index, derived in self.structure.derived.items():
            values[index] = derived.compute(batch, spec)
        return self._nested(values)

    def _nested(self, values: list[Any]) -> Any:
        tree = self.structure.tree
        return values[0] if tree is None else tree.unflatten(iter(values), self.num_samples, self.device)

    # --------------------------------------------------------------------------------------- other memory

    def to(self, device: torch.device | str, non_blocking: bool = False) -> FlatBatch:
        """The batch on `device`; the host's lengths stay at hand."""
        target = torch.device(device)
        if all(tensor.device == target for tensor in self.tensors):
            return self
        return self._replaced([tensor.to(target, non_blocking=non_blocking) for tensor in self.tensors])

    def pin_memory(self) -> FlatBatch:
        """The batch in page-locked host memory, from which copies to a device overlap with its work."""
        return self._replaced([tensor.pin_memory() for tensor in self.tensors])

    def plain(self) -> FlatBatch:
        """The batch with tensors that can be copied as bytes: contiguous, no lazy conjugates or negatives."""
        if all(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() for tensor in self.tensors):
            return self
        return self._replaced([tensor.resolve_conj().resolve_neg().contiguous() for tensor in self.tensors])

    def _replaced(self, tensors: Sequence[torch.Tensor]) -> FlatBatch:
        """The same samples in other tensors."""
        on_device = None if self._lengths is not None else self._lengths_tensor
        if on_device is not None and tensors:
            on_device = on_device.to(tensors[0].device, non_blocking=True)
        return self.rebuild(tensors, self._lengths, totals=self.totals, lengths_tensor=on_device)

    @property
    def needs_host(self) -> bool:
        """Whether `unflatten` reads something on the host that a device has: arrays, Python objects, or lengths."""
        on_device = any(self.tensors[index].is_cuda for index in self.structure.on_host)
        return on_device or (self.structure.reads_lengths and self._lengths is None)

    def read_back(self) -> FlatBatch:
        """The same with what `unflatten` needs on the host on its way there, queued on the current stream.

        The caller keeps this batch alive and does not build the other one until the stream has come so far.
        """
        on_host = self.structure.on_host
        tensors = [coming(tensor) if index in on_host else tensor for index, tensor in enumerate(self.tensors)]
        result = self.rebuild(tensors, self._lengths, totals=self.totals, lengths_tensor=self.lengths_tensor)
        if self._lengths is None:
            result._lengths_coming = coming(self.lengths_tensor)
        return result

    def empty(self) -> FlatBatch:
        """The same structure with no samples, on the host; it can be pickled and sent to a rank without a batch."""
        lengths = np.zeros((0, self.num_jagged), np.int64)
        return self.rebuild(self.make_room(0, lengths.sum(axis=0), torch.device("cpu")), lengths)

    def make_room(self, num_samples: int, totals: NDArray[np.int64], device: torch.device) -> list[torch.Tensor]:
        """Uninitialised tensors for a batch of this structure with so many samples and values per jagged column."""
        values = totals.tolist()
        tensors = []
        for leaf in self.structure.leaves:
            rows = leaf.rows * num_samples if leaf.rows else sum([values[column] for column in leaf.columns])
            tensors.append(torch.empty((rows, *leaf.shape), dtype=leaf.dtype, device=device))
        return tensors

    def rebuild(
        self, tensors: Sequence[torch.Tensor], lengths: NDArray[np.int64] | None = None, **contents: Any
    ) -> FlatBatch:
        """A batch of the same structure around other samples, of which `contents` are as for a batch."""
        return FlatBatch(self.structure, tensors, lengths, shared=self.shared, **contents)

    # ------------------------------------------------------------- memory that a loader uses again

    def watch(self) -> None:
        """Takes note of what the tensors are like, for `check_unchanged`.

        Of the largest on the host some bytes, of others only how often torch wrote to them: this is done for every
        batch, on the thread that launches the step.
        """
        on_host = [index for index, tensor in enumerate(self.tensors) if tensor.is_cpu]
        largest = sorted(on_host, key=lambda index: self.tensors[index].numel())[-_WATCHED_TENSORS:]
        self._watched = [_version(one) for one in self.tensors], {i: _some_bytes(self.tensors[i]) for i in largest}

    def check_unchanged(self, function: str = "") -> None:
        """Refuses a batch that was written to since `watch`, as far as a look at each tensor can tell.

        Args:
            function: The user's function that alone has had the batch since, such as "cost"; "": nobody knows.

        Raises:
            BatchError: If a tensor is another one than it was.
        """
        versions, seen = self._watched or ([], {})
        written = [index for index, version in enumerate(versions) if _version(self.tensors[index]) != version]
        written += [index for index, content in seen.items() if _some_bytes(self.tensors[index]) != content]
        if not written:
            return
        path = self.structure.leaves[written[0]].path
        if function:
            raise BatchError(
                f"the {function} function writes to {path!r} of the batch, whose samples would be trained changed; let "
                "it compute on a copy, for example without operations in place"
            )
        raise BatchError(
            f"{path!r} of a batch was written to before its samples moved: the loader uses the memory of a batch again "
            "for a later one; set BatchSpec(copy=True), or let the loader give clones"
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _some_bytes(tensor: torch.Tensor) -> bytes:
    """From the middle: what is at the ends of a batch may well be padding, or the same in all."""
    if not tensor.numel():
        return b""
    if not tensor.is_contiguous():
        return string_at(tensor.data_ptr(), tensor.dtype.itemsize)
    length = min(_WATCHED_BYTES, tensor.nbytes)
    return string_at(tensor.data_ptr() + (tensor.nbytes - length) // 2, length)


def coming(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on its way to page-locked memory of the host, queued on the current stream."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _unpickled(tensors: list[Any], structure: Structure, shared: Sequence[Any], lengths: Any) -> FlatBatch:
    plain = [torch.from_numpy(data).view(dtype).view(shape) for data, dtype, shape in tensors]
    return FlatBatch(structure, plain, lengths, shared=shared)
