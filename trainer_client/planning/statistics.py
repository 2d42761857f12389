"""Key statistics from live batches: one call in the loop, the work in a thread beside it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from evenkeel.key_statistics import KeySampler, KeyTrace, dumps, loads, merge
from evenkeel.placement import InvalidInputError
from trainer_client.planning.describe import embedding_modules, module_configs

_AHEAD = 8
_PATIENCE = 120.0
_KINDS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class _Features:
    """Values of one `KeyedJaggedTensor` on the host, or on their way to it."""

    values: torch.Tensor
    lengths: torch.Tensor | Sequence[int]
    names: Sequence[str]
    arrived: Any


class KeyStatistics:
    """Follows the keys of live batches, to predict what caches of every size will miss.

        statistics = KeyStatistics(model)  # before it is sharded
        for batch in loader:
            statistics.observe(batch.sparse_features)
            …
        request, curves = with_statistics(request, statistics.gather())

    Give each batch once, in the order of training: the statistics tell after how many other keys a key comes back. Some
    hundred steps of the size that the job trains are enough. Keys are followed by a hash, so that memory and time stay
    small whatever the size of the tables; a batch on a GPU is copied without waiting for it.
    """

    def __init__(self, tables: nn.Module | Mapping[str, Sequence[str]], *, max_references: int = 2_000_000) -> None:
        """Start empty.

        Args:
            tables: The model before it is sharded, whose embedding collections are followed; or the features of each
                table, by its name.
            max_references: References kept at most by all ranks together, 12 bytes each; 2 to 3 in a file.

        Raises:
            InvalidInputError: If there is no table, or no room for a few thousand references a table and rank.
        """
        features = features_of(tables) if isinstance(tables, nn.Module) else tables
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        least = len(features) << 12
        self._sampler = KeySampler(list(features), max_references=max(max_references // ranks, least))
        self._features = {name: tuple(names) for name, names in features.items()}
        self._seen: set[str] = set()
        self._tables: dict[str, list[int]] = {}
        for index, names in enumerate(features.values()):
            for name in names:
                self._tables.setdefault(name, []).append(index)
        self._queue: queue.Queue[tuple[list[_Features], int]] = queue.Queue(_AHEAD)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def observe(self, *batches: Any) -> None:
        """Take the keys of one step.

        Features that belong to no table are passed over.

        Args:
            batches: `KeyedJaggedTensor`s of this step on this rank, on any device.

        Raises:
            RuntimeError: If an earlier batch could not be read, or the thread that reads them is stuck.
        """
        self._raise_failure()
        step = [_on_the_way(batch) for batch in batches]
        samples = max((int(batch.stride()) for batch in batches), default=0)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="evenkeel-key-statistics", daemon=True)
            self._thread.start()
        try:
            self._queue.put((step, samples), timeout=_PATIENCE)
        except queue.Full:
            raise RuntimeError(f"key statistics: no batch was read for {_PATIENCE:g} s") from None

    def traces(self) -> dict[str, KeyTrace]:
        """What this rank saw, by name of the table; waits for batches that are still being read.

        Tables are left out of which no batch has a feature: they may be looked up all the same.

        Raises:
            RuntimeError: If a batch could not be read.
        """
        told = self._told()
        return {name: trace for name, trace in self._sampler.traces().items() if name in told}

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
        if not (dist.is_available() and dist.is_initialized()):
            return merge([self.traces()])
        own: tuple[bytes, set[str]] | str
        try:
            told = self._told()  # on one rank suffices: where another has no such feature, nothing is looked up
            own = (dumps(self._sampler.traces() if self._sampler.steps else {}), told)
        except RuntimeError as error:
            own = str(error)
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, own, group=group)
        failed = [(rank, one) for rank, one in enumerate(every) if isinstance(one, str)]
        if failed:
            raise RuntimeError(f"key statistics of rank {failed[0][0]} of the group: {failed[0][1]}")
        known = set().union(*(told for _, told in every))
        return {name: trace for name, trace in merge([loads(one) for one, _ in every]).items() if name in known}

    def save(self, path: str | Path) -> None:
        """Write what this rank saw; `evenkeel plan --statistics` takes the files of all ranks.

        Raises:
            OSError: If the file cannot be written.
            RuntimeError: If a batch could not be read.
        """
        Path(path).write_bytes(dumps(self.traces()))

    def _told(self) -> set[str]:
        """Tables of which a batch had a feature."""
        self._wait()
        return {name for name, features in self._features.items() if not self._seen.isdisjoint(features)}

    def _wait(self) -> None:
        self._queue.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"key statistics: a batch could not be read: {self._failure}") from self._failure

    def _work(self) -> None:
        while True:
            step, samples = self._queue.get()
            try:
                if self._failure is None:
                    self._read(step, samples)
            except BaseException as error:
                self._failure = error
            finally:
                del step
                self._queue.task_done()

    def _read(self, step: list[_Features], samples: int) -> None:
        batches = []
        for features in step:
            if features.arrived is not None:
                features.arrived.synchronize()
            lengths: Any = features.lengths
            if isinstance(lengths, torch.Tensor):
                lengths = lengths.numpy().reshape(len(features.names), -1).sum(axis=1) if features.names else []
            self._seen.update(features.names)
            ends = np.cumsum(lengths, dtype=np.int64).tolist()
            runs = [
                (table, begin, end)
                for name, begin, end in zip(features.names, [0, *ends], ends, strict=False)
                for table in self._tables.get(name, ())
            ]
            batches.append((features.values.numpy(), np.array(runs, dtype=np.int64).reshape(-1, 3)))
        self._sampler.observe(batches, samples)


def features_of(model: nn.Module) -> dict[str, Sequence[str]]:
    """The features of each table of the model, by its name.

    Raises:
        InvalidInputError: If it has no table.
    """
    found: dict[str, Sequence[str]] = {}
    for _, module in embedding_modules(model):
        found |= {config.name: config.feature_names for config in module_configs(module)}
    if not found:
        remedy = "give the model before it is sharded, or the features of each table by its name"
        raise InvalidInputError("tables", type(model).__name__, "has no embedding collection of TorchRec", remedy)
    return found


def _on_the_way(batch: Any) -> _Features:
    """The batch's keys as they are on the host, or a copy that is under way there."""
    values = batch.values().detach()
    known = batch.length_per_key_or_none()
    if known is None and batch.variable_stride_per_key():
        known = batch.length_per_key()
    lengths = batch.lengths().detach() if known is None else known
    if values.dtype not in _KINDS:
        values = values.to(torch.int64)
    if values.device.type == "cpu":
        return _Features(values.contiguous(), lengths, batch.keys(), None)
    values = _fetched(values)
    if isinstance(lengths, torch.Tensor):
        lengths = _fetched(lengths)
    event: Any = torch.cuda.Event
    arrived = event()
    arrived.record()
    return _Features(values, lengths, batch.keys(), arrived)


def _fetched(values: torch.Tensor) -> torch.Tensor:
    there = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    return there.copy_(values, non_blocking=True)
