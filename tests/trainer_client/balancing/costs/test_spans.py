"""Spans of samples cost together what the samples cost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_client.balancing.costs import (
    HSTUCost,
    LearnedCost,
    SampleCost,
    SemanticIdCost,
    SequenceTerms,
    TokenCost,
    TransformerCost,
)

SMALL: dict[str, Any] = {"num_layers": 2, "width": 8, "num_heads": 2}
COSTS = [
    HSTUCost(**SMALL, head_dim=4, value_dim=3, history=("a", "a"), candidates="k", context=3),
    HSTUCost(**SMALL, head_dim=4, history="a", candidates="k", history_includes_candidates=True, backward=False),
    TransformerCost(**SMALL, tokens="a", vocabulary=50, context=2),
    SemanticIdCost(**SMALL, items="a", targets="k", codebook=20, context=1),
    TokenCost(tokens=("a", "k"), per_sample=4),
]


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: type(cost).__name__)
@settings(max_examples=15)
@given(a=st.lists(st.integers(4, 40), max_size=5), seed=st.integers(0, 99))
def test_spans_add_up(cost: SampleCost, a: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = {"a": torch.tensor(a, dtype=torch.int64), "k": torch.from_numpy(rng.integers(0, 4, len(a)))}
    spans = cost.spans(batch)
    assert spans is not None
    np.testing.assert_allclose(spans.whole, cost(batch), rtol=1e-12)
    cuts = np.sort(rng.integers(0, spans.positions + 1, (3, len(a))), axis=0)
    edges = np.concatenate([np.zeros((1, len(a))), cuts, [spans.positions]])
    total = sum(spans.before(end) - spans.before(begin) for begin, end in itertools.pairwise(edges))
    np.testing.assert_allclose(total + spans.fixed, cost(batch), rtol=1e-12)


def test_what_cannot_be_told_apart_stays_whole() -> None:
    class Own(SampleCost):
        def __call__(self, batch: Any) -> Any:
            return np.ones(len(batch["a"]))

    batch = {"a": torch.tensor([3, 4])}
    assert Own().spans(batch) is None
    assert TransformerCost(**SMALL, tokens="a", causal=False).spans(batch) is None


def test_items_stay_together() -> None:
    batch = {"a": torch.tensor([5]), "k": torch.tensor([2])}
    interleaved, codes = COSTS[0].spans(batch), COSTS[3].spans(batch)
    assert interleaved is not None
    assert (interleaved.first_cut.tolist(), interleaved.num_cuts.tolist()) == ([5], [5])
    assert codes is not None
    assert (codes.first_cut.tolist(), codes.num_cuts.tolist()) == ([4], [5])


def test_fitted_costs_are_split_as_they_were_fitted() -> None:
    terms = SequenceTerms(history="a", candidates="k", context=2)
    batch = {"a": torch.tensor([3, 9, 0]), "k": torch.tensor([2, 0, 1])}
    coefficients = np.array([5.0, 2.0, 0.25, 3.0])
    spans = terms.spans(batch, coefficients)
    np.testing.assert_allclose(spans.whole, terms(batch).numpy() @ coefficients)
    prior = COSTS[2]
    before = LearnedCost(terms, prior=prior).spans(batch)
    assert before is not None
    np.testing.assert_allclose(before.whole, prior(batch))
    assert LearnedCost(terms, prior=lambda batch: np.ones(len(batch["a"]))).spans(batch) is None
