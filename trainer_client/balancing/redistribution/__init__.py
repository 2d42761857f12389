"""Moving samples between ranks: one All2All a batch, however many fields it has."""

from trainer_client.balancing.redistribution.copying import load_on_device, warm_up
from trainer_client.balancing.redistribution.exchange import Pending, redistribute, start

__all__ = [
    "Pending",
    "load_on_device",
    "redistribute",
    "start",
    "warm_up",
]
