"""The ways of choosing the rank that owns an embedding key.

With `W` ranks, key `k` read as an unsigned 64-bit number (int32 keys are sign-extended, so a key has one owner
whatever the dtype that carries it) and `blk` the feature's block size, `ceil(rows / W)`:

================= ======================================= ==================================
routing           owner                                   index sent to the owner
================= ======================================= ==================================
`continuous`      `k // blk` if `k < blk * W` else `k % W`  `k % blk` in range, else `k // W`
`roundrobin`      `k % W`                                 `k`
`hash_roundrobin` `fmix64(k ^ fmix64(seed)) % W`          `k`
================= ======================================= ==================================

`fmix64` is the finaliser of MurmurHash3's 64-bit variant (Austin Appleby, public domain). `fmix64(0)` is 0, so
seed 0 is the plain hash.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer_client.checks import is_whole

MAX_RANKS = 4096
"""Ranks at most."""
DistType = Literal["continuous", "roundrobin", "hash_roundrobin"]
"""Name of a rule that says which rank owns a key."""
DIST_TYPES: tuple[DistType, ...] = ("continuous", "roundrobin", "hash_roundrobin")
"""All of them."""
HASH_IDENTITY = "murmur3_fmix64_xor_seed"

_MASK = (1 << 64) - 1
_HIGH = _MASK >> 33  # what a shift by 33 leaves of a number without a sign


def fmix64(key: int) -> int:
    """MurmurHash3's 64-bit finaliser of `key` modulo 2**64."""
    key &= _MASK
    key ^= key >> 33
    key = key * 0xFF51AFD7ED558CCD & _MASK
    key ^= key >> 33
    key = key * 0xC4CEB9FE1A85EC53 & _MASK
    return key ^ key >> 33


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How one table's keys are spread over ranks.

    Attributes:
        dist_type: One of `DIST_TYPES`.
        seed: Seed of the hash, 0 <= seed < 2**64. A non-zero seed makes the owner independent of a hash table behind
            it that uses the same hash. Only `hash_roundrobin` has one.

    Raises:
        ValueError: If `dist_type` is unknown, the seed is out of range, or given without a hash.
    """

    dist_type: DistType = "roundrobin"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dist_type not in DIST_TYPES:
            raise ValueError(f"dist_type is {self.dist_type!r}; choose one of {', '.join(DIST_TYPES)}")
        if not (is_whole(self.seed) and 0 <= self.seed <= _MASK):
            raise ValueError(f"seed is {self.seed!r}; give a whole number from 0 to 2**64 - 1")
        if self.seed and self.dist_type != "hash_roundrobin":
            raise ValueError(f"seed is {self.seed}, but {self.dist_type} has no hash; leave the seed at 0")

    def __str__(self) -> str:
        return f"hash_roundrobin(seed={self.seed})" if self.seed else self.dist_type

    @property
    def code(self) -> int:
        """Its number, a `mode` to the kernels: 0 continuous, 1 roundrobin, 2 hash_roundrobin."""
        return DIST_TYPES.index(self.dist_type)

    @property
    def mix(self) -> int:
        """What is XORed into a key before hashing, as a signed 64-bit number."""
        mixed = fmix64(self.seed)
        return mixed - (1 << 64) if mixed >> 63 else mixed

    def owner(self, key: int, *, world_size: int, block_size: int = 0) -> int:
        """Rank that owns one key, in plain Python integers; negative keys count modulo 2**64."""
        key &= _MASK
        if self.dist_type == "continuous" and key < block_size * world_size:
            return key // block_size
        return (fmix64(key ^ fmix64(self.seed)) if self.dist_type == "hash_roundrobin" else key) % world_size


RoutingLike = str | Routing
"""A routing, or the name of its rule, with seed 0."""
_BY_NAME: dict[str, Routing] = {dist_type: Routing(dist_type=dist_type) for dist_type in DIST_TYPES}


def continuous() -> Routing:
    """Contiguous blocks of rows, as TorchRec's row-wise sharding has them."""
    return _BY_NAME["continuous"]


def roundrobin() -> Routing:
    """Key modulo ranks: the default."""
    return _BY_NAME["roundrobin"]


def hash_roundrobin(seed: int = 0) -> Routing:
    """Hash of the key modulo ranks: even whatever pattern the keys follow."""
    return Routing(dist_type="hash_roundrobin", seed=seed)


def as_routing(routing: RoutingLike) -> Routing:
    """The routing that a name stands for; one that is a routing already.

    Raises:
        ValueError: If the name is unknown.
    """
    known = routing if isinstance(routing, Routing) else _BY_NAME.get(str(routing))  # of a file may come anything
    if known is None:
        raise ValueError(f"routing is {routing!r}; choose one of {', '.join(DIST_TYPES)} or pass a Routing")
    return known


def as_routings(routing: RoutingLike | Sequence[RoutingLike]) -> tuple[Routing, ...]:
    """Routings of a batch's features: one for all of them, or one each."""
    if isinstance(routing, Sequence) and not isinstance(routing, str | bytes):
        return tuple(as_routing(item) for item in routing)
    return (as_routing(routing),)


def check_world_size(world_size: int) -> int:
    """Returns `world_size`."""
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size is {world_size}; give 1 to {MAX_RANKS}")
    return world_size


def block_size(num_rows: int, world_size: int) -> int:
    """Rows of a continuous table that a rank holds: `ceil(num_rows / world_size)`."""
    return -(-num_rows // world_size)


def fmix64_of(keys: Tensor) -> Tensor:
    """MurmurHash3 finaliser of int64 numbers, read as unsigned."""
    for factor in (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64)):
        keys = (keys ^ (keys >> 33 & _HIGH)) * factor
    return keys ^ (keys >> 33 & _HIGH)


def as_int64(keys: Tensor) -> Tensor:
    """Keys as the int64 numbers that routing reads: int32 sign-extended, uint64 bit for bit."""
    if keys.dtype == torch.uint64:
        return keys.view(torch.int64)
    if keys.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"keys have dtype {keys.dtype}; use int32, int64 or uint64")
    return keys.to(torch.int64)
