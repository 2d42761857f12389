"""One batch that both sides move: the peer's own class around the example's sequences, with more beside them."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal

import torch

from examples.datasets import SequenceBatch
from trainer_client.balancing.batches import BatchSpec

Payload = Literal["ids", "features20", "embeddings"]
PAYLOADS: tuple[Payload, ...] = ("ids", "features20", "embeddings")
FEATURES = 20
WORDS = 512  # int64 words of a token's dense embedding: 4 KB
NUM_CONTEXT = 2
KEYS = ("history", "actions", "candidates")

SPEC = BatchSpec(
    rows_per_sample={"context": NUM_CONTEXT},
    batch_size={"batch_size", "actual_batch_size"},
    shared={"feature_to_max_seqlen", "contextual_feature_names"},
)


def batch_class(base: type[Any]) -> type[Any]:
    """The peer's `BaseBatch` with the fields of a `SequenceBatch`; two-dimensional ones flattened, as it wants them."""
    names = ("extra", "context", "sample", "workload")
    return make_dataclass("PeerBatch", [(name, Any, field(default=None)) for name in names], bases=(base,))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMaker:
    """From a batch of the example to one that both sides move.

    Attributes:
        kind: Of `batch_class`.
        payload: What travels with the sequences: nothing, 20 features of ids, or 4 KB a token.
        words: (most,) int64 in page-locked memory: what dense embeddings are cut from, so that a run fits the host.
    """

    kind: type[Any]
    payload: Payload
    words: torch.Tensor

    def make(self, sequences: SequenceBatch, workload: torch.Tensor, *, keep: int, pad_to: int) -> Any:
        """The first `keep` samples, padded to `pad_to` with samples of length and workload 0 at the end."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        lengths = sequences.num_history[:keep]
        tokens, candidates = int(lengths.sum()), int(sequences.num_candidates[:keep].sum())

        def pad(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([rows[:keep], rows.new_zeros(pad_to - keep, *rows.shape[1:])])

        history, num_candidates = pad(sequences.num_history), pad(sequences.num_candidates)
        values = [sequences.history[:tokens], sequences.actions[:tokens], sequences.candidates[:candidates]]
        extra = None
        if self.payload == "features20":
            names = [f"feature{index}" for index in range(FEATURES)]
            extra = KeyedJaggedTensor(
                names, sequences.history[:tokens].repeat(FEATURES), lengths=history.repeat(FEATURES)
            )
        elif self.payload == "embeddings":
            extra = KeyedJaggedTensor(["embedding"], self.words[: tokens * WORDS], lengths=history * WORDS)
        return self.kind(
            features=KeyedJaggedTensor(
                list(KEYS), torch.cat(values), lengths=torch.cat([history, history, num_candidates])
            ),
            batch_size=pad_to,
            feature_to_max_seqlen={},
            labels=KeyedJaggedTensor(["label"], sequences.labels[:candidates].long(), lengths=num_candidates),
            actual_batch_size=keep,
            extra=extra,
            context=pad(sequences.context).reshape(-1),
            sample=pad(sequences.sample),
            workload=pad(workload),
        )


def to_sequences(batch: Any) -> SequenceBatch:
    """What the model takes; of views, and without the padding. Waits for no device where lengths per key are known."""
    features, samples = batch.features, batch.actual_batch_size
    begins = features.offset_per_key()
    history, actions, candidates = (features.values()[begins[i] : begins[i + 1]] for i in range(len(KEYS)))
    lengths = features.lengths().view(len(KEYS), -1)[:, :samples]
    return SequenceBatch(
        sample=batch.sample[:samples],
        context=batch.context.view(-1, NUM_CONTEXT)[:samples],
        num_history=lengths[0],
        history=history,
        actions=actions,
        num_candidates=lengths[2],
        candidates=candidates,
        labels=batch.labels.values().float(),
    )
