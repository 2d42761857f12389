"""Where each embedding table should live: storage, hit rates, kernel times, one search. No I/O, no torch."""

from evenkeel.placement.access import Eviction, Histogram, MissCurve, Zipf
from evenkeel.placement.fields import InvalidInputError
from evenkeel.placement.hardware import HardwareProfile, RuntimeCosts, builtin_profile, builtin_profiles
from evenkeel.placement.model import DataType, Mode, Optimizer, Runtime, Sharding, Step, Table, Topology
from evenkeel.placement.plan import Placement, Plan, Status, TrivialPlan
from evenkeel.placement.planner import plan
from evenkeel.placement.request import PlanRequest, SolverOptions, parse_topology
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
