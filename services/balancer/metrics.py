"""Prometheus metrics of the balancer; no label per round, sample or rank."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from evenkeel.partitioning.delays import Cause
from services.balancer.history import OTHER, History, Totals
from services.operations.process import EventLoopLag, add_process_metrics

COMPUTING = "computing"
"""Cause of a rank that computes slowly, beside those of `Cause`."""

_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_FAILURES = (
    ("CANCELLED", "deadline"), ("DEADLINE_EXCEEDED", "worker"), ("FAILED_PRECONDITION", "infeasible"),
    ("INTERNAL", "internal"), ("INVALID_ARGUMENT", "request"), ("PERMISSION_DENIED", "job"),
    ("RESOURCE_EXHAUSTED", "limit"), ("UNAUTHENTICATED", "token"), ("UNAVAILABLE", "worker"),
)  # fmt: skip
_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("rounds", "Rounds planned.", lambda totals: totals.rounds),
    ("samples", "Samples of planned rounds.", lambda totals: totals.samples),
    ("batch_bytes", "Bytes of the samples of planned rounds.", lambda totals: totals.size),
    ("moved_bytes", "Bytes of the samples that change rank.", lambda totals: totals.moved_size),
    (
        "rounds_by_lead",
        "Rounds that the lead planned by itself, as it said with its next request.",
        lambda totals: totals.by_lead,
    ),
    (
        "saved_gpu_seconds",
        "Estimate of the time that balancing saved, summed over ranks; only of jobs that measure their steps.",
        lambda totals: totals.saved_gpu_seconds,
    ),
)


class Metrics:
    """What a balancer counts and measures.

    Attributes:
        registry: Where the metrics live; one of its own for each balancer.
        lag: How late the event loop is.
    """

    def __init__(self, history: History, *, version: str = "") -> None:
        """Registers the metrics.

        Args:
            history: What is known of jobs.
            version: The software's version.
        """
        self.registry = CollectorRegistry()
        add_process_metrics(self.registry, service="balancer", version=version)
        self.lag = EventLoopLag(self.registry, service="balancer")
        self._round_seconds = Histogram(
            "evenkeel_balancer_round_seconds",
            "From a call's begin to its plan.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._search_seconds = Histogram(
            "evenkeel_balancer_search_seconds",
            "Of that, the search in a worker.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._failed = Counter(
            "evenkeel_balancer_failed_calls_total",
            "Calls without a plan, by gRPC status and reason; their leads planned by themselves.",
            ("status", "reason"),
            registry=self.registry,
        )
        for status, reason in _FAILURES:  # from 0 on: of a counter that begins with its first failure that has no rate
            self._failed.labels(status, reason)
        self.registry.register(_JobsCollector(history))

    def planned(self, search_seconds: float, seconds: float) -> None:
        """A round was planned."""
        self._search_seconds.observe(search_seconds)
        self._round_seconds.observe(seconds)

    def failed(self, status: str, reason: str) -> None:
        """A call failed."""
        self._failed.labels(status, reason).inc()

    def observe(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Adds a gauge, or a counter where the name says so, whose value is asked for at each scrape."""
        if name.endswith("_total"):
            self.registry.register(_ReadCounter(f"evenkeel_balancer_{name}", text, read))
        else:
            Gauge(f"evenkeel_balancer_{name}", text, registry=self.registry).set_function(read)


class _ReadCounter(Collector):
    """A counter that somebody else counts."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, self._read())


class _JobsCollector(Collector):
    """Reads the history at each scrape: a round adds to plain numbers only."""

    def __init__(self, history: History) -> None:
        self._history = history

    def collect(self) -> Iterator[Metric]:
        totals = list(self._history.totals.items())
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"evenkeel_balancer_{name}", text, labels=("job",))
            for job, counted in totals:
                counter.add_metric((job,), read(counted))
            yield counter
        imbalance = SummaryMetricFamily(
            "evenkeel_balancer_imbalance_ratio",
            "Largest load over mean load, summed over the rounds: as loaded, as planned, and at the lower bound.",
            labels=("job", "when"),
        )
        for job, counted in totals:
            for when in ("before", "after", "bound"):
                imbalance.add_metric((job, when), counted.rounds, getattr(counted, when))
        yield imbalance
        streams = [stream for stream in self._history.streams if stream.state(self._history.now) != "left"]
        yield GaugeMetricFamily(
            "evenkeel_balancer_jobs", "Jobs that have asked for a plan within ten minutes.",
            len({stream.name.job for stream in streams}),
        )  # fmt: skip
        slow: Counts[tuple[str, str]] = Counts()
        for stream in streams:
            job = stream.name.job if stream.name.job in self._history.totals else OTHER
            slow[job, COMPUTING] += len(stream.latest.facts.stragglers)
            for cause in Cause:
                slow[job, cause.label] += sum(one.cause is cause for one in stream.latest.facts.delays)
        ranks = GaugeMetricFamily(
            "evenkeel_balancer_slow_ranks",
            "Ranks known to compute more slowly than their job's median, or to get their batches later, by cause.",
            labels=("job", "cause"),
        )
        for labels, count in slow.items():
            ranks.add_metric(labels, count)
        yield ranks
