"""One batch of samples picked from several batches of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.redistribution.copies import describe_samples
from trainer_client.balancing.redistribution.copying import copy_described, piece_bytes
from trainer_client.balancing.redistribution.fields import FieldTable


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
    device = next((batch.device for batch in batches if batch.device is not None), torch.device("cpu"))
    if template.structure.on_host:
        batches = [batch.to(device) for batch in batches]
    fields = FieldTable.of(template.structure.leaves)
    lengths = np.concatenate([batch.lengths[samples] for batch, samples in zip(batches, chosen, strict=True)])
    totals = lengths.sum(axis=0)
    tensors = template.make_room(len(lengths), totals, device)
    # alive until the copies are queued: kernels read them by address
    sources = [batch.plain() for batch in batches]
    words, job = describe_samples(
        np.concatenate(chosen).astype(np.int64),
        np.cumsum([0, *(samples.size for samples in chosen)]),
        np.concatenate([batch.lengths for batch in batches]),
        np.cumsum([0, *(batch.num_samples for batch in batches)]),
        fields,
        np.stack([fields.addresses(own.tensors, batch.totals) for own, batch in zip(sources, batches, strict=True)]),
        fields.addresses(tensors, totals),
        most=piece_bytes(device),
    )
    copy_described(words, job, device)
    return template.rebuild(tensors, num_samples=len(lengths), totals=totals, lengths=lengths)
