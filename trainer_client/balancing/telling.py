"""What a stream says to people, on which rank and how loudly."""

from __future__ import annotations

import logging

from trainer_client.balancing.agreement import Verdict
from trainer_client.balancing.breaker import Breaker
from trainer_client.balancing.options import BalanceOptions

logger = logging.getLogger(__name__)


def tell_end(name: str, verdict: Verdict, taken: int, *, rank: int, again: bool) -> None:
    """Says that a loop has ended because another rank has left its own.

    Time limits end evaluations so every time: a warning on one rank, once, is enough for those who wonder.

    Args:
        name: Of the loader.
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


def tell_dropped(name: str, round_number: int, verdict: Verdict, *, rank: int, num_ranks: int) -> None:
    """Says that `drop_last` has dropped a global batch: rank 0 says when that ends the loops."""
    logger.log(
        logging.INFO if verdict.ends and rank == 0 else logging.DEBUG,
        "%s: round %d has a global batch with too few samples for %d ranks, which drop_last drops%s", name,
        round_number, num_ranks, "; the loops of all ranks end" if verdict.ends else "",
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
        name: Of the loader.
        round_number: After whose agreement it did.
        verdict: Of the round.
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
