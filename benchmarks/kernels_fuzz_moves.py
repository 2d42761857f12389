"""Instances of what ranks copy and of where keys go, beside plain indexing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.references.bucketize import bucketize
from evenkeel.partitioning import slice_plan
from evenkeel.partitioning.sorting import ascending_order
from trainer_client.balancing.redistribution.copies import WHOLE, FieldTable, Job, copy_on_host, describe_samples
from trainer_client.balancing.redistribution.moves import describe, measure
from trainer_client.embedding.routing import as_routing, block_bucketize
from trainer_client.embedding.routing.ownership import Routing

Rng = np.random.Generator
Bytes = NDArray[np.uint8]
FENCE = 64  # bytes before and behind each buffer that nothing may write
_INTACT = 0xA5


class _Buffer:
    """Memory between fences."""

    def __init__(self, content: Bytes) -> None:
        self._whole = np.full(content.size + 2 * FENCE, _INTACT, np.uint8)
        self.inside = self._whole[FENCE : FENCE + content.size]
        self.inside[:] = content

    @property
    def address(self) -> int:
        return int(self.inside.ctypes.data)

    def check(self) -> None:
        fences = np.concatenate([self._whole[:FENCE], self._whole[self._whole.size - FENCE :]])
        assert (fences == _INTACT).all(), "something was written beside a buffer"


def _fields(rng: Rng, num_jagged: int) -> FieldTable:
    """Some jagged and dense fields; those of one tensor lie behind each other in it."""
    leaves = int(rng.integers(0, 4))
    column, unit_bytes, leaf_index, before = [], [], [], []
    for leaf in range(leaves):
        width = int(rng.integers(0, 6))
        if num_jagged and rng.random() < 0.6:
            columns = rng.permutation(num_jagged)[: rng.integers(1, num_jagged + 1)].tolist()
            for position, each in enumerate(columns):
                column.append(each)
                unit_bytes.append(width)
                leaf_index.append(leaf)
                before.append(columns[:position])
        else:
            column.append(-1)
            unit_bytes.append(width)
            leaf_index.append(leaf)
            before.append([])
    return FieldTable(
        column=np.array(column, np.int64),
        unit_bytes=np.array(unit_bytes, np.int64),
        leaf_index=np.array(leaf_index, np.int64),
        before_begin=np.cumsum([0, *map(len, before)], dtype=np.int64),
        before_columns=np.array([c for columns in before for c in columns], np.int64),
    )


def _tensor_bytes(fields: FieldTable, leaf: int, units: NDArray[np.int64]) -> int:
    own = np.flatnonzero(fields.leaf_index == leaf)
    return int(sum(units[fields.column[f]] * fields.unit_bytes[f] for f in own))


def _rows(fields: FieldTable, field: int, buffer: Bytes, units: NDArray[np.int64]) -> Bytes:
    """The bytes of a field in its tensor; `units` counts each jagged column and, last, the samples."""
    before = fields.before_columns[fields.before_begin[field] : fields.before_begin[field + 1]]
    begin = int(units[before].sum()) * int(fields.unit_bytes[field])
    return buffer[begin : begin + int(units[fields.column[field]] * fields.unit_bytes[field])]


def check_moves(rng: Rng) -> str:
    """An exchange among a few ranks: packed, handed over, unpacked; every byte arrives where plain indexing puts it."""
    num_ranks, num_jagged = int(rng.integers(1, 5)), int(rng.integers(0, 4))
    fields = _fields(rng, num_jagged)
    num_leaves = int(fields.leaf_index.max(initial=-1)) + 1
    counts = rng.integers(0, 6, num_ranks) * (rng.random(num_ranks) < 0.8)
    n = int(counts.sum())
    homes, ranks = np.repeat(np.arange(num_ranks), counts), rng.integers(0, num_ranks, n).astype(np.int32)
    lengths = rng.integers(0, 6, (n, num_jagged)) * (rng.random((n, num_jagged)) < 0.7)
    if rng.random() < 0.2:
        ranks = homes.astype(np.int32)
    slices = slice_plan(ranks, counts, lengths)
    most = int(rng.choice([1, 7, 64, WHOLE]))
    join = bool(rng.random() < 0.5)
    units = np.column_stack([lengths, np.ones(n, np.int64)])
    field_data = [rng.integers(0, 256, int(units[:, c].sum() * b)).astype(np.uint8)
                  for c, b in zip(fields.column, fields.unit_bytes, strict=True)]  # fmt: skip
    starts = [np.concatenate([[0], np.cumsum(units[:, c] * b)])
              for c, b in zip(fields.column, fields.unit_bytes, strict=True)]  # fmt: skip

    def expected(field: int, samples: NDArray[np.int64]) -> Bytes:
        cut = starts[field]
        return np.concatenate([np.zeros(0, np.uint8), *(field_data[field][cut[i] : cut[i + 1]] for i in samples)])

    prepared: list[dict[str, Any]] = []
    for rank in range(num_ranks):
        own = np.flatnonzero(homes == rank)
        held, piece = lengths[own], slices[rank]
        amounts = measure(piece, held, fields, num_ranks, most)
        own_units, new_units = units[own].sum(axis=0), amounts.units
        assert (new_units == units[ranks == rank].sum(axis=0)).all()
        here = [_Buffer(np.zeros(_tensor_bytes(fields, leaf, own_units), np.uint8)) for leaf in range(num_leaves)]
        for field, leaf in enumerate(fields.leaf_index):
            _rows(fields, field, here[leaf].inside, own_units)[:] = expected(field, own)
        there = [_Buffer(np.zeros(_tensor_bytes(fields, leaf, new_units), np.uint8)) for leaf in range(num_leaves)]
        sent, received = (
            _Buffer(np.zeros(int(b.sum()), np.uint8)) for b in (amounts.sent_bytes, amounts.received_bytes)
        )
        words = np.full(amounts.num_words, -1, np.int64)
        moves = describe(
            words, amounts, piece, held, fields,
            fields.first_rows(np.array([b.address for b in here], np.int64), own_units),
            fields.first_rows(np.array([b.address for b in there], np.int64), new_units),
            sent.address, received.address, most=most, join=join,
        )  # fmt: skip
        assert moves.num_words <= words.size
        copy_on_host(words, moves.pack)
        copy_on_host(words, moves.keep)
        prepared.append({"amounts": amounts, "there": there, "sent": sent, "received": received, "here": here,
                         "words": words, "unpack": moves.unpack})  # fmt: skip
    for rank, mine in enumerate(prepared):
        blocks = []
        for other in prepared:
            ends = np.concatenate([[0], np.cumsum(other["amounts"].sent_bytes)])
            blocks.append(other["sent"].inside[ends[rank] : ends[rank + 1]])
        assert [block.size for block in blocks] == mine["amounts"].received_bytes.tolist()
        mine["received"].inside[:] = np.concatenate(blocks)
        copy_on_host(mine["words"], mine["unpack"])
        samples = np.flatnonzero(ranks == rank)
        for field, leaf in enumerate(fields.leaf_index):
            arrived = _rows(fields, field, mine["there"][leaf].inside, mine["amounts"].units)
            assert (arrived == expected(field, samples)).all(), f"field {field} of rank {rank} differs"
        for buffer in (*mine["here"], *mine["there"], mine["sent"], mine["received"]):
            buffer.check()
    return "moved"


def check_gathers(rng: Rng) -> str:
    """Samples of several batches, gathered one after the other."""
    num_jagged, num_groups = int(rng.integers(0, 3)), int(rng.integers(1, 4))
    sizes = rng.integers(0, 6, num_groups)
    first = np.concatenate([[0], np.cumsum(sizes)])
    n = int(first[-1])
    lengths = rng.integers(0, 6, (n, num_jagged))
    column = np.concatenate([np.arange(num_jagged), [-1]])
    unit_bytes = rng.integers(0, 5, column.size)
    fields = FieldTable(
        column=column, unit_bytes=unit_bytes, leaf_index=np.arange(column.size),
        before_begin=np.zeros(column.size + 1, np.int64), before_columns=np.zeros(0, np.int64),
    )  # fmt: skip
    units = np.column_stack([lengths, np.ones(n, np.int64)])[:, column] * unit_bytes
    data = [[_Buffer(rng.integers(0, 256, int(units[a:b, f].sum())).astype(np.uint8)) for f in range(column.size)]
            for a, b in pairwise(first)]  # fmt: skip
    chosen = [rng.integers(0, size, rng.integers(0, size + 1)) if rng.random() < 0.3
              else rng.permutation(size)[: rng.integers(0, size + 1)] for size in sizes]  # fmt: skip
    if sum(int(units[first[g] + i].sum()) for g in range(num_groups) for i in chosen[g]) > int(units.sum()):
        chosen = [np.unique(samples) for samples in chosen]
    expected = [
        np.concatenate([
            np.zeros(0, np.uint8),
            *(data[g][f].inside[s : s + units[first[g] + i, f]]
              for g in range(num_groups)
              for i in chosen[g]
              for s in [int(units[first[g] : first[g] + i, f].sum())]),
        ])
        for f in range(column.size)
    ]  # fmt: skip
    targets = [_Buffer(np.zeros(part.size, np.uint8)) for part in expected]
    words, job = describe_samples(
        np.concatenate(chosen).astype(np.int64), np.cumsum([0, *map(len, chosen)]), lengths, first, fields,
        np.array([[buffer.address for buffer in group] for group in data]),
        np.array([buffer.address for buffer in targets]), most=int(rng.choice([1, 5, WHOLE])),
    )  # fmt: skip
    assert isinstance(job, Job)
    copy_on_host(words, job)
    for target, part in zip(targets, expected, strict=True):
        target.check()
        assert (target.inside == part).all()
    return "gathered"


def check_bucketize(rng: Rng) -> str:
    """Keys of every size and sign, under every mode, beside the definition."""
    num_features, batch = int(rng.integers(1, 4)), int(rng.integers(0, 5))
    sizes = rng.integers(0, 5, num_features).tolist() if rng.random() < 0.3 else None
    num_rows = sum(sizes) if sizes is not None else num_features * batch
    lengths = torch.from_numpy(rng.integers(0, 5, num_rows) * (rng.random(num_rows) < 0.8))
    n = int(lengths.sum())
    kind = int(rng.integers(4))
    keys = torch.from_numpy(
        rng.integers(-(2**63), 2**63 - 1, n, endpoint=True) if kind == 0
        else rng.integers(0, 100, n) if kind == 1
        else rng.choice(np.array([0, -1, 2**63 - 1, -(2**63), 2**31, 2**32 - 1]), n) if kind == 2
        else rng.integers(0, 2**31, n)
    ).to(torch.int64)  # fmt: skip
    if kind == 3:
        keys = keys.to(torch.int32)
    if rng.random() < 0.5:
        lengths = lengths.to(torch.int32)
    num_ranks = int(rng.choice([1, 2, 3, 8, 100, 257, 4096]))
    blocks = [int(b) for b in rng.choice(np.array([1, 2, 7, 2**20, 2**40, 2**62, 2**63 - 1]), num_features)]
    routings = [_routing(rng) for _ in range(num_features)]
    arguments = {"weights": torch.arange(n, dtype=torch.float32) if rng.random() < 0.5 else None}
    found = block_bucketize(
        lengths, keys, blocks, num_ranks, routings, positions=True, permutation=True, batch_sizes=sizes, **arguments
    )
    wanted = bucketize(lengths, keys, blocks, num_ranks, routings, batch_sizes=sizes, **arguments)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or other is None or torch.equal(mine, other)
    return "bucketized"


def _routing(rng: Rng) -> Routing:
    kind = int(rng.integers(3))
    if kind < 2:
        return as_routing(("continuous", "roundrobin")[kind])
    return Routing(dist_type="hash_roundrobin", seed=int(rng.integers(0, 2**63)))


def check_order(rng: Rng) -> str:
    """The radix sort beside numpy's stable one."""
    n = int(rng.choice([0, 1, 2, 50, 9000], p=[0.1, 0.2, 0.3, 0.395, 0.005]))
    values = rng.integers(0, 2 ** int(rng.integers(0, 64)), n) if rng.random() < 0.8 else np.full(n, 2**63 - 1)
    assert (ascending_order(values.astype(np.int64)) == np.argsort(values, kind="stable")).all()
    return "sorted"
