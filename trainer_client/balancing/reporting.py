"""From the votes and the plan of a round to its report."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenkeel.partitioning.api import evenness
from evenkeel.partitioning.rounds import Figures, RankPlan
from trainer_client.balancing.agreement import Verdict
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.report import RoundReport
from trainer_client.balancing.tickets import Ticket
from trainer_client.balancing.votes import Vote


def report_round(
    ticket: Ticket,
    votes: list[Vote],
    verdict: Verdict,
    *,
    plan: RankPlan,
    rank: int,
    options: BalanceOptions,
    wait_seconds: float,
) -> tuple[RoundReport, ...]:
    """The report of each batch of a round."""
    speeds = None if options.speeds is None else np.asarray(options.speeds, dtype=np.float64)
    reports = []
    for batch in range(max(1, *(vote.num_batches for vote in votes))):
        of_batch = [vote.of_batch(batch) for vote in votes]
        home_loads = np.array([vote.load for vote in of_batch], dtype=np.float64)
        own_size = int(ticket.samples.moving_sizes[ticket.samples.in_batch(batch)].sum())
        figures = plan.figures[batch] if plan.figures else _as_loaded(of_batch, home_loads, speeds, own_size)
        reports.append(
            RoundReport(
                round=ticket.round,
                batch=batch,
                mode=verdict.mode,
                reason=verdict.reason,
                ranks=verdict.ranks,
                home_loads=home_loads,
                own_load=plan.loads[batch] if plan.loads else float(home_loads[rank]),
                max_load=figures.max_load_after,
                imbalance_before=figures.imbalance_before,
                imbalance=figures.imbalance_after,
                lower_bound=figures.lower_bound,
                samples=figures.samples,
                own_samples=int(plan.slices[batch].source_counts.sum()),
                moved_samples=figures.moved_samples,
                size=figures.size,
                moved_size=figures.moved_size,
                wait_seconds=wait_seconds,
                partition_seconds=plan.seconds,
            )
        )
    return tuple(reports)


def _as_loaded(
    votes: list[Vote], loads: NDArray[np.float64], speeds: NDArray[np.float64] | None, own_size: int
) -> Figures:
    """Those of a batch that nobody has planned, as far as the votes tell; its size is that on this rank."""
    mean, (largest, even) = float(loads.mean()), evenness(loads, speeds)
    # The bound is that of free counts and equal speeds, which holds for every way of balancing.
    bound = max(mean, *(vote.heaviest for vote in votes)) if speeds is None else float("nan")
    return Figures(
        mean_load=mean, max_load_before=largest, max_load_after=largest, imbalance_before=even, imbalance_after=even,
        lower_bound=bound, samples=sum(vote.samples for vote in votes), moved_samples=0, size=own_size, moved_size=0,
        moved_size_between_nodes=0,
    )  # fmt: skip
