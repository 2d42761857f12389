"""One batch of samples picked from several batches of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.batches import FlatBatch
from trainer_client.redistribution.copying import copy_table, describe_ranges
from trainer_client.redistribution.fields import FieldTable
from trainer_client.redistribution.ranges import Ranges, sample_ranges


def pick(batches: Sequence[FlatBatch], chosen: Sequence[NDArray[np.int64]]) -> FlatBatch:
    """The chosen samples of several batches, batch after batch.

    Args:
        batches: Batches of one schema, on one device, with the lengths on the host.
        chosen: For each batch the samples wanted, as indices in ascending order.

    Returns:
        The batch; one that is wanted whole and alone is returned as it is.
    """
    whole = [i for i, samples in enumerate(chosen) if samples.size]
    if len(whole) == 1 and chosen[whole[0]].size == batches[whole[0]].num_samples:
        return batches[whole[0]]
    template = batches[0]
    fields = FieldTable.of(template.structure.leaves)
    picked = [batch.lengths[samples] for batch, samples in zip(batches, chosen, strict=True)]
    lengths = np.concatenate(picked)
    totals = lengths.sum(axis=0)
    device = next((batch.device for batch in batches if batch.device is not None), torch.device("cpu"))
    tensors = [
        torch.empty((rows, *leaf.shape), dtype=leaf.dtype, device=device)
        for leaf, rows in zip(template.structure.leaves, template.leaf_rows(len(lengths), totals), strict=True)
    ]
    landing = fields.addresses(tensors, totals)
    parts, sources = [], []
    for batch, samples, own in zip(batches, chosen, picked, strict=True):
        if not samples.size:
            continue
        plain = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in batch.tensors]
        sources.append(plain)  # alive until the copies are done: kernels read them by address
        parts.append(
            Ranges(
                *sample_ranges(
                    np.ascontiguousarray(samples, np.int64),
                    np.array([0, samples.size]),
                    batch.lengths,
                    fields.addresses(plain, batch.totals),
                    fields.column,
                    fields.rows,
                    fields.row_bytes,
                    landing[None, :],
                )
            )
        )
        rows = fields.segment_rows(np.array([samples.size]), own.sum(axis=0)[None, :])
        landing = landing + rows[0] * fields.row_bytes
    if parts:
        copy_table(describe_ranges(parts, device))
    return template.rebuild(tensors, num_samples=len(lengths), totals=totals, lengths=lengths)
