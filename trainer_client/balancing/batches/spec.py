"""What a user declares about a batch that its tensors do not tell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal, get_args

from trainer_client.checks import is_whole

_WILDCARDS = frozenset("*?[")
_COLLECTIONS = ("shared", "batch_size", "objects", "sequence")


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
        if not isinstance(self.value, int | float):
            raise BatchError(f"value is {self.value!r}; give the number that samples are filled up with")
        if not is_whole(self.multiple) or self.multiple < 1:
            raise BatchError(f"multiple is {self.multiple!r}; give a whole number >= 1")


@dataclass(frozen=True, slots=True)
class MaxLength:
    """For `BatchSpec.derived`: the length of the longest sample of a batch, 0 without samples; no device is waited for.

    Attributes:
        path: The jagged field, or the integer tensor (samples,) that `rows_per_sample` or `padded` names.
    """

    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise BatchError(f"path is {self.path!r}; give the path of the lengths")


Derive = Callable[[Any], Any] | MaxLength
Part = Literal["last", "first", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Declarations per path; needed only for what is not one row per sample.

    A path joins dict keys, attribute names, positions and keys of a `KeyedJaggedTensor` with dots: `user.history`,
    `features.clicks`, `targets.0`. The weights of a jagged field are at `features.clicks.weights`. A declaration is a
    path or a pattern of `fnmatch` over whole paths (`features.*`; `*` matches dots too).

    Five kinds of fields follow from it: rows (as many for each sample), jagged (their number differs: jagged tensors,
    flattened and padded ones), objects, shared values, and values that are derived from the batch that is trained.

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

    __hash__ = object.__hash__  # by identity: what was read by a spec is remembered with it

    def __post_init__(self) -> None:
        for name in _COLLECTIONS:
            declared = getattr(self, name)
            if isinstance(declared, str) or (isinstance(declared, Mapping) and name not in _MAPPED):
                raise BatchError(f"{name} is {declared!r}; give a collection of paths")
        for name, (wanted, fits) in _MAPPED.items():
            declared = getattr(self, name)
            if name != "sequence" and not isinstance(declared, Mapping):
                raise BatchError(f"{name} is {declared!r}; give a mapping from paths to {wanted}")
            for path, value in declared.items() if isinstance(declared, Mapping) else ():
                if not fits(value):
                    raise BatchError(f"{name}[{path!r}] is {value!r}; give {wanted}")


def check_spec(spec: object) -> None:
    """Raises `BatchError` if what shall declare a batch's fields does not."""
    if spec is not None and not isinstance(spec, BatchSpec):
        raise BatchError(f"spec is {spec!r}; give a BatchSpec, such as BatchSpec(rows_per_sample={{'items': 'count'}})")


def _is_count(value: object) -> bool:
    return is_whole(value) and value >= 1  # type: ignore[operator]


_MAPPED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rows_per_sample": ("a whole number >= 1, or a path", lambda rows: isinstance(rows, str) or _is_count(rows)),
    "padded": ("the path of the lengths, or a Padded", lambda padding: isinstance(padding, str | Padded)),
    "derived": ("a function of the batch, or a MaxLength", lambda it: isinstance(it, MaxLength) or callable(it)),
    "parts": ("'last', 'first' or 'all'", lambda part: part in get_args(Part)),
    "sequence": ("the values of an item, a whole number >= 1", _is_count),
}


class Declarations:
    """The declarations of a spec by path, of which the first pattern that matches counts.

    Attributes:
        spec: The spec.
        structures: What is known of batches that were read by it, by all that it follows from.
    """

    def __init__(self, spec: BatchSpec) -> None:
        names = dict.fromkeys((*_MAPPED, *_COLLECTIONS))
        self.spec = spec
        self.structures: list[tuple[Any, Any]] = []
        self.at = lru_cache(4096)(self._at)
        self.rows_at = lru_cache(4096)(self._rows_at)
        self.are_below = lru_cache(4096)(self._are_below)
        self._patterns = [(name, pattern) for name in names for pattern in getattr(spec, name)]

    def _at(self, path: str) -> dict[str, Any]:
        """What parameters of the spec declare about a path: its value, of a collection 1."""
        declared: dict[str, Any] = {}
        for name, pattern in self._patterns:
            if name not in declared and _matches(path, pattern):
                values = getattr(self.spec, name)
                declared[name] = values[pattern] if isinstance(values, Mapping) else 1
        if isinstance(lengths := declared.get("padded"), str):
            declared["padded"] = Padded(lengths=lengths)
        return declared

    def _rows_at(self, path: str) -> int | str | None:
        """`rows_per_sample` of a path; None where it is declared to be something else than rows."""
        declared = self.at(path)
        is_rows = declared.keys() <= {"rows_per_sample", "sequence", "parts"}
        return declared.get("rows_per_sample", 1) if is_rows else None

    def _are_below(self, path: str, count: int) -> bool:
        """Whether something is declared about one of the first `count` values in the list at a path."""
        values = [f"{path}.{index}" if path else str(index) for index in range(count)]
        return any(
            (path and pattern.startswith(f"{path}."))
            or any(pattern.startswith(f"{value}.") or _matches(value, pattern) for value in values)
            for _, pattern in self._patterns
        )

    def check_used(self, used: Collection[tuple[str, str]], absent: Iterable[str], paths: Sequence[str]) -> None:
        """Refuses declarations of single paths that were not used, by parameter and path; patterns may match nothing.

        What is declared at or below an absent path, whose value is None, may be missing.
        """
        may_miss = tuple(f"{path}." for path in absent)
        for name, path in self._patterns:
            if (name, path) in used or _WILDCARDS.intersection(path) or f"{path}.".startswith(may_miss):
                continue
            for other, pattern in self._patterns:
                if other != name and _matches(path, pattern):
                    raise BatchError(f"{path!r} is declared in {name} and in {other}; declare it once")
                if other in _WHOLE and any(path.startswith(f"{one}.") and _matches(one, pattern) for one in paths):
                    raise BatchError(
                        f"{name} names {path!r}, which is a part of what {other} declares ({pattern!r}); declare one "
                        "of them"
                    )
            if path in paths:
                raise BatchError(
                    f"{name} names {path!r}, {WANTED.get(name, 'which is declared otherwise; declare it once')}"
                )
            raise BatchError(
                f"{name} names {path!r}, which the batch does not have; its paths are: {', '.join(filter(None, paths))}"
                f" (a pattern such as '{path}*' may match nothing)"
            )


@lru_cache(maxsize=64)
def declarations_of(spec: BatchSpec) -> Declarations:
    """The declarations of a spec, which are the same as long as the spec is."""
    return Declarations(spec)


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or fnmatchcase(path, pattern)


_WHOLE = ("shared", "objects", "derived")  # what is declared so is not looked into
WANTED = {
    "rows_per_sample": "which is no tensor, or knows its lengths; declare flattened tensors only",
    "padded": "which is no dense tensor (samples, width, …); declare padded tensors only",
    "objects": "which is no list, tuple or array; tensors travel as they are",
    "sequence": "which is no jagged field; say what its lengths are in rows_per_sample or padded",
    "parts": "which is no jagged field; all parts of a sample get its other fields",
}
