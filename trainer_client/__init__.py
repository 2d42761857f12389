"""The library on each training rank.

Around an existing loop:

    balancer = Balancer.connect("balancer:50051", job="train-42")
    for batch in BalancedLoader(loader, balancer, cost=HSTUCost(...), device=device): ...

The packages below hold the parts: balancing, batches, redistribution, costs, routing, checkpoints, measurement.
"""

from trainer_client.balancing import BalancedLoader, BalanceOptions, Balancer, RoundReport
from trainer_client.batches import BatchSpec, MaxLength, Padded
from trainer_client.costs import HSTUCost, TokenCost, TransformerCost

__all__ = [
    "BalanceOptions",
    "BalancedLoader",
    "Balancer",
    "BatchSpec",
    "HSTUCost",
    "MaxLength",
    "Padded",
    "RoundReport",
    "TokenCost",
    "TransformerCost",
]
