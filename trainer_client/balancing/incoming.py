"""A loader's batches on their way to their submission: those that are on a device wait for their numbers, one ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches import Arriving, BatchError, BatchSpec, FlatBatch, is_on_device
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.dividing import Cost
from trainer_client.balancing.options import MAX_WINDOW
from trainer_client.balancing.places import Place, Source

_AHEAD = 1  # batches that are read before they are needed, so that a training step lies between copy and use


class Incoming:
    """The batches of a loader; those on a device come flattened, with their lengths and costs on the host.

    Batches on the host pass as they are. One that is on a device is fetched a batch earlier than it is needed; its
    lengths, its integers and what the cost says are copied meanwhile.
    """

    def __init__(self, source: Source, *, cost: Cost, memory: Cost | None, spec: BatchSpec | None) -> None:
        """Reads nothing yet.

        Args:
            source: The batches.
            cost: From a batch to one number per sample. It is given a batch on a device as it is, and may return a
                tensor on the device; one that needs lengths on the host gets the flattened batch.
            memory: The same for memory.
            spec: The batches' declarations.
        """
        self._source = source
        self._spec = spec
        self._cost = _Reader(cost)
        self._memory = None if memory is None else _Reader(memory)
        self._on_device: bool | None = None
        self._arriving: deque[Arriving] = deque()
        self._places: deque[Place] = deque()  # before each batch that arrives
        self._asked = 0  # batches that were asked for here, also after the end

    @property
    def cost(self) -> Cost:
        """The cost of what comes out here: the user's own, where batches are on the host."""
        return self._cost.function if self._on_device is False else self._cost

    @property
    def memory(self) -> Cost | None:
        """The memory of what comes out here."""
        if self._memory is None:
            return None
        return self._memory.function if self._on_device is False else self._memory

    @property
    def place(self) -> Place:
        """Where the loader was before the batch that comes out next."""
        return self._places[0] if self._places else self._source.place(self._asked)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._asked += 1
        while len(self._arriving) <= _AHEAD:
            place = None if self._on_device is False else self._source.place(self._asked - 1 + len(self._arriving))
            try:
                batch = next(self._source)
            except StopIteration:
                break
            if self._on_device is None:
                self._on_device = is_on_device(batch, self._spec)
            if not self._on_device:
                return batch
            assert place is not None
            self._places.append(place)
            parts = [reader.begin(batch) for reader in self._readers()]
            self._arriving.append(Arriving(batch, self._spec, [value for part in parts for value in part]))
        if not self._arriving:
            raise StopIteration
        self._places.popleft()
        flat, values = self._arriving.popleft().get()
        for reader in self._readers():
            reader.end(flat, values)
        return flat

    def _readers(self) -> list[_Reader]:
        return [reader for reader in (self._cost, self._memory) if reader is not None]


@dataclass(slots=True)
class _Known:
    """What a function said of a batch: values, or the error that it cannot read it on a device."""

    values: Any = None
    error: BatchError | None = None


class _Reader:
    """A cost, of batches on a device begun when they arrive and known when they are submitted."""

    def __init__(self, function: Cost) -> None:
        self.function = function
        self._begun: deque[_Known] = deque()
        self._known: deque[tuple[FlatBatch, _Known]] = deque(maxlen=MAX_WINDOW)  # those of a window that fills

    def begin(self, batch: Any) -> list[torch.Tensor]:
        """Asks the function; what it gives on a device is to be copied."""
        known = _Known()
        if isinstance(self.function, LearnedCost):
            known.error = BatchError("a learned cost follows what is known when the batch is submitted")
            self._begun.append(known)
            return []
        try:
            known.values = self.function(batch)
        except BatchError as error:  # lengths of the host are needed
            known.error = error
        self._begun.append(known)
        on_device = isinstance(known.values, torch.Tensor) and known.values.device.type != "cpu"
        return [known.values] if on_device else []

    def end(self, flat: FlatBatch, copied: list[NDArray[Any]]) -> None:
        """Takes what was copied for it."""
        known = self._begun.popleft()
        if isinstance(known.values, torch.Tensor) and known.values.device.type != "cpu":
            shape = tuple(known.values.shape)
            known.values = copied.pop(0).reshape(shape)
        self._known.append((flat, known))

    @property
    def spans(self) -> Any:
        """What says what positions cost; None if the function does not."""
        return getattr(self.function, "spans", None)

    def __call__(self, batch: Any) -> Any:
        """The values of a batch that has arrived, or of one on the host."""
        known = next((known for flat, known in self._known if flat is batch), None)
        if known is None:
            return self.function(batch)
        if known.error is None:
            return known.values
        try:
            return self.function(batch)
        except BatchError:
            raise
        except Exception as error:
            raise BatchError(
                f"the cost cannot be computed from a batch on a device: {known.error}; compute it with torch on the "
                "device, or with the costs of trainer_client.balancing.costs"
            ) from error
