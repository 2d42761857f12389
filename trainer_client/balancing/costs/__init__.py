"""Predicted work of samples: what the balancer evens out."""

from trainer_client.balancing.costs.base import SampleCost, TokenCost
from trainer_client.balancing.costs.by_name import cost_names, make_cost, register_cost
from trainer_client.balancing.costs.fits import Fit, FitOptions
from trainer_client.balancing.costs.hstu import HSTUCost
from trainer_client.balancing.costs.learned import LearnedCost
from trainer_client.balancing.costs.terms import SequenceTerms, Terms
from trainer_client.balancing.costs.transformer import SemanticIdCost, TransformerCost

__all__ = [
    "Fit",
    "FitOptions",
    "HSTUCost",
    "LearnedCost",
    "SampleCost",
    "SemanticIdCost",
    "SequenceTerms",
    "Terms",
    "TokenCost",
    "TransformerCost",
    "cost_names",
    "make_cost",
    "register_cost",
]
