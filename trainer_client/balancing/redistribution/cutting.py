"""Samples in parts: a batch in which some samples are several, each with a span of their sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.splits import ALL, Cuts, part_lengths
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.batches.structure import Leaf
from trainer_client.balancing.redistribution.copies import FieldTable, describe_samples
from trainer_client.balancing.redistribution.copying import copy_described, piece_bytes

Ints = NDArray[np.int64]


def cut(flat: FlatBatch, cuts: Cuts) -> FlatBatch:
    """The batch with parts in place of samples, in the order of `cuts`.

    A part has a span of the sequence; other jagged fields go with the parts that are declared, fields with as many rows
    for each sample with all. Parts of a sample follow each other, so what goes with one part each, or is cut, stays
    where it is in memory: only the rest is copied, by one kernel on a device, for which the host does not wait.

    Args:
        flat: With the lengths on the host, of a structure with `roles`.
        cuts: Of all its samples.
    """
    structure = flat.structure
    roles = flat.roles
    assert roles is not None, "no sequence is declared"
    assert cuts.num_samples == flat.num_samples, "cuts of another batch"
    lengths = part_lengths(flat.lengths, cuts, roles)
    tensors = list(flat.tensors)
    counts = dict(structure.counts)
    repeated = [index for index, leaf in enumerate(structure.leaves) if _is_repeated(leaf, structure.roles)]
    wanted = [index for index in repeated if index not in counts]
    for device in {tensors[index].device for index in wanted}:
        chosen = [index for index in wanted if tensors[index].device == device]
        for index, tensor in zip(chosen, _repeat(flat, chosen, cuts.samples, lengths, device), strict=True):
            tensors[index] = tensor
    for index, tensor in _count(flat, counts, lengths):
        tensors[index] = tensor
    return flat.rebuild(tensors, num_samples=len(cuts), totals=lengths.sum(axis=0), lengths=lengths)


def _is_repeated(leaf: Leaf, roles: Sequence[int]) -> bool:
    """Whether several parts of a sample have the same values of it."""
    return bool(leaf.rows) or any(roles[column] == ALL for column in leaf.columns)


def _repeat(
    flat: FlatBatch, chosen: list[int], samples: Ints, lengths: Ints, device: torch.device
) -> list[torch.Tensor]:
    """Tensors of some leaves on one device, whose samples are to be there once for each part."""
    leaves = tuple(flat.structure.leaves[index] for index in chosen)
    roles = flat.structure.roles
    sources = [flat.tensors[index].resolve_conj().resolve_neg().contiguous() for index in chosen]
    plain = [leaf for leaf in leaves if leaf.rows or all(roles[column] == ALL for column in leaf.columns)]
    totals = lengths.sum(axis=0)
    targets = [
        source.new_empty(
            (leaf.rows * len(samples) if leaf.rows else sum(int(totals[c]) for c in leaf.columns), *leaf.shape)
        )
        for leaf, source in zip(leaves, sources, strict=True)
    ]
    if plain:
        pairs = [(s, t) for leaf, s, t in zip(leaves, sources, targets, strict=True) if leaf in plain]
        fields = FieldTable.of(tuple(plain))
        described = describe_samples(
            samples, np.array([0, len(samples)]), flat.lengths, np.array([0, flat.num_samples]), fields,
            fields.addresses([source for source, _ in pairs], flat.totals)[None],
            fields.addresses([target for _, target in pairs], totals), most=piece_bytes(device),
        )  # fmt: skip
        copy_described(*described, device)
    for leaf, source, target in zip(leaves, sources, targets, strict=True):
        if leaf not in plain:  # keys of one tensor, of which some go with all parts and some do not
            _repeat_some(flat, leaf, source, target, samples, totals)
    return targets


def _repeat_some(
    flat: FlatBatch, leaf: Leaf, source: torch.Tensor, target: torch.Tensor, samples: Ints, totals: Ints
) -> None:
    here = there = 0
    for column in leaf.columns:
        size, wanted = int(flat.totals[column]), int(totals[column])
        values = source[here : here + size]
        if flat.structure.roles[column] == ALL:
            own = flat.lengths[:, column]
            starts = (np.cumsum(own) - own)[samples]
            counts = own[samples]
            rows = np.arange(wanted) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
            index = torch.from_numpy(rows)
            if source.is_cuda:
                index = index.pin_memory().to(source.device, non_blocking=True)
            as_bytes = source.dtype.itemsize == 1  # indexing is not implemented for floating-point numbers of 8 bits
            values = (values.view(torch.uint8) if as_bytes else values).index_select(0, index).view(source.dtype)
        target[there : there + wanted].copy_(values)
        here, there = here + size, there + wanted


def _count(flat: FlatBatch, counts: dict[int, int], lengths: Ints) -> list[tuple[int, torch.Tensor]]:
    """Tensors that hold lengths, with those of the parts; on a device from one copy for each dtype."""
    made: list[tuple[int, torch.Tensor]] = []
    kinds = {index: (flat.tensors[index].device, flat.tensors[index].dtype) for index in counts}
    for kind in set(kinds.values()):
        device, dtype = kind
        chosen = [index for index in counts if kinds[index] == kind]
        table = torch.from_numpy(lengths[:, [counts[index] for index in chosen]].T.copy()).to(dtype)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        made += zip(chosen, table.unbind(0), strict=True)
    return made
