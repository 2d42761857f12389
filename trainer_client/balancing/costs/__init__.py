"""Predicted work of samples: what the balancer evens out."""

from trainer_client.balancing.costs.base import SampleCost
from trainer_client.balancing.costs.by_name import cost_names, make_cost, register_cost
from trainer_client.balancing.costs.hstu import HSTUCost
from trainer_client.balancing.costs.semantic_ids import SemanticIdCost
from trainer_client.balancing.costs.tokens import TokenCost
from trainer_client.balancing.costs.transformer import TransformerCost

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
