"""What a rank counts and measures; how many series there are does not depend on what runs through them."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from evenkeel import __version__
from evenkeel.partitioning.api import imbalance_of_bound
from evenkeel.partitioning.delays import Cause
from trainer_client.balancing import RoundReport

# Steps take from a few milliseconds to minutes; balancing a hundredth of that.
_STEP_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_EXCESS_BUCKETS = (0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_MAX_LOADERS = 16
_MAX_TABLES = 200
OTHER = "other"

_COUNTERS = {
    "rounds": "Batches by what all ranks did with them.",
    "samples": "Samples that this rank trained.",
    "batch_bytes": "Bytes of all ranks' samples, this rank's share.",
    "moved_bytes": "Bytes of the samples that changed rank, this rank's share.",
    "split_samples": "Samples that were split over ranks, this rank's share of all.",
    "exposed_wait_seconds": "Time that training waited for the next batch: loading, balancing, moving; on a GPU, as "
    "its stream did.",
    "agreement_wait_seconds": "Time that the training thread waited for the ranks' agreement.",
    "service_wait_seconds": "Time waited for the balancer behind training.",
    "partition_seconds": "Time of the partition searches.",
    "redistribution_seconds": "Time that the training thread spent in starting and ending moves.",
    "loading_wait_seconds": "Time that the training thread waited for the wrapped loader.",
    "saved_seconds": "Estimate of the time that balancing saved: step time x (largest load over speed before / after - "
    "1).",
    "lost_seconds": "Estimate of the time that ranks wait for the one with the largest load: step time x (1 - 1 / "
    "imbalance after), where loads are known; the balancer's page counts the same.",
    "breaker_changes": "Changes of the breaker.",
}
_GAUGES = {
    "info": "What runs on this rank; always 1.",
    "load": "Predicted work of this rank's part of the last batch, in units of the cost; NaN: unknown.",
    "mean_load": "Predicted work of a rank's part of the last batch, mean over all ranks; NaN: unknown.",
    "speed_ratio": "How fast this rank computes, relative to the median rank; 1 unless known to be slower.",
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
_BUCKETS = {"imbalance_excess_ratio": _EXCESS_BUCKETS, "step_seconds": _STEP_BUCKETS}
_LABELS = {  # besides `job` and `rank`; `loader` where nothing is said
    "info": ("version",),
    "rounds": ("loader", "mode", "reason"),
    "load": ("loader", "when"),
    "late_ratio": ("loader", "cause"),
    "imbalance_excess_ratio": ("loader", "when"),
    "key_skew_ratio": ("table",),
}


class _Names:
    """Label values that come from the program; those beyond a bound share one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._seen:
            if len(self._seen) >= self._most:
                return OTHER
            self._seen.add(name)
        return name


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
        self._loaders, self._tables = _Names(_MAX_LOADERS), _Names(_MAX_TABLES)
        self._metrics: dict[str, Any] = {}
        for kind, metrics in ((Counter, _COUNTERS), (Gauge, _GAUGES), (Histogram, _HISTOGRAMS)):
            for name, text in metrics.items():
                labels = ("job", "rank", *_LABELS.get(name, ("loader",)))
                options: dict[str, Any] = {"buckets": _BUCKETS[name]} if name in _BUCKETS else {}
                self._metrics[name] = kind(f"evenkeel_trainer_{name}", text, labels, registry=self.registry, **options)
        self._of("info", __version__).set(1)

    def _of(self, name: str, *labels: str) -> Any:
        return self._metrics[name].labels(self._job, str(self._rank), *labels)

    def batch(self, loader: str, report: RoundReport) -> None:
        """A balanced batch has come out of a loader."""
        loader = self._loaders.label(loader)
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
        bound = imbalance_of_bound(report.lower_bound, report.max_load, report.imbalance)
        for when, value in (("before", report.imbalance_before), ("after", report.imbalance), ("bound", bound)):
            if math.isfinite(value):
                self._of("imbalance_excess_ratio", loader, when).observe(max(0.0, value - 1))
        self._of("samples", loader).inc(report.own_samples)
        self._of("batch_bytes", loader).inc(report.size / report.world_size)
        self._of("moved_bytes", loader).inc(report.moved_size / report.world_size)
        self._of("split_samples", loader).inc(report.split_samples / report.world_size)
        self._of("service_wait_seconds", loader).inc(report.wait_seconds)
        self._of("partition_seconds", loader).inc(report.partition_seconds)

    def step(self, loader: str, report: RoundReport, seconds: float) -> None:
        """A batch has been trained on for so long."""
        loader = self._loaders.label(loader)
        self._of("step_seconds", loader).observe(seconds)
        if math.isfinite(report.imbalance) and report.imbalance >= 1:
            # Of loads, not of imbalances: where ranks differ in speed, each of these is over a mean of its own.
            gain = max(0.0, report.max_load_before / report.max_load - 1) if report.max_load else 0.0
            self._of("saved_seconds", loader).inc(seconds * gain)
            self._of("lost_seconds", loader).inc(seconds * (1 - 1 / report.imbalance))

    def waited(self, loader: str, seconds: float) -> None:
        """Training waited for its next batch; on a GPU, the device did."""
        self._of("exposed_wait_seconds", self._loaders.label(loader)).inc(max(0.0, seconds))

    def parts(self, loader: str, *, agreement: float = 0.0, redistribution: float = 0.0, loading: float = 0.0) -> None:
        """The training thread waited for the agreement, for the end of a move, for the wrapped loader."""
        loader = self._loaders.label(loader)
        self._of("agreement_wait_seconds", loader).inc(max(0.0, agreement))
        self._of("redistribution_seconds", loader).inc(max(0.0, redistribution))
        self._of("loading_wait_seconds", loader).inc(max(0.0, loading))

    def breaker(self, loader: str, *, open_: bool, changes: int) -> None:
        """The breaker's state, and how often it has changed since the last call."""
        loader = self._loaders.label(loader)
        self._of("breaker_open", loader).set(open_)
        self._of("breaker_changes", loader).inc(changes)

    def key_skew(self, table: str, ratio: float) -> None:
        """Keys per rank of a table's lookup, largest over mean; as `trainer_client.embedding.routing` reports it."""
        self._of("key_skew_ratio", self._tables.label(table)).set(ratio)
