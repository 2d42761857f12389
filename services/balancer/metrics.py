"""Prometheus metrics of the balancer; no label per round, sample or rank."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.balancer.decisions import Outcome, Reason
from services.balancer.effects import Decided, SessionId
from services.balancer.shares import Shares
from services.operations.http import OperationsServer, Site
from services.operations.process import EventLoopLag, add_process_metrics
from services.operations.tallies import Tallies

_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_EXCESS = (0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_OTHER = "other"


class Metrics:
    """What a balancer counts and measures.

    Attributes:
        registry: Where the metrics live; one of its own for each balancer.
    """

    def __init__(self, *, version: str = "", max_jobs: int = 200) -> None:
        """Registers the metrics.

        Args:
            version: The software's version.
            max_jobs: Jobs that get a label of their own. A caller gets as many as are left for others; its later jobs
                share the label `other`.
        """
        self.registry = CollectorRegistry()
        add_process_metrics(self.registry, service="balancer", version=version)
        self.lag = EventLoopLag(self.registry, service="balancer")
        self._labels = Shares(max_jobs)
        self._jobs: dict[str, _OfJob] = {}
        self._rounds = Counter(
            "evenkeel_balancer_rounds_total",
            "Rounds, by what the ranks did: followed a plan, or stayed as loaded or balanced by themselves, and why.",
            ("job", "outcome", "reason"),
            registry=self.registry,
        )
        self._by_ranks = Counter(
            "evenkeel_balancer_rounds_by_ranks_total",
            "Rounds without a plan that was followed, which the ranks have balanced by themselves.",
            ("job",),
            registry=self.registry,
        )
        self._wait = Tallies(
            "evenkeel_balancer_round_wait_seconds",
            "From the first rank's submission to a round, as its node's leader got it, to the decision.",
            ("job",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._partition = Tallies(
            "evenkeel_balancer_partition_seconds",
            "Time to compute a plan and cut it into slices.",
            (),
            buckets=_SECONDS,
            registry=self.registry,
        ).labels()
        self._excess = Tallies(
            "evenkeel_balancer_imbalance_excess_ratio",
            "Largest load over mean load, minus one: before and after balancing, and the lower bound.",
            ("job", "when"),
            buckets=_EXCESS,
            registry=self.registry,
        )
        self._samples = Counter(
            "evenkeel_balancer_samples_total", "Samples of balanced rounds.", ("job",), registry=self.registry
        )
        self._moved = Counter(
            "evenkeel_balancer_moved_samples_total",
            "Samples of balanced rounds that left their home.",
            ("job",),
            registry=self.registry,
        )
        self._split = Counter(
            "evenkeel_balancer_split_samples_total",
            "Samples of balanced rounds that were split over ranks.",
            ("job",),
            registry=self.registry,
        )
        self._late = Counter(
            "evenkeel_balancer_late_ranks_total",
            "Ranks that missed the deadline of a round.",
            ("job",),
            registry=self.registry,
        )
        self._ended = Counter(
            "evenkeel_balancer_quiet_streams_ended_total",
            "Streams ended because they were quiet while the process took more memory than it may.",
            registry=self.registry,
        )
        self._refused = Counter(
            "evenkeel_balancer_refused_calls_total",
            "Calls and streams refused, by reason: token, job or rate.",
            ("reason",),
            registry=self.registry,
        )
        for reason in ("token", "job", "rate"):
            self._refused.labels(reason)
        self._lost = Counter(
            "evenkeel_balancer_workers_lost_total",
            "Partition workers that have ended, by cause: died, stuck (killed), unwanted (killed past the deadline).",
            ("cause",),
            registry=self.registry,
        )
        for cause in ("died", "stuck", "unwanted"):
            self._lost.labels(cause)
        self._queue = Tallies(
            "evenkeel_balancer_queue_seconds",
            "From a complete round to a worker that begins with its plan.",
            (),
            buckets=_SECONDS,
            registry=self.registry,
        ).labels()
        self._unplanned = Counter(
            "evenkeel_balancer_refused_partitions_total",
            "Complete rounds that no worker began with, by reason: overloaded, queued, too_costly, quarantined.",
            ("reason",),
            registry=self.registry,
        )
        for reason in ("overloaded", "queued", "too_costly", "quarantined"):
            self._unplanned.labels(reason)
        self._cheaper = Counter(
            "evenkeel_balancer_cheaper_partitions_total",
            "Rounds that got the cheapest search, since their own would not have ended in time.",
            registry=self.registry,
        )

    def streams_ended(self, count: int) -> None:
        """Quiet streams were ended because the process took too much memory."""
        self._ended.inc(count)

    def refused(self, reason: str) -> None:
        """A call was refused: `token`, `job` or `rate`."""
        self._refused.labels(reason).inc()

    def observe(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Adds a gauge whose value is asked for at each scrape."""
        Gauge(name, help_text, registry=self.registry).set_function(read)

    def decided(self, event: Decided) -> None:
        """A round was decided, and the ranks followed the decision, as far as they tell."""
        of_job, decision = self._of_job(event.session.key.job, event.caller), event.decision
        of_job.rounds(decision.outcome, decision.reason).inc()
        of_job.wait.observe(event.waited)
        if decision.plan is None:
            of_job.late.inc(len(decision.missing_ranks))
            return
        figures = decision.plan.figures
        self._partition.observe(decision.plan.seconds)
        of_job.before.observe(figures.imbalance_before - 1)
        of_job.after.observe(figures.imbalance_after - 1)
        of_job.bound.observe(max(0.0, figures.imbalance_bound - 1))
        of_job.samples.inc(figures.samples)
        of_job.moved.inc(figures.moved_samples)
        if figures.split_samples:
            of_job.split.inc(figures.split_samples)

    def balanced_by_ranks(self, session: SessionId, caller: str, rounds: int) -> None:
        """Of rounds without a plan that was followed the ranks of a session have balanced so many by themselves."""
        self._of_job(session.key.job, caller).by_ranks.inc(rounds)

    def worker_lost(self, cause: str) -> None:
        """A worker has `died`, or was killed: `stuck`, `unwanted`."""
        self._lost.labels(cause).inc()

    def waited(self, seconds: float) -> None:
        """A complete round waited this long for a worker."""
        self._queue.observe(seconds)

    def refused_partition(self, reason: Reason) -> None:
        """A complete round gets no plan because of how it would have been computed."""
        self._unplanned.labels(reason.label).inc()

    def made_cheaper(self) -> None:
        """A round got the cheapest search."""
        self._cheaper.inc()

    def serve(
        self, host: str, port: int, *, ready: Callable[[], bool], site: Site | None = None
    ) -> tuple[int, Callable[[], None]]:
        """Serves `/metrics`, `/healthz`, `/readyz` and a site over HTTP; returns the bound port and how to stop."""
        server = OperationsServer(self.registry, host, port, ready=ready, site=site)
        return server.port, server.close

    def observe_shares(self, what: str, unit: str, shares: Shares) -> None:
        """Adds gauges of what callers share.

        Args:
            what: `memory`, `sessions`, …
            unit: Of it, for the names: `_bytes` or none.
            shares: The good.
        """
        prefix = f"evenkeel_balancer_{what}"
        self.observe(f"{prefix}_used{unit}", f"What callers hold: {what}.", lambda: shares.used)
        self.observe(f"{prefix}_limit{unit}", f"What there is: {what}.", lambda: shares.total)
        self.observe(
            f"{prefix}_largest_caller{unit}", f"What the greediest caller holds: {what}.", lambda: shares.largest
        )

    def _of_job(self, job: str, caller: str) -> _OfJob:
        of_job = self._jobs.get(job)
        if of_job is None:
            label = job
            if not self._labels.take((caller, "")):
                label, of_job = _OTHER, self._jobs.get(_OTHER)
            if of_job is None:
                of_job = self._jobs[label] = _OfJob(self, label)
        return of_job


class _OfJob:
    """The metrics of one job, each looked up by its label once: a round counts in eight of them."""

    def __init__(self, metrics: Metrics, job: str) -> None:
        self._job, self._rounds = job, metrics._rounds
        self._by_outcome: dict[tuple[Outcome, Reason], Counter] = {}
        self.wait = metrics._wait.labels(job)
        self.late = metrics._late.labels(job)
        self.before, self.after, self.bound = (
            metrics._excess.labels(job, when) for when in ("before", "after", "bound")
        )
        self.samples, self.moved = metrics._samples.labels(job), metrics._moved.labels(job)
        self.split, self.by_ranks = metrics._split.labels(job), metrics._by_ranks.labels(job)

    def rounds(self, outcome: Outcome, reason: Reason) -> Counter:
        """The count of rounds that ended so."""
        counter = self._by_outcome.get((outcome, reason))
        if counter is None:
            counter = self._rounds.labels(self._job, outcome.name.lower(), reason.label)
            self._by_outcome[outcome, reason] = counter
        return counter
