"""What caches of embedding tables missed, and how popular keys are, from the keys of live batches. No torch.

`KeySampler` follows a sample of the keys over the steps, a `KeyTrace` is what it saw, `miss_curve` says what caches
of every size would have missed.
`trainer_client.planning.KeyStatistics` collects on the ranks of a job.
"""

from evenkeel.key_statistics.curves import MeasuredCurve, miss_curve
from evenkeel.key_statistics.files import dumps, loads, with_statistics
from evenkeel.key_statistics.trace import KeySampler, KeyTrace, heavy_hitters, merge

__all__ = [
    "KeySampler",
    "KeyTrace",
    "MeasuredCurve",
    "dumps",
    "heavy_hitters",
    "loads",
    "merge",
    "miss_curve",
    "with_statistics",
]
