"""Predicted work of samples: what the balancer evens out; by their names for configuration files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evenkeel.plugins import Plugins
from trainer_client.balancing.costs.base import SampleCost
from trainer_client.balancing.costs.fitting import Fit, FitOptions
from trainer_client.balancing.costs.learned import LearnedCost, SequenceTerms, Terms
from trainer_client.balancing.costs.sequences import HSTUCost, SemanticIdCost, TokenCost, TransformerCost

__all__ = [
    "Fit", "FitOptions", "HSTUCost", "LearnedCost", "SampleCost", "SemanticIdCost", "SequenceTerms", "Terms",
    "TokenCost", "TransformerCost", "cost_names", "make_cost",
]  # fmt: skip

CostFactory = Callable[..., Callable[[Any], Any]]
_OURS: dict[str, CostFactory] = {
    "hstu": HSTUCost, "learned": LearnedCost.of, "semantic_ids": SemanticIdCost, "tokens": TokenCost,
    "transformer": TransformerCost,
}  # fmt: skip
_COSTS: Plugins[CostFactory] = Plugins("cost", _OURS, group="evenkeel.costs")


def cost_names() -> tuple[str, ...]:
    """All names: this library's, and those of installed packages (entry points in the group `evenkeel.costs`)."""
    return _COSTS.names


def make_cost(name: str, **options: Any) -> Callable[[Any], Any]:
    """A cost by its name.

    Raises:
        ValueError: If there is no such cost, or it does not take these options.
    """
    try:
        return _COSTS.find(name)(**options)
    except TypeError as error:
        raise ValueError(f"options of the cost {name!r}: {error}") from error
