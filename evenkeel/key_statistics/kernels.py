"""What is done for every key of a batch, compiled: hash, sample, keep each key of a step once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evenkeel.partitioning.compile import kernel, step
from evenkeel.partitioning.preparing import KernelSet, ready

Array = npt.NDArray[Any]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


@step
def _mixed(key: Any) -> Any:
    """SplitMix64's finaliser: a permutation of 64-bit integers, so that no two keys have one hash."""
    key = (key ^ (key >> _30)) * _FIRST
    key = (key ^ (key >> _27)) * _SECOND
    return key ^ (key >> _31)


@kernel
def sample(
    values: Array,
    runs: Array,
    limits: Array,
    stamp: Any,
    stamps: Array,
    places: Array,
    hashes: Array,
    counts: Array,
    used: Any,
) -> Any:
    """Appends the keys of a step whose hash is at most their table's limit, each key of a table once with a count.

    `runs` has (table, first, last, kept) of each run of `values`; the last is written. `stamps` and `places` are an
    open-addressing table that needs no clearing: a cell belongs to this step and table if it holds `stamp + table`.
    Returns the new end of `hashes` and `counts`.
    """
    mask = np.uint64(stamps.size - 1)
    for run in range(runs.shape[0]):
        table, begin = runs[run, 0], used
        limit, own = limits[table], stamp + table
        for i in range(runs[run, 1], runs[run, 2]):
            mixed = _mixed(np.uint64(np.int64(values[i])) + _GOLDEN)
            if mixed > limit:
                continue
            cell = (mixed ^ np.uint64(table)) & mask
            while stamps[cell] == own and hashes[places[cell]] != mixed:
                cell = (cell + np.uint64(1)) & mask
            if stamps[cell] == own:
                counts[places[cell]] += np.uint32(1)
            else:
                stamps[cell], places[cell] = own, used
                hashes[used], counts[used] = mixed, np.uint32(1)
                used += 1
        runs[run, 3] = used - begin
    return used


@kernel
def sketch(values: Array, runs: Array, salt: Any, registers: Array) -> None:
    """Notes all keys of a step in HyperLogLog sketches, (tables, registers)."""
    mask = np.uint64(registers.shape[1] - 1)
    for run in range(runs.shape[0]):
        own = registers[runs[run, 0]]
        for i in range(runs[run, 1], runs[run, 2]):
            mixed = _mixed(_mixed(np.uint64(np.int64(values[i])) + _GOLDEN) + salt)
            rest = mixed >> np.uint64(12)
            zeros = 1
            while rest & np.uint64(1) == 0 and zeros < 52:
                rest >>= np.uint64(1)
                zeros += 1
            own[mixed & mask] = max(own[mixed & mask], np.uint8(zeros))


@kernel
def thin(segments: Array, limits: Array, hashes: Array, counts: Array) -> Any:
    """Drops what is above its table's limit, in place; `segments` has (step, table, length). Returns what is left."""
    read = written = 0
    for row in range(segments.shape[0]):
        limit, start = limits[segments[row, 1]], written
        for i in range(read, read + segments[row, 2]):
            if hashes[i] <= limit:
                hashes[written], counts[written] = hashes[i], counts[i]
                written += 1
        read += segments[row, 2]
        segments[row, 2] = written - start
    return written


@kernel
def cache_ranks(
    starts: Array, previous: Array, position: Array, tree: Array, held: Array, above: Array, tied: Array
) -> None:
    """How many keys go before each referenced key in a cache's order, at the beginning of the step.

    Each reference puts its key on a position of the order, where it stays until its next one. References of a step
    (`starts` delimits steps) all see the order before the step.

    Args:
        starts: (steps + 1,) first reference of each step.
        previous: (references,) index of the same key's previous reference; -1 for the first.
        position: (references,) place in the order after the reference; the larger, the longer a key is kept.
        tree: (positions + 1,) zeros, for a Fenwick tree.
        held: (positions,) zeros, for keys at each position.
        above: (references,) out: keys at larger positions; -1 for first references.
        tied: (references,) out: keys at the same position, itself included.
    """
    keys = 0
    for step_ in range(starts.size - 1):
        for i in range(starts[step_], starts[step_ + 1]):
            if previous[i] < 0:
                above[i] = -1
                continue
            at = position[previous[i]]
            tied[i] = held[at]
            node, up_to = at + 1, 0
            while node > 0:
                up_to += tree[node]
                node -= node & -node
            above[i] = keys - up_to
        for i in range(starts[step_], starts[step_ + 1]):
            if previous[i] < 0:
                keys += 1
            else:
                _add(tree, held, position[previous[i]], -1)
            _add(tree, held, position[i], 1)


@step
def _add(tree: Array, held: Array, at: Any, change: Any) -> None:
    held[at] += change
    node = at + 1
    while node < tree.size:
        tree[node] += change
        node += node & -node


KERNELS = KernelSet(sources=Path(__file__).parent, load=f"{__name__}:load_all", parts=(f"{__name__}:load_all",))
"""What key statistics compile."""


def load_all() -> None:
    """Calls each kernel once."""
    hashes, counts = np.zeros(8, dtype=np.uint64), np.zeros(8, dtype=np.uint32)
    stamps, places = np.zeros(16, dtype=np.int64), np.zeros(16, dtype=np.int64)
    limits, runs = np.full(1, 2**64 - 1, dtype=np.uint64), np.array([[0, 0, 3, 0]], dtype=np.int64)
    used = np.int64(0)
    for kind in (np.int64, np.int32):
        values = np.array([5, 7, 5], dtype=kind)
        used = np.int64(sample(values, runs, limits, np.int64(1), stamps, places, hashes, counts, used))
        sketch(values, runs, np.uint64(1), np.zeros((1, 512), dtype=np.uint8))
    thin(np.array([[0, 0, used]], dtype=np.int64), limits, hashes, counts)
    integers = [np.array(each, dtype=np.int64) for each in ([0, 1, 2], [-1, 0], [0, 1], [0, 0, 0], [0, 0])]
    cache_ranks(*integers, *np.zeros((2, 2), dtype=np.int64))


def warm_up() -> None:
    """Compiles the kernels, or loads them."""
    ready([KERNELS])
