"""From a model to the planner and back: describe its tables, ask, and apply the plan to DynamicEmb or TorchRec.

`model` has the way in one call: `describe` the tables, look at batches (`statistics`) and at the `machine`, ask, let
`clock` have plans race. `applying` makes of a plan what the libraries take. `trial` trains tables and times them, for
`clock` and for `measuring`, which is for `evenkeel calibrate`. `collective` is what ranks do together. TorchRec and
DynamicEmb are imported when they are used.
"""

from evenkeel.key_statistics import with_statistics
from evenkeel.planner_client import PlannerClient, PlannerError
from trainer_client.planning.applying import (
    dynamicemb_constraints,
    fused_params,
    load_sharding_plan,
    parameter_constraints,
    sharding_plan,
)
from trainer_client.planning.describe import describe_configs, describe_model
from trainer_client.planning.model import PlannedModel, TorchRecPlanner, plan_model
from trainer_client.planning.statistics import KeyStatistics

__all__ = [
    "KeyStatistics",
    "PlannedModel",
    "PlannerClient",
    "PlannerError",
    "TorchRecPlanner",
    "describe_configs",
    "describe_model",
    "dynamicemb_constraints",
    "fused_params",
    "load_sharding_plan",
    "parameter_constraints",
    "plan_model",
    "sharding_plan",
    "with_statistics",
]
