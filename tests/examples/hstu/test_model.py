import torch

from examples.datasets import SequenceBatch
from examples.hstu.attention import attend
from examples.hstu.sequences import arrange


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
