"""Where a loader is in its data: noted before a batch is read, and found again by whoever resumes.

Three ways, the first that a loader allows: the project's own sampler, whose state is one small value for all ranks; the
loader's own `state_dict` and `load_state_dict`; counting batches, which are read again and skipped.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from rich.progress import Progress
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)

Way = Literal["sampler", "loader", "skip"]
_BYTES_LOOKED_AT = 256  # of a tensor, to tell one batch from another
_TENSORS_LOOKED_AT = 4
_OVER = "_iterator_finished"  # in the states of torchdata's StatefulDataLoader


class GlobalSampler(Protocol):
    """A sampler whose place is one small value for the whole job; those of `trainer_client.balancing.sampling` are."""

    def count_steps(self) -> int:
        """Global batches of the whole of the present epoch."""

    def state_after(self, batches: int) -> dict[str, Any]:
        """The place after so many batches of the current iteration, the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins at a place; at its epoch's end, with the first sample again."""

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of `epoch`, the `"epoch"` of states: what is left of it after `load_state_dict`."""


@dataclass(frozen=True, slots=True)
class Place:
    """A point between two batches of a rank's own loader.

    Attributes:
        way: How it is found again.
        at: The sampler's state, the loader's state (pickled, as loaders go on changing theirs), or the batches read.
        ended: The loader has no batch left; of a sampler the state says it.
        of_all: `at` is a list of the loader's states on all ranks of a job of another size, to be dealt out again.
        last: With `skip`, what the batch before it looked like.
        plain: As plain values, once somebody has asked for them.
    """

    way: Way
    at: Any
    ended: bool = False
    last: int = 0
    of_all: bool = False
    plain: dict[str, Any] | None = field(init=False, default=None, compare=False)

    def __post_init__(self) -> None:
        if self.way != "loader":  # whose states take some time to unpickle
            self.to_state()

    def to_state(self) -> dict[str, Any]:
        """As plain values."""
        if self.plain is None:
            at = pickle.loads(self.at) if self.way == "loader" else self.at
            object.__setattr__(self, "plain", {"way": self.way, "at": at, "ended": self.ended, "last": self.last})
            assert self.plain is not None
        return self.plain

    @classmethod
    def from_state(cls, state: Any) -> Place:
        """Reads what `to_state` wrote.

        Raises:
            ValueError: If it is something else.
        """
        if not isinstance(state, dict) or state.get("way") not in get_args(Way) or "at" not in state:
            raise ValueError(f"state['source'] is {state!r}; load what BalancedLoader.state_dict gave")
        at = pickle.dumps(state["at"]) if state["way"] == "loader" else state["at"]
        return cls(state["way"], at, bool(state.get("ended")), int(state.get("last", 0)))


def sampler_of(loader: Any) -> GlobalSampler | None:
    """The project's own sampler in a loader, if it has one."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inside = (batch_sampler, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    return next((one for one in inside if hasattr(one, "state_after") and hasattr(one, "count_steps")), None)


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tells a loader which epoch begins, or its samplers and data set, as far as they want to know."""
    parts: list[Any] = [loader]
    if not hasattr(loader, "set_epoch"):
        batch_sampler = getattr(loader, "batch_sampler", None)
        parts = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
        parts.append(getattr(loader, "dataset", None))
    for part in {id(part): part for part in parts if hasattr(part, "set_epoch")}.values():
        part.set_epoch(epoch)


def way_of(loader: Any) -> Way:
    """How a place in a loader's data is found again."""
    if sampler_of(loader) is not None:
        return "sampler"
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return "skip"
    # Accelerate's loaders have the pair, and it works only with this.
    return "loader" if getattr(loader, "use_stateful_dataloader", True) else "skip"


class Source:
    """The batches of a loader in one pass, and where it is."""

    def __init__(self, loader: Any, start: Place | None = None) -> None:
        """Begins an iteration, which may fork workers.

        Args:
            loader: Any iterable of batches.
            start: Where to go on; None: at the loader's own beginning.

        Raises:
            ValueError: If the place is not one of this loader's.
        """
        self._loader = loader
        self._way = way_of(loader)
        self._read = 0
        self._ended = start is not None and start.ended
        self._last = 0
        if start is not None:
            if start.way != self._way:
                raise ValueError(
                    f"state['source']['way'] is {start.way!r}, and this loader's place is found by {self._way!r}; go "
                    "on with the kind of loader and sampler that the state was taken from"
                )
            self._load(start)
            _warn_of_order(loader, self._way)
        self._batches: Iterator[Any] = iter(()) if self._ended else iter(loader)
        if start is not None and self._way == "skip":
            self._skip(start)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended, self._batches = True, iter(())
            raise
        self._read += 1
        if self._way == "skip":
            self._last = fingerprint(batch)
        return batch

    def place(self, batches: int) -> Place:
        """Where it is now.

        Args:
            batches: That the ranks have taken in this iteration, also where this one had none any more. A sampler tells
                the place after them, the other ways that after what has been read.
        """
        if self._way == "sampler":
            sampler = sampler_of(self._loader)
            assert sampler is not None
            return Place("sampler", sampler.state_after(batches))
        if self._way == "loader":
            state = self._loader.state_dict()
            # One that reads ahead, as Accelerate's, has seen its end with its last batch, and would begin anew.
            ended = self._ended or (self._read > 0 and isinstance(state, dict) and bool(state.get(_OVER)))
            return Place("loader", pickle.dumps(state), ended)
        return Place("skip", self._read, self._ended, self._last)

    def _load(self, start: Place) -> None:
        if self._way == "sampler":
            sampler = sampler_of(self._loader)
            assert sampler is not None
            sampler.load_state_dict(start.at)
            sampler.set_epoch(start.at["epoch"])  # else another pass over it would begin where nothing of it is left
        elif start.of_all:
            self._loader.load_state_dicts(pickle.loads(start.at))
        elif self._way == "loader":
            self._loader.load_state_dict(pickle.loads(start.at))
        elif not isinstance(start.at, int) or start.at < 0:
            raise ValueError(f"state['source']['at'] is {start.at!r}; with 'skip' it is a number of batches")

    def _skip(self, start: Place) -> None:
        if self._ended:
            self._read, self._last = start.at, start.last
            return
        for _ in _shown(start.at):
            if next(self, None) is None and self._ended:
                raise ValueError(
                    f"the loader ended after {self._read} batches, and the state was taken after {start.at}; go on "
                    "with the data that the state was taken from"
                )
        if start.at and start.last != self._last:
            raise ValueError(
                f"batch {start.at - 1} of the loader is not the one that was trained there before: batches come in "
                "another order, or are others; seed the loader's order (set_epoch, generator=), or use "
                "trainer_client.balancing.sampling.GlobalBatchSampler"
            )


def _warn_of_order(loader: Any, way: Way) -> None:
    sampler: Any = getattr(loader, "sampler", None)
    own = torch.utils.data.RandomSampler
    drawn = isinstance(sampler, own) if way == "skip" else type(sampler) is own  # torchdata's keeps its generator
    if drawn and way != "sampler" and sampler.generator is None:
        logger.warning(
            "the loader draws its order from torch's own generator, which must be where it was when that order was "
            "drawn; trainer_client.balancing.sampling.GlobalBatchSampler needs neither that nor skipping"
        )


def _shown(count: int) -> Iterator[int]:
    """Counts up, with a bar for people where this is the rank that talks to them."""
    if not (count and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"):
        yield from range(count)
        return
    with Progress(transient=True) as progress:
        yield from progress.track(range(count), description="skipping trained batches")


def fingerprint(batch: Any) -> int:
    """A number that tells batches apart, from the first values of their first tensors."""
    value = 0
    plain = (leaf for leaf in tree_leaves(batch) if type(leaf) is torch.Tensor and leaf.layout is torch.strided)
    tensors = (leaf for leaf in plain if leaf.device.type == "cpu" and not leaf.is_nested)
    for tensor in itertools.islice(tensors, _TENSORS_LOOKED_AT):
        value = zlib.crc32(str((tensor.dtype, tuple(tensor.shape))).encode(), value)
        first = tensor.detach().reshape(-1)[: _BYTES_LOOKED_AT // max(1, tensor.element_size())]
        first = first.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)  # an expanded one too
        value = zlib.crc32(first.view(torch.uint8).numpy().tobytes(), value)
    return value
