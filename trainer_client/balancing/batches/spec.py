"""What a user declares about a batch that its tensors do not tell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar, get_args

from trainer_client.checks import is_whole

_WILDCARDS = frozenset("*?[")
_COLLECTIONS = ("shared", "batch_size", "objects", "sequence")
_MAPPINGS = ("rows_per_sample", "padded", "derived", "parts")
T = TypeVar("T")


class BatchError(ValueError):
    """A batch cannot be read; the message names the field, what was found, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """How a tensor (samples, width, …) is padded, whose width differs from batch to batch and from rank to rank.

    Samples travel without their padding, and the batch that a rank trains is padded again to its own longest sample.

    Attributes:
        lengths: Path of the jagged field, or of the integer tensor (samples,), that says how much of each sample is not
            padding. None: nothing does, so all of it travels, and the batch becomes as wide as the widest that it came
            from.
        value: What to pad with.
        side: Where the padding is.
        multiple: The width becomes a multiple of this.
    """

    lengths: str | None = None
    value: float = 0
    side: Literal["right", "left"] = "right"
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise BatchError(f"side is {self.side!r}; padding is 'right' or 'left' of the values")
        if not is_whole(self.multiple) or self.multiple < 1:
            raise BatchError(f"multiple is {self.multiple!r}; give a whole number >= 1")


@dataclass(frozen=True, slots=True)
class MaxLength:
    """For `BatchSpec.derived`: the length of the longest sample of a batch, 0 without samples; no device is waited for.

    Attributes:
        path: The jagged field, or the integer tensor (samples,) that `rows_per_sample` or `padded` names.
    """

    path: str


Derive = Callable[[Any], Any] | MaxLength
Part = Literal["last", "first", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Declarations per path; needed only for what is not one row per sample.

    A path joins dict keys, attribute names, positions and keys of a `KeyedJaggedTensor` with dots: `user.history`,
    `features.clicks`, `targets.0`. The weights of a jagged field are at `features.clicks.weights`. A declaration is a
    path or a pattern of `fnmatch` over whole paths (`features.*`; `*` matches dots too).

    Attributes:
        rows_per_sample: Flattened tensors. A number k: k rows for each sample. A path: as many rows for each sample as
            the jagged field at that path has values, or as the integer tensor (samples,) at that path says.
        padded: Tensors (samples, width, …) that are padded to the longest sample of their batch: the path of what says
            the lengths, or a `Padded`.
        shared: Values that are the same for all samples and never move; what lies below a declared path is shared too.
        batch_size: Integers, or 0-d integer tensors, that hold the number of samples; updated when it changes. Another
            number is refused, but on a device, which would have to be waited for.
        derived: Values that follow from the samples, such as the longest length: a `MaxLength`, or a function of the
            batch that is trained, in which derived values are None.
        objects: Lists, tuples and NumPy arrays with one Python object for each sample that do not look like it: lists
            of lists, and lists with tensors in them. They travel as pickles.
        sequence: Jagged fields that are cut where a sample is split over ranks; a mapping says how many values an item
            has, without one it is one. Fields that share their lengths are cut alike.
        parts: Which parts of a split sample get other jagged fields: "last", "first" or "all"; default: the last.
        copy: Copy each batch when it is read; for loaders that write the next batch into the memory of the one before.
    """

    rows_per_sample: Mapping[str, int | str] = field(default_factory=dict)
    padded: Mapping[str, str | Padded] = field(default_factory=dict)
    shared: Collection[str] = ()
    batch_size: Collection[str] = ()
    derived: Mapping[str, Derive] = field(default_factory=dict)
    objects: Collection[str] = ()
    sequence: Mapping[str, int] | Collection[str] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)
    copy: bool = False

    def __post_init__(self) -> None:
        for name in _COLLECTIONS:
            if isinstance(getattr(self, name), str):
                raise BatchError(f"{name} is the string {getattr(self, name)!r}; give a collection of paths")
        for path, rows in self.rows_per_sample.items():
            if not isinstance(rows, str) and (isinstance(rows, bool) or rows < 1):
                raise BatchError(f"rows_per_sample[{path!r}] is {rows!r}; give a whole number >= 1, or a path")
        if not isinstance(self.padded, Mapping):
            raise BatchError(f"padded is {self.padded!r}; give a mapping from paths to what says the lengths")
        for path, padding in self.padded.items():
            if not isinstance(padding, str | Padded):
                raise BatchError(f"padded[{path!r}] is {padding!r}; give the path of the lengths, or a Padded")
        if not isinstance(self.derived, Mapping):
            raise BatchError(f"derived is {self.derived!r}; give a mapping from paths to functions of the batch")
        for path, function in self.derived.items():
            if not (isinstance(function, MaxLength) or callable(function)):
                raise BatchError(f"derived[{path!r}] is {function!r}; give a function of the batch, or a MaxLength")
        for path, values in self.sequence.items() if isinstance(self.sequence, Mapping) else ():
            if not is_whole(values) or values < 1:
                raise BatchError(f"sequence[{path!r}] is {values!r}; give the values of an item, a whole number >= 1")
        if not isinstance(self.parts, Mapping):
            raise BatchError(f"parts is {self.parts!r}; give a mapping from paths to 'last', 'first' or 'all'")
        for path, part in self.parts.items():
            if part not in get_args(Part):
                raise BatchError(f"parts[{path!r}] is {part!r}; give 'last', 'first' or 'all'")


class Declarations:
    """The declarations of a spec, looked up by path; remembers which ones found something."""

    def __init__(self, spec: BatchSpec) -> None:
        self._spec = spec
        self._used: set[tuple[str, str]] = set()
        self._paths: list[str] = []

    def is_shared(self, path: str) -> bool:
        """Whether the value at `path` is declared to be shared."""
        self._paths.append(path)
        return self._match("shared", path) is not None

    def is_batch_size(self, path: str) -> bool:
        """Whether the value at `path` is declared to be the number of samples."""
        return self._match("batch_size", path) is not None

    def holds_objects(self, path: str) -> bool:
        """Whether the value at `path` is declared to hold one Python object for each sample."""
        return self._match("objects", path) is not None

    def rows(self, path: str) -> int | str | None:
        """The declared rows per sample of the tensor at `path`."""
        return self._found(self._spec.rows_per_sample, "rows_per_sample", path)

    def padding(self, path: str) -> Padded | None:
        """How the tensor at `path` is declared to be padded."""
        found = self._found(self._spec.padded, "padded", path)
        return Padded(lengths=found) if isinstance(found, str) else found

    def derive(self, path: str) -> Derive | None:
        """What the value at `path` is declared to follow from."""
        return self._found(self._spec.derived, "derived", path)

    def items(self, path: str) -> int | None:
        """Values of an item of the sequence that the jagged field at `path` is declared to be of; None: of none."""
        pattern = self._match("sequence", path)
        if pattern is None:
            return None
        declared = self._spec.sequence
        return int(declared[pattern]) if isinstance(declared, Mapping) else 1

    def part(self, path: str) -> Part | None:
        """Which parts of a split sample the jagged field at `path` is declared to go with."""
        return self._found(self._spec.parts, "parts", path)

    def names(self, name: str, path: str) -> bool:
        """Whether a declaration names just this path, without a pattern."""
        return path in getattr(self._spec, name)

    @property
    def has_sequence(self) -> bool:
        """Whether a sequence is declared."""
        return bool(self._spec.sequence)

    def declares_parts(self, path: str, count: int) -> bool:
        """Whether something is declared about parts of the list at `path`, or below them."""
        parts = [f"{path}.{index}" if path else str(index) for index in range(count)]
        for name in (*_MAPPINGS, *_COLLECTIONS):
            for pattern in getattr(self._spec, name):
                if path and pattern.startswith(f"{path}."):
                    return True
                if any(pattern.startswith(f"{part}.") or _matches(part, pattern) for part in parts):
                    return True
        return False

    def none_at(self, path: str) -> None:
        """Takes note of a value that is None: what is declared there or below may be missing in this batch."""
        for name in (*_MAPPINGS, *_COLLECTIONS):
            for pattern in getattr(self._spec, name):
                if pattern == path or pattern.startswith(f"{path}."):
                    self._used.add((name, pattern))

    def check_used(self) -> None:
        """Refuses declarations of single paths that the batch does not have.

        Raises:
            BatchError: If there is one; patterns may match nothing.
        """
        for name in (*_MAPPINGS, *_COLLECTIONS):
            for pattern in getattr(self._spec, name):
                if (name, pattern) not in self._used and not _WILDCARDS.intersection(pattern):
                    self._refuse_twice(name, pattern)
                    if pattern in self._paths:
                        raise BatchError(f"{name} names {pattern!r}, {_WANTED[name]}")
                    known = ", ".join(path for path in self._paths if path)
                    raise BatchError(
                        f"{name} names {pattern!r}, which the batch does not have; its paths are: {known} (a pattern "
                        f"such as '{pattern}*' may match nothing)"
                    )

    def _refuse_twice(self, name: str, path: str) -> None:
        """Refuses a path that is declared otherwise too, or lies in what is declared as a whole.

        Raises:
            BatchError: If it is one.
        """
        for other in (*_MAPPINGS, *_COLLECTIONS):
            for pattern in getattr(self._spec, other):
                if other != name and _matches(path, pattern):
                    raise BatchError(f"{path!r} is declared in {name} and in {other}; declare it once")
                if other in _WHOLE and any(
                    path.startswith(f"{one}.") and _matches(one, pattern) for one in self._paths
                ):
                    raise BatchError(
                        f"{name} names {path!r}, which is a part of what {other} declares ({pattern!r}); declare one "
                        "of them"
                    )

    def _found(self, declared: Mapping[str, T], name: str, path: str) -> T | None:
        pattern = self._match(name, path) if declared else None
        return None if pattern is None else declared[pattern]

    def _match(self, name: str, path: str) -> str | None:
        for pattern in getattr(self._spec, name):
            if _matches(path, pattern):
                self._used.add((name, pattern))
                return str(pattern)
        return None


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


_WHOLE = ("shared", "objects", "derived")  # what is declared so is not looked into
_WANTED = {
    "rows_per_sample": "which is no tensor; declare flattened tensors only",
    "padded": "which is no dense tensor (samples, width, …); declare padded tensors only",
    "shared": "which is declared otherwise; declare it once",
    "batch_size": "which is declared otherwise; declare it once",
    "derived": "which is declared otherwise; declare it once",
    "objects": "which is no list, tuple or array; tensors travel as they are",
    "sequence": "which is no jagged field; say what its lengths are in rows_per_sample or padded",
    "parts": "which is no jagged field; all parts of a sample get its other fields",
}
