"""What a rank counts and measures; how many series there are does not depend on what runs through them."""

from __future__ import annotations

import math

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


class _Names:
    """Label values that come from the program; those beyond a bound share one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(name)
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
        self._job, self._rank = job, str(rank)
        self._loaders, self._tables = _Names(_MAX_LOADERS), _Names(_MAX_TABLES)
        self._info = self._gauge("info", "What runs on this rank; always 1.", "version")
        self._rounds = self._counter("rounds_total", "Batches by what all ranks did with them.", "loader", "mode",
                                     "reason")  # fmt: skip
        self._load = self._gauge(
            "load",
            "Predicted work of this rank's part of the last batch, in units of the cost; NaN: unknown.",
            "loader",
            "when",
        )
        self._mean_load = self._gauge(
            "mean_load",
            "Predicted work of a rank's part of the last batch, mean over all ranks; NaN: unknown.",
            "loader",
        )
        self._speed = self._gauge(
            "speed_ratio", "How fast this rank computes, relative to the median rank; 1 unless known to be slower.",
            "loader",
        )  # fmt: skip
        self._late = self._gauge(
            "late_ratio",
            "How much later this rank's batches come than the median rank's, in what that computes; 0 unless known.",
            "loader", "cause",
        )  # fmt: skip
        self._samples = self._counter("samples_total", "Samples that this rank trained.", "loader")
        self._excess = self._histogram(
            "imbalance_excess_ratio",
            "Largest load over mean load, minus one: before and after balancing, and the lower bound.",
            _EXCESS_BUCKETS, "loader", "when",
        )  # fmt: skip
        self._bytes = self._counter("batch_bytes_total", "Bytes of all ranks' samples, this rank's share.", "loader")
        self._moved = self._counter(
            "moved_bytes_total", "Bytes of the samples that changed rank, this rank's share.", "loader"
        )
        self._split = self._counter(
            "split_samples_total", "Samples that were split over ranks, this rank's share of all.", "loader"
        )
        self._step = self._histogram(
            "step_seconds",
            "Time from getting a batch to asking for the next; on a GPU, of its stream.",
            _STEP_BUCKETS,
            "loader",
        )
        self._exposed = self._counter(
            "exposed_wait_seconds_total",
            "Time that training waited for the next batch: loading, balancing, moving; on a GPU, as its stream did.",
            "loader",
        )  # fmt: skip
        self._agreement = self._counter(
            "agreement_wait_seconds_total", "Time that the training thread waited for the ranks' agreement.", "loader"
        )
        self._service = self._counter(
            "service_wait_seconds_total", "Time waited for the balancer behind training.", "loader"
        )
        self._partition = self._counter("partition_seconds_total", "Time of the partition searches.", "loader")
        self._redistribution = self._counter(
            "redistribution_seconds_total",
            "Time that the training thread spent in starting and ending moves.",
            "loader",
        )
        self._loading = self._counter(
            "loading_wait_seconds_total", "Time that the training thread waited for the wrapped loader.", "loader"
        )
        self._saved = self._counter(
            "saved_seconds_total",
            "Estimate of the time that balancing saved: step time x (largest load over speed before / after - 1).",
            "loader",
        )  # fmt: skip
        self._lost = self._counter(
            "lost_seconds_total",
            "Estimate of the time that ranks wait for the one with the largest load: step time x (1 - 1 / imbalance "
            "after), where loads are known; the balancer's page counts the same.",
            "loader",
        )  # fmt: skip
        self._breaker = self._gauge("breaker_open", "1 while rounds go on without asking the balancer.", "loader")
        self._breaker_changes = self._counter("breaker_changes_total", "Changes of the breaker.", "loader")
        self._skew = self._gauge(
            "key_skew_ratio", "Keys of the rank with the most over the mean, of a table's last lookup.", "table"
        )
        self._info.labels(self._job, self._rank, __version__).set(1)

    def batch(self, loader: str, report: RoundReport) -> None:
        """A balanced batch has come out of a loader."""
        loader = self._loaders.label(loader)
        ranks, mean = report.world_size, report.mean_load
        self._rounds.labels(self._job, self._rank, loader, report.mode.value, report.reason.value).inc()
        self._load.labels(self._job, self._rank, loader, "before").set(report.home_load)
        self._load.labels(self._job, self._rank, loader, "after").set(report.own_load)
        self._mean_load.labels(self._job, self._rank, loader).set(mean)
        own = int(self._rank)
        speed = next((slow.speed for slow in report.learned.stragglers if slow.rank == own), 1.0)
        self._speed.labels(self._job, self._rank, loader).set(speed)
        delays = {late.cause: late.share for late in report.learned.delays if late.rank == own}
        for cause in Cause:
            self._late.labels(self._job, self._rank, loader, cause.label).set(delays.get(cause, 0.0))
        self._samples.labels(self._job, self._rank, loader).inc(report.own_samples)
        bound = imbalance_of_bound(report.lower_bound, report.max_load, report.imbalance)
        for when, value in (("before", report.imbalance_before), ("after", report.imbalance), ("bound", bound)):
            if math.isfinite(value):
                self._excess.labels(self._job, self._rank, loader, when).observe(max(0.0, value - 1))
        self._bytes.labels(self._job, self._rank, loader).inc(report.size / ranks)
        self._moved.labels(self._job, self._rank, loader).inc(report.moved_size / ranks)
        self._split.labels(self._job, self._rank, loader).inc(report.split_samples / ranks)
        self._service.labels(self._job, self._rank, loader).inc(report.wait_seconds)
        self._partition.labels(self._job, self._rank, loader).inc(report.partition_seconds)

    def step(self, loader: str, report: RoundReport, seconds: float) -> None:
        """A batch has been trained on for so long."""
        loader = self._loaders.label(loader)
        self._step.labels(self._job, self._rank, loader).observe(seconds)
        if math.isfinite(report.imbalance) and report.imbalance >= 1:
            # Of loads, not of imbalances: where ranks differ in speed, each of these is over a mean of its own.
            gain = max(0.0, report.max_load_before / report.max_load - 1) if report.max_load else 0.0
            self._saved.labels(self._job, self._rank, loader).inc(seconds * gain)
            self._lost.labels(self._job, self._rank, loader).inc(seconds * (1 - 1 / report.imbalance))

    def waited(self, loader: str, seconds: float) -> None:
        """Training waited for its next batch; on a GPU, the device did."""
        self._exposed.labels(self._job, self._rank, self._loaders.label(loader)).inc(max(0.0, seconds))

    def parts(self, loader: str, *, agreement: float = 0.0, redistribution: float = 0.0, loading: float = 0.0) -> None:
        """The training thread waited for the agreement, for the end of a move, for the wrapped loader."""
        labels = self._job, self._rank, self._loaders.label(loader)
        self._agreement.labels(*labels).inc(max(0.0, agreement))
        self._redistribution.labels(*labels).inc(max(0.0, redistribution))
        self._loading.labels(*labels).inc(max(0.0, loading))

    def breaker(self, loader: str, *, open_: bool, changes: int) -> None:
        """The breaker's state, and how often it has changed since the last call."""
        labels = self._job, self._rank, self._loaders.label(loader)
        self._breaker.labels(*labels).set(open_)
        self._breaker_changes.labels(*labels).inc(changes)

    def key_skew(self, table: str, ratio: float) -> None:
        """Keys per rank of a table's lookup, largest over mean; as `trainer_client.embedding.routing` reports it."""
        self._skew.labels(self._job, self._rank, self._tables.label(table)).set(ratio)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"evenkeel_trainer_{name}", text, ("job", "rank", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"evenkeel_trainer_{name}", text, ("job", "rank", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(
            f"evenkeel_trainer_{name}", text, ("job", "rank", *labels), buckets=buckets, registry=self.registry
        )
