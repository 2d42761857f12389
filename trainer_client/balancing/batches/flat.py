"""A batch taken apart into tensors whose rows belong to samples, and what batches of one kind have in common."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from ctypes import string_at
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.splits import ALL, FIRST, LAST
from trainer_client.balancing.batches.containers import Tree
from trainer_client.balancing.batches.fields import Derived, Field, Shared, SharedValues, describe
from trainer_client.balancing.batches.spec import BatchError, BatchSpec, Padded

_PARTS = {LAST: "the last part", FIRST: "the first part", ALL: "all parts"}
_MAX_LINES = 64  # of a state; of further fields only a digest
_WATCHED_BYTES = 64
_WATCHED_TENSORS = 4
PICKLES = "objects"  # label of the bytes of Python objects
LENGTHS_DTYPE = torch.int32  # on the wire and on devices; flatten() refuses longer samples


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSchema:
    """One field.

    Attributes:
        path: Where it is in the batch.
        dtype: Name of its dtype, such as "int64"; "" for shared values.
        kind: Rows per sample are fixed (dense), vary (jagged), or there is one value for all samples (shared).
        shape: Shape of one row or value.
        rows: Rows per sample of a dense field, 0 otherwise.
        lengths: Path of what gives the number of rows of each sample of a jagged field, "" otherwise.
        role: What a jagged field is to a sample in parts: values of an item if it is of the sequence, else with which
            parts it goes, as in `evenkeel.partitioning.splits`; None where no sequence is declared.
    """

    path: str
    dtype: str = ""
    kind: Literal["dense", "jagged", "shared"] = "dense"
    shape: tuple[int, ...] = ()
    rows: int = 0
    lengths: str = ""
    role: int | None = None

    def __str__(self) -> str:
        if self.kind == "shared":
            return f"{self.path}: shared"
        rows = f"{self.rows} rows per sample" if self.kind == "dense" else f"jagged by {self.lengths}{self._parts}"
        return f"{self.path}: {self.dtype}{list(self.shape)}, {rows}"

    @property
    def _parts(self) -> str:
        if self.role is None:
            return ""
        return f", {self.role} an item of the sequence" if self.role > 0 else f", with {_PARTS[self.role]}"

    @property
    def constant(self) -> str:
        """What stays the same from batch to batch, also where rows are padded to the longest of each batch."""
        if self.kind == "shared":
            return str(self)
        text = f"{self.path}: {self.dtype}"
        if self.shape:
            text += f", rows of {len(self.shape)} dimension{'s' * (len(self.shape) > 1)}"
        if self.kind == "jagged":
            return f"{text}, jagged by {self.lengths}{self._parts}"
        return text if self.rows == 1 else f"{text}, {self.rows} rows per sample"


def remedy(lines: Sequence[str], others: Sequence[str]) -> str:
    """What to do about two ranks' fields that differ, given as lines of their schemas."""
    widths = re.compile(r"\[\d+(?=[\],].* rows per sample)")  # the first size of a row of a dense field
    here = {widths.sub("[", line): line for line in lines if widths.search(line)}
    for other in others:
        if other != (line := here.get(widths.sub("[", other), other)):
            return (
                f"if {line.rpartition(': ')[0]!r} is padded to the longest sample of its batch, declare it in "
                "BatchSpec.padded together with what says the lengths; else give all ranks rows of the same shape"
            )
    return "give all ranks batches of the same fields and dtypes"


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The fields of a batch, sorted by path: two batches of one schema can exchange samples.

    Containers do not belong to it: ranks may order the keys of their dicts differently.
    """

    fields: tuple[FieldSchema, ...]

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """One readable line per field."""
        return tuple(str(field) for field in self.fields)

    @cached_property
    def constant_lines(self) -> tuple[str, ...]:
        """One readable line per field, of what stays the same from batch to batch, for few KB at most."""
        lines = tuple(field.constant for field in self.fields)
        if len(lines) <= _MAX_LINES:
            return lines
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
        return (*lines[:_MAX_LINES], f"{len(lines) - _MAX_LINES} more fields, all together {digest}")

    @cached_property
    def hash(self) -> bytes:
        """16 bytes that name the schema, the same in every process."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).digest()

    def diff(self, other: Schema, *, own: str = "this batch", others: str = "the other") -> str:
        """What differs, one line per difference, ready to be shown; "" if nothing does.

        Args:
            other: The schema to compare with.
            own: What to call the batch of this schema, for example "rank 0".
            others: What to call the other batch.
        """
        ours, theirs = ({field.path: str(field) for field in schema.fields} for schema in (self, other))
        return "\n".join(
            f"{own} has {ours.get(path, f'no {path}')}; {others} has {theirs.get(path, f'no {path}')}"
            for path in sorted(ours.keys() | theirs.keys())
            if ours.get(path) != theirs.get(path)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of a batch.

    Attributes:
        path: Where it is.
        dtype: Its dtype.
        shape: Shape of one row.
        rows: Rows of each sample if fixed, 0 if jagged.
        columns: The jagged columns whose values lie in it, one after the other; () if rows are fixed.
        field_paths: Path of each of its fields: one per column, or one.
        label: What the schema says instead of the dtype; "" for the dtype.
        on_host: It is in the host's memory wherever the batch is.
        padding: How it is padded outside of a `FlatBatch`.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: int
    columns: tuple[int, ...]
    field_paths: tuple[str, ...]
    label: str = ""
    on_host: bool = False
    padding: Padded | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What batches of one kind have in common.

    Attributes:
        tree: The containers; None if the batch is a single field.
        fields: The leaves of the tree.
        leaves: The tensors.
        columns: Path of each jagged column, ascending.
        schema: What other ranks' batches must agree with.
        shared: What its shared values are.
        roles: What each jagged column is to a sample in parts, as in `evenkeel.partitioning.splits`; empty where no
            sequence is declared: then no sample is split.
        reads_lengths: Building a batch reads its lengths on the host.
        sources: Where the lengths of a batch are, and of which columns: those of a leaf's values, or of the i-th of
            `Taken.lengths` as -1 - i, one column after the other.
        has_empty_lists: Lists that hold nothing are containers, which is so only where there are samples.
        counts: Leaf and column of each tensor that holds the lengths of a jagged column.
        on_host: The leaves that are in the host's memory wherever the batch is.
        padded: The leaves that are padded outside of a `FlatBatch`.
        pickles: Paths of the jagged columns that are lists of Python objects.
        derived: The fields that are computed from the others, by their number.
        order: Number of each column.
    """

    tree: Tree | None
    fields: tuple[Field, ...]
    leaves: tuple[Leaf, ...]
    columns: tuple[str, ...]
    schema: Schema
    shared: SharedValues = ()
    roles: tuple[int, ...] = ()
    reads_lengths: bool = False
    sources: tuple[tuple[int, list[int]], ...] = ()
    has_empty_lists: bool = False
    counts: tuple[tuple[int, int], ...] = field(init=False)
    on_host: tuple[int, ...] = field(init=False)
    padded: tuple[int, ...] = field(init=False)
    pickles: frozenset[str] = field(init=False)
    derived: dict[int, Derived] = field(init=False)
    order: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        leaves = list(enumerate(self.leaves))
        order = {path: column for column, path in enumerate(self.columns)}
        computed = {
            "order": order,
            "derived": {i: one for i, one in enumerate(self.fields) if isinstance(one, Derived) and one.needs_batch},
            "counts": tuple((i, order[leaf.path]) for i, leaf in leaves if leaf.rows and leaf.path in order),
            "on_host": tuple(i for i, leaf in leaves if leaf.on_host),
            "padded": tuple(i for i, leaf in leaves if leaf.padding is not None),
            "pickles": frozenset(leaf.path for leaf in self.leaves if leaf.label == PICKLES),
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    def with_shared(self, values: Sequence[tuple[str, Any]]) -> Structure:
        """The same with other shared values, given by path in the order of the fields."""
        if not values:
            return self
        rest = iter(values)
        fields = (Shared(*next(rest)) if isinstance(one, Shared) and one.path else one for one in self.fields)
        return replace(self, fields=tuple(fields), shared=describe(values))


class FlatBatch:
    """A batch as tensors (leaves) and the lengths of its jagged columns; made by `flatten`, never changed.

    Attributes:
        structure: Containers, fields, leaves and schema.
        tensors: One per leaf; the first dimension counts rows.
        num_samples: Number of samples n.
        totals: (num_jagged,) int64, values of each jagged column over all samples, on the host.
    """

    __slots__ = (
        "_counts", "_lengths", "_lengths_coming", "_lengths_tensor", "_offsets", "_watched", "num_samples", "structure",
        "tensors", "totals",
    )  # fmt: skip

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
        self._watched: tuple[list[int], dict[int, bytes]] | None = None
        self._counts: Mapping[str, NDArray[np.int64]] = {}  # see `set_counts`
        self._offsets: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"FlatBatch({self.num_samples} samples on {self.device}: {'; '.join(self.schema.lines)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles host copies of the tensors as plain bytes: torch's own way fails for some dtypes."""
        contents = [(tensor.shape, tensor.dtype, _bytes_of(tensor)) for tensor in self.tensors]
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
            return self.lengths[:, self.structure.order[path]]
        if path in self._counts:
            return self._counts[path]
        for leaf, tensor in zip(self.structure.leaves, self.tensors, strict=True):
            if leaf.path == path and leaf.rows == 1 and not leaf.shape and not leaf.dtype.is_floating_point:
                if tensor.device.type != "cpu":
                    raise BatchError(f"{path!r} is on {tensor.device}; costs are read from the host's batch")
                return tensor.numpy().astype(np.int64)
        jagged = ", ".join(self.structure.columns) or "none"
        raise BatchError(f"{path!r} is no jagged field nor an integer per sample; jagged fields: {jagged}")

    def set_counts(self, counts: Mapping[str, NDArray[np.int64]]) -> None:
        """Takes the host's copies of integer tensors (n,) that are on a device, by path, for `lengths_of`."""
        self._counts = counts

    # ------------------------------------------------------------------------- what fields are built from

    def lengths_at(self, paths: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """(columns × n,) lengths of some jagged columns on the batch's device, one column after the other."""
        table = self.lengths_tensor
        if not paths:
            return table.new_empty(0, dtype=dtype)
        indices = [self.structure.order[path] for path in paths]
        if indices == list(range(indices[0], indices[0] + len(indices))):
            return table[indices[0] : indices[0] + len(indices)].reshape(-1).to(dtype)
        # an index list would travel to the device and make the host wait for it
        return torch.cat([table[index] for index in indices]).to(dtype)

    def host_lengths_at(self, path: str) -> list[int]:
        """(n,) lengths of one column."""
        lengths: list[int] = self.lengths[:, self.structure.order[path]].tolist()
        return lengths

    def offsets_at(self, path: str, alike: str | None) -> torch.Tensor:
        """(n + 1,) where samples begin in a column; the tensor of column `alike`, if that has the same lengths."""
        if alike is not None and self.host_lengths_at(alike) == self.host_lengths_at(path):
            path = alike
        if path not in self._offsets:
            ends = torch.cumsum(self.lengths_at((path,), torch.int64), 0)
            self._offsets[path] = torch.nn.functional.pad(ends, (1, 0))
        return self._offsets[path]

    def unflatten(self, spec: BatchSpec | None = None) -> Any:
        """The batch again: the same containers and types around these tensors.

        Args:
            spec: The declarations that the batch was flattened with, on a rank that has got its structure from another
                one: functions in it need no pickling then.
        """
        self._offsets = {}
        values = [field.build(self) for field in self.structure.fields]
        batch = self._unflattened(values)
        if not self.structure.derived:
            return batch
        for index, derived in self.structure.derived.items():
            values[index] = derived.compute(batch, spec)
        return self._unflattened(values)

    def _unflattened(self, values: list[Any]) -> Any:
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
        on_device = None if self._lengths is not None else self._lengths_tensor
        if on_device is not None and tensors:
            on_device = on_device.to(tensors[0].device, non_blocking=True)
        return self.rebuild(
            tensors, num_samples=self.num_samples, totals=self.totals, lengths=self._lengths, lengths_tensor=on_device
        )

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
        on_host = self.structure.on_host
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

    def empty(self) -> FlatBatch:
        """The same structure with no samples, on the host; it can be pickled and sent to a rank without a batch."""
        totals = np.zeros(self.num_jagged, dtype=np.int64)
        tensors = self.make_room(0, totals, torch.device("cpu"))
        return self.rebuild(tensors, num_samples=0, totals=totals, lengths=np.zeros((0, self.num_jagged), np.int64))

    def make_room(self, num_samples: int, totals: NDArray[np.int64], device: torch.device) -> list[torch.Tensor]:
        """Uninitialised tensors for a batch of this structure with so many samples and values per jagged column."""
        values = totals.tolist()
        tensors = []
        for leaf in self.structure.leaves:
            rows = leaf.rows * num_samples if leaf.rows else sum([values[column] for column in leaf.columns])
            tensors.append(torch.empty((rows, *leaf.shape), dtype=leaf.dtype, device=device))
        return tensors

    def rebuild(self, tensors: Sequence[torch.Tensor], **contents: Any) -> FlatBatch:
        """A batch of the same structure around other samples.

        Args:
            tensors: One per leaf.
            contents: As for a batch: number of samples m, totals, (m, num_jagged) lengths on the host, where known, and
                (num_jagged, m) int32 on the device of the tensors, which may be left out if those are given.
        """
        return FlatBatch(structure=self.structure, tensors=tensors, **contents)

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


def _coming(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy()


def _unpickled(
    structure: Structure,
    contents: list[tuple[torch.Size, torch.dtype, NDArray[np.uint8]]],
    num_samples: int,
    totals: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> FlatBatch:
    tensors = [torch.from_numpy(data).view(dtype).view(shape) for shape, dtype, data in contents]
    return FlatBatch(structure=structure, tensors=tensors, num_samples=num_samples, totals=totals, lengths=lengths)
