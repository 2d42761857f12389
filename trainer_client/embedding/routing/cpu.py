"""Bucketize on the CPU: a counting pass and a scatter pass, compiled, over numpy views of the tensors.

Output slots follow from one cursor per rank: the rank-major output, with its cells in (feature, row) order, is a stable
partition of the whole index array by owner. Each thread takes one run of rows through both passes. What is left to pay
on large batches is the first touch of the new lengths (ranks x rows), so they come from `calloc` on huge pages, whose
zeros are the kernel's, and no thread writes them but where there are keys.
"""

import os
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evenkeel.partitioning.compile import kernel

_KEYS_PER_THREAD = 1 << 17
"""Below this, handing work to another thread costs more than it saves."""
_CELLS_PER_KEY = 16
"""Cells that are as much work as one key."""
_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_ZERO = np.zeros(1, dtype=np.int64)
Array = npt.NDArray[Any]


@kernel
def _modulo(key: Any, ranks: Any, power_of_two: bool) -> Any:
    return key & (ranks - np.uint64(1)) if power_of_two else key % ranks


@kernel
def _route(keys: Array, spans: Array, owners: Array, sent: Array, counts: Array, mixed: bool) -> None:
    """Writes each key's owner and, where any span is continuous, the index sent to it; counts keys per rank.

    `spans` (spans, 5) has first and last key, number of the routing, mix and block size of runs of keys routed alike.
    """
    world_size = counts.size
    ranks = np.uint64(world_size)
    power_of_two = world_size & (world_size - 1) == 0
    for span in range(spans.shape[0]):
        first, last, mode = spans[span, 0], spans[span, 1], spans[span, 2]
        if mode == 0:
            _continuous(keys[first:last], np.uint64(spans[span, 4]), ranks, owners[first:last], sent[first:last])
        elif mode == 1:
            for i in range(first, last):
                owners[i] = _modulo(np.uint64(np.int64(keys[i])), ranks, power_of_two)
        else:
            mix = np.uint64(spans[span, 3])
            for i in range(first, last):
                key = np.uint64(np.int64(keys[i])) ^ mix
                key ^= key >> np.uint64(33)
                key *= _M1
                key ^= key >> np.uint64(33)
                key *= _M2
                key ^= key >> np.uint64(33)
                owners[i] = _modulo(key, ranks, power_of_two)
        if mixed and mode != 0:
            for i in range(first, last):
                sent[i] = keys[i]
        for i in range(first, last):
            counts[owners[i]] += np.uint64(1)


@kernel
def _continuous(keys: Array, width: Any, ranks: Any, owners: Array, sent: Array) -> None:
    bounded = width <= np.uint64(0x7FFFFFFFFFFFFFFF) // ranks
    block, limit, last = np.int64(width), np.int64(width * ranks), np.int64(ranks) - 1
    # The quotient is at most 4096, so a float64 product is off by one at most.
    inverse = 1.0 / np.float64(width) if width > np.uint64(0) else 0.0
    for i in range(keys.size):
        key = np.int64(keys[i])
        if bounded and np.int64(0) <= key < limit:
            owner = min(np.int64(np.float64(key) * inverse), last)
            rest = key - owner * block
            if rest < 0:
                owner -= 1
                rest += block
            elif rest >= block:
                owner += 1
                rest -= block
            sent[i] = rest
            owners[i] = owner
        else:
            unsigned = np.uint64(key)
            if width > np.uint64(0) and unsigned // width < ranks:
                owners[i] = unsigned // width
                sent[i] = np.int64(unsigned % width)
            else:
                owners[i] = unsigned % ranks
                sent[i] = np.int64(unsigned // ranks)


@kernel
def _scatter(
    keys: Array, owners: Array, lengths: Array, column: int, cursors: Array, new_keys: Array, cells: Array,
    num_rows: int, slots: Array,
) -> None:  # fmt: skip
    """Places the keys of rows `column` and on, and writes their cells: `cells[rank * num_rows + row]`."""
    one, stride = np.uint64(1), np.uint64(num_rows)
    before = np.empty_like(cursors)
    at = np.uint64(0)
    for row in range(lengths.size):
        cell, end = np.uint64(column + row), at + np.uint64(lengths[row])
        # In a long row it is cheaper to see how far every cursor went than to count each key.
        if 2 * lengths[row] <= cursors.size:
            while at < end:
                owner = np.uint64(owners[at])
                slot = cursors[owner]
                cursors[owner] = slot + one
                new_keys[slot] = keys[at]
                slots[at] = slot
                cells[owner * stride + cell] += 1
                at += one
        else:
            for rank in range(cursors.size):
                before[rank] = cursors[rank]
            while at < end:
                owner = np.uint64(owners[at])
                slot = cursors[owner]
                cursors[owner] = slot + one
                new_keys[slot] = keys[at]
                slots[at] = slot
                at += one
            for rank in range(cursors.size):
                cells[np.uint64(rank) * stride + cell] = cursors[rank] - before[rank]


@kernel
def _place(lengths: Array, slots: Array, positions: Array) -> None:
    """Writes the place of every key in its row, by slot."""
    at = 0
    for row in range(lengths.size):
        for place in range(lengths[row]):
            positions[slots[at]] = place
            at += 1


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="evenkeel-bucketize")


# A forked child has the executor but none of its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


def _run(function: Callable[..., None], tasks: list[tuple[Any, ...]]) -> None:
    """The first task on this thread, the others beside it."""
    others = [_pool(len(tasks) - 1).submit(function, *task) for task in tasks[1:]]
    function(*tasks[0])
    for other in others:
        other.result()


def _row_bounds(row_ends: Array, world_size: int) -> list[int]:
    """First row of every thread's run, and the number of rows: about equally much work for each."""
    num_rows = row_ends.size
    if not num_rows:
        return [0, 0]
    work = int(row_ends[-1]) + num_rows * world_size // _CELLS_PER_KEY
    threads = max(1, min(torch.get_num_threads(), work // _KEYS_PER_THREAD))
    if threads == 1:
        return [0, num_rows]
    done = row_ends + np.arange(1, num_rows + 1) * world_size // _CELLS_PER_KEY
    cuts = np.searchsorted(done, np.arange(1, threads) * (int(done[-1]) / threads))
    return [0, *dict.fromkeys(cut for cut in cuts.tolist() if 0 < cut < num_rows), num_rows]


def _zeros(like: Tensor, size: int) -> Tensor:
    """Zeros that nothing has touched yet: numpy asks for them from `calloc`, on huge pages where there are many."""
    return torch.from_numpy(np.zeros(size, dtype=like.numpy().dtype))


def _empty(like: Tensor) -> Tensor:
    """Memory of the same size, on huge pages where it is large."""
    return torch.from_numpy(np.empty_like(like.numpy()))


def block_bucketize(
    lengths: Tensor,
    indices: Tensor,
    block_sizes: Tensor,
    world_size: int,
    modes: list[int],
    mixes: list[int],
    weights: Tensor | None = None,
    positions: bool = False,
    permutation: bool = True,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The CPU kernel of `evenkeel::block_bucketize`; arguments as the operator's."""
    num_rows, num_keys = lengths.numel(), indices.numel()
    num_features = max(len(modes), block_sizes.numel(), batch_sizes.numel() if batch_sizes is not None else 1)
    counts, keys = lengths.numpy(), indices.numpy()
    row_ends = np.cumsum(counts, dtype=np.int64)
    blocks = block_sizes.tolist()
    if min(blocks, default=0) < 0:
        raise ValueError(f"block_sizes has {min(blocks)}; give the rows that a rank holds of each table, or 0")
    _check_sums(counts, int(row_ends[-1]) if num_rows else 0, num_keys, batch_sizes)
    if batch_sizes is None:
        starts = [feature * (num_rows // num_features) for feature in range(num_features)]
    else:
        starts = [0, *np.cumsum(batch_sizes.numpy(), dtype=np.int64).tolist()][:num_features]
    ends = np.concatenate([_ZERO, row_ends])
    bounds = _row_bounds(row_ends, world_size)
    spans = _spans(ends, starts, bounds, modes, mixes, blocks)
    owners = np.empty(num_keys, dtype=np.uint8 if world_size <= 256 else np.uint16)
    continuous = 0 in modes
    sent = np.empty_like(keys) if continuous else keys
    mixed = continuous and len(set(modes)) > 1
    cursors = np.zeros((len(spans), world_size), dtype=np.uint64)
    _run(_route, [(keys, span, owners, sent, cursor, mixed) for span, cursor in zip(spans, cursors, strict=True)])
    totals = cursors.sum(axis=0)
    cursors = np.cumsum(cursors, axis=0) - cursors + (np.cumsum(totals) - totals)
    new_lengths, new_indices = _zeros(lengths, world_size * num_rows), _empty(indices)
    slots = _empty(indices)
    out, cells, slots_array = new_indices.numpy(), new_lengths.numpy(), slots.numpy()
    tasks = []
    for number, (first, last) in enumerate(pairwise(bounds)):
        local = slice(int(ends[first]), int(ends[last]))
        rows = (counts[first:last], first, cursors[number])
        tasks.append((sent[local], owners[local], *rows, out, cells, num_rows, slots_array[local]))
    _run(_scatter, tasks)
    new_weights = places = None
    if positions:
        places = torch.empty_like(indices)
        _place(counts, slots_array, places.numpy())
    if weights is not None:
        new_weights = torch.empty_like(weights)
        new_weights[slots.to(torch.int64)] = weights
    return new_lengths, new_indices, new_weights, places, slots if permutation else None


def _check_sums(lengths: Array, total: int, num_keys: int, batch_sizes: Tensor | None) -> None:
    """Refuses what would let the kernels read or write beyond their arrays; sums of large numbers may wrap around."""
    if lengths.size and not 0 <= int(lengths.min()) <= int(lengths.max()) <= num_keys:
        bad = int(np.argmin(lengths) if int(lengths.min()) < 0 else np.argmax(lengths))
        raise ValueError(f"lengths[{bad}] is {int(lengths[bad])}; there are {num_keys} indices, use 0 to {num_keys}")
    if total != num_keys:
        raise ValueError(f"lengths sum to {total}, but there are {num_keys} indices; they must agree")
    if batch_sizes is not None and lengths.size:
        sizes = batch_sizes.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) != lengths.size:
            raise ValueError(f"batch_sizes {sizes[:16]} add up to {sum(sizes)}, but there are {lengths.size} lengths")


def _spans(
    ends: Array, starts: list[int], bounds: list[int], modes: list[int], mixes: list[int], blocks: list[int]
) -> list[Array]:
    """What `_route` takes, for each thread: runs of keys that are routed alike."""
    one = len(modes) == 1 and (modes[0] != 0 or len(blocks) == 1)
    starts = [0] if one else starts
    spans = []
    for first, last in pairwise(bounds):
        local: list[tuple[int, ...]] = []
        for feature in range(max(0, bisect_right(starts, first) - 1), len(starts)):
            begin = max(first, starts[feature])
            if begin >= last and local:
                break
            end = min(last, starts[feature + 1]) if feature + 1 < len(starts) else last
            pick = feature if len(modes) > 1 else 0
            block = blocks[feature if len(blocks) > 1 else 0] if blocks else 0
            local.append((int(ends[begin]), int(ends[max(begin, end)]), modes[pick], mixes[pick], block))
        spans.append(np.array(local, dtype=np.int64).reshape(-1, 5))
    return spans


def warm_up() -> None:
    """Compiles the kernels, or loads them from where they are kept, for int64 keys with lengths of either width."""
    key, block = torch.ones(1, dtype=torch.int64, device="cpu"), torch.ones(1, dtype=torch.int64, device="cpu")
    for dtype in (torch.int64, torch.int32):
        block_bucketize(torch.ones(1, dtype=dtype, device="cpu"), key, block, 2, [0], [0])
