"""Costs count what torch computes, and say the same of spans as of whole samples."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from trainer_client.balancing.batches import BatchError, BatchSpec, flatten
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
HSTU: dict[str, Any] = {**SMALL, "num_layers": 1, "head_dim": 4}
COSTS = [
    HSTUCost(**SMALL, head_dim=4, value_dim=3, history=("a", "a"), candidates="k", context=3),
    HSTUCost(**SMALL, head_dim=4, history="a", candidates="k", history_includes_candidates=True, backward=False),
    TransformerCost(**SMALL, tokens="a", vocabulary=50, context=2),
    SemanticIdCost(**SMALL, items="a", targets="k", codebook=20, context=1),
    TokenCost(tokens=("a", "k"), per_sample=4),
]


def allowed_pairs(history: int, candidates: int, context: int) -> int:
    """Counts the entries of HSTU's attention mask one by one."""
    kinds = ["context"] * context + ["history"] * history + ["candidate"] * candidates
    count = 0
    for query, query_kind in enumerate(kinds):
        for key, key_kind in enumerate(kinds):
            if key_kind == "candidate":
                count += query == key
            elif query_kind == key_kind == "history":
                count += key <= query
            else:
                count += 1
    return count


@given(history=st.integers(0, 12), candidates=st.integers(0, 5), context=st.integers(0, 4))
def test_hstu_attention_counts_the_pairs_of_its_mask(history: int, candidates: int, context: int) -> None:
    cost = HSTUCost(**HSTU, history="h", backward=False)
    flops = cost.flops(np.array([float(history)]), float(candidates), float(context))[0]
    products = 10 * 8 * 2 * 4 * (history + candidates + context)
    # Per pair and head: a score over head_dim and a weighted sum over head_dim, two FLOPs each.
    assert flops - products == allowed_pairs(history, candidates, context) * 2 * (2 * 4 + 2 * 4)


@given(s=st.integers(0, 40))
def test_causal_attention_counts_the_lower_triangle(s: int) -> None:
    causal, full = (
        TransformerCost(**HSTU, tokens="t", backward=False, causal=one).flops(np.array([float(s)]))[0]
        for one in (True, False)
    )
    assert full - causal == 4 * 8 * (s * s - sum(range(1, s + 1)))


def test_semantic_ids_are_the_positions_of_a_transformer_and_an_output_layer_at_the_targets() -> None:
    batch, a, k = {"a": torch.tensor([5, 2]), "k": torch.tensor([2, 0])}, np.array([5.0, 2]), np.array([2.0, 0])
    layers = TransformerCost(**SMALL, tokens="a").flops(3 * (a + k) + 1)
    np.testing.assert_allclose(COSTS[3](batch), layers + 3 * 2 * 8 * 20 * 3 * k)
    hstu = HSTUCost(**HSTU, history="a", candidates="k", context=2)
    np.testing.assert_array_equal(hstu(batch), hstu.flops(a, k, 2.0))


def test_hstu_projections_as_torch_counts_them() -> None:
    width, heads, dim, values, positions = 32, 2, 8, 12, 5
    x = torch.randn(positions, width, requires_grad=True)
    project = torch.randn(width, heads * (2 * dim + 2 * values), requires_grad=True)
    output = torch.randn(heads * values, width, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        result = (x @ project)[:, : heads * values] @ output
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    once, both = (
        HSTUCost(
            num_layers=1, width=width, num_heads=heads, head_dim=dim, value_dim=values, history="h", backward=one
        ).flops(np.array([float(positions)]))[0]
        for one in (False, True)
    )  # fmt: skip
    attention = 2 * heads * (dim + values) * positions * (positions + 1) / 2
    assert once - attention == forward.get_total_flops()
    assert both - 3.5 * attention == forward.get_total_flops() + backward.get_total_flops()


@pytest.mark.parametrize("gated", [False, True])
def test_transformer_as_torch_counts_it(gated: bool) -> None:
    s, width, heads, kv_heads, inner, vocabulary = 6, 16, 4, 2, 40, 11
    dim = width // heads
    weight = {
        name: torch.randn(shape)
        for name, shape in {
            "q": (width, heads * dim), "k": (width, kv_heads * dim), "v": (width, kv_heads * dim),
            "o": (heads * dim, width), "up": (width, inner), "gate": (width, inner), "down": (inner, width),
            "head": (width, vocabulary),
        }.items()
    }  # fmt: skip
    x = torch.randn(s, width)
    with FlopCounterMode(display=False) as counter:
        q, k, v = ((x @ weight[name]).view(s, -1, dim).transpose(0, 1) for name in "qkv")
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
        mixed = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        x = torch.bmm(mixed, v).transpose(0, 1).reshape(s, -1) @ weight["o"]
        hidden = x @ weight["up"] * silu(x @ weight["gate"]) if gated else x @ weight["up"]
        _ = hidden @ weight["down"] @ weight["head"]
    cost = TransformerCost(
        num_layers=1, width=width, num_heads=heads, num_kv_heads=kv_heads, feed_forward=inner, gated=gated,
        vocabulary=vocabulary, tokens="t", causal=False, backward=False,
    )  # fmt: skip
    assert cost.flops(np.array([float(s)]))[0] == counter.get_total_flops()


def test_backward_of_attention_as_torch_counts_it() -> None:
    shape = (1, 4, 100, 32)
    forward, backward = sdpa_flop_count(shape, shape, shape), sdpa_backward_flop_count(shape, shape, shape, shape)
    once, both = (
        TransformerCost(num_layers=1, width=128, num_heads=4, tokens="t", causal=False, backward=one).flops(
            np.array([100.0])
        )[0]
        for one in (False, True)
    )
    assert both - 3 * (once - forward) == forward + backward


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: type(cost).__name__)
@settings(max_examples=15)
@given(a=st.lists(st.integers(4, 40), max_size=5), seed=st.integers(0, 99))
def test_spans_add_up_and_a_flat_batch_costs_the_same(cost: SampleCost, a: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = {"a": torch.tensor(a, dtype=torch.int64), "k": torch.from_numpy(rng.integers(0, 4, len(a)))}
    spans, costs = cost.spans(batch), cost(batch)
    assert costs.dtype == (np.int64 if isinstance(cost, TokenCost) else np.float64)
    np.testing.assert_array_equal(cost(flatten(batch, BatchSpec())), costs)
    np.testing.assert_allclose(spans.whole, costs, rtol=1e-12)
    cuts = np.sort(rng.integers(0, spans.positions + 1, (3, len(a))), axis=0)
    edges = np.concatenate([np.zeros((1, len(a))), cuts, [spans.positions]])
    total = sum(spans.before(end) - spans.before(begin) for begin, end in itertools.pairwise(edges))
    np.testing.assert_allclose(total + spans.fixed, costs, rtol=1e-12)


def test_items_stay_together_and_what_cannot_be_told_apart_stays_whole() -> None:
    batch = {"a": torch.tensor([5]), "k": torch.tensor([2])}
    interleaved, codes = COSTS[0].spans(batch), COSTS[3].spans(batch)
    assert (interleaved.first_cut.tolist(), interleaved.num_cuts.tolist()) == ([5], [5])
    assert (codes.first_cut.tolist(), codes.num_cuts.tolist()) == ([4], [5])
    assert TransformerCost(**SMALL, tokens="a", causal=False).spans(batch) is None
    assert LearnedCost(SequenceTerms(history="a"), prior=lambda one: np.ones(len(one["a"]))).spans(batch) is None


def test_keys_of_a_keyed_jagged_tensor_are_fields() -> None:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keyed = KeyedJaggedTensor(["item.id", "action"], torch.arange(6), lengths=torch.tensor([1, 2, 0, 3]))
    assert TokenCost(tokens=("features.item.id", "features.action"))({"features": keyed}).tolist() == [1, 5]
    with pytest.raises(BatchError, match=r"nothing is called 'price' in a KeyedJaggedTensor of item.id, action"):
        TokenCost(tokens="features.price")({"features": keyed})


def batch() -> dict[str, Any]:
    return {"h": torch.tensor([3, 0, 10]), "c": torch.tensor([1, 0, 2]), "x": torch.zeros(3, 2), "few": torch.arange(2)}


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("y", r"the batch has no 'y': nothing is called 'y' in a dict of h, c, x, few, n, m"),
        ("x", r"'x' is a tensor torch.float32 of shape \(3, 2\)"),
        (("h", "few"), "'h' holds 3 samples, 'few' 2; name jagged fields, or tensors of"),
        ("n", "sample 1 of 'n' is -1"),
        ("m", "compute costs from the host's batch"),
    ],
)
def test_errors_name_the_field(field: Any, words: str) -> None:
    one = {**batch(), "n": torch.tensor([1, -1]), "m": torch.tensor([1, 2]).to("meta")}
    with pytest.raises(BatchError, match=words):
        TokenCost(tokens=field)(one)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (HSTUCost, {**HSTU, "num_heads": 0, "history": "h"}, "num_heads is 0"),
        (HSTUCost, {**HSTU, "history": ()}, "history is \\(\\); name at least one field"),
        (TransformerCost, {"num_layers": 1, "width": 10, "num_heads": 3, "tokens": "h"}, "give head_dim"),
        (TransformerCost, {**SMALL, "tokens": "h", "vocabulary": -1}, "vocabulary is -1"),
        (SemanticIdCost, {**SMALL, "items": "x", "targets": -1}, "targets is -1"),
    ],
)
def test_options_out_of_range_are_named(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**options)


def test_candidates_inside_the_history_are_not_counted_twice() -> None:
    within = HSTUCost(**HSTU, history="h", candidates="c", history_includes_candidates=True)
    beside = HSTUCost(**HSTU, history="rest", candidates="c")
    rest = batch()["h"] - batch()["c"]
    np.testing.assert_array_equal(within(batch()), beside({**batch(), "rest": rest}))
    with pytest.raises(ValueError, match="sample 2 has more candidates than positions in 'c'"):
        HSTUCost(**HSTU, history="c", candidates="h", history_includes_candidates=True)(batch())
