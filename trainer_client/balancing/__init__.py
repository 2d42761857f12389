"""Balancing the batches of a group of ranks: options, agreement, fallbacks and the loader on top."""

from evenkeel.partitioning.splits import SplitOptions
from trainer_client.balancing.balancer import Balancer
from trainer_client.balancing.errors import (
    PeersDifferError,
    ProgramOrderError,
    SchemaMismatchError,
    ServiceRequiredError,
)
from trainer_client.balancing.loader import BalancedLoader
from trainer_client.balancing.options import BalanceOptions
from trainer_client.balancing.report import Counters, Mode, Reason, RoundReport
from trainer_client.balancing.rounds import Ticket
from trainer_client.balancing.stream import BatchStream

__all__ = [
    "BalanceOptions",
    "BalancedLoader",
    "Balancer",
    "BatchStream",
    "Counters",
    "Mode",
    "PeersDifferError",
    "ProgramOrderError",
    "Reason",
    "RoundReport",
    "SchemaMismatchError",
    "ServiceRequiredError",
    "SplitOptions",
    "Ticket",
]
