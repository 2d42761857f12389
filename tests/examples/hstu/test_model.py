from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from examples.datasets import Keys, SequenceBatch, SyntheticSequences, ZipfLengths
from examples.hstu import model
from examples.hstu.attention import attend, choose_kernel
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


def test_layers_that_are_called_together_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compiled_transform = torch.compile(model.transform, backend="eager", dynamic=True)  # traced, no code generated

    def counted(layers: Sequence[model.Layer], *tensors: torch.Tensor) -> torch.Tensor:
        calls.append(len(layers))
        return compiled_transform(layers, *tensors)

    monkeypatch.setattr(model, "compiled_transform", lambda: counted)
    batch, options = _batch(), replace(OPTIONS, num_layers=5, kernel="dense")
    found = {}
    for size, compiled, apart in ((1, False, False), (1, True, False), (2, True, False), (2, True, True)):
        torch.manual_seed(0)
        ranker = Ranker(replace(options, layers_per_call=size, compile=compiled))
        ranker.layers_apart = apart
        hooked: list[str] = []
        for layer in ranker.layers:
            layer.register_forward_hook(lambda *_, hooked=hooked: hooked.append("hook"))
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(model, "TRACEABLE", {"dense"})  # not before: layers leave their attention out of the graph
            found[size, compiled, apart] = ranker(batch).tolist(), list(calls), len(hooked)
    expected = found[1, False, False][0]
    assert [logits == expected for logits, _, _ in found.values()] == [True] * 4
    assert [called for _, called, _ in found.values()] == [[], [1] * 5, [2, 2, 1], [1] * 5]
    assert [hooks for _, _, hooks in found.values()][-1] == 5  # as whoever measures layers wants it


def test_candidates_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    ranker = Ranker(OPTIONS)
    batch = _batch(candidates=3)
    before = ranker(batch).view(-1, 3)
    batch.candidates = batch.candidates.clone()
    batch.candidates[1::3] = (batch.candidates[1::3] + 7) % 100
    after = ranker(batch).view(-1, 3)
    assert torch.allclose(before[:, [0, 2]], after[:, [0, 2]], atol=1e-6)
    assert not torch.allclose(before[:, 1], after[:, 1], atol=1e-3)


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


def test_kernels_that_cannot_compute_the_mask_are_refused() -> None:
    assert choose_kernel("auto", torch.device("cpu"), 4) == "dense"
    assert choose_kernel("auto", torch.device("cuda"), 1) == "varlen"
    assert choose_kernel("auto", torch.device("cuda"), 4) == "flex"
    with pytest.raises(ValueError, match="'varlen' is causal, and 4 candidates"):
        choose_kernel("varlen", torch.device("cuda"), 4)
    with pytest.raises(ValueError, match="'flex' needs a GPU"):
        choose_kernel("flex", torch.device("cpu"), 1)
