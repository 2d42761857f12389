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
    "TokenCost", "TransformerCost", "cost_names", "make_cost", "register_cost",
]  # fmt: skip

CostFactory = Callable[..., Callable[[Any], Any]]
_OURS: dict[str, CostFactory] = {
    "hstu": HSTUCost, "learned": LearnedCost.of, "semantic_ids": SemanticIdCost, "tokens": TokenCost,
    "transformer": TransformerCost,
}  # fmt: skip
_COSTS: Plugins[CostFactory] = Plugins("cost", _OURS, group="evenkeel.costs")


def cost_names() -> tuple[str, ...]:
    """All names: this library's, registered ones, and those of installed packages."""
    return _COSTS.names


def register_cost(name: str, factory: CostFactory) -> None:
    """Makes a cost available under a name, as an entry point of a package in the group `evenkeel.costs` does.

    Args:
        name: The name.
        factory: From the options of a configuration to a callable from a batch to one number per sample.

    Raises:
        ValueError: If the name is taken by another factory.
    """
    _COSTS.register(name, factory)


def make_cost(name: str, **options: Any) -> Callable[[Any], Any]:
    """A cost by its name.

    Raises:
        ValueError: If there is no such cost, or it does not take these options.
    """
    try:
        return _COSTS.find(name)(**options)
    except TypeError as error:
        raise ValueError(f"options of the cost {name!r}: {error}") from error
