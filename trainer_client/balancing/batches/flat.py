"""A batch taken apart into tensors whose rows belong to samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches.nodes import settle
from trainer_client.balancing.batches.overwritten import Watch
from trainer_client.balancing.batches.spec import BatchError, BatchSpec
from trainer_client.balancing.batches.structure import LENGTHS_DTYPE, Schema, Structure


class FlatBatch:
    """A batch as tensors (leaves) and the lengths of its jagged columns; made by `flatten`, never changed.

    Attributes:
        structure: Containers, leaves and schema.
        tensors: One per leaf; the first dimension counts rows.
        num_samples: Number of samples n.
        totals: (num_jagged,) int64, values of each jagged column over all samples, on the host.
    """

    __slots__ = (
        "_counts",
        "_lengths",
        "_lengths_coming",
        "_lengths_tensor",
        "_watch",
        "num_samples",
        "structure",
        "tensors",
        "totals",
    )

    def __init__(
        self,
        *,
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        num_samples: int,
        totals: NDArray[np.int64],
        lengths: NDArray[np.int64] | None = None,
        lengths_tensor: torch.Tensor | None = None,
    ) -> None:
        assert len(tensors) == len(structure.leaves)
        assert lengths is not None or lengths_tensor is not None
        self.structure = structure
        self.tensors = tuple(tensors)
        self.num_samples = num_samples
        self.totals = totals
        self._lengths = lengths
        self._lengths_tensor = lengths_tensor
        self._lengths_coming: torch.Tensor | None = None  # see `read_back`
        self._watch: Watch | None = None
        self._counts: Mapping[str, NDArray[np.int64]] = {}  # see `know`

    def __repr__(self) -> str:
        fields = "; ".join(self.schema.lines)
        return f"FlatBatch({self.num_samples} samples on {self.device}: {fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles host copies of the tensors as plain bytes: torch's own way fails for some dtypes."""
        contents = [(tensor.shape, tensor.dtype, _to_bytes(tensor)) for tensor in self.tensors]
        lengths = self._lengths
        if lengths is None:
            lengths = self.lengths_tensor.t().to("cpu", torch.int64).contiguous().numpy()
        return _unpickled, (self.structure, contents, self.num_samples, self.totals, lengths)

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
        """(num_jagged,) as `Structure.roles`; None where no sequence is declared, or the batch has none of it."""
        roles = self.structure.roles
        return np.array(roles, np.int64) if any(role > 0 for role in roles) else None

    @property
    def device(self) -> torch.device | None:
        """Where the tensors are but for those that stay on the host; None without tensors.

        Raises:
            BatchError: If they are on several devices.
        """
        devices = {tensor.device for tensor in self.tensors}
        if len(devices) > 1:
            leaves = self.structure.leaves
            pairs = [(leaf, tensor) for leaf, tensor in zip(leaves, self.tensors, strict=True) if not leaf.on_host]
            found = {tensor.device: leaf.path for leaf, tensor in pairs}
            if len(found) == 1:
                return next(iter(found))
            where = ", ".join(f"{path!r} on {device}" for device, path in found.items())
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
        fixed = 4 * self.num_jagged
        per_value = [0] * self.num_jagged
        for leaf in self.structure.leaves:
            fixed += leaf.rows * leaf.row_bytes
            for column in leaf.columns:
                per_value[column] += leaf.row_bytes
        return self.lengths @ np.array(per_value, dtype=np.int64) + fixed

    def lengths_of(self, path: str) -> NDArray[np.int64]:
        """(n,) int64: lengths of the jagged field at `path`, or the values of an integer tensor (n,) on the host.

        Raises:
            BatchError: If there is neither at that path.
        """
        if path in self.structure.columns:
            if path in self.structure.pickles:
                raise BatchError(f"{path!r} is a list of Python objects; make it an int32 or int64 tensor (n,)")
            return self.lengths[:, self.structure.columns.index(path)]
        if path in self._counts:
            return self._counts[path]
        for leaf, tensor in zip(self.structure.leaves, self.tensors, strict=True):
            if leaf.path == path and leaf.rows == 1 and not leaf.shape and not leaf.dtype.is_floating_point:
                if tensor.device.type != "cpu":
                    raise BatchError(f"{path!r} is on {tensor.device}; costs are read from the host's batch")
                return tensor.numpy().astype(np.int64)
        known = ", ".join(self.structure.columns) or "none"
        raise BatchError(f"{path!r} is no jagged field nor an integer per sample; jagged fields: {known}")

    def know(self, counts: Mapping[str, NDArray[np.int64]]) -> None:
        """Takes the host's copies of integer tensors (n,) that are on a device, by path, for `lengths_of`."""
        self._counts = counts

    def to(self, device: torch.device | str, non_blocking: bool = False) -> FlatBatch:
        """The batch on `device`; the host's lengths stay at hand."""
        target = torch.device(device)
        if all(tensor.device == target for tensor in self.tensors):
            return self
        return self._replaced([tensor.to(target, non_blocking=non_blocking) for tensor in self.tensors])

    @property
    def needs_host(self) -> bool:
        """Whether `unflatten` reads something on the host that a device has: arrays, Python objects, or lengths."""
        structure = self.structure
        on_device = any(self.tensors[index].is_cuda for index in structure.on_host)
        return on_device or (structure.reads_lengths and self._lengths is None)

    def read_back(self) -> FlatBatch:
        """The same with what `unflatten` needs on the host on its way there, queued on the current stream.

        The caller keeps this batch alive and does not build the other one until the stream has come so far.
        """
        on_host = set(self.structure.on_host)
        result = self.rebuild(
            [_coming(tensor) if index in on_host else tensor for index, tensor in enumerate(self.tensors)],
            num_samples=self.num_samples,
            totals=self.totals,
            lengths=self._lengths,
            lengths_tensor=self.lengths_tensor,
        )
        if self._lengths is None:
            result._lengths_coming = _coming(self.lengths_tensor)
        return result

    def pin_memory(self) -> FlatBatch:
        """The batch in page-locked host memory, from which copies to a device overlap with its work."""
        return self._replaced([tensor.pin_memory() for tensor in self.tensors])

    def plain(self) -> FlatBatch:
        """The batch with tensors that can be copied as bytes: contiguous, no lazy conjugates or negatives."""
        if all(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() for tensor in self.tensors):
            return self
        return self._replaced([tensor.resolve_conj().resolve_neg().contiguous() for tensor in self.tensors])

    def empty(self) -> FlatBatch:
        """The same structure with no samples, on the host; it can be pickled and sent to a rank without a batch."""
        return FlatBatch(
            structure=self.structure,
            tensors=[torch.empty((0, *leaf.shape), dtype=leaf.dtype, device="cpu") for leaf in self.structure.leaves],
            num_samples=0,
            totals=np.zeros(self.num_jagged, dtype=np.int64),
            lengths=np.zeros((0, self.num_jagged), dtype=np.int64),
        )

    def watch(self) -> None:
        """Takes note of what the tensors are like, for `check_unchanged`."""
        self._watch = Watch(self.tensors)

    def check_unchanged(self, function: str = "") -> None:
        """Refuses a batch that was written to since `watch`, as far as a look at each tensor can tell.

        Args:
            function: The user's function that alone has had the batch since, such as "cost"; "": nobody knows.

        Raises:
            BatchError: If a tensor is another one than it was.
        """
        if self._watch is not None:
            self._watch.check(self.tensors, [leaf.path for leaf in self.structure.leaves], function)

    def unflatten(self, spec: BatchSpec | None = None) -> Any:
        """The batch again: the same containers and types around these tensors.

        Args:
            spec: The declarations that the batch was flattened with, on a rank that has got its structure from another
                one: functions in it need no pickling then.
        """
        parts = _Parts(self)
        batch = self.structure.root.build(parts)
        return settle(self.structure.root, batch, parts, spec) if self.structure.is_derived else batch

    def make_room(self, num_samples: int, totals: NDArray[np.int64], device: torch.device) -> list[torch.Tensor]:
        """Uninitialised tensors for a batch of this structure with so many samples and values per jagged column."""
        values = totals.tolist()
        tensors = []
        for leaf in self.structure.leaves:
            rows = leaf.rows * num_samples if leaf.rows else sum([values[column] for column in leaf.columns])
            tensors.append(torch.empty((rows, *leaf.shape), dtype=leaf.dtype, device=device))
        return tensors

    def rebuild(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        num_samples: int,
        totals: NDArray[np.int64],
        lengths: NDArray[np.int64] | None = None,
        lengths_tensor: torch.Tensor | None = None,
    ) -> FlatBatch:
        """A batch of the same structure around other samples.

        Args:
            tensors: One per leaf.
            num_samples: Number of samples m.
            totals: (num_jagged,) values of each jagged column.
            lengths: (m, num_jagged) on the host, where known.
            lengths_tensor: (num_jagged, m) int32 on the device of the tensors; may be left out if `lengths` is given.
        """
        return FlatBatch(
            structure=self.structure,
            tensors=tensors,
            num_samples=num_samples,
            totals=totals,
            lengths=lengths,
            lengths_tensor=lengths_tensor,
        )

    def _replaced(self, tensors: Sequence[torch.Tensor]) -> FlatBatch:
        device_lengths = None if self._lengths is not None else self._lengths_tensor
        if device_lengths is not None and tensors:
            device_lengths = device_lengths.to(tensors[0].device, non_blocking=True)
        return self.rebuild(
            tensors,
            num_samples=self.num_samples,
            totals=self.totals,
            lengths=self._lengths,
            lengths_tensor=device_lengths,
        )


class _Parts:
    """What the nodes of a structure take from a batch."""

    def __init__(self, flat: FlatBatch) -> None:
        self._flat = flat
        self._column = {path: column for column, path in enumerate(flat.structure.columns)}
        self._offsets: dict[str, torch.Tensor] = {}
        self.device = flat.device

    @property
    def num_samples(self) -> int:
        return self._flat.num_samples

    def tensor(self, leaf: int) -> torch.Tensor:
        return self._flat.tensors[leaf]

    def lengths(self, columns: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        indices = [self._column[path] for path in columns]
        table = self._flat.lengths_tensor
        if not indices:
            return table.new_empty(0, dtype=dtype)
        begin, end = indices[0], indices[0] + len(indices)
        if indices == list(range(begin, end)):
            return table[begin:end].reshape(-1).to(dtype)
        # an index list would travel to the device and make the host wait for it
        return torch.cat([table[index] for index in indices]).to(dtype)

    def offsets(self, column: str, alike: str | None) -> torch.Tensor:
        if alike is not None and self.lengths_on_host(alike) == self.lengths_on_host(column):
            column = alike
        if column not in self._offsets:
            lengths = self.lengths((column,), torch.int64)
            self._offsets[column] = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
        return self._offsets[column]

    def lengths_on_host(self, column: str) -> list[int]:
        lengths: list[int] = self._flat.lengths[:, self._column[column]].tolist()
        return lengths

    def totals(self, columns: Sequence[str]) -> list[int]:
        return [int(self._flat.totals[self._column[path]]) for path in columns]


def _coming(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # one row of a larger tensor counts as contiguous whatever its stride, but only stride 1 can be viewed as bytes
    line = plain.as_strided((plain.numel(),), (1,))
    return line.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _unpickled(
    structure: Structure,
    contents: list[tuple[torch.Size, torch.dtype, bytes]],
    num_samples: int,
    totals: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> FlatBatch:
    tensors = [
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
        if data
        else torch.empty(shape, dtype=dtype, device="cpu")
        for shape, dtype, data in contents
    ]
    return FlatBatch(structure=structure, tensors=tensors, num_samples=num_samples, totals=totals, lengths=lengths)
