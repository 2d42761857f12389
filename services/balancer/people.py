"""What people see of a balancer: metrics, health, and the page with its JSON."""

from __future__ import annotations

from collections.abc import Callable

from services.balancer.access import Occupancy
from services.balancer.history import History
from services.balancer.metrics import Metrics
from services.balancer.settings import Settings
from services.balancer.site import BalancerSite
from services.balancer.summary import RoundSummary
from services.balancer.views import Views
from services.balancer.workers import WorkerPool
from services.operations.http import OperationsServer
from services.security.tokens import TokenStore
from services.security.transport import Transport


class People:
    """Observes the calls of a balancer.

    Attributes:
        metrics_port: The bound port of the metrics; None without.
    """

    def __init__(self, history: History, metrics: Metrics, server: OperationsServer | None) -> None:
        self._history, self._metrics, self._server = history, metrics, server
        self.metrics_port = None if server is None else server.port
        metrics.lag.start()

    def planned(self, summary: RoundSummary, seconds: float) -> None:
        """See `Observer`."""
        self._history.planned(summary, seconds)
        self._metrics.planned(summary.seconds, seconds)

    def failed(self, job: str, status: str, reason: str, seconds: float) -> None:  # noqa: ARG002
        """See `Observer`."""
        self._history.failed(job, status, reason)
        self._metrics.failed(status, reason)

    def close(self) -> None:
        """Stops serving."""
        self._metrics.lag.stop()
        if self._server is not None:
            self._server.close()


def open_people(
    settings: Settings,
    *,
    version: str,
    instance: int,
    draining: Callable[[], bool],
    tokens: TokenStore | None,
    transport: Transport,
    occupancy: Occupancy,
    pool: WorkerPool,
) -> People:
    """Serves metrics, health and the page, where the settings ask for them; needs a running event loop.

    Args:
        settings: Where to serve them.
        version: Of the software.
        instance: Drawn when the process starts.
        draining: Whether the balancer is shutting down, or has not started yet.
        tokens: Who may see which jobs; None: everybody all.
        transport: How the balancer may be reached, and with it the page.
        occupancy: Calls and bytes under way.
        pool: The workers.

    Raises:
        OSError: If the port cannot be had.
    """
    history = History()
    metrics = build_metrics(history, occupancy, pool, version)
    if settings.metrics_port is None:
        return People(history, metrics, None)
    views = Views(history, version=version, instance=instance, draining=draining)
    site = BalancerSite(views, transport=transport, tokens=tokens, refused=metrics.failed)
    server = OperationsServer(
        metrics.registry, settings.metrics_host, settings.metrics_port,
        ready=lambda: not draining() and pool.size > 0, site=site,
    )  # fmt: skip
    return People(history, metrics, server)


def build_metrics(history: History, occupancy: Occupancy, pool: WorkerPool, version: str = "") -> Metrics:
    """All metrics of a balancer."""
    metrics = Metrics(history, version=version)
    metrics.observe("calls", "Calls under way.", lambda: occupancy.num_calls)
    metrics.observe("waiting_calls", "Of those, calls that wait for a worker.", lambda: pool.waiting)
    metrics.observe("request_bytes", "Requests under way.", lambda: occupancy.num_bytes)
    metrics.observe(
        "worker_restarts_total", "Workers that have died or were killed, and replaced.", lambda: pool.restarts
    )
    return metrics
