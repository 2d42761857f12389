import pytest
import torch

from examples.datasets import Keys, SequenceBatch, SyntheticSequences, ZipfLengths
from examples.hstu.attention import attend
from examples.hstu.model import ModelOptions, Ranker, loss_of
from examples.hstu.sequences import arrange

OPTIONS = ModelOptions(
    num_layers=2, width=32, num_heads=2, head_dim=16, embedding_dim=16, num_items=100, max_tokens=64
)  # fmt: skip


def _batch(size: int = 6, candidates: int = 1, seed: int = 0) -> SequenceBatch:
    data = SyntheticSequences(
        num_batches=1, batch_size=size, lengths=ZipfLengths(maximum=64), items=Keys(count=100),
        num_candidates=candidates, seed=seed,
    )  # fmt: skip
    return data.batch(0)


def _one(batch: SequenceBatch, sample: int) -> SequenceBatch:
    history = slice(int(batch.num_history[:sample].sum()), int(batch.num_history[: sample + 1].sum()))
    candidates = slice(int(batch.num_candidates[:sample].sum()), int(batch.num_candidates[: sample + 1].sum()))
    only = slice(sample, sample + 1)
    return SequenceBatch(
        sample=batch.sample[only], context=batch.context[only], num_history=batch.num_history[only],
        history=batch.history[history], actions=batch.actions[history], num_candidates=batch.num_candidates[only],
        candidates=batch.candidates[candidates], labels=batch.labels[candidates],
    )  # fmt: skip


def test_tokens_are_context_then_items_with_their_actions_then_candidates() -> None:
    batch = SequenceBatch(
        sample=torch.arange(2), context=torch.tensor([[0], [1]]), num_history=torch.tensor([2, 1]),
        history=torch.tensor([10, 11, 12]), actions=torch.tensor([20, 21, 22]), num_candidates=torch.tensor([1, 2]),
        candidates=torch.tensor([30, 31, 32]), labels=torch.zeros(3),
    )  # fmt: skip
    sequences = arrange(batch, interleaved=True)
    parts = torch.cat([batch.context.reshape(-1), batch.history, batch.actions, batch.candidates])
    assert parts[sequences.order].tolist() == [0, 10, 20, 11, 21, 30, 1, 12, 22, 31, 32]
    assert sequences.offsets.tolist() == [0, 6, 11]
    assert sequences.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert sequences.candidates.tolist() == [5, 9, 10]


@pytest.mark.parametrize("candidates", [1, 3])
def test_a_sample_scores_the_same_in_any_batch(candidates: int) -> None:
    torch.manual_seed(0)
    ranker = Ranker(OPTIONS)
    batch = _batch(candidates=candidates)
    together = ranker(batch)
    alone = torch.cat([ranker(_one(batch, sample)) for sample in range(batch.size)])
    assert torch.allclose(together, alone, atol=1e-5)


def test_attention_follows_the_mask() -> None:
    lengths, candidates = torch.tensor([5, 1, 7]), torch.tensor([2, 1, 0])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    query, key, value = torch.randn(3, 13, 2, 4, dtype=torch.float64).unbind(0)
    found = attend(query, key, value, offsets, candidates, max_length=8, kernel="dense")
    for begin, length, count in zip(offsets.tolist(), lengths.tolist(), candidates.tolist(), strict=False):
        for row in range(length):
            history = length - count
            seen = [*range(min(row + 1, history)), *([row] if row >= history else [])]
            columns = [begin + column for column in seen]
            for head in range(2):
                weights = (key[columns, head] @ query[begin + row, head] / 2.0).softmax(0)
                assert torch.allclose(found[begin + row, head], weights @ value[columns, head])


def test_an_empty_batch_has_gradients_for_every_parameter() -> None:
    ranker = Ranker(OPTIONS)
    batch = _batch()
    empty = SequenceBatch(**{name: getattr(batch, name)[:0] for name in SequenceBatch.__slots__})
    loss = loss_of(ranker(empty), empty)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in ranker.parameters())
