"""Which bytes to copy where, and copying them wherever they are: on a device in one kernel launch.

Fields of one jagged column are cut at the same samples, so what to copy is written once for all of them, in units: rows
of a jagged field, samples of a dense one. The last column, after the jagged ones, has one unit a sample.

A training step launches the redistribution between its own kernels, so the host's time counts: all arithmetic on
samples, fields and peers is compiled. Host and device read the same arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO, kernel
from trainer_client.balancing.batches.contents import Leaf
from trainer_client.nvrtc import Module

Ints = NDArray[np.int64]
WHOLE = 1 << 62  # bytes: no piece is cut
PIECE_BYTES = 4096  # one warp each: enough of them to fill a device from a few MiB on
MAX_UNITS = 1 << 31  # of a column: pieces count in 32 bits
_KERNEL = "copy_pieces"
_THREADS = 256
# Collectives need whole multiprocessors: a kernel beside them fills half of the device, which keeps its memory busy.
_THREADS_BESIDE = 1024
_Parameters = ctypes.c_int64 * 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """F fields sorted by path, so that all ranks of one schema agree on the order; (F,) int64 each."""

    column: Ints  # its jagged column; -1, the last one, if rows are fixed
    unit_bytes: Ints  # bytes of one row if jagged, of one sample if rows are fixed
    leaf: Ints  # the tensor in which a field lies
    in_memory: Ints  # the fields in the order in which they lie in memory

    @staticmethod
    @lru_cache(maxsize=64)
    def of(leaves: tuple[Leaf, ...], table_bytes: int = 0) -> FieldTable:
        """The fields of a batch with these leaves.

        With `table_bytes` a table with so many bytes for each sample travels as the last field, and lies in a tensor
        after the leaves.
        """
        entries: list[tuple[str, int, int, int]] = []
        for index, leaf in enumerate(leaves):
            if leaf.rows:
                entries.append((leaf.path, -1, leaf.rows * leaf.row_bytes, index))
            entries += [(path, column, leaf.row_bytes, index) for path, column in leaf.jagged_fields]
        order = sorted(range(len(entries)), key=lambda position: entries[position][0])
        if table_bytes:
            order.append(len(entries))
            entries.append(("", -1, table_bytes, len(leaves)))
        table = np.array([entries[position][1:] for position in order], dtype=np.int64).reshape(-1, 3)
        column, unit_bytes, leaf_of = (np.ascontiguousarray(one) for one in table.T)
        in_memory = np.argsort(np.array(order, dtype=np.int64))
        return FieldTable(column=column, unit_bytes=unit_bytes, leaf=leaf_of, in_memory=in_memory)

    def addresses(self, tensors: Sequence[torch.Tensor], totals: Ints) -> Ints:
        """(F,) address of each field's first row in contiguous tensors that hold `totals` values per column."""
        begins = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        return _first_rows(begins, totals, self.column, self.unit_bytes, self.leaf, self.in_memory)


@kernel
def _first_rows(ends: Ints, totals: Ints, column: Ints, unit_bytes: Ints, leaf: Ints, in_memory: Ints) -> Ints:
    addresses = np.empty(in_memory.size, np.int64)
    for field in in_memory:
        addresses[field] = ends[leaf[field]]
        if column[field] >= 0:
            ends[leaf[field]] += totals[column[field]] * unit_bytes[field]
    return addresses


class Copies:
    """What some jobs copy, one launch each, in arrays that lie in one piece of memory: one copy brings it to a device.

    Attributes:
        words: The memory, a multiple of 16 bytes.
        unit_bytes: (F,) int64, bytes of a unit of each field.
        addresses: (groups, 2, F) int64, where the first unit is copied from, and where to.
        item_begin: (jobs, F + 1) int64, where each field's items begin: the pieces of its column.
        first_piece: (jobs, F) int64, the first piece of each field's column.
        pieces: (k, 4) int32, unit to copy from, unit to copy to, units, group.
        begins: Where these arrays begin in `words`, in words of 8 bytes.
    """

    __slots__ = ("addresses", "begins", "first_piece", "item_begin", "pieces", "unit_bytes", "words")

    def __init__(self, words: Ints, unit_bytes: Ints, groups: int, jobs: int) -> None:
        fields = unit_bytes.size
        groups_end = fields * (1 + 2 * groups)
        items_end = groups_end + jobs * (fields + 1)
        self.words = words
        self.begins = (0, fields, groups_end, items_end, (items_end + jobs * fields + 1) & -2)
        self.unit_bytes = words[:fields]
        self.unit_bytes[:] = unit_bytes
        self.addresses = words[fields:groups_end].reshape(groups, 2, fields)
        self.item_begin = words[groups_end:items_end].reshape(jobs, fields + 1)
        self.first_piece = words[items_end : items_end + jobs * fields].reshape(jobs, fields)
        self.pieces = words[self.begins[-1] :].view(np.int32).reshape(-1, 4)

    @staticmethod
    def num_words(fields: int, groups: int, jobs: int, pieces: int) -> int:
        """Words that so many pieces take at most."""
        return fields * (1 + 2 * groups + 2 * jobs) + jobs + 1 + 2 * pieces & -2

    def shorten(self, pieces: int) -> None:
        """Says that there are only so many pieces, where there was room for more."""
        self.words = self.words[: self.begins[-1] + 2 * pieces]


# ------------------------------------------------------------------------- pieces, written in other kernels


@kernel
def units_of_pieces(column: Ints, unit_bytes: Ints, num_columns: int, most: int) -> Ints:
    """(num_columns,) units above which a piece of each column is cut; 0 for columns without bytes."""
    units = np.zeros(num_columns, np.int64)
    for field in range(column.size):  # -1 is the last column
        units[column[field]] = max(units[column[field]], unit_bytes[field])
    for index in range(num_columns):
        if units[index]:
            units[index] = max(most // units[index], 1)
    return units


@kernel
def add_piece(pieces: NDArray[np.int32], count: int, source: int, target: int, units: int, group: int, cut: int) -> int:
    """Appends a range of units, in pieces of at most `cut`; returns the new number of pieces."""
    done = 0
    while done < units:
        pieces[count, 0] = source + done
        pieces[count, 1] = target + done
        pieces[count, 2] = min(cut, units - done)
        pieces[count, 3] = group
        done += cut
        count += 1
    return count


@kernel
def add_samples(
    pieces: NDArray[np.int32],
    count: int,
    samples: Ints,
    begin: Ints,
    parts: Ints,
    lengths: Ints,
    cuts: Ints,
    piece_begin: Ints,
) -> int:
    """Appends samples, of each column neighbours here and there as one range; returns the new number of pieces.

    Group g copies `samples[begin[k] : begin[k + 1]]`, rows of `lengths`, with k = `parts[g]`; -1: nothing.
    """
    num_samples, num_jagged = lengths.shape
    starts = np.zeros(num_samples + 1, np.int64)
    for index in range(cuts.size):
        piece_begin[index] = count
        if not cuts[index]:
            continue
        for i in range(num_samples):
            starts[i + 1] = starts[i] + (lengths[i, index] if index < num_jagged else 1)
        for group in range(parts.size):
            part = parts[group]
            if part < 0:
                continue
            since = until = target = ZERO
            for sample in samples[begin[part] : begin[part + 1]]:
                if starts[sample] != until:
                    count = add_piece(pieces, count, since, target, until - since, group, cuts[index])
                    target += until - since
                    since = starts[sample]
                until = starts[sample + 1]
            count = add_piece(pieces, count, since, target, until - since, group, cuts[index])
    piece_begin[cuts.size] = count
    return count


@kernel
def write_items(column: Ints, unit_bytes: Ints, piece_begin: Ints, item_begin: Ints, first_piece: Ints) -> None:
    """Writes the first items (F + 1,) and first pieces (F,) of the fields."""
    items = 0
    for field in range(column.size):
        index = column[field] % (piece_begin.size - 1)
        item_begin[field] = items
        first_piece[field] = piece_begin[index]
        if unit_bytes[field]:
            items += piece_begin[index + 1] - piece_begin[index]
    item_begin[column.size] = items


# ------------------------------------------------------------------------------------------------- copying


def piece_bytes(device: torch.device) -> int:
    """Bytes above which a piece is cut for the device."""
    return PIECE_BYTES if device.type == "cuda" else WHOLE


def copy(copies: Copies, job: int, on_device: torch.Tensor | None, stream: int = 0, *, beside: bool = False) -> None:
    """Copies on a stream of the current device, which has `copies.words` aligned to 16 bytes, or on the host.

    `beside` leaves half of the device to kernels that are launched later, as those of a collective.
    """
    if on_device is None:
        _copy_on_host(
            copies.unit_bytes, copies.addresses, copies.item_begin[job], copies.first_piece[job], copies.pieces
        )
        return
    fields, items = copies.unit_bytes.size, int(copies.item_begin[job, -1])
    if not items:
        return
    module, multiprocessors = load_kernel(torch.cuda.current_device())
    threads = _THREADS_BESIDE if beside else _THREADS
    blocks = -(-32 * items // threads)
    unit_bytes, addresses, item_begin, first_piece, pieces = (on_device.data_ptr() + 8 * one for one in copies.begins)
    item_begin += 8 * job * (fields + 1)
    first_piece += 8 * job * fields
    module.launch(
        _KERNEL,
        blocks=min(blocks, multiprocessors // 2) if beside else blocks,
        threads=threads,
        shared=0,
        stream=stream,
        parameters=_Parameters(
            unit_bytes, item_begin, first_piece, addresses, addresses + 8 * fields, pieces, items, fields,
            2 * fields, 2 * fields,
        ),
    )  # fmt: skip


# C's memcpy on plain addresses: index operations of torch cost an order of magnitude more for short rows
_memcpy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


@kernel
def _copy_on_host(
    unit_bytes: Ints, addresses: Ints, item_begin: Ints, first_piece: Ints, pieces: NDArray[np.int32]
) -> None:
    for field in range(unit_bytes.size):
        unit = unit_bytes[field]
        for i in range(item_begin[field + 1] - item_begin[field]):
            piece = pieces[first_piece[field] + i]
            since, to = addresses[piece[3], 0, field], addresses[piece[3], 1, field]
            _memcpy(to + piece[1] * unit, since + piece[0] * unit, piece[2] * unit)


def source() -> str:
    """The CUDA source."""
    return (Path(__file__).parent / "kernels" / "copy_pieces.cu").read_text()


@cache
def load_kernel(device: int) -> tuple[Module, int]:
    """The compiled kernel of a CUDA device, and how many multiprocessors that has."""
    return Module(source(), [_KERNEL], {}, device), torch.cuda.get_device_properties(device).multi_processor_count
