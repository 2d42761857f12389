"""Prometheus metrics of the planner, in a registry of their own."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import evenkeel
from evenkeel.placement import Status
from services.operations.process import EventLoopLag, add_process_metrics
from services.planner.worker import Facts

_GAPS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3)
_BUCKETS = (0.00025, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 60.0)


class Metrics:
    """What the service counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        add_process_metrics(self.registry, service="planner", version=evenkeel.__version__)
        self.lag = EventLoopLag(self.registry, service="planner")
        self.requests = Counter(
            "evenkeel_planner_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "evenkeel_planner_request_duration_seconds",
            "Time from a request to its answer.",
            ["route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.plans = Counter("evenkeel_planner_plans", "Plans made, by status.", ["status"], registry=self.registry)
        self.solve_seconds = Histogram(
            "evenkeel_planner_solve_duration_seconds",
            "Time from the start of a search to its plan, waiting for a worker not included.",
            ["status"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.gap = Histogram(
            "evenkeel_planner_plan_gap_ratio",
            "Relative distance of a plan's time to the bound proved for it.",
            buckets=_GAPS,
            registry=self.registry,
        )
        self.infeasible = Counter(
            "evenkeel_planner_infeasible_plans",
            "Requests for which nothing fits, by the budget that is too small.",
            ["binding"],
            registry=self.registry,
        )
        # All series from the start: a rate over one that appears later misses its first increments.
        for status in Status:
            self.plans.labels(status.value)
            self.solve_seconds.labels(status.value)
        for binding in ("hbm", "host", "both"):
            self.infeasible.labels(binding)
        self.cancelled = Counter(
            "evenkeel_planner_cancelled", "Searches given up because the client went away.", registry=self.registry
        )
        self.tables = Histogram(
            "evenkeel_planner_tables",
            "Tables of a request.",
            buckets=(1, 10, 30, 100, 300, 1000, 3000),
            registry=self.registry,
        )
        self.running = Gauge("evenkeel_planner_running_requests", "Requests being solved.", registry=self.registry)
        self.waiting = Gauge(
            "evenkeel_planner_waiting_requests", "Requests that wait for a worker.", registry=self.registry
        )

    def answered(self, facts: Facts) -> None:
        """Counts what a worker answered."""
        if facts.tables is not None:
            self.tables.observe(facts.tables)
        if facts.plan_status is not None:
            self.plans.labels(facts.plan_status).inc()
            self.solve_seconds.labels(facts.plan_status).observe(facts.plan_seconds)
        if facts.gap is not None:
            self.gap.observe(facts.gap)
        if facts.binding is not None:
            self.infeasible.labels(facts.binding).inc()


class Measure:
    """Counts requests and their time by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 499

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            route = scope.get("route")
            name = getattr(route, "path", "other")
            self.metrics.requests.labels(name, str(status)).inc()
            self.metrics.seconds.labels(name).observe(time.perf_counter() - begin)
