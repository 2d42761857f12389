"""Key statistics from live batches: one call in the loop, the work in a thread beside it; and batches of all ranks."""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from evenkeel.key_statistics import KeySampler, KeyTrace, dumps, loads, merge
from evenkeel.placement import InvalidInputError
from evenkeel.placement.plan_text import spans
from trainer_client.planning.collective import all_or_none, group_size, in_group, on_all
from trainer_client.planning.describe import features_of, in_short

_AHEAD = 8
_PATIENCE = 120.0
_KINDS = (torch.int64, torch.int32)
_DEPTH = 6
_BATCHES, _STEPS = 200, 16
"""To observe: batches of each rank that has some, and steps of all ranks of the job, at least."""
_REFERENCES = 2_000_000


class _Keys(NamedTuple):
    """Those of one `KeyedJaggedTensor` on the host, or on their way to it."""

    names: Sequence[str]
    values: torch.Tensor
    lengths: torch.Tensor | Sequence[int]
    arrived: Any


class KeyStatistics:
    """Follows the keys of live batches: what caches of every size would have missed.

        statistics = KeyStatistics(model)  # before it is sharded
        for batch in loader:
            statistics.observe(batch.sparse_features)
            …
        request, curves = with_statistics(request, statistics.gather())

    Give each batch once, in the order of training: the statistics say after how many other keys a key comes back. Some
    hundred steps of the size that the job trains are enough. Keys are followed by a hash, so that memory and time stay
    small whatever the size of the tables; a batch on a GPU is copied without waiting for it.
    """

    def __init__(self, tables: nn.Module | Mapping[str, Sequence[str]], *, max_references: int = _REFERENCES) -> None:
        """Start empty.

        Args:
            tables: The model before it is sharded, whose embedding collections are followed; or the features of each
                table, by its name.
            max_references: References kept at most by all ranks together, 12 bytes each; 2 to 3 in a file.

        Raises:
            InvalidInputError: If there is no table, or no room for a few thousand references a table and rank.
        """
        features = features_of(tables) if isinstance(tables, nn.Module) else tables
        least = len(features) << 12
        self._sampler = KeySampler(list(features), max_references=max(max_references // group_size(None), least))
        self._features = {name: tuple(names) for name, names in features.items()}
        self._seen: set[str] = set()
        self._tables: dict[str, list[int]] = {}
        for index, names in enumerate(features.values()):
            for name in names:
                self._tables.setdefault(name, []).append(index)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._reading: deque[Future[None]] = deque()
        weakref.finalize(self, self._work.put, None)

    def observe(self, *batches: Any) -> None:
        """Take the keys of one step.

        Features that belong to no table are passed over.

        Args:
            batches: `KeyedJaggedTensor`s of this step on this rank, on any device.

        Raises:
            RuntimeError: If an earlier batch could not be read, or the thread that reads them is stuck.
        """
        self._wait(_AHEAD)
        step = [_on_the_way(batch) for batch in batches]
        samples = max((int(batch.stride()) for batch in batches), default=0)
        if self._reader is None:  # a daemon: a copy that never arrives must not keep the job from ending
            self._reader = threading.Thread(target=_run, args=(self._work,), name="key-statistics", daemon=True)
            self._reader.start()
        self._reading.append(Future())
        self._work.put((self._reading[-1], partial(self._count, step, samples)))

    def traces(self) -> dict[str, KeyTrace]:
        """What this rank saw, by name of the table; waits for batches that are still being read.

        Tables are left out of which no batch has a feature: they may be looked up all the same.

        Raises:
            RuntimeError: If a batch could not be read.
        """
        seen = self._seen_tables()
        return {name: trace for name, trace in self._sampler.traces().items() if name in seen}

    def samples_per_step(self) -> int:
        """Mean samples of a step on this rank; waits as `traces` does.

        Raises:
            RuntimeError: If a batch could not be read.
        """
        self._wait()
        return round(self._sampler.samples / self._sampler.steps) if self._sampler.steps else 0

    def unmatched_features(self) -> tuple[frozenset[str], frozenset[str]]:
        """Features of tables that no batch has, and features of batches that no table takes; waits as `traces` does.

        Raises:
            RuntimeError: If a batch could not be read.
        """
        self._wait()
        return frozenset(self._tables.keys() - self._seen), frozenset(self._seen - self._tables.keys())

    def gather(self, group: dist.ProcessGroup | None = None) -> dict[str, KeyTrace]:
        """What all ranks saw, made one, on all of them. Collective where there is a process group.

        Args:
            group: The ranks that observed the same steps; all by default.

        Raises:
            RuntimeError: If a batch could not be read on this rank. The other ranks raise as well.
        """
        if not in_group():
            return merge([self.traces()])

        def local() -> tuple[bytes, set[str]]:
            seen = self._seen_tables()  # on one rank suffices: where another has no such feature, nothing is looked up
            return dumps(self._sampler.traces() if self._sampler.steps else {}), seen

        every = on_all(local, group)
        known = set().union(*(seen for _, seen in every))
        return {name: trace for name, trace in merge([loads(one) for one, _ in every]).items() if name in known}

    def save(self, path: str | Path) -> None:
        """Write what this rank saw; `evenkeel plan --statistics` takes the files of all ranks.

        Raises:
            OSError: If the file cannot be written.
            RuntimeError: If a batch could not be read.
        """
        Path(path).write_bytes(dumps(self.traces()))

    def _seen_tables(self) -> set[str]:
        self._wait()
        return {name for name, features in self._features.items() if not self._seen.isdisjoint(features)}

    def _wait(self, ahead: int = 0) -> None:
        """Waits until no more than so many steps are still to be read."""
        while self._reading and (len(self._reading) > ahead or self._reading[0].done()):
            try:
                self._reading[0].result(_PATIENCE)
            except TimeoutError:
                raise RuntimeError(f"key statistics: no batch was read for {_PATIENCE:g} s") from None
            except Exception as error:
                raise RuntimeError(f"key statistics: a batch could not be read: {error}") from error
            self._reading.popleft()

    def _count(self, step: list[_Keys], samples: int) -> None:
        batches = []
        for names, values, lengths, arrived in step:
            if arrived is not None:
                arrived.synchronize()
            by_name: Any = lengths
            if isinstance(lengths, torch.Tensor):
                by_name = lengths.numpy().reshape(len(names), -1).sum(axis=1) if names else []
            self._seen.update(names)
            ends = np.cumsum(by_name, dtype=np.int64).tolist()
            runs = [
                (table, begin, end)
                for name, begin, end in zip(names, [0, *ends], ends, strict=False)
                for table in self._tables.get(name, ())
            ]
            batches.append((values.numpy(), np.array(runs, dtype=np.int64).reshape(-1, 3)))
        self._sampler.observe(batches, samples)


_Work: TypeAlias = tuple[Future[None], Callable[[], None]]


def _run(work: queue.SimpleQueue[_Work | None]) -> None:
    for done, read in iter(work.get, None):
        try:
            done.set_result(read())
        except Exception as error:
            done.set_exception(error)
        del done, read  # or it would keep the statistics while it waits


def _on_the_way(batch: Any) -> _Keys:
    """The batch's keys as they are on the host, or a copy that is under way there, into pinned memory."""
    values, lengths = batch.values().detach(), batch.length_per_key_or_none()
    if lengths is None:
        lengths = batch.length_per_key() if batch.variable_stride_per_key() else batch.lengths().detach()
    if values.dtype not in _KINDS:
        values = values.to(torch.int64)
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.to("cpu", non_blocking=True)
    copy, arrived = values.contiguous().to("cpu", non_blocking=True), None  # before it is there, nothing may read it
    if values.device.type == "cuda":
        event: Any = torch.cuda.Event
        arrived = event()
        arrived.record()
    return _Keys(batch.keys(), copy, lengths, arrived)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What batches of all ranks showed, the same on all.

    Attributes:
        traces: Key statistics by table; none of tables whose features no batch has.
        samples: Samples of a batch on the rank with the largest ones; None where nothing showed.
        notes: What is missing and what was assumed, in sentences.
    """

    traces: Mapping[str, KeyTrace]
    samples: int | None = None
    notes: tuple[str, ...] = ()


def observe(
    model: nn.Module,
    batches: Iterable[Any] | KeyStatistics | None,
    *,
    ranks: int,
    most: int | None,
    samples: int | None,
    known: Collection[str],
    group: dist.ProcessGroup | None,
) -> Observed:
    """Read the batches of all ranks that have some. Collective where there is a group.

    Args:
        model: The model.
        batches: Those of this rank.
        ranks: Of the job.
        most: Batches to read at most; by default as many as the job needs.
        samples: Of a batch, where batches are not to tell.
        known: Tables of which it is known how they are looked up.
        group: The ranks that observe.
    """
    brings = on_all(lambda: batches is not None, group)
    bringing = tuple(rank for rank, brought in enumerate(brings) if brought)
    if not bringing:
        return Observed(traces={})
    count = max(_BATCHES, -(-_STEPS * ranks // len(bringing))) if most is None else most
    # A `KeyStatistics` leaves room for one of every rank, and those that bring nothing need none.
    room = _REFERENCES * group_size(None) // len(bringing)
    given = batches if isinstance(batches, KeyStatistics) else None
    statistics = all_or_none(lambda: given or KeyStatistics(model, max_references=room), group)

    def local() -> tuple[int, frozenset[str], frozenset[str]]:
        if isinstance(batches, KeyStatistics):
            return batches.samples_per_step(), *batches.unmatched_features()
        largest = 0
        for jagged in () if batches is None else _read(batches, count):
            statistics.observe(*jagged)
            largest = max(largest, *(int(keys.stride()) for keys in jagged))
        return largest, *statistics.unmatched_features()

    seen = [one for one, brought in zip(on_all(local, group), brings, strict=True) if brought]
    sizes, missing, passed_over = zip(*seen, strict=True)
    traces = statistics.gather(group)
    notes = []
    if len(bringing) < len(brings):
        named = f"rank{'s' * (len(bringing) > 1)} {spans(bringing)}"
        notes.append(f"batches are those of {named} of {len(brings)}: the others gave none")
    if samples is None and min(sizes) < max(sizes):
        notes.append(f"largest batches have {min(sizes)} to {max(sizes)} samples: all ranks are planned with the most")
    if quiet := [name for name, trace in traces.items() if not trace.lookups]:
        notes.append(f"batches have no key of {in_short(quiet)}: planned as if nothing were ever looked up there")
    unused = in_short(sorted(frozenset.union(*passed_over)), "features")
    others = f"; batches have features that no table takes: {unused}" if unused else ""
    for name, features in features_of(model).items():
        lacking = sorted(frozenset.intersection(*missing).intersection(features))
        if lacking and (name in traces or name not in known):
            notes.append(f"no batch has feature {in_short(lacking, 'features')} of table {name}{others}")
    return Observed(traces=traces, samples=max(sizes) or None, notes=tuple(notes))


def _read(batches: Iterable[Any], most: int) -> Iterator[list[Any]]:
    read = 0
    for batch in itertools.islice(batches, most):
        jagged = list(_keyed_jagged(batch, _DEPTH))
        if not jagged:
            remedy = "give batches that hold one, or statistics: KeyStatistics, ids_per_sample and access"
            raise InvalidInputError("batches", type(batch).__name__, "holds no KeyedJaggedTensor", remedy)
        read = max(read, *(int(keys.stride()) for keys in jagged))
        yield jagged
    if not read:
        raise InvalidInputError("batches", 0, "has no batch", "give some hundred, or none at all")


def _keyed_jagged(value: Any, depth: int) -> Iterator[Any]:
    """Every `KeyedJaggedTensor` in a batch, through containers, dataclasses and plain objects."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if isinstance(value, KeyedJaggedTensor):
        if value.lengths_or_none() is None and value.offsets_or_none() is None:
            what = "of a KeyedJaggedTensor are none: its third argument is weights"
            raise InvalidInputError("lengths", None, what, "name what you give: lengths=… or offsets=…")
        yield value
        return
    if depth == 0 or isinstance(value, torch.Tensor | str | bytes):
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from _keyed_jagged(part, depth - 1)
