"""What a stream says to people, on which rank and how loudly; what keeps it from the balancer, how batches differ."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NoReturn

from trainer_client.balancing.agreement import SchemaMismatchError, Verdict
from trainer_client.balancing.batches.shared import Said
from trainer_client.balancing.batches.structure import remedy
from trainer_client.balancing.breaker import Breaker
from trainer_client.balancing.groups import Groups
from trainer_client.balancing.options import BalanceOptions

if TYPE_CHECKING:  # grpcio is needed only where a service is
    from trainer_client.balancing.service import Connection
    from trainer_client.balancing.service.outages import Cause

logger = logging.getLogger(__name__)


def tell_end(name: str, verdict: Verdict, taken: int, *, rank: int, again: bool) -> None:
    """Says that a loop has ended because another rank has left its own.

    Time limits end evaluations so every time: a warning on one rank, once, is enough for those who wonder.

    Args:
        name: The loader's name.
        verdict: By which the pass has ended.
        taken: Batches that this rank's loop has got.
        rank: This rank.
        again: It has said so before.
    """
    first = next((other for other in range(rank) if other not in verdict.ranks), rank)
    logger.log(
        logging.INFO if again or rank != first else logging.WARNING,
        "%s: rank %d has left its loop after %d batches, which ends the loops of all ranks, this one after %d; batches "
        "loaded ahead are dropped", name, verdict.ranks[0], verdict.taken, taken,
    )  # fmt: skip


def tell_unreadable(name: str, error: Exception) -> None:
    """Says that this rank's first batch cannot be read, before the error is raised: the others are waited for first."""
    logger.error(
        "%s: this rank's first batch cannot be read (%s: %s); the loops of all ranks end", name, type(error).__name__,
        error,
    )  # fmt: skip


@cache
def warn_of_unasked_splits(name: str) -> None:
    """Once a process for each loader: a loop that does not ask for them trains every step so."""
    logger.warning(
        "%s: some samples of a batch lay on several ranks (BalanceOptions.split), but the loop went on to the next one "
        "without having asked for its splits: a model that takes pieces for whole samples computes other losses and "
        "gradients; give it PieceGroup.pieces(loader.splits), or leave split out, as for evaluation by a balancer of "
        "its own (docs/pieces.md)", name,
    )  # fmt: skip


def tell_dropped(name: str, round_number: int, verdict: Verdict, *, rank: int, world_size: int) -> None:
    """Says that `drop_last` has dropped a global batch: rank 0 says when that ends the loops."""
    logger.log(
        logging.INFO if verdict.ends and rank == 0 else logging.DEBUG,
        "%s: round %d has a global batch with too few samples for %d ranks, which drop_last drops%s", name,
        round_number, world_size, "; the loops of all ranks end" if verdict.ends else "",
    )  # fmt: skip


def tell_breaker(
    name: str,
    round_number: int,
    verdict: Verdict,
    breaker: Breaker,
    options: BalanceOptions,
    *,
    rank: int,
    missed: bool,
    trouble: str,
    lasting: bool = False,
) -> None:
    """Says that the breaker has opened or closed: rank 0 for all; the first rank that missed the answer knows why.

    Args:
        name: The loader's name.
        round_number: After whose agreement it did.
        verdict: What the ranks do in the round.
        breaker: As it is now.
        options: Rank 0's options.
        rank: This rank.
        missed: Whether this rank missed the answer.
        trouble: What it knows of its connection.
        lasting: It has a cause that does not pass, which was told as an error.
    """
    first_missing = missed and verdict.ranks[:1] == (rank,)
    level = logging.WARNING if rank == 0 or first_missing else logging.INFO
    if breaker.closed:
        logger.log(level, "%s: the balancer is back; asking it again from round %d on",
                   name, round_number + options.depth)  # fmt: skip
        return
    about = f" (ranks {', '.join(map(str, verdict.ranks[:8]))})" if verdict.ranks else ""
    logger.log(
        level, "%s: no common decision of the balancer for round %d, %s%s%s; going on %s until %s",
        name, round_number, verdict.reason.value, about, f": {trouble}" if missed and trouble else "",
        "balancing on the ranks" if options.fallback == "embedded" else "without balancing",
        "that is mended" if lasting else "it is back",
    )  # fmt: skip


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
            name: The stream's name.
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


NAMES = "give loaders of different batches different names (BalancedLoader(name=…))"


def raise_mismatch(schemas: Sequence[tuple[str, ...] | None]) -> NoReturn:
    """Raises the error that shows how the first two differing ranks differ.

    Args:
        schemas: One readable line per field, by rank; None for a rank that has seen no batch.

    Raises:
        SchemaMismatchError: If it is called; it does nothing else.
    """
    known = [(rank, lines) for rank, lines in enumerate(schemas) if lines is not None]
    first_rank, first = known[0]
    for rank, lines in known[1:]:
        if lines != first:
            only_first = [line for line in first if line not in lines]
            only_other = [line for line in lines if line not in first]
            here, there = "; ".join(only_first), "; ".join(only_other)
            if here and there:
                both = f"rank {first_rank} has {here}, rank {rank} has {there}"
            elif here:
                both = f"rank {first_rank} has {here}, which rank {rank} lacks"
            elif there:
                both = f"rank {rank} has {there}, which rank {first_rank} lacks"
            else:
                both = f"ranks {first_rank} and {rank} have the same fields in another order"
            raise SchemaMismatchError(
                f"batches differ between ranks: {both}; {remedy(only_first, only_other)}; {NAMES}"
            )
    raise SchemaMismatchError(
        f"batches changed their fields or dtypes between rounds, and not on all ranks alike; {NAMES}"
    )


def raise_shared_differ(said: Sequence[Said]) -> NoReturn:
    """Raises the error that shows the first shared value in which two ranks differ.

    Args:
        said: What each rank's shared values are, by rank; () for one without samples.

    Raises:
        SchemaMismatchError: If it is called; it does nothing else.
    """
    known = [(rank, dict(one)) for rank, one in enumerate(said) if one]
    first_rank, first = known[0]
    for rank, one in known[1:]:
        for path, value in first.items():
            if one.get(path) != value:
                raise SchemaMismatchError(
                    f"shared values differ between ranks: {path!r} is {value} on rank {first_rank}, {one.get(path)} on "
                    f"rank {rank}; samples of all ranks are trained with it: give all ranks the same value, or declare "
                    "it in derived, with the function that gives it, if it follows from the samples or is each rank's "
                    "own"
                )
    raise SchemaMismatchError(f"shared values differ between ranks; {NAMES}")
