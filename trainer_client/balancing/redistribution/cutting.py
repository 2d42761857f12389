"""Samples in parts: a batch in which some samples are several, each with a span of their sequence."""

from __future__ import annotations

import numpy as np
import torch

from evenkeel.partitioning.splits import ALL, Cuts, part_lengths
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.redistribution.copies import Ints
from trainer_client.balancing.redistribution.copying import Samples, gather


def cut(flat: FlatBatch, cuts: Cuts) -> FlatBatch:
    """The batch with parts in place of samples, in the order of `cuts`.

    A part has a span of the sequence; other jagged fields go with the parts that are declared, fields with as many rows
    for each sample with all. Parts of a sample follow each other, so what goes with one part each, or is cut, stays
    where it is in memory: only the rest is copied, on a device without waiting for it. The lengths are on the host.
    """
    leaves, roles = flat.structure.leaves, flat.roles
    assert roles is not None, "no sequence is declared"
    assert (roles > 0).any() or len(cuts) == flat.num_samples, "no field of the sequence is there"
    assert cuts.num_samples == flat.num_samples, "cuts of another batch"
    lengths = part_lengths(flat.lengths, cuts, roles)
    totals = lengths.sum(axis=0)
    counts = dict(flat.structure.counts)
    goes_with_all = roles == ALL
    # behind the samples one that holds the columns that stay as they are, beside others in one tensor that do not
    table = np.vstack([flat.lengths * goes_with_all, flat.totals * ~goes_with_all])
    dense = [i for i, leaf in enumerate(leaves) if leaf.rows and i not in counts]
    jagged = [i for i, leaf in enumerate(leaves) if goes_with_all[list(leaf.columns)].any()]
    tensors = list(flat.tensors)
    for device in {tensor.device for tensor in tensors}:
        for wanted, samples, rows in (
            (dense, cuts.samples, flat.lengths),
            (jagged, np.append(cuts.samples, flat.num_samples), table),
        ):
            here = [index for index in wanted if tensors[index].device == device]
            sources = [tensors[index].resolve_conj().resolve_neg().contiguous() for index in here]
            if here:
                chosen = Samples(sources, rows, flat.totals, samples)
                for index, tensor in zip(here, gather(tuple(leaves[i] for i in here), [chosen], totals), strict=True):
                    tensors[index] = tensor
        _write_counts(tensors, {i: column for i, column in counts.items() if tensors[i].device == device}, lengths)
    return flat.rebuild(tensors, num_samples=len(cuts), totals=totals, lengths=lengths)


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
