"""What a loader's own data is read through: its batches, and the position in them that a state names.

A position is found again in one of three ways, the first that a loader allows: the project's own sampler, whose state
is one small value for all ranks; the loader's own `state_dict` and `load_state_dict`; counting batches, which are read
again and skipped.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import string_at
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from rich.progress import track
from torch.utils._pytree import tree_leaves

from trainer_client.balancing.batches import Arriving, BatchError, BatchSpec, FlatBatch, is_on_device
from trainer_client.balancing.batches.schema import bytes_of
from trainer_client.balancing.costs.base import Cost
from trainer_client.balancing.costs.learned import LearnedCost

logger = logging.getLogger(__name__)

_BYTES_LOOKED_AT = 256  # of a tensor, to tell one batch from another
_TENSORS_LOOKED_AT = 4
_OVER = "_iterator_finished"  # in the states of torchdata's StatefulDataLoader


@dataclass(frozen=True, slots=True)
class Position:
    """A point between two batches of a rank's own loader.

    Attributes:
        way: How it is found again; `loaders`: by the states of the loaders of a job of another size, to be dealt out.
        at: The sampler's state, the loader's state (pickled, as loaders go on changing theirs), or the batches read.
        ended: The loader has no batch left; of a sampler the state says it.
        last: With `skip`, what the batch before it looked like.
    """

    way: Literal["sampler", "loader", "skip", "loaders"]
    at: Any
    ended: bool = False
    last: int = 0

    def to_state(self) -> dict[str, Any]:
        """As plain values."""
        at = pickle.loads(self.at) if self.way in ("loader", "loaders") else self.at
        return {"way": self.way, "at": at, "ended": self.ended, "last": self.last}

    @classmethod
    def from_state(cls, state: Any) -> Position:
        """Reads what `to_state` wrote; `ValueError` if it is something else."""
        ways = ("sampler", "loader", "skip", "loaders")
        if not isinstance(state, dict) or state.get("way") not in ways or "at" not in state:
            raise ValueError(f"state['source'] is {state!r}; load what BalancedLoader.state_dict gave")
        at = pickle.dumps(state["at"]) if state["way"] in ("loader", "loaders") else state["at"]
        return cls(state["way"], at, bool(state.get("ended")), int(state.get("last", 0)))


class GlobalSampler(Protocol):
    """A sampler whose position is one small value for the whole job; those of `…balancing.sampling` are."""

    def count_steps(self) -> int:
        """Global batches of the whole of the present epoch."""

    def state_after(self, batches: int) -> dict[str, Any]:
        """The position after so many batches of the current iteration, the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins at a position; at its epoch's end, with the first sample again."""

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of `epoch`, the `"epoch"` of states: what is left of it after `load_state_dict`."""


def sampler_of(loader: Any) -> GlobalSampler | None:
    """The project's own sampler in a loader, if it has one."""
    parts = [part for part in _parts(loader) if hasattr(part, "state_after") and hasattr(part, "count_steps")]
    return parts[0] if parts else None


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tells a loader which epoch begins, or its samplers and data set, as far as they want to know."""
    parts = [loader] if hasattr(loader, "set_epoch") else [*_parts(loader), getattr(loader, "dataset", None)]
    for part in {id(part): part for part in parts if hasattr(part, "set_epoch")}.values():
        part.set_epoch(epoch)


def _parts(loader: Any) -> list[Any]:
    """A loader's samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [batch_sampler, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)]


class Source:
    """The batches of a loader in one pass, and the position in them.

    Batches on the host pass as they are. One that is on a device is read a batch earlier than it is needed, so that a
    training step lies between copy and use; its lengths, its integers and what the cost says are copied meanwhile, and
    it comes flattened.
    """

    def __init__(
        self, loader: Any, start: Position | None, *, functions: Sequence[Cost] = (), spec: BatchSpec | None = None
    ) -> None:
        """Begins an iteration, which may fork workers, at `start` if that is a position of this loader's.

        Functions, such as the cost, are given a batch on a device as it is, and may return a tensor on the device; one
        that needs lengths on the host gets the flattened batch. `ask` knows what they have said.
        """
        self._loader, self._spec, self._functions = loader, spec, functions
        self._on_device: bool | None = None
        self._arriving: deque[tuple[Position, Arriving]] = deque()
        self._asked = 0  # batches that were asked for here, also after the end
        self._read = 0  # batches that were read
        self._last = 0  # what the latest looked like
        self._ended = start is not None and start.ended
        self._sampler = sampler_of(loader)
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        # Accelerate's loaders have the pair, and it works only with this.
        self._stateful = stateful and getattr(loader, "use_stateful_dataloader", True)
        if start is not None:
            self._load(start)
        self._batches: Iterator[Any] = iter(()) if self._ended else iter(loader)
        if start is not None and start.way == "skip":
            self._skip(start)

    @property
    def position(self) -> Position:
        """Where the loader was before the batch that comes out next."""
        return self._arriving[0][0] if self._arriving else self._position(self._asked)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._asked += 1
        if self._on_device is False:
            return self._next()
        while len(self._arriving) < 2:
            position = self._position(self._asked - 1 + len(self._arriving))
            try:
                batch = self._next()
            except StopIteration:
                break
            if self._on_device is None:
                self._on_device = is_on_device(batch, self._spec)
            if not self._on_device:
                return batch
            values = [ask_ahead(function, batch) for function in self._functions]
            self._arriving.append((position, Arriving(batch, self._spec, values)))
        if not self._arriving:
            raise StopIteration
        flat, values = self._arriving.popleft()[1].get()
        flat.answers = tuple(zip(self._functions, values, strict=True))
        return flat

    def _next(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended, self._batches = True, iter(())
            raise
        self._read += 1
        if self._way == "skip":
            self._last = fingerprint(batch)
        return batch

    @property
    def _way(self) -> Literal["sampler", "loader", "skip"]:
        return "sampler" if self._sampler is not None else "loader" if self._stateful else "skip"

    def _position(self, batches: int) -> Position:
        """A sampler's after so many batches, also where this rank had none any more; else that after what was read."""
        if self._sampler is not None:
            return Position("sampler", self._sampler.state_after(batches))
        if self._stateful:
            state = self._loader.state_dict()
            # One that reads ahead, as Accelerate's, has seen its end with its last batch, and would begin anew.
            ended = self._ended or (self._read > 0 and isinstance(state, dict) and bool(state.get(_OVER)))
            return Position("loader", pickle.dumps(state), ended)
        return Position("skip", self._read, self._ended, self._last)

    def _load(self, start: Position) -> None:
        if start.way not in (self._way, "loaders"):
            raise ValueError(
                f"state['source']['way'] is {start.way!r}, and this loader's position is found by {self._way!r}; go on "
                "with the kind of loader and sampler that the state was taken from"
            )
        if self._sampler is not None:
            self._sampler.load_state_dict(start.at)
            self._sampler.set_epoch(start.at["epoch"])  # else another pass would begin where nothing of it is left
            return
        if start.way == "loaders":
            self._loader.load_state_dicts(pickle.loads(start.at))
        elif start.way == "loader":
            self._loader.load_state_dict(pickle.loads(start.at))
        elif not isinstance(start.at, int) or start.at < 0:
            raise ValueError(f"state['source']['at'] is {start.at!r}; with 'skip' it is a number of batches")
        sampler: Any = getattr(self._loader, "sampler", None)
        drawn = torch.utils.data.RandomSampler
        # a sampler derived from it, as torchdata's, keeps its generator in the loader's state
        is_drawn = isinstance(sampler, drawn) if start.way == "skip" else type(sampler) is drawn
        if is_drawn and sampler.generator is None:
            logger.warning(
                "the loader draws its order from torch's own generator, which must be where it was when that order was "
                "drawn; trainer_client.balancing.sampling.GlobalBatchSampler needs neither that nor skipping"
            )

    def _skip(self, start: Position) -> None:
        if self._ended:
            self._read, self._last = start.at, start.last
            return
        shown = start.at > 0 and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
        for _ in track(range(start.at), "skipping trained batches", transient=True, disable=not shown):
            try:
                self._next()
            except StopIteration:
                raise ValueError(
                    f"the loader ended after {self._read} batches, and the state was taken after {start.at}; go on "
                    "with the data that the state was taken from"
                ) from None
        if start.at and start.last != self._last:
            raise ValueError(
                f"batch {start.at - 1} of the loader is not the one that was trained there before: batches come in "
                "another order, or are others; seed the loader's order (set_epoch, generator=), or use "
                "trainer_client.balancing.sampling.GlobalBatchSampler"
            )


def ask_ahead(function: Cost, batch: Any) -> Any:
    """What a user's function says of a batch on a device; the error if it needs lengths on the host."""
    if isinstance(function, LearnedCost):
        return BatchError("a learned cost follows what is known when the batch is submitted")
    try:
        return function(batch)
    except BatchError as error:
        return error


def ask(function: Cost, batch: Any) -> Any:
    """What a user's function says of a batch, on the host now, or when it arrived on a device."""
    answers = batch.answers if isinstance(batch, FlatBatch) else ()
    answer = next((value for asked, value in answers if asked is function), None)
    if answer is not None and not isinstance(answer, BatchError):
        return answer
    try:
        return function(batch)
    except BatchError:
        raise
    except Exception as error:
        if answer is None:
            raise
        raise BatchError(
            f"the cost cannot be computed from a batch on a device: {answer}; compute it with torch on the device, "
            "or with the costs of trainer_client.balancing.costs"
        ) from error


def fingerprint(batch: Any) -> int:
    """A number that tells batches apart, from the first values of their first tensors."""
    value = 0
    plain = (leaf for leaf in tree_leaves(batch) if type(leaf) is torch.Tensor and leaf.layout is torch.strided)
    tensors = (leaf for leaf in plain if leaf.device.type == "cpu" and not leaf.is_nested)
    for tensor in itertools.islice(tensors, _TENSORS_LOOKED_AT):
        value = zlib.crc32(str((tensor.dtype, tuple(tensor.shape))).encode(), value)
        count = _BYTES_LOOKED_AT // max(1, tensor.element_size())
        if tensor.is_contiguous():  # as nearly all are, and this is done for every batch
            size = min(count, tensor.numel()) * tensor.element_size()
            value = zlib.crc32(string_at(tensor.data_ptr(), size), value)
        else:
            value = zlib.crc32(bytes_of(tensor.detach().reshape(-1)[:count]).data, value)
    return value
