from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.balancer_process import fork
from services.operations.launch import Process, running_service


@dataclass
class Served:
    """A planner in a process of its own."""

    url: str
    metrics_url: str
    process: Process
    log: Path


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[Served]:
    metrics = folder / "metrics_port"
    watched = ("--metrics-port", "0", "--metrics-port-file", str(metrics), "--log-format", "json")
    with running_service("services.planner", *watched, *flags, spawn=fork) as planner:
        yield Served(
            f"http://{planner.address}",
            f"http://127.0.0.1:{metrics.read_text().strip()}",
            planner.running,
            planner.log_file,
        )
        if planner.running.poll() is None:
            assert planner.stop() == 0
