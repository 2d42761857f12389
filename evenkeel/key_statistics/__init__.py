"""What caches of embedding tables will miss, from the keys of live batches. No torch.

`KeySampler` follows a sample of the keys over the steps, a `KeyTrace` is what it saw, `miss_curve` says what caches of
every size will miss. `trainer_client.planning.KeyStatistics` collects on the ranks of a job.
"""

from evenkeel.key_statistics.curves import MeasuredCurve, miss_curve
from evenkeel.key_statistics.files import dumps, loads, merge, with_statistics
from evenkeel.key_statistics.kernels import KERNELS, warm_up
from evenkeel.key_statistics.sampler import KeySampler
from evenkeel.key_statistics.trace import KeyTrace

__all__ = [
    "KERNELS",
    "KeySampler",
    "KeyTrace",
    "MeasuredCurve",
    "dumps",
    "loads",
    "merge",
    "miss_curve",
    "warm_up",
    "with_statistics",
]
