"""Batches made of samples of others on the same device: some samples of several batches, and samples in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel.partitioning.compile import ZERO
from evenkeel.partitioning.splits import ALL, part_lengths, samples_of_parts
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.batches.contents import Leaf
from trainer_client.balancing.redistribution.copies import (
    MAX_UNITS,
    Copies,
    FieldTable,
    Ints,
    add_samples,
    copy,
    piece_bytes,
    units_of_pieces,
    write_items,
)


class Samples(NamedTuple):
    """Some samples of a batch, by its contiguous tensors, with its lengths on the host."""

    tensors: Sequence[torch.Tensor]
    lengths: Ints  # (n, num_jagged)
    totals: Ints  # (num_jagged,) values of each column in the tensors
    chosen: Ints  # (m,)


def pick(batches: Sequence[FlatBatch], chosen: Sequence[NDArray[np.int64]]) -> FlatBatch:
    """The chosen samples, ascending, of several batches of one schema and device, with lengths on the host.

    A batch that is wanted whole and alone is returned as it is.
    """
    some = [i for i, samples in enumerate(chosen) if samples.size]
    if len(some) == 1 and chosen[some[0]].size == batches[some[0]].num_samples:
        return batches[some[0]]
    structure = batches[0].structure
    devices = [batch.device for batch in batches]  # refuses a batch on several
    if structure.on_host:
        device = next((device for device in devices if device is not None), torch.device("cpu"))
        batches = [batch.to(device) for batch in batches]
    pairs = list(zip(batches, chosen, strict=True))
    lengths = np.concatenate([batch.lengths[samples] for batch, samples in pairs])
    sources = [Samples(batch.plain().tensors, batch.lengths, batch.totals, samples) for batch, samples in pairs]
    return batches[0].rebuild(gather(structure.leaves, sources, lengths.sum(axis=0)), lengths)


def cut(flat: FlatBatch, begins: Ints) -> FlatBatch:
    """The batch with parts in place of samples, by the first item of each; see `samples_of_parts`.

    A part has a span of the sequence; other jagged fields go with the parts that are declared, fields with as many rows
    for each sample with all. Parts of a sample follow each other, so what goes with one part each, or is cut, stays
    where it is in memory: only the rest is copied, on a device without waiting for it. The lengths are on the host.
    """
    leaves, roles = flat.structure.leaves, flat.roles
    assert roles is not None, "no sequence is declared"
    assert (roles > 0).any() or len(begins) == flat.num_samples, "no field of the sequence is there"
    of = samples_of_parts(begins)
    assert np.count_nonzero(begins == 0) == flat.num_samples, "parts of another batch"
    lengths = part_lengths(flat.lengths, begins, roles)
    totals = lengths.sum(axis=0)
    counts = flat.structure.counts
    goes_with_all = roles == ALL
    # behind the samples one that holds the columns that stay as they are, beside others in one tensor that do not
    table = np.vstack([flat.lengths * goes_with_all, flat.totals * ~goes_with_all])
    dense = [i for i, leaf in enumerate(leaves) if leaf.rows and i not in counts]
    jagged = [i for i, leaf in enumerate(leaves) if goes_with_all[list(leaf.columns)].any()]
    tensors = list(flat.tensors)
    for device in {tensor.device for tensor in tensors}:
        for wanted, samples, rows in (
            (dense, of, flat.lengths),
            (jagged, np.append(of, flat.num_samples), table),
        ):
            here = [index for index in wanted if tensors[index].device == device]
            sources = [tensors[index].resolve_conj().resolve_neg().contiguous() for index in here]
            chosen = Samples(sources, rows, flat.totals, samples)
            for index, tensor in zip(here, gather(tuple(leaves[i] for i in here), [chosen], totals), strict=True):
                tensors[index] = tensor
        _write_counts(tensors, {i: column for i, column in counts.items() if tensors[i].device == device}, lengths)
    return flat.rebuild(tensors, lengths)


def _write_counts(tensors: list[torch.Tensor], counts: dict[int, int], lengths: Ints) -> None:
    """Puts tensors with the lengths of the parts in place of those that hold lengths, from one copy for each dtype."""
    for dtype in {tensors[index].dtype for index in counts}:
        chosen = [index for index in counts if tensors[index].dtype == dtype]
        device = tensors[chosen[0]].device
        table = torch.from_numpy(lengths[:, [counts[index] for index in chosen]].T.copy()).to(dtype)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        for index, tensor in zip(chosen, table.unbind(0), strict=True):
            tensors[index] = tensor


def gather(leaves: tuple[Leaf, ...], batches: Sequence[Samples], totals: Ints) -> list[torch.Tensor]:
    """New tensors with the chosen samples of batches of one device, batch after batch, which have `totals` values.

    On a device the current stream copies, and the host does not wait.
    """
    if not leaves:
        return []
    count, device = sum(one.chosen.size for one in batches), batches[0].tensors[0].device
    rows = [leaf.rows * count if leaf.rows else int(totals[list(leaf.columns)].sum()) for leaf in leaves]
    like = zip(batches[0].tensors, rows, leaves, strict=True)
    tensors = [tensor.new_empty((number, *leaf.shape)) for tensor, number, leaf in like]
    fields = FieldTable.of(leaves)
    addresses = np.array([fields.addresses(one.tensors, one.totals) for one in batches])
    copies = describe_samples(batches, fields, addresses, fields.addresses(tensors, totals), piece_bytes(device))
    if device.type != "cuda":
        copy(copies, 0, None)
        return tensors
    with torch.cuda.device(device):
        on_device = torch.from_numpy(copies.words).pin_memory().to(device, non_blocking=True)
        copy(copies, 0, on_device, torch.cuda.current_stream(device).cuda_stream)
    return tensors


def describe_samples(batches: Sequence[Samples], fields: FieldTable, source: Ints, target: Ints, most: int) -> Copies:
    """Copies the chosen samples, one batch after the other, in pieces of at most `most` bytes.

    (batches, F) `source` and (F,) `target` are addresses of the fields' first rows.
    """
    count = len(batches)
    # (batches, C) units of each column, of all samples and of those chosen; the last column has one a sample
    loaded = np.array([np.append(one.totals, len(one.lengths)) for one in batches])
    picked = np.array([np.append(one.lengths[one.chosen].sum(axis=0), one.chosen.size) for one in batches])
    cuts = units_of_pieces(fields.column, fields.unit_bytes, loaded.shape[1], most)
    copied = np.flatnonzero(cuts)  # only these are limited: what is beside them is not touched
    units = np.maximum(loaded.sum(axis=0), picked.sum(axis=0))[copied]
    if (largest := int(units.max(initial=0))) >= MAX_UNITS:
        raise ValueError(f"a jagged field has {largest} values in these batches; there may be {MAX_UNITS - 1} at most")
    num_pieces = (int(picked[:, -1].sum()) + count) * copied.size
    num_pieces += int((picked.sum(axis=0)[copied] // cuts[copied]).sum())
    words = np.empty(Copies.num_words(fields.column.size, count, 1, num_pieces), np.int64)
    copies = Copies(words, fields.unit_bytes, count, 1)
    # samples are rows of all batches' lengths, so units count from the first batch's first one on
    before = np.cumsum(loaded, axis=0) - loaded, np.cumsum(picked, axis=0) - picked
    copies.addresses[:, 0] = source - before[0][:, fields.column] * fields.unit_bytes
    copies.addresses[:, 1] = target + before[1][:, fields.column] * fields.unit_bytes
    samples = np.concatenate([one.chosen + first for one, first in zip(batches, before[0][:, -1], strict=True)])
    lengths, begin = np.concatenate([one.lengths for one in batches]), np.append(before[1][:, -1], samples.size)
    piece_begin, groups = np.zeros(loaded.shape[1] + 1, np.int64), np.arange(count)
    copies.shorten(add_samples(copies.pieces, ZERO, samples, begin, groups, lengths, cuts, piece_begin))
    write_items(fields.column, fields.unit_bytes, piece_begin, copies.item_begin[0], copies.first_piece[0])
    return copies
