"""What keeps ranks from the balancer and does not pass by itself: told once, by name, on rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer_client.balancing.groups import Groups

if TYPE_CHECKING:  # grpcio is needed only where a service is
    from trainer_client.balancing.service import Connection
    from trainer_client.balancing.service.causes import Cause

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
"""How long `BalanceOptions.require_service` waits for a service that may be starting too."""

_LOOK_SECONDS = 0.2


class ServiceRequiredError(RuntimeError):
    """`BalanceOptions.require_service` is set, and not every rank has come to the service."""


class Causes:
    """Tells the causes of all ranks, each once."""

    def __init__(self, name: str, groups: Groups, connection: Connection | None, fallback: str) -> None:
        """Knows of none yet.

        Args:
            name: Of the stream.
            groups: The ranks that speak to the service.
            connection: This rank's; None without a service.
            fallback: What the job does meanwhile.
        """
        self._name = name
        self._groups = groups
        self._connection = connection
        self._going_on = "balancing on the ranks" if fallback == "embedded" else "without balancing"
        self._known: Cause | None = None
        self._told: set[str] = set()

    @property
    def is_new(self) -> bool:
        """Whether this rank has a cause that it has not told yet."""
        cause = None if self._connection is None else self._connection.cause
        return cause is not None and cause != self._known

    def tell(self) -> None:
        """Rank 0 says what all ranks have. Collective."""
        self._known = None if self._connection is None else self._connection.cause
        causes = self._groups.gather_objects(self._known)
        if self._groups.rank == 0:
            for text in _by_cause(causes):
                if text not in self._told:
                    self._told.add(text)
                    logger.error("%s: waiting will not bring the balancer to %s; going on %s until it is mended",
                                 self._name, text, self._going_on)  # fmt: skip


def require_service(groups: Groups, connection: Connection) -> None:
    """Waits until the streams of all ranks are joined. Collective among the ranks that speak to the service.

    Raises:
        ServiceRequiredError: If one has a cause that does not pass, or time is up; on all ranks.
    """
    started = time.monotonic()
    while True:
        states = groups.gather_objects(
            (connection.ready, connection.cause, connection.trouble, time.monotonic() - started)
        )
        missing = [rank for rank, (ready, *_) in enumerate(states) if not ready]
        if not missing:
            return
        causes = [cause for _, cause, *_ in states]
        if any(causes):
            raise ServiceRequiredError(
                f"require_service is set, and the balancer does not serve {'; '.join(_by_cause(causes))}"
            )
        if states[0][3] > START_SECONDS:
            trouble = states[missing[0]][2] or "no answer"
            raise ServiceRequiredError(
                f"require_service is set, and {_ranks(missing)} did not come to the balancer within {START_SECONDS:g} "
                f"s: {trouble}; start it, or leave require_service out to go on without it"
            )
        time.sleep(_LOOK_SECONDS)


def _by_cause(causes: Sequence[Cause | None]) -> list[str]:
    """Each cause with the ranks that it holds up."""
    found: dict[str, list[int]] = {}
    for rank, cause in enumerate(causes):
        if cause is not None:
            found.setdefault(str(cause), []).append(rank)
    return [f"{_ranks(ranks)} ({text})" for text, ranks in found.items()]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
