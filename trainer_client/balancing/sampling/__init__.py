"""Which samples each rank loads in a step: the order of a data set, global batches along it, and where they go on."""

from trainer_client.balancing.sampling.budgets import TokenBudgetSampler
from trainer_client.balancing.sampling.order import SampleOrder
from trainer_client.balancing.sampling.samplers import GlobalBatchSampler, OrderedBatchSampler

__all__ = ["GlobalBatchSampler", "OrderedBatchSampler", "SampleOrder", "TokenBudgetSampler"]
