"""The order of a data set as a function of seed and epoch: no memory, and no walk to get to a position in it."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

VERSION = 1  # of the order: the same seed and epoch give the same order in every release that has this version
MAX_SAMPLES = 2**62
_ROUNDS = 10  # as many as NIST SP 800-38G has in FF1
_LEAST = 4  # each half counts at least so far, since Feistel networks of tiny halves mix badly
_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _32 = np.uint64(30), np.uint64(27), np.uint64(32)


class SampleOrder:
    """A permutation of the samples 0 to n-1, of which any part can be asked for at any time.

    A generalised Feistel network with cycle walking: methods 2 and 3 of Black and Rogaway, Ciphers with Arbitrary
    Finite Domains (CT-RSA 2002). A position is split into two digits of about √n values; ten rounds add to each digit
    in turn a keyed function of the other one: the upper half of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014),
    brought to the digit's range. The few results beyond n-1 go through the network again, until they are below n. Keys
    are SHAKE-256 of seed and epoch.
    """

    def __init__(self, length: int, *, seed: int = 0, epoch: int = 0, shuffle: bool = True) -> None:
        """The order of one epoch.

        Args:
            length: Samples of the data set, up to 2**62.
            seed: Of all epochs.
            epoch: Each has an order of its own.
            shuffle: False: 0 to n-1 as they are, whatever the epoch.
        """
        self.length = length
        self._shuffle = shuffle and length > 1
        low = max(_LEAST, math.isqrt(max(length - 1, 0)) + 1)
        self._low, self._high = np.uint64(low), np.uint64(max(_LEAST, -(-length // low)))
        secret = hashlib.shake_256(f"evenkeel/order/{VERSION}/{seed}/{epoch}".encode()).digest(8 * _ROUNDS)
        self._keys = np.frombuffer(secret, "<u8").astype(np.uint64)

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at some positions of the order.

        Args:
            positions: (k,) numbers from 0 to n-1.

        Returns:
            (k,) indexes into the data set.
        """
        if not self._shuffle:
            return positions
        samples = self._mixed(positions.astype(np.uint64))
        while (beyond := np.flatnonzero(samples >= np.uint64(self.length))).size:
            samples[beyond] = self._mixed(samples[beyond])
        return samples.astype(np.int64)

    def _mixed(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """All rounds of the network."""
        second, first = np.divmod(values, self._low)
        for even, odd in self._keys.reshape(-1, 2):
            first = first + _drawn(second, even, self._low)
            first = np.minimum(first, first - self._low)  # modulo: below 0 it wraps to more
            second = second + _drawn(first, odd, self._high)
            second = np.minimum(second, second - self._high)
        return second * self._low + first


def _drawn(digits: NDArray[np.uint64], key: np.uint64, size: np.uint64) -> NDArray[np.uint64]:
    mixed = digits * _GOLDEN + key
    mixed = (mixed ^ (mixed >> _30)) * _FIRST
    mixed = (mixed ^ (mixed >> _27)) * _SECOND
    return ((mixed >> _32) * size) >> _32
