"""Moving samples between ranks: one All2All a batch, however many fields it has."""

from trainer_client.balancing.redistribution.copying import KERNELS, load_on_device, warm_up
from trainer_client.balancing.redistribution.pending import Pending
from trainer_client.balancing.redistribution.reference import gather_samples, redistribute_reference, select_samples
from trainer_client.balancing.redistribution.start import Method, redistribute, start

__all__ = [
    "KERNELS",
    "Method",
    "Pending",
    "gather_samples",
    "load_on_device",
    "redistribute",
    "redistribute_reference",
    "select_samples",
    "start",
    "warm_up",
]
