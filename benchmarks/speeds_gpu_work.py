"""What `speeds_gpu`'s ranks do in a step, and the process that takes a part of a GPU from one of them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer_client.observing.measurement import StepTimer

MEAN_LOAD = 25_600.0
SIZE = 3072


class Work:
    """What a rank does for a load: on a GPU or, where it has none, wait."""

    def __init__(self, device: torch.device, milliseconds: float, *, alone: bool) -> None:
        self._device = device
        self._seconds = milliseconds / 1e3
        self.alone = alone  # the only rank on a GPU: the others are on the CPU, and so are the collectives
        self._gradient = torch.zeros(100_000, device="cpu" if alone else device)
        self.slowdown = 1.0  # without GPUs
        self.replayed: NDArray[np.float64] | None = None  # seconds of a unit of load, one for each measured step
        self._draws = np.random.default_rng([3, dist.get_rank()])
        self._per_load = 0.0
        if device.type == "cuda":
            self._weights = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) / SIZE**0.5
            self._products(50)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self._products(500)
            torch.cuda.synchronize()
            number = torch.tensor([500 * self._seconds / (time.perf_counter() - begin)], device=device)
            if not alone:
                dist.broadcast(number, 0)
            self._per_load = float(number.item()) / MEAN_LOAD

    def _products(self, number: int) -> None:
        x = self._weights
        for _ in range(number):
            x = x @ self._weights
        self._gradient.add_(x[0, 0].float() if not self.alone else 0.0)

    def _wait(self, load: float) -> None:
        """As long as the load takes."""
        seconds = self._seconds * load / MEAN_LOAD * self.slowdown
        if self.replayed is not None:
            seconds = load * float(self._draws.choice(self.replayed))
        end = time.perf_counter() + seconds
        time.sleep(max(0.0, seconds - 3e-4))
        while time.perf_counter() < end:  # a sleep ends late
            pass

    def step(self, load: float, timer: StepTimer) -> None:
        """Trains, so to say."""
        timer.batch_ready()
        if self._device.type == "cuda":
            self._products(max(1, round(load * self._per_load)))
        else:
            self._wait(load)
        timer.compute_done()
        if self.alone and self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.all_reduce(self._gradient)
        timer.gradients_ready()
        timer.end_step()


class Other:
    """A process of its own on a GPU, with work for it for a part of the time."""

    def __init__(self, device: torch.device, work: Work) -> None:
        self._work = work
        self._process: subprocess.Popen[str] | None = None
        if device.type == "cuda":
            command = [sys.executable, "-m", "benchmarks.speeds_gpu_work", str(device.index)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            self._process.stdout.readline()  # it is ready

    def take(self, busy: float) -> None:
        """Sets for which share of the time it has work."""
        if self._process is None:
            self._work.slowdown = 1 + busy
            return
        assert self._process.stdin is not None
        self._process.stdin.write(f"{busy}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends it."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(20)


def be_other(index: int) -> None:
    """The other process: reads for which share of the time to be busy, until its input ends."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    weights = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) / SIZE**0.5
    torch.cuda.synchronize()
    state = {"busy": 0.0, "over": 0.0}

    def listen() -> None:
        for line in sys.stdin:
            state["busy"] = float(line)
        state["over"] = 1.0

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    end = time.monotonic() + 900
    while not state["over"] and time.monotonic() < end:
        busy = state["busy"]  # another thread sets it
        if not busy:
            time.sleep(0.001)
            continue
        begin = time.perf_counter()
        for _ in range(16):
            weights @ weights
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        time.sleep(took * (1 / busy - 1))


if __name__ == "__main__":
    be_other(int(sys.argv[1]))
