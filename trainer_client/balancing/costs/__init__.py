"""Predicted work of samples: what the balancer evens out."""

from trainer_client.balancing.costs.base import SampleCost, TokenCost
from trainer_client.balancing.costs.by_name import cost_names, make_cost, register_cost
from trainer_client.balancing.costs.hstu import HSTUCost
from trainer_client.balancing.costs.transformer import SemanticIdCost, TransformerCost

__all__ = [
    "HSTUCost",
    "SampleCost",
    "SemanticIdCost",
    "TokenCost",
    "TransformerCost",
    "cost_names",
    "make_cost",
    "register_cost",
]
