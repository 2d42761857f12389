"""A round at the lead, as a list of stages: each capability is one line here, and one file or folder elsewhere.

What a plan takes into account beside them is listed in `evenkeel.partitioning.refinements`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.costs.learning import CostLearner
from trainer_client.balancing.decide import Rules
from trainer_client.balancing.kernels import Kernels
from trainer_client.balancing.lead import Lead, Planning, Stage, Templates
from trainer_client.balancing.learned_speeds import SpeedLearner
from trainer_client.balancing.options import StreamConfig
from trainer_client.balancing.report import Counters
from trainer_client.balancing.splitting import Splitting
from trainer_client.balancing.windows import WindowStates


def make_lead(
    config: StreamConfig,
    *,
    template: FlatBatch,
    nodes: Sequence[str],
    peers: Sequence[Sequence[int]] = (),
    counters: Counters | None = None,
    learns: Callable[[], LearnedCost | None] = lambda: None,
    waits: bool = False,
) -> Lead:
    """The lead of a stream of ranks on `nodes`; `peers` (ranks, peers) are the job's ranks, copies in a row.

    With `waits` no round is planned before the kernels are compiled.
    """
    name, options, num_ranks = config.loader, config.options, len(nodes)
    options.check_world(num_ranks)
    templates, plans = Templates(name, template), config.balance and num_ranks > 1
    waits |= options.memory_caps is not None  # where these are tight, the plain heuristic finds no plan
    kernels = Kernels(name, wait=waits) if plans else None
    stages: list[Stage | None] = [  # rounds finish from the last to the first: an answer comes before own planning
        Splitting(template) if options.split is not None else None,
        SpeedLearner(name, options, nodes) if options.learn_speeds and num_ranks > 1 else None,
        CostLearner(name, num_ranks, learns) if num_ranks > 1 else None,
        WindowStates(options.window, kernels),
        Planning(name, kernels),
        _asker(config, counters or Counters()) if plans and config.address is not None else None,
    ]
    rules = Rules(
        name=name, balance=config.balance, min_samples=options.min_samples, peers=peers, schema_lines=templates.lines
    )
    return Lead(
        rules, options.of_rounds, templates=templates, nodes=nodes, stages=[one for one in stages if one is not None]
    )


def _asker(config: StreamConfig, counters: Counters) -> Stage:
    from trainer_client.balancing.asking import Asker  # which needs grpcio

    asker = Asker(config, counters)
    if config.options.require_service:
        asker.require()
    return asker
