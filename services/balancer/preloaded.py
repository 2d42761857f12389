"""Imported by the process that workers are forked from: they begin with everything compiled."""

import services.balancer.planning  # noqa: F401
from evenkeel.partitioning import warm_up

warm_up()
