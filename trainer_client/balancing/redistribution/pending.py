"""A redistribution in flight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from trainer_client.balancing.batches import FlatBatch


class Pending:
    """What `start` returns; `wait` gives the batch.

    Its process must wait for every redistribution that it started, in the order of starting.
    """

    def __init__(
        self,
        finish: Callable[[], FlatBatch],
        event: torch.cuda.Event | None = None,
        *,
        home: torch.cuda.Stream | None = None,
        held: FlatBatch | None = None,
        read: FlatBatch | None = None,
    ) -> None:
        """A redistribution in flight.

        Args:
            finish: Gives the batch.
            event: When the device has it; None on the host.
            home: The stream that was current at the start, if the result's tensors are of its memory.
            held: The batch as it was, if it is of the device's memory: it is read until the event.
            read: The result as it is on the device, if parts of it are read back to the host, which then waits for the
                event.
        """
        self._finish: Callable[[], FlatBatch] | None = finish
        self._event = event
        self._home = home
        self._held = held
        self._read = read
        self._result: FlatBatch | None = None
        self._done: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self._result is None and self._event is not None and self._home is not None:
            with suppress(Exception):  # at the interpreter's end the device may be gone
                self._home.wait_event(self._event)  # never waited for: its memory must not be used again before

    @property
    def landed(self) -> bool:
        """Whether `wait` has given the batch."""
        return self._result is not None

    def then(self, done: Callable[[], None]) -> None:
        """Calls `done` once, when `wait` has the batch."""
        self._done = done

    def wait(self) -> FlatBatch:
        """The batch that this rank trains.

        On CUDA it is ordered before later work of the current stream, and the host goes on at once; but it waits for
        the move if parts of the batch are read on the host: arrays, Python objects, `MaxLength`, padded tensors.

        Raises:
            RuntimeError: If the process group failed, or another rank sent what the slice does not announce.
        """
        if self._result is None:
            assert self._finish is not None
            result = self._finish()
            self._finish = None
            if self._event is not None:
                self._order(self._event, result)
                if self._read is not None:
                    self._event.synchronize()
            self._held = self._read = None
            self._result = result
            done, self._done = self._done, None
            if done is not None:
                done()
        return self._result

    def _order(self, event: torch.cuda.Event, result: FlatBatch) -> None:
        """Orders the event before what comes, so that memory of both batches is used again only after it.

        The allocator gives freed memory to later work of the stream that it was allocated on. Memory of the home
        stream needs no `record_stream`, whose events cost the host more than the allocation, as long as that stream
        waits for the event before the memory is freed.
        """
        current = torch.cuda.current_stream(result.device)
        current.wait_event(event)
        at_home = self._home == current
        if self._home is not None and not at_home:
            self._home.wait_event(event)
        result.lengths_tensor.record_stream(current)
        if not at_home:
            for tensor in result.tensors:
                if tensor.is_cuda:
                    tensor.record_stream(current)
