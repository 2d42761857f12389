"""A round at the lead, as a list of stages: each capability is one line here, and one file or folder elsewhere.

What a plan takes into account beside them are stages of `evenkeel.partitioning.stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.costs.learning import CostLearner
from trainer_client.balancing.decide import Rules
from trainer_client.balancing.kernels import Kernels
from trainer_client.balancing.lead import Lead, Stage
from trainer_client.balancing.learned_speeds import SpeedLearner
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.planning import Planning
from trainer_client.balancing.schemas import Templates
from trainer_client.balancing.splitting import Splitting
from trainer_client.balancing.windows import WindowStates

if TYPE_CHECKING:  # which needs grpcio
    from trainer_client.balancing.asking import Asker


def make_lead(
    name: str,
    options: BalanceOptions,
    *,
    balance: bool,
    template: FlatBatch,
    nodes: Sequence[str],
    peers: NDArray[np.int64] | None = None,
    asker: Asker | None = None,
    kernels: Kernels | None = None,
    learns: Callable[[], LearnedCost | None] = lambda: None,
) -> Lead:
    """The lead of a stream of ranks on `nodes`; `peers` (ranks, peers) are the job's ranks, copies in a row.

    Without an `asker` there is no service; without `kernels` nothing is planned, or they are there.
    """
    templates = Templates(name, template)
    stages: list[Stage | None] = [
        Splitting(template) if options.split is not None else None,
        SpeedLearner.of(name, options, nodes),
        CostLearner(name, len(nodes), learns) if len(nodes) > 1 else None,
        WindowStates(options.window, kernels),
        Planning(name, kernels, min_samples=options.min_samples),
        asker,
    ]
    rules = Rules(
        name=name, balance=balance, min_samples=options.min_samples, peers=peers, schema_lines=templates.lines
    )
    return Lead(
        rules, options.of_rounds, templates=templates, nodes=nodes, stages=[one for one in stages if one is not None]
    )
