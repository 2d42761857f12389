"""Prometheus metrics of the planner, in a registry of their own."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import evenkeel
from evenkeel.placement import PlanRequest, Status
from services.operations.process import EventLoopLag, add_process_metrics
from services.planner.answers import Answer, AnyRequest

_GAPS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3)
_TIMES = (0.00025, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 60.0)
_TABLES = (1, 10, 30, 100, 300, 1000, 3000)


class Metrics:
    """What the service counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        add_process_metrics(self.registry, service="planner", version=evenkeel.__version__)
        self.lag = EventLoopLag(self.registry, service="planner")
        count = partial(Counter, registry=self.registry)
        times = partial(Histogram, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        name = "evenkeel_planner_{}".format
        self.requests = count(name("requests"), "Requests answered.", ["route", "status"])
        text = "Time from a request to its answer."
        self.seconds = times(name("request_duration_seconds"), text, ["route"], buckets=_TIMES)
        self.plans = count(name("plans"), "Plans made, by status.", ["status"])
        text = "Time from the start of a search to its plan, waiting for a worker not included."
        self.solve_seconds = times(name("solve_duration_seconds"), text, ["status"], buckets=_TIMES)
        text = "Relative distance of a plan's time to the bound proved for it."
        self.gap = times(name("plan_gap_ratio"), text, buckets=_GAPS)
        text = "Requests for which nothing fits, by the budget that is too small."
        self.infeasible = count(name("infeasible_plans"), text, ["binding"])
        self.cancelled = count(name("cancelled"), "Searches given up because the client went away.")
        self.tables = times(name("tables"), "Tables of a request.", buckets=_TABLES)
        self.running = gauge(name("running_requests"), "Requests being solved.")
        self.waiting = gauge(name("waiting_requests"), "Requests that wait for a worker.")
        # All series from the start: a rate over one that appears later misses its first increments.
        for status in Status:
            self.plans.labels(status.value)
            self.solve_seconds.labels(status.value)
        for binding in ("hbm", "host", "both"):
            self.infeasible.labels(binding)

    def answered(self, request: AnyRequest, answer: Answer) -> None:
        """Counts an answer."""
        if isinstance(request, PlanRequest):
            self.tables.observe(len(request.tables))
        if (plan := answer.plan) is None:
            return
        self.plans.labels(plan.status.value).inc()
        self.solve_seconds.labels(plan.status.value).observe(answer.plan_seconds)
        if plan.gap is not None:
            self.gap.observe(plan.gap)
        if plan.shortage is not None:
            self.infeasible.labels(plan.shortage.binding).inc()
