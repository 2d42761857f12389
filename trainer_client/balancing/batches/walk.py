"""One pass over a user's batch, to its nodes, tensors and lengths; what cannot be moved is refused with a remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches import jagged
from trainer_client.balancing.batches.containers import container
from trainer_client.balancing.batches.jagged import PaddedNode, fits
from trainer_client.balancing.batches.nodes import BatchSizeNode, DerivedNode, Node, SharedNode, TensorNode
from trainer_client.balancing.batches.objects import ArrayNode, ObjectsNode, as_tensor, is_numeric, pickled, unit
from trainer_client.balancing.batches.refusals import DERIVED, join, name_of, remedy, tensor_problem, type_name
from trainer_client.balancing.batches.sequences import Reading, reading
from trainer_client.balancing.batches.spec import BatchError, Declarations, Derive, MaxLength, Padded
from trainer_client.balancing.batches.structure import PICKLES, Leaf


@dataclasses.dataclass(slots=True, kw_only=True)
class Draft:
    """A leaf whose columns are still known by path.

    Attributes:
        path, rows, columns, field_paths, label, on_host, padding: As those of a `Leaf`.
        tensor: The tensor; one that is padded still has its padding.
    """

    path: str
    tensor: torch.Tensor
    rows: int
    columns: tuple[str, ...] = ()
    field_paths: tuple[str, ...]
    label: str = ""
    on_host: bool = False
    padding: Padded | None = None

    def leaf(self, order: dict[str, int]) -> Leaf:
        """The leaf."""
        return Leaf(
            path=self.path,
            dtype=self.tensor.dtype,
            shape=tuple(self.tensor.shape[1 if self.padding is None else 2 :]),
            rows=self.rows,
            columns=tuple(order[path] for path in self.columns),
            field_paths=self.field_paths,
            label=self.label,
            on_host=self.on_host,
            padding=self.padding,
        )


class Walk:
    """One pass over a batch."""

    def __init__(self, declarations: Declarations, *, empty_lists_are_objects: bool = False) -> None:
        """Has seen nothing yet.

        Args:
            declarations: What is declared.
            empty_lists_are_objects: Lists that hold nothing are those of a batch without samples.
        """
        self.drafts: list[Draft] = []
        self.columns: dict[str, torch.Tensor] = {}
        self.jagged: list[tuple[str, ...]] = []  # columns of each jagged tensor
        self.shared: list[str] = []
        self.shared_values: list[tuple[str, Any]] = []
        self.holds_values = False  # the nodes do: shared ones, of this batch alone
        self.reads_lengths = False  # nodes do, on the host
        self._nested_offsets: list[tuple[str, torch.Tensor]] = []
        self.has_empty_lists = False
        self._empty_lists_are_objects = empty_lists_are_objects
        self._declarations = declarations
        self._lists: list[str] = []  # around the value that is looked at, undeclared
        self._said: list[tuple[str, int]] = []  # declared numbers of samples
        self._sizes: list[tuple[str, int]] = []
        self._rows_from: list[tuple[Draft, str]] = []
        self._needed: list[tuple[str, str]] = []  # columns that derived values need

    def node(self, value: Any, path: str) -> Node:
        """The node of a value."""
        declared = self._declarations
        if declared.is_shared(path):
            self.shared.append(path)
            self.shared_values.append((path, value))
            self.holds_values |= value is not None
            return SharedNode(value)
        derive = declared.derive(path)
        if derive is not None:
            return self._derived(derive, path)
        if value is None:
            declared.none_at(path)
            return SharedNode(None)
        if declared.is_batch_size(path):
            return self._batch_size(value, path)
        if jagged.is_keyed_jagged_tensor(value):
            return self._keyed(value, path)
        if jagged.is_jagged_tensor(value):
            return self._jagged(value, path)
        if jagged.is_nested(value):
            return self._nested(value, path)
        if isinstance(value, torch.Tensor):
            return self._dense(value, path)
        if type(value) is np.ndarray:
            return self._array(value, path)
        if isinstance(value, list | tuple) and self._holds_objects(value, path):
            return self._objects(value, path)
        if isinstance(value, torch.nn.utils.rnn.PackedSequence):
            raise BatchError(remedy(value, path))
        is_list = isinstance(value, list | tuple) and bool(path)
        if is_list:
            self._lists.append(path)
        node = container(value, lambda item, name: self.node(item, join(path, name)))
        if node is None:
            raise BatchError(remedy(value, path) + self._hint())
        if is_list:
            self._lists.pop()
        return node

    def _hint(self) -> str:
        """What else to do about a value in a list that is read as a container."""
        if not self._lists:
            return ""
        return f"; if {self._lists[0]!r} holds one entry for each sample, declare it in objects"

    def _holds_objects(self, values: Any, path: str) -> bool:
        """Whether a list holds one object for each sample: by declaration, or by what it holds.

        Raises:
            BatchError: If neither tells.
        """
        if self._declarations.holds_objects(path):
            return True
        if hasattr(values, "_fields") or self._declarations.declares_parts(path, len(values)):
            return False
        if not values:
            self.has_empty_lists = True
            return self._empty_lists_are_objects
        found = reading(values)
        if found is Reading.UNCLEAR:
            raise BatchError(
                f"{name_of(path)} is a {type_name(values)} with lists in it, which may mean two things: declare "
                f"objects={{{path!r}}} if it holds one entry for each sample, objects={{{join(path, '*')!r}}} if each "
                "of the lists in it does, or shared if it is the same for all samples"
            )
        return found is Reading.OBJECTS

    def _derived(self, derive: Derive, path: str) -> Node:
        if not isinstance(derive, MaxLength):
            return DerivedNode(path, derive)
        self._needed.append((path, derive.path))
        self.reads_lengths = True
        return DerivedNode(path, derive, derive.path)

    def _dense(self, tensor: torch.Tensor, path: str, label: str = "", on_host: bool = False) -> Node:
        self._check_tensor(tensor, path)
        rows, padding = self._declarations.rows(path), self._declarations.padding(path)
        draft = Draft(path=path, tensor=tensor, rows=0, field_paths=(path,), label=label, on_host=on_host)
        if padding is not None:
            return self._padded(draft, padding)
        if isinstance(rows, str):
            self._rows_from.append((draft, rows))
        else:
            draft.rows = 1 if rows is None else rows
            samples, rest = divmod(tensor.shape[0], draft.rows)
            if rest:
                raise BatchError(
                    f"{name_of(path)} has {tensor.shape[0]} rows, which rows_per_sample = {rows} does not divide"
                )
            self._sizes.append((path, samples))
        return TensorNode(self._add(draft))

    def _padded(self, draft: Draft, padding: Padded) -> Node:
        path, tensor = draft.path, draft.tensor
        if self._declarations.rows(path) is not None:
            raise BatchError(f"{path!r} is both in padded and in rows_per_sample; declare it once")
        if tensor.dim() < 2:
            raise BatchError(
                f"{path!r} is in padded, but has the shape {tuple(tensor.shape)}; give (samples, width, …)"
            )
        if not fits(padding.value, tensor.dtype):
            raise BatchError(f"padded[{path!r}] has the value {padding.value}, which {tensor.dtype} cannot hold")
        draft.padding = padding
        self.reads_lengths = True
        if padding.lengths is None:
            self.jagged.append((path,))
            width = torch.full(tensor.shape[:1], tensor.shape[1], dtype=torch.int64, device="cpu")
            self._add_column(path, width, tensor.shape[0])
            draft.columns = (path,)
        else:
            self._rows_from.append((draft, padding.lengths))
            self._sizes.append((path, tensor.shape[0]))
        return PaddedNode(self._add(draft), padding.lengths or path, padding)

    def _array(self, array: NDArray[Any], path: str) -> Node:
        if not array.ndim:
            raise BatchError(remedy(array, path))
        if self._declarations.holds_objects(path) or not is_numeric(array):
            return self._objects(array, path)
        node = self._dense(as_tensor(array), path, label=unit(array), on_host=True)
        if isinstance(node, TensorNode):
            return ArrayNode(node.leaf, array.dtype)
        raise BatchError(f"{path!r} is in padded, which is for tensors; convert it with torch.from_numpy")

    def _objects(self, values: Any, path: str) -> Node:
        data, sizes = pickled(values, path)
        self.jagged.append((path,))
        self.reads_lengths = True
        self._add_column(path, sizes, len(values))
        leaf = self._add(
            Draft(path=path, tensor=data, rows=0, columns=(path,), field_paths=(path,), label=PICKLES, on_host=True)
        )
        return ObjectsNode.of(values, path, leaf, declared=self._declarations.holds_objects(path))

    def _jagged(self, value: Any, path: str) -> Node:
        self._refuse_rows(path)
        lengths = jagged.jagged_lengths(value)
        self.jagged.append((path,))
        self._add_column(path, lengths, lengths.numel())
        values = self._add(Draft(path=path, tensor=value.values(), rows=0, columns=(path,), field_paths=(path,)))
        weights = self._weights(value, path, (path,))
        return jagged.JaggedNode(path, values, weights, lengths.dtype)

    def _keyed(self, value: Any, path: str) -> Node:
        self._refuse_rows(path)
        jagged.check_keyed(value, path)
        keys, stride = tuple(value.keys()), value.stride()
        columns = tuple(join(path, key) for key in keys)
        lengths = jagged.jagged_lengths(value)
        self.jagged.append(columns)
        for index, column in enumerate(columns):
            self._add_column(column, lengths[index * stride : (index + 1) * stride], stride)
        values = self._add(Draft(path=path, tensor=value.values(), rows=0, columns=columns, field_paths=columns))
        weights = self._weights(value, path, columns)
        return jagged.KeyedNode(keys, columns, values, weights, lengths.dtype)

    def _weights(self, value: Any, path: str, columns: tuple[str, ...]) -> int | None:
        weights = value.weights_or_none()
        if weights is None:
            return None
        return self._add(
            Draft(
                path=join(path, "weights"),
                tensor=weights,
                rows=0,
                columns=columns,
                field_paths=tuple(f"{column}.weights" for column in columns),
            )
        )

    def _nested(self, value: torch.Tensor, path: str) -> Node:
        self._refuse_rows(path)
        values, offsets = jagged.nested_parts(value, path)
        self.jagged.append((path,))
        self._add_column(path, torch.diff(offsets), offsets.numel() - 1)
        alike = next((column for column, known in self._nested_offsets if known is offsets), None)
        self._nested_offsets.append((path, offsets))
        self.reads_lengths |= alike is not None
        leaf = self._add(Draft(path=path, tensor=values, rows=0, columns=(path,), field_paths=(path,)))
        return jagged.NestedNode(path, leaf, alike)

    def _refuse_rows(self, path: str) -> None:
        if self._declarations.rows(path) is not None:
            raise BatchError(f"rows_per_sample names {path!r}, whose lengths are known; declare tensors only")

    def _check_tensor(self, tensor: torch.Tensor, path: str) -> None:
        problem = tensor_problem(tensor, path)
        if problem:
            raise BatchError(problem + (self._hint() if tensor.dim() == 0 else ""))

    def _add(self, draft: Draft) -> int:
        self._check_tensor(draft.tensor, draft.path)
        self.drafts.append(draft)
        return len(self.drafts) - 1

    def _add_column(self, path: str, lengths: torch.Tensor, samples: int) -> None:
        if path in self.columns:
            raise BatchError(f"two jagged fields have the path {path!r}; rename one")
        self.columns[path] = lengths
        self._sizes.append((path, samples))

    def resolve_rows(self) -> None:
        """Gives flattened and padded tensors the column that another field's lengths or counts make."""
        counts = {
            draft.path: draft.tensor
            for draft in self.drafts
            if draft.rows == 1 and draft.tensor.dim() == 1 and draft.tensor.dtype in (torch.int32, torch.int64)
        }
        for draft, source in self._rows_from:
            declared = "rows_per_sample" if draft.padding is None else "padded"
            self._need(source, counts, f"{declared} of {draft.path!r} names")
            draft.columns = (source,)
        for path, source in self._needed:
            self._need(source, counts, f"derived[{path!r}] is the longest")

    def _need(self, source: str, counts: dict[str, torch.Tensor], who: str) -> None:
        """Makes sure that there is a column of lengths.

        Raises:
            BatchError: If what it names has none, which lists of Python objects have not: theirs are of pickles.
        """
        found = [draft for draft in self.drafts if draft.path == source]
        if source in self.columns and not any(draft.label == PICKLES for draft in found):
            return
        if source not in counts:
            raise BatchError(
                f"{who} {source!r}, which is neither a jagged field nor an int32 or int64 tensor with one count per "
                f"sample: {self._what_is(source, found)}"
            )
        self.columns[source] = counts[source]

    def _what_is(self, path: str, found: list[Draft]) -> str:
        """What there is at a path that has no lengths, and what to do."""
        if not found:
            below = sorted(column for column in self.columns if column.startswith(f"{path}."))
            if below:
                return f"name one of {', '.join(below[:8])}"
            if path in self.shared:
                return "it is declared in shared"
            return "the batch has no field of this path with one entry for each sample"
        (draft, *_) = found
        if draft.label == PICKLES:
            return "it is a list or array of Python objects; make it a tensor, as with torch.tensor"
        shape, dtype = tuple(draft.tensor.shape), str(draft.tensor.dtype).removeprefix("torch.")
        if draft.rows == 0:
            return "it is flattened by the lengths of another field itself; name those"
        if draft.rows > 1:
            return f"it has {draft.rows} rows per sample"
        return f"it is of {dtype} and shape {shape}; convert it, as with .flatten() or .to(torch.int64)"

    def sources(self, order: dict[str, int]) -> tuple[tuple[int, list[int]], ...]:
        """Where the lengths are; see `Recipe`."""
        places = {draft.path: index for index, draft in enumerate(self.drafts)}
        own = [(-1 - index, [order[path] for path in paths]) for index, paths in enumerate(self.jagged) if paths]
        known = {path for paths in self.jagged for path in paths}
        return (*own, *((places[path], [order[path]]) for path in order if path not in known))

    def check_sizes(self) -> int:
        """The number of samples.

        Raises:
            BatchError: If fields disagree, there are none, or two have one path.
        """
        if not self._sizes:
            raise BatchError("the batch has no tensor with samples; at least one must not be shared")
        first_path, first = self._sizes[0]
        for path, samples in self._sizes[1:]:
            if samples != first:
                raise BatchError(
                    f"batch sizes disagree: {name_of(first_path)} holds {first} samples, {name_of(path)} {samples}; "
                    "declare rows_per_sample for a flattened tensor, objects for a list with one entry for each "
                    f"sample, or shared for a value common to all samples{self._offsets_hint()}"
                )
        seen: set[str] = set()
        for path in (path for draft in self.drafts for path in draft.field_paths):
            if path in seen:
                raise BatchError(f"two fields have the path {path!r}; rename one")
            seen.add(path)
        for path, said in self._said:
            if said != first:
                raise BatchError(
                    f"batch_size names {path!r}, which is {said}, but the batch holds {first} samples; give their "
                    f"number, or declare it in shared if it is the same on all ranks, {DERIVED}"
                )
        return first

    def _offsets_hint(self) -> str:
        """What to do about a tensor that says where samples begin, with one number more than there are samples."""
        for draft in self.drafts:
            tensor = draft.tensor
            if tensor.dim() == 1 and tensor.numel() > 1 and not tensor.dtype.is_floating_point and not tensor.is_cuda:
                ends = {other.tensor.shape[0] for other in self.drafts if other is not draft}
                if not tensor[0] and (tensor.diff() >= 0).all() and int(tensor[-1]) in ends:
                    return (
                        f"; {draft.path!r} looks like offsets, which do not move: give the samples' lengths instead, "
                        f"{draft.path}.diff(), and make offsets of those of the batch that is trained"
                    )
        return ""

    @property
    def holds_no_samples(self) -> bool:
        """Whether nothing in the batch holds a sample."""
        return not any(samples for _, samples in self._sizes)

    def _batch_size(self, value: Any, path: str) -> BatchSizeNode:
        if isinstance(value, int) and not isinstance(value, bool):
            self._said.append((path, value))
            return BatchSizeNode(None)
        if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.dtype.is_floating_point:
            if value.device.type == "cpu":  # a device would have to be waited for
                self._said.append((path, int(value)))
            return BatchSizeNode(value.dtype)
        raise BatchError(f"batch_size names {path!r}, which is {type_name(value)}; give an int or a 0-d integer tensor")
