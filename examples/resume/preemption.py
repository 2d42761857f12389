"""SIGTERM, as a scheduler sends it some seconds before it takes the machine away."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist


class Preemption:
    """A flag that all ranks see in the same step, and an end of the process when time is up.

    Ranks get the signal at different moments, some perhaps not at all. If each stopped when it has got it, the others
    would wait for it in the next gradients. So each step tells the others, in a small collective beside its own.
    """

    def __init__(self, seconds: float, device: torch.device | None = None) -> None:
        """Takes the signal over.

        Args:
            seconds: From the signal to the end of the process, saved or not; less than the scheduler gives.
            device: On which the default process group communicates; None: the host.
        """
        self._seconds = seconds
        self._device = device
        self._asked = False
        self._told = torch.zeros(1)
        self._work: dist.Work | None = None
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._asked:
            self._asked = True
            timer = threading.Timer(self._seconds, os._exit, (128 + signal.SIGTERM,))
            timer.daemon = True
            timer.start()

    def begin_step(self) -> None:
        """Tells the other ranks whether this one has got the signal; waits for nothing."""
        self._told = torch.tensor([float(self._asked)], device=self._device)
        self._work = dist.all_reduce(self._told, dist.ReduceOp.MAX, async_op=True)

    def stops(self) -> bool:
        """Whether some rank had got it when it began this step; the same on all ranks."""
        assert self._work is not None
        self._work.wait()
        return bool(self._told)
