"""A balancer that computes its plans in threads of its own process: what worker processes are measured beside."""

from __future__ import annotations

import asyncio
import gc
import queue
import signal
import sys
import threading

from services.balancer.workers.tasks import Task

from benchmarks.harness.plans import make_plan
from evenkeel.partitioning import warm_up
from services.balancer.server import BalancerServer
from services.balancer.settings import Settings, load_settings
from services.operations.program import run_service, write_port


class Threads:
    """Computes plans in threads of this process: nothing is copied, and a crash ends the service."""

    queued = 0
    pids = ()

    def __init__(self, num_threads: int) -> None:
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._num_threads = num_threads

    async def start(self) -> None:
        """Compiles, and starts the threads."""
        warm_up()
        self._loop = asyncio.get_running_loop()
        for _ in range(self._num_threads):
            threading.Thread(target=self._run, daemon=True).start()

    def submit(self, task: Task) -> None:
        """Queues a task."""
        self._tasks.put(task)

    def cancel(self, task: Task) -> None:
        """A thread cannot be stopped."""

    def close(self) -> None:
        """They end with the process."""

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            self._loop.call_soon_threadsafe(task.started)
            self._loop.call_soon_threadsafe(task.done, make_plan(task.inputs))


async def serve(settings: Settings) -> int:
    """Runs it until SIGTERM, as `services.balancer.__main__` does."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = BalancerServer(settings)
    server._pool = server.hub._pool = Threads(settings.workers)  # type: ignore[assignment]  # the service has no such way
    await server.start()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)
    write_port(settings.port_file, server.port)
    await stop.wait()
    await server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(run_service(load_settings, serve, sys.argv[1:]))
