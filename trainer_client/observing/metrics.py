"""Prometheus metrics of each rank: an optional exporter, `pip install 'evenkeel[metrics]'`.

exporter = RankExporter.start(rank=rank, job="train-42", port=9200 + local_rank)
for batch in exporter.watch(loader): ...

How many series there are does not depend on what runs through them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from evenkeel import __version__
from evenkeel.partitioning.delays import Cause
from trainer_client.balancing import BalancedLoader, Counters, RoundReport
from trainer_client.embedding.routing.ownership import RoutingLike
from trainer_client.embedding.routing.skew import feature_skew
from trainer_client.launchers import local_rank
from trainer_client.observing.measurement import Mark

B = TypeVar("B")

_ENVIRONMENT = "EVENKEEL_METRICS_PORT"
_ALL_ADDRESSES = ("", "0.0.0.0", "::")
_NO_MORE: Any = object()
_exporters: set[RankExporter] = set()  # those that serve

# Steps take from a few milliseconds to minutes; balancing a hundredth of that.
_STEP_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_EXCESS_BUCKETS = (0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_MOST = {"loader": 16, "table": 200}  # values of a label that come from the program
OTHER = "other"

_COUNTERS = {
    "rounds": "Batches by what all ranks did with them.",
    "samples": "Samples that this rank trained.",
    "dropped_samples": "Samples that this rank loaded and nobody trained.",
    "batch_bytes": "Bytes of all ranks' samples, this rank's share.",
    "moved_bytes": "Bytes of samples that changed rank, this rank's share.",
    "split_samples": "Samples split over ranks, this rank's share.",
    "exposed_wait_seconds": "Time that training waited for the next batch: loading, balancing, moving; on a GPU, as "
    "its stream did.",
    "agreement_wait_seconds": "Time that the training thread waited for the ranks' agreement.",
    "service_wait_seconds": "Time waited for the balancer behind training.",
    "partition_seconds": "Time of the partition searches.",
    "redistribution_seconds": "Time of the training thread in starting and ending moves.",
    "loading_wait_seconds": "Time that the training thread waited for the wrapped loader.",
    "saved_seconds": "Estimate of the time that balancing saved: step time x (largest load over speed before / after - "
    "1).",
    "lost_seconds": "Estimate of the time that ranks wait for the one with the largest load: step time x (1 - 1 / "
    "imbalance after), where loads are known.",
    "breaker_changes": "Changes of the breaker.",
}
_GAUGES = {
    "info": "What runs on this rank; always 1.",
    "load": "Predicted work of this rank's part of the last batch, in units of the cost; NaN: unknown.",
    "mean_load": "Mean load of all ranks in the last batch; NaN: unknown.",
    "speed_ratio": "How fast this rank computes, over the median rank; 1 unless known to be slower.",
    "late_ratio": "How much later this rank's batches come than the median rank's, in what that computes; 0 unless "
    "known.",
    "breaker_open": "1 while rounds go on without asking the balancer.",
    "key_skew_ratio": "Keys of the rank with the most over the mean, of a table's last lookup.",
}
_HISTOGRAMS = {
    "imbalance_excess_ratio": "Largest load over mean load, minus one: before and after balancing, and the lower "
    "bound.",
    "step_seconds": "Time from getting a batch to asking for the next; on a GPU, of its stream.",
}
_TOTALS = {  # metrics that are totals of a stream: the attributes of `Counters`
    "agreement_wait_seconds": "exposed_seconds",
    "service_wait_seconds": "wait_seconds",
    "partition_seconds": "partition_seconds",
    "redistribution_seconds": "redistribution_seconds",
    "loading_wait_seconds": "loading_seconds",
    "breaker_changes": "breaker_changes",
    "dropped_samples": "dropped_samples",
}
_BUCKETS = {"imbalance_excess_ratio": _EXCESS_BUCKETS, "step_seconds": _STEP_BUCKETS}
_LABELS = {  # besides `job` and `rank`; `loader` where nothing is said
    "info": ("version",),
    "rounds": ("loader", "mode", "reason"),
    "load": ("loader", "when"),
    "late_ratio": ("loader", "cause"),
    "imbalance_excess_ratio": ("loader", "when"),
    "key_skew_ratio": ("table",),
}


class RankMeasures:
    """The metrics of one rank.

    Every series carries the labels `job` and `rank`. Shares of what all ranks do together (bytes) are divided by the
    number of ranks, so that a sum over the ranks is the job's.

    Attributes:
        registry: Where the metrics live; one of its own, apart from the program's other metrics.
    """

    def __init__(self, *, job: str, rank: int) -> None:
        self.registry = CollectorRegistry()
        self._job, self._rank = job, rank
        self._names: dict[str, set[str]] = {label: set() for label in _MOST}
        self._totals: dict[str, tuple[Counters, Counters]] = {}  # of each loader's stream: its own, and as last read
        self._metrics: dict[str, Any] = {}
        for kind, metrics in ((Counter, _COUNTERS), (Gauge, _GAUGES), (Histogram, _HISTOGRAMS)):
            for name, text in metrics.items():
                labels = ("job", "rank", *_LABELS.get(name, ("loader",)))
                options: dict[str, Any] = {"buckets": _BUCKETS[name]} if name in _BUCKETS else {}
                self._metrics[name] = kind(f"evenkeel_trainer_{name}", text, labels, registry=self.registry, **options)
        self._of("info", __version__).set(1)

    def _of(self, name: str, first: str, *labels: str) -> Any:
        """A series; values of a label that come from the program share one beyond a bound."""
        label = _LABELS.get(name, ("loader",))[0]
        if (names := self._names.get(label)) is not None:
            if len(names) < _MOST[label]:
                names.add(first)
            first = first if first in names else OTHER
        return self._metrics[name].labels(self._job, str(self._rank), first, *labels)

    def batch(self, loader: str, report: RoundReport) -> None:
        """A balanced batch has come out of a loader."""
        self._of("rounds", loader, report.mode.value, report.reason.value).inc()
        self._of("load", loader, "before").set(report.home_load)
        self._of("load", loader, "after").set(report.own_load)
        self._of("mean_load", loader).set(report.mean_load)
        learned, rank = report.learned, self._rank
        speed = next((slow.speed for slow in learned.stragglers if slow.rank == rank), 1.0)
        self._of("speed_ratio", loader).set(speed)
        delays = {late.cause: late.share for late in learned.delays if late.rank == rank}
        for cause in Cause:
            self._of("late_ratio", loader, cause.label).set(delays.get(cause, 0.0))
        for when, value in (
            ("before", report.imbalance_before), ("after", report.imbalance), ("bound", report.imbalance_bound),
        ):  # fmt: skip
            if math.isfinite(value):
                self._of("imbalance_excess_ratio", loader, when).observe(max(0.0, value - 1))
        self._of("samples", loader).inc(report.own_samples)
        self._of("batch_bytes", loader).inc(report.size / report.world_size)
        self._of("moved_bytes", loader).inc(report.moved_size / report.world_size)
        self._of("split_samples", loader).inc(report.split_samples / report.world_size)

    def step(self, loader: str, report: RoundReport, seconds: float) -> None:
        """A batch has been trained on for so long."""
        self._of("step_seconds", loader).observe(seconds)
        if math.isfinite(report.imbalance) and report.imbalance >= 1:
            # Of loads, not of imbalances: where ranks differ in speed, each of these is over a mean of its own.
            gain = max(0.0, report.max_load_before / report.max_load - 1) if report.max_load else 0.0
            self._of("saved_seconds", loader).inc(seconds * gain)
            self._of("lost_seconds", loader).inc(seconds * (1 - 1 / report.imbalance))

    def waited(self, loader: str, seconds: float) -> None:
        """Training waited for its next batch; on a GPU, the device did."""
        self._of("exposed_wait_seconds", loader).inc(max(0.0, seconds))

    def totals(self, loader: str, counters: Counters) -> None:
        """What a loader's stream has come to by now."""
        known, before = self._totals.get(loader, (None, Counters()))
        now = replace(counters)  # which other threads go on with
        self._totals[loader] = counters, now
        for name, total in _TOTALS.items():
            since = getattr(before, total) if known is counters else 0
            self._of(name, loader).inc(max(0, getattr(now, total) - since))
        self._of("breaker_open", loader).set(now.breaker_open)

    def key_skew(self, table: str, ratio: float) -> None:
        """Keys per rank of a table's lookup, largest over mean; as `trainer_client.embedding.routing` reports it."""
        self._of("key_skew_ratio", table).set(ratio)


class RankExporter:
    """The metrics of one rank on an HTTP port of their own.

    Attributes:
        measures: What it counts; use it directly in loops that `watch` does not fit.
        port: The bound port.
    """

    def __init__(self, measures: RankMeasures, port: int, closing: contextlib.ExitStack) -> None:
        self.measures = measures
        self.port = port
        self._closing = closing
        self._key_calls = 0
        # Not yet known to be over; without a report what was no step, but the end of a loop.
        self._steps: deque[tuple[str, RoundReport | None, Mark, Mark, Mark]] = deque()
        _exporters.add(self)

    @classmethod
    def start(
        cls,
        *,
        job: str,
        rank: int,
        host: str = "127.0.0.1",
        port: int = 0,
        targets: str | os.PathLike[str] | None = None,
        advertise: str | None = None,
    ) -> RankExporter:
        """Starts serving.

        Args:
            job: The training job, as the balancer knows it.
            rank: This rank within the group that balances together.
            host: Address to listen on; the metrics are readable for everybody who reaches it.
            port: Port to listen on; 0 picks a free one.
            targets: Folder that Prometheus watches (`file_sd_configs`): the exporter writes its address there and takes
                it away when it stops.
            advertise: The host that Prometheus reaches this one by; default: `host`, or this machine's name where that
                stands for all addresses (`0.0.0.0`, `::`).

        Raises:
            ValueError: If the port is out of range.
            OSError: If the port is taken, or the folder of targets cannot be written to.
        """
        if not 0 <= port < 65536:
            raise ValueError(f"port is {port}; use 0 for a free one, or 1 to 65535")
        measures = RankMeasures(job=job, rank=rank)
        try:
            server, thread = start_http_server(port, addr=host, registry=measures.registry)
        except OSError as error:
            text = f"metrics cannot be served on {host}:{port}: {error.strerror}; choose another host or port"
            raise OSError(error.errno, text) from None

        closing = contextlib.ExitStack()
        for step in (thread.join, server.server_close, server.shutdown):  # the last is called first
            closing.callback(step)
        if targets is not None:
            try:
                address = _reached_at(advertise, host, server.server_port)
                target_file = _write_target(Path(targets), job, rank, address)
            except OSError as error:
                closing.close()
                text = f"targets is {str(targets)!r}, where no file can be written: {error.strerror}"
                raise OSError(error.errno, text) from None
            closing.callback(target_file.unlink, missing_ok=True)
        return cls(measures, int(server.server_port), closing)

    @classmethod
    def from_env(cls, *, job: str, rank: int) -> RankExporter | None:
        """What the environment says: `EVENKEEL_METRICS_PORT` is the port of local rank 0 (0: any free one; unset: no
        exporter), `EVENKEEL_METRICS_HOST` the address, `EVENKEEL_METRICS_TARGETS` the folder of the target files and
        `EVENKEEL_METRICS_ADVERTISE` the host in them.

        Raises:
            ValueError: If the port is no number.
        """  # noqa: D205
        value = os.environ.get(_ENVIRONMENT, "").strip()
        if not value:
            return None
        if not value.isdecimal():
            raise ValueError(f"{_ENVIRONMENT} is {value!r}; give a port number, or 0 for any free one")
        first = int(value)
        return cls.start(
            job=job,
            rank=rank,
            host=os.environ.get("EVENKEEL_METRICS_HOST") or "127.0.0.1",
            port=first + local_rank() if first else 0,
            targets=os.environ.get("EVENKEEL_METRICS_TARGETS") or None,
            advertise=os.environ.get("EVENKEEL_METRICS_ADVERTISE") or None,
        )

    def watch(
        self, loader: BalancedLoader[B], *, name: str = "train", device: torch.device | str | None = None
    ) -> Iterator[B]:
        """The loader's batches, measured: what balancing did, how long each step took, how long training waited.

        On a GPU both times are those of the device's current stream, read some steps later without waiting for it.

        Args:
            loader: The loader; its own attributes (`report`, `loss_scale`, …) stay in use.
            name: Value of the label `loader`.
            device: Where the model trains; default: the current GPU if the program uses one, else the CPU.
        """
        if device is None:
            on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        device = torch.device(device)
        batches = iter(loader)
        while True:
            asked = Mark(device)
            batch: Any = next(batches, _NO_MORE)
            got = Mark(device)
            self.measures.totals(name, loader.counters)
            report = None if batch is _NO_MORE else loader.report
            if report is not None:
                self.measures.batch(name, report)
                yield batch
            self._steps.append((name, report, asked, got, Mark(device)))
            self._read_steps()
            if report is None:
                return

    def _read_steps(self) -> None:
        while self._steps and self._steps[0][-1].ready():
            name, report, asked, got, done = self._steps.popleft()
            self.measures.waited(name, got.since(asked) / 1e3)
            if report is not None:
                self.measures.step(name, report, done.since(got) / 1e3)

    def keys(
        self,
        kjt: Any,
        *,
        world_size: int,
        routing: RoutingLike | Sequence[RoutingLike] = "roundrobin",
        block_sizes: Sequence[int] | None = None,
        every: int = 100,
    ) -> None:
        """Measures how unevenly the keys of every so-many-th batch fall on the ranks that own them, by feature.

        Args:
            kjt: A batch's KeyedJaggedTensor, best on the host: the one that is measured is copied there.
            world_size: Ranks that own the keys.
            routing: One for all features, or one per feature.
            block_sizes: Rows a rank of each feature's table, for `continuous`.
            every: Calls from one that measures to the next; the others cost nothing.

        Raises:
            ValueError: If the numbers of routings, block sizes and features differ.
        """
        self._key_calls += 1
        if (self._key_calls - 1) % every:
            return
        skew = feature_skew(kjt, world_size=world_size, routing=routing, block_sizes=block_sizes)
        for name, ratio in skew.items():
            self.measures.key_skew(name, ratio)

    def close(self) -> None:
        """Stops serving and takes the target file away; what still serves at the program's end is closed then."""
        if self not in _exporters:
            return
        _exporters.discard(self)
        self._read_steps()
        self._closing.close()

    def __enter__(self) -> RankExporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_target(folder: Path, job: str, rank: int, address: str) -> Path:
    """Prometheus picks up whole files only; a rank that restarts replaces its own file."""
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in job)
    path = folder / f"{safe}-{rank}.json"
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps([{"targets": [address]}]) + "\n")
    part.replace(path)
    return path


def _reached_at(advertise: str | None, host: str, port: int) -> str:
    """`host:port` as Prometheus writes it."""
    name = advertise or (socket.gethostname() if host in _ALL_ADDRESSES else host)
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


@atexit.register
def _close_all() -> None:
    for exporter in list(_exporters):
        exporter.close()


os.register_at_fork(after_in_child=_exporters.clear)  # the servers and their files are the parent's
