"""Points in time on a device's stream, or on the host where there is no device."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in time."""

    def ready(self) -> bool:
        """Whether the device has got there."""
        ...

    def since(self, earlier: Mark) -> float:
        """Milliseconds from an earlier mark of the same clock; both must be ready."""
        ...


class CudaMark:
    """A point in a CUDA stream."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def ready(self) -> bool:
        """Whether the device has got there; does not wait."""
        done: bool = self._event.query()  # type: ignore[no-untyped-call]
        return done

    def since(self, earlier: Mark) -> float:
        """Milliseconds of device time since an earlier mark."""
        assert isinstance(earlier, CudaMark)
        elapsed: float = earlier._event.elapsed_time(self._event)
        return elapsed


class HostMark:
    """A point in the host's time, for work on CPUs."""

    __slots__ = ("_time",)

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def ready(self) -> bool:
        """Whether it has been reached: always."""
        return True

    def since(self, earlier: Mark) -> float:
        """Milliseconds since an earlier mark."""
        assert isinstance(earlier, HostMark)
        return 1e3 * (self._time - earlier._time)


def mark(device: torch.device) -> Mark:
    """Now, on the device's current stream."""
    return CudaMark(device) if device.type == "cuda" else HostMark()
