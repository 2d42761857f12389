"""One batch that both sides move: the peer's own class around the example's sequences."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

import torch

from examples.datasets import SequenceBatch
from trainer_client.balancing.batches import BatchSpec

NUM_CONTEXT = 2
KEYS = ("history", "actions", "candidates")

SPEC = BatchSpec(
    rows_per_sample={"context": NUM_CONTEXT},
    batch_size={"batch_size", "actual_batch_size"},
    shared={"feature_to_max_seqlen", "contextual_feature_names"},
)


def batch_class(base: type[Any]) -> type[Any]:
    """The peer's `BaseBatch` with the fields of a `SequenceBatch`; two-dimensional ones flattened, as it wants them."""
    names = ("context", "sample", "workload")
    kind = make_dataclass("PeerBatch", [(name, Any, field(default=None)) for name in names], bases=(base,))
    kind.__module__ = __name__  # by whose name other ranks unpickle it
    globals()[kind.__name__] = kind
    return kind


def make_batch(kind: type[Any], sequences: SequenceBatch, workload: torch.Tensor) -> Any:
    """A batch of the example as one that both sides move.

    Args:
        kind: Of `batch_class`.
        sequences: The batch.
        workload: (samples,) int64 that both sides balance by.
    """
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    history, candidates = sequences.num_history, sequences.num_candidates
    values = [sequences.history, sequences.actions, sequences.candidates]
    return kind(
        features=KeyedJaggedTensor(list(KEYS), torch.cat(values), lengths=torch.cat([history, history, candidates])),
        batch_size=sequences.size,
        feature_to_max_seqlen={},
        labels=KeyedJaggedTensor(["label"], sequences.labels.long(), lengths=candidates),
        actual_batch_size=sequences.size,
        context=sequences.context.reshape(-1),
        sample=sequences.sample,
        workload=workload,
    )


def to_sequences(batch: Any) -> SequenceBatch:
    """What the model takes; of views, and without the padding. Waits for no device where lengths per key are known."""
    features, samples = batch.features, batch.actual_batch_size
    begins = features.offset_per_key()
    history, actions, candidates = (features.values()[begins[i] : begins[i + 1]] for i in range(len(KEYS)))
    lengths = features.lengths().view(len(KEYS), -1)[:, :samples]
    return SequenceBatch(
        sample=batch.sample[:samples], context=batch.context.view(-1, NUM_CONTEXT)[:samples],
        num_history=lengths[0], history=history, actions=actions,
        num_candidates=lengths[2], candidates=candidates, labels=batch.labels.values().float(),
    )  # fmt: skip
