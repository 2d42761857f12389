"""The library on each training rank.

Around an existing loop:

    balancer = Balancer.connect("balancer:50051", job="train-42")
    for batch in BalancedLoader(loader, balancer, cost=HSTUCost(...), device=device): ...

What that takes is named here. The wings, each of which works without the others:

- `trainer_client.balancing`: batches, costs, the agreement of the ranks, moving samples.
- `trainer_client.embedding`: routing of keys to their owners, tables, checkpoints.
- `trainer_client.planning`: from a model to the planner and back.
- `trainer_client.observing`: what watches the others: times of steps, metrics of ranks.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_client.balancing import BalancedLoader, BalanceOptions, Balancer, RoundReport, SplitOptions
    from trainer_client.balancing.batches import BatchSpec, MaxLength, Padded
    from trainer_client.balancing.costs import HSTUCost, SemanticIdCost, TokenCost, TransformerCost
    from trainer_client.balancing.sampling import GlobalBatchSampler, TokenBudgetSampler

__all__ = [
    "BalanceOptions",
    "BalancedLoader",
    "Balancer",
    "BatchSpec",
    "GlobalBatchSampler",
    "HSTUCost",
    "MaxLength",
    "Padded",
    "RoundReport",
    "SemanticIdCost",
    "SplitOptions",
    "TokenBudgetSampler",
    "TokenCost",
    "TransformerCost",
]

_ROOMS = (
    "trainer_client.balancing",
    "trainer_client.balancing.batches",
    "trainer_client.balancing.costs",
    "trainer_client.balancing.sampling",
)


def __getattr__(name: str) -> Any:
    # Whoever imports one wing does not wait for what another one imports.
    if name in __all__:
        for room in map(importlib.import_module, _ROOMS):
            if hasattr(room, name):
                return getattr(room, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
