"""From a model to the planner and back: describe its tables, ask, and apply the plan to DynamicEmb or TorchRec.

TorchRec and DynamicEmb are imported when they are used.
"""

from evenkeel.planner_client import PlannerClient, PlannerError
from trainer_client.planning.describe import describe_configs, describe_model
from trainer_client.planning.dynamicemb import dynamicemb_constraints
from trainer_client.planning.histograms import KeyHistogram
from trainer_client.planning.proposer import ExactProposer
from trainer_client.planning.torchrec import miss_curve, parameter_constraints, sharding_plan

__all__ = [
    "ExactProposer",
    "KeyHistogram",
    "PlannerClient",
    "PlannerError",
    "describe_configs",
    "describe_model",
    "dynamicemb_constraints",
    "miss_curve",
    "parameter_constraints",
    "sharding_plan",
]
