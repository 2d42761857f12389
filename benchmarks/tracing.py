"""What traces cost a rank, per step: off, and on with spans that are thrown away.

python -m benchmarks.tracing --json benchmarks/results/tracing.json

Off is the floor of the code that looks whether a step is traced, as it stands in the stream and its worker; on is
the making of a traced step's spans (step, submit, wait, agree, redistribute), which wait for a collector elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from trainer_client.balancing.tracing import StreamTracer, tracer_of

from trainer_client.balancing import Mode, Reason, tracing


class Thrown(SpanProcessor):
    """Takes spans as a queue would, and keeps none."""

    def on_end(self, span: ReadableSpan) -> None:
        """A span has ended."""


REPORT: Any = SimpleNamespace(
    mode=Mode.SERVICE, reason=Reason.NONE, imbalance_before=1.5, imbalance=1.0, own_load=1e9, moved_size=1 << 20
)


def step(tracer: StreamTracer | None, number: int) -> None:
    """All that a step of the stream and its worker does for its trace."""
    trace = None if tracer is None else tracer.begin(number)
    if trace is not None:
        trace.submitted()
    began = time.time_ns() if trace is not None else 0
    answered = time.time_ns() if trace is not None else 0
    agreed = time.time_ns() if trace is not None else 0
    if trace is not None:
        trace.part("wait", began, answered, answered=True)
        trace.part("agree", answered, agreed)
        trace.agreed(REPORT)
    exposed = trace is not None
    if exposed and trace is not None:
        trace.moving()
    if trace is not None:
        trace.moved()


def nanoseconds(body: Callable[[int], None], times: int, repeats: int = 7) -> list[float]:
    """Per call, of each repeat."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter_ns()
        for number in range(times):
            body(number)
        found.append((time.perf_counter_ns() - started) / times)
    return found


def main() -> None:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    empty = nanoseconds(lambda _: None, 200_000)
    off = nanoseconds(lambda number: step(None, number), 200_000)
    results = {"loop alone": empty, "off": off}
    for every in (100, 1):
        tracing.start(processor=Thrown(), every=every)
        tracer = tracer_of(job="job", group="default", loader="train", run="run:0", rank=0)
        results[f"on, every {every}"] = nanoseconds(lambda number, t=tracer: step(t, number), 5_000)  # type: ignore[misc]
        tracing.stop()
    for name, values in results.items():
        print(
            f"{name:14} {statistics.median(values):10.0f} ns a step (best {min(values):.0f}, worst {max(values):.0f})"
        )
    if options.json is not None:
        document = {
            "command": "python -m benchmarks.tracing", "cores": os.cpu_count(), "python": platform.python_version(),
            "load_average_at_start": load, "nanoseconds_a_step": results,
        }  # fmt: skip
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
