"""What balancing did, step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console

from trainer_client.balancing import RoundReport

Record = Mapping[str, Any]


class Sink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Takes one record."""
        ...

    def close(self) -> None:
        """No record will follow."""
        ...


class JsonLines:
    """One JSON object a line; a job that dies leaves all lines but its last whole."""

    def __init__(self, path: str | Path) -> None:
        self._file: TextIO = Path(path).open("w", buffering=1, encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, record: Record) -> None:
        """Appends a line."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class ConsoleLines:
    """A line for people, every so many steps."""

    def __init__(self, console: Console | None = None, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; use at least 1")
        self._console = console or Console()
        self._every = every
        self._count = 0

    def write(self, record: Record) -> None:
        """Prints the first record and every `every`-th after it."""
        if self._count % self._every == 0:
            before, after = record["imbalance_before"], record["imbalance"]
            timed = f", {record['step_ms']:.1f} ms" if record.get("step_ms") is not None else ""
            self._console.print(
                f"step {record['step']}: load max/mean {before:.3f} → {after:.3f} by {record['mode']}, "
                f"{record['moved_share']:.1%} moved{timed}",
                highlight=False,
                soft_wrap=True,
            )
        self._count += 1

    def close(self) -> None:
        """Nothing to do."""


class BalanceLogger:
    """Records what balancing did, step by step.

    Attributes:
        records: The records, in order.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        """Opens the log; records go to the sinks besides `records`."""
        self.records: list[Record] = []
        self._sinks = tuple(sinks)

    def log(self, step: int, report: RoundReport, **more: float | None) -> None:
        """Records a step by its report and further values, such as `step_ms`."""
        record: dict[str, Any] = {
            "step": step, "round": report.round, "mode": report.mode.value, "reason": report.reason.value,
            "own_load": report.own_load, "max_load": report.max_load, "imbalance_before": report.imbalance_before,
            "imbalance": report.imbalance, "lower_bound": report.lower_bound, "samples": report.samples,
            "own_samples": report.own_samples, "moved_samples": report.moved_samples,
            "moved_share": report.moved_share, "wait_seconds": report.wait_seconds,
            "partition_seconds": report.partition_seconds, **more,
        }  # fmt: skip
        self.records.append(record)
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Closes the sinks."""
        for sink in self._sinks:
            sink.close()


def plot_balance(records: Sequence[Record], path: str | Path) -> Path:
    """Draws max/mean load before and after balancing by step; needs matplotlib."""
    from matplotlib.figure import Figure

    if not records:
        raise ValueError("there are no records to draw; log steps first")
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    steps = [record["step"] for record in records]
    read: Callable[[str], list[float]] = lambda key: [record[key] for record in records]  # noqa: E731
    axes.plot(steps, read("imbalance_before"), color="#c44e52", label="as loaded")
    axes.plot(steps, read("imbalance"), color="#4c72b0", label="as trained")
    axes.set(xlabel="step", ylabel="max / mean load", ylim=(0.95, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    return Path(path)
