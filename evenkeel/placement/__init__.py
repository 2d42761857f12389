"""Where each embedding table should live. No I/O, no torch.

- What is asked: `request` (tables, machines, step), `access` (how often keys are looked up), `hardware` (profiles);
  `fields` checks all of them.
- What a table costs: `layouts`, `storage` (bytes), `options` (seconds, and all placements of a table).
- The search: `problem` (all options in arrays), `search` (average rank), `placing` (ranks), `trivial`, `planner`.
- The answer: `plan`, `shortage` (why nothing fits), `what_if`; in other forms: `report`,
  `plan_text`, `plan_file`, `application`.
- What is measured: `calibration` (profiles), `whole_step`; `hot_rows` beside a plan.
"""

from evenkeel.placement.access import Eviction, Histogram, MissCurve, Zipf
from evenkeel.placement.fields import InvalidInputError
from evenkeel.placement.hardware import HardwareProfile, Runtime, RuntimeCosts, builtin_profile, builtin_profiles
from evenkeel.placement.plan import Placement, Plan, Status, TrivialPlan
from evenkeel.placement.planner import plan
from evenkeel.placement.request import (
    DataType,
    Mode,
    Optimizer,
    PlanRequest,
    Sharding,
    SolverOptions,
    Step,
    Table,
    Topology,
    parse_topology,
)
from evenkeel.placement.what_if import WhatIf, what_if
from evenkeel.placement.whole_step import whole_step_seconds

__all__ = [
    "DataType",
    "Eviction",
    "HardwareProfile",
    "Histogram",
    "InvalidInputError",
    "MissCurve",
    "Mode",
    "Optimizer",
    "Placement",
    "Plan",
    "PlanRequest",
    "Runtime",
    "RuntimeCosts",
    "Sharding",
    "SolverOptions",
    "Status",
    "Step",
    "Table",
    "Topology",
    "TrivialPlan",
    "WhatIf",
    "Zipf",
    "builtin_profile",
    "builtin_profiles",
    "parse_topology",
    "plan",
    "what_if",
    "whole_step_seconds",
]
