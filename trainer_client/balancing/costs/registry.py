"""Costs by name, for configuration files and flags."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from trainer_client.balancing.costs.hstu import HSTUCost
from trainer_client.balancing.costs.semantic_ids import SemanticIdCost
from trainer_client.balancing.costs.tokens import TokenCost
from trainer_client.balancing.costs.transformer import TransformerCost

CostFactory = Callable[..., Callable[[Any], Any]]
ENTRY_POINTS = "evenkeel.costs"

_factories: dict[str, CostFactory] = {
    "hstu": HSTUCost,
    "semantic_ids": SemanticIdCost,
    "tokens": TokenCost,
    "transformer": TransformerCost,
}


@lru_cache(maxsize=1)
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def cost_names() -> tuple[str, ...]:
    """All names: this library's, registered ones, and those of installed packages."""
    return tuple(sorted({*_factories, *_installed()}))


def register_cost(name: str, factory: CostFactory) -> None:
    """Makes a cost available under a name.

    An installed package does the same with an entry point in the group `evenkeel.costs`.

    Args:
        name: The name.
        factory: From the options of a configuration to a callable from a batch to one number per sample.

    Raises:
        ValueError: If the name is taken by another factory.
    """
    if name in cost_names() and _factories.get(name) is not factory:
        raise ValueError(f"a cost named {name!r} is registered already; choose another name")
    _factories[name] = factory


def make_cost(name: str, **options: Any) -> Callable[[Any], Any]:
    """A cost by its name.

    Args:
        name: One of `cost_names()`.
        options: What the cost takes.

    Raises:
        ValueError: If there is no such cost, or it does not take these options.
    """
    factory: CostFactory
    if name in _factories:
        factory = _factories[name]
    elif name in _installed():
        factory = _installed()[name].load()
    else:
        raise ValueError(f"there is no cost named {name!r}; choose one of {', '.join(cost_names())}")
    try:
        return factory(**options)
    except TypeError as error:
        raise ValueError(f"options of the cost {name!r}: {error}") from error
