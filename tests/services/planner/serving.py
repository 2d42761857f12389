from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.zygote import Program


@dataclass
class Served:
    """A planner in a process of its own."""

    url: str
    metrics_url: str
    process: Program


@contextmanager
def served(folder: Path, *flags: str, **environment: str) -> Iterator[Served]:
    port, metrics = folder / "port", folder / "metrics_port"
    arguments = ["--port", "0", "--port-file", str(port), "--metrics-port", "0", "--metrics-port-file", str(metrics)]
    process = Program("services.planner", *arguments, "--log-format", "json", *flags, **environment)
    try:
        deadline = time.monotonic() + 100
        while not (port.exists() and metrics.exists()):
            assert process.poll() is None, "the planner ended before it was ready"
            assert time.monotonic() < deadline, "the planner was not ready in time"
            time.sleep(0.05)
        urls = [f"http://127.0.0.1:{file.read_text().strip()}" for file in (port, metrics)]
        yield Served(urls[0], urls[1], process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
