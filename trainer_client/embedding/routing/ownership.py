"""The owners of keys in plain torch operations, on any device."""

import torch
from torch import Tensor

from trainer_client.embedding.routing.modes import Routing, check_num_ranks

_LOW = 0xFFFFFFFF
_MIN = -(1 << 63)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(keys: Tensor, by: int) -> Tensor:
    return (keys >> by) & ((1 << 64 - by) - 1)


def fmix64(keys: Tensor) -> Tensor:
    """MurmurHash3 finaliser of int64 numbers, read as unsigned."""
    keys = keys ^ _shift(keys, 33)
    keys = keys * _signed(0xFF51AFD7ED558CCD)
    keys = keys ^ _shift(keys, 33)
    keys = keys * _signed(0xC4CEB9FE1A85EC53)
    return keys ^ _shift(keys, 33)


def _divide_by_ranks(keys: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Unsigned quotient and remainder, by long division in base 2**32."""
    high, low = _shift(keys, 32), keys & _LOW
    rest = (high % num_ranks << 32) + low
    return (high // num_ranks << 32) + rest // num_ranks, rest % num_ranks


def _divide_by_block(keys: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Unsigned quotient and remainder for blocks below 2**63, halving keys so that the signed division applies."""
    quotient = _shift(keys, 1) // block << 1
    rest = keys - quotient * block
    over = (rest < 0) | (rest >= block)
    return quotient + over, torch.where(over, rest - block, rest)


def as_int64(keys: Tensor) -> Tensor:
    """Keys as the int64 numbers that routing reads: int32 sign-extended, uint64 bit for bit.

    Raises:
        ValueError: If the dtype is none of int32, int64, uint64.
    """
    if keys.dtype == torch.uint64:
        return keys.view(torch.int64)
    if keys.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"keys have dtype {keys.dtype}; use int32, int64 or uint64")
    return keys.to(torch.int64)


def route(keys: Tensor, routing: Routing, *, num_ranks: int, block_size: int = 0) -> tuple[Tensor, Tensor]:
    """Owner of each key, and the index that is sent to it.

    Args:
        keys: Any shape; int32, int64 or uint64.
        routing: The table's mode.
        num_ranks: Ranks that share the table.
        block_size: Rows a rank under `continuous`, below 2**63; other modes ignore it.

    Returns:
        Owners as int64 and indices in the keys' dtype (the low half of an out-of-range quotient for int32), in the
        shape of `keys`.

    Raises:
        ValueError: If `num_ranks` or a dtype is out of range.
    """
    check_num_ranks(num_ranks)
    wide = as_int64(keys)
    if routing.dist_type == "roundrobin":
        return _divide_by_ranks(wide, num_ranks)[1], keys
    if routing.dist_type == "hash_roundrobin":
        return _divide_by_ranks(fmix64(wide ^ routing.mix), num_ranks)[1], keys
    quotient, remainder = _divide_by_ranks(wide, num_ranks)
    if block_size > 0:
        limit = min(block_size * num_ranks, 1 << 64)
        # Unsigned comparison: flip the sign bit of both sides.
        inside = (wide ^ _MIN) <= ((limit - 1) - (1 << 63))
        block, within = _divide_by_block(wide, block_size)
        remainder, quotient = torch.where(inside, block, remainder), torch.where(inside, within, quotient)
    sent = quotient.view(torch.uint64) if keys.dtype == torch.uint64 else quotient.to(keys.dtype)
    return remainder, sent


def owners(keys: Tensor, routing: Routing, *, num_ranks: int, block_size: int = 0) -> Tensor:
    """Rank that owns each key, as int64 in the shape of `keys`; see `route`."""
    return route(keys, routing, num_ranks=num_ranks, block_size=block_size)[0]
