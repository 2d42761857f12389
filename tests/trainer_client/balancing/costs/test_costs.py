from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import silu
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from evenkeel.partitioning.splits import SpanCosts
from trainer_client.balancing.batches import BatchError, BatchSpec, flatten
from trainer_client.balancing.costs import (
    HSTUCost,
    SampleCost,
    TokenCost,
    TransformerCost,
    cost_names,
    make_cost,
    register_cost,
)
from trainer_client.balancing.costs.base import count_positions

SMALL: dict[str, Any] = {"num_layers": 1, "width": 8, "num_heads": 2, "head_dim": 4}


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
    cost = HSTUCost(**SMALL, history="h", backward=False)
    flops = cost.flops(np.array([float(history)]), float(candidates), float(context))[0]
    products = 10 * 8 * 2 * 4 * (history + candidates + context)
    # Per pair and head: a score over head_dim and a weighted sum over head_dim, two FLOPs each.
    assert flops - products == allowed_pairs(history, candidates, context) * 2 * (2 * 4 + 2 * 4)


def test_hstu_of_width_1024_is_quadratic_from_5120_positions_on() -> None:
    cost = HSTUCost(num_layers=8, width=1024, num_heads=4, head_dim=256, history="h", backward=False)
    lengths = np.array([512.0, 4096.0])
    np.testing.assert_allclose(cost.flops(lengths) / (8 * 10 * 1024**2), lengths + lengths**2 / 5120, rtol=1e-3)


def test_hstu_agrees_with_the_usual_formula_but_for_the_diagonal() -> None:
    """4·H·s·(ctx+hist)·D − 2·H·hist²·D + 4·H·cand·D per layer, which leaves out half of the diagonal."""
    heads, dim, history, candidates, context = 4, 256, 1000.0, 50.0, 7.0
    total = history + candidates + context
    usual = 4 * heads * total * (context + history) * dim - 2 * heads * history**2 * dim + 4 * heads * candidates * dim
    cost = HSTUCost(num_layers=1, width=1024, num_heads=heads, head_dim=dim, history="h", backward=False)
    attention = cost.flops(np.array([history]), candidates, context)[0] - 10 * 1024 * heads * dim * total
    assert attention - usual == 4 * heads * dim * history / 2


def test_hstu_projections_as_torch_counts_them() -> None:
    width, heads, dim, values, positions = 32, 2, 8, 12, 5
    x = torch.randn(positions, width, requires_grad=True)
    project = torch.randn(width, heads * (2 * dim + 2 * values), requires_grad=True)
    output = torch.randn(heads * values, width, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        result = (x @ project)[:, : heads * values] @ output
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    options = {
        "num_layers": 1,
        "width": width,
        "num_heads": heads,
        "head_dim": dim,
        "value_dim": values,
        "history": "h",
    }
    pairs = positions * (positions + 1) / 2
    attention = 2 * heads * (dim + values) * pairs
    once = HSTUCost(**options, backward=False).flops(np.array([float(positions)]))[0]  # type: ignore[arg-type]
    both = HSTUCost(**options).flops(np.array([float(positions)]))[0]  # type: ignore[arg-type]
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
    forward = sdpa_flop_count(shape, shape, shape)
    backward = sdpa_backward_flop_count(shape, shape, shape, shape)
    assert forward + backward == 3.5 * forward
    options = {"num_layers": 3, "width": 128, "num_heads": 4, "tokens": "t", "causal": False}
    once = TransformerCost(**options, backward=False).flops(np.array([100.0]))[0]  # type: ignore[arg-type]
    both = TransformerCost(**options).flops(np.array([100.0]))[0]  # type: ignore[arg-type]
    assert both - 3 * (once - 3 * forward) == 3 * (forward + backward)


@given(s=st.integers(0, 40))
def test_causal_attention_counts_the_lower_triangle(s: int) -> None:
    options = {"num_layers": 1, "width": 8, "num_heads": 2, "tokens": "t", "backward": False}
    causal = TransformerCost(**options).flops(np.array([float(s)]))[0]  # type: ignore[arg-type]
    full = TransformerCost(**options, causal=False).flops(np.array([float(s)]))[0]  # type: ignore[arg-type]
    assert full - causal == 4 * 8 * (s * s - sum(range(1, s + 1)))


def batch() -> dict[str, Any]:
    return {"h": torch.tensor([3, 0, 10]), "c": torch.tensor([1, 0, 2]), "x": torch.zeros(3, 2), "few": torch.arange(2)}


def test_costs_read_a_batch_and_its_flat_form() -> None:
    user = {key: value for key, value in batch().items() if key != "few"}
    cost = HSTUCost(**SMALL, history="h", candidates="c", context=2)
    expected = cost.flops(np.array([3.0, 0, 10]), np.array([1.0, 0, 2]), 2.0)
    np.testing.assert_array_equal(cost(user), expected)
    np.testing.assert_array_equal(cost(flatten(user, BatchSpec())), expected)
    assert cost(user).dtype == np.float64
    assert TokenCost(tokens=("h", "c"))(user).tolist() == [4, 0, 12]
    assert TokenCost(tokens="h", per_sample=5)(user).dtype == np.int64


def test_candidates_inside_the_history_are_not_counted_twice() -> None:
    within = HSTUCost(**SMALL, history="h", candidates="c", history_includes_candidates=True)
    beside = HSTUCost(**SMALL, history="rest", candidates="c")
    rest = batch()["h"] - batch()["c"]
    np.testing.assert_array_equal(within(batch()), beside({**batch(), "rest": rest}))
    with pytest.raises(ValueError, match="sample 2 has more candidates than positions in 'c'"):
        HSTUCost(**SMALL, history="c", candidates="h", history_includes_candidates=True)(batch())


def test_keys_of_a_keyed_jagged_tensor_are_fields() -> None:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keyed = KeyedJaggedTensor(["item.id", "action"], torch.arange(6), lengths=torch.tensor([1, 2, 0, 3]))
    assert TokenCost(tokens=("features.item.id", "features.action"))({"features": keyed}).tolist() == [1, 5]
    with pytest.raises(BatchError, match=r"nothing is called 'price' in a KeyedJaggedTensor of item.id, action"):
        TokenCost(tokens="features.price")({"features": keyed})


def test_errors_name_the_field() -> None:
    with pytest.raises(BatchError, match=r"the batch has no 'y': nothing is called 'y' in a dict of h, c, x, few"):
        TokenCost(tokens="y")(batch())
    with pytest.raises(BatchError, match=r"'x' is a tensor torch.float32 of shape \(3, 2\)"):
        TokenCost(tokens="x")(batch())
    with pytest.raises(BatchError, match="'h' holds 3 samples, 'few' 2; name jagged fields, or tensors of"):
        TokenCost(tokens=("h", "few"))(batch())
    with pytest.raises(BatchError, match="sample 1 of 'n' is -1"):
        TokenCost(tokens="n")({"n": torch.tensor([1, -1])})
    with pytest.raises(BatchError, match="compute costs from the host's batch"):
        TokenCost(tokens="n")({"n": torch.tensor([1, 2]).to("meta")})
    with pytest.raises(ValueError, match="num_heads is 0"):
        HSTUCost(**{**SMALL, "num_heads": 0}, history="h")
    with pytest.raises(ValueError, match="give head_dim"):
        TransformerCost(num_layers=1, width=10, num_heads=3, tokens="h")


@dataclass(frozen=True)
class LookupCost(SampleCost):
    """Two terms: looking up the words of a sample, and attention of a causal layer over its history."""

    words: str
    history: str

    def spans(self, batch: Any) -> SpanCosts:
        words = 0.5 * np.asarray(count_positions(batch, self.words))
        return SpanCosts.of(count_positions(batch, self.history), per_pair=2.0, fixed=words)


def test_a_cost_of_ones_own_is_ten_lines() -> None:
    cost = LookupCost(words="c", history="h")
    assert cost(batch()).tolist() == [0.5 + 2 * 6, 0, 1 + 2 * 55]
    assert cost.spans(batch()).of_spans(0, np.array([2, 0, 5])).tolist() == [2 * 3, 0, 2 * 15]


def test_costs_by_name() -> None:
    assert {"hstu", "transformer", "tokens"} <= set(cost_names())
    assert make_cost("tokens", tokens="h") == TokenCost(tokens="h")

    def constant(value: float) -> Any:
        return lambda batch: np.full(len(batch["h"]), value)

    register_cost("constant-for-test", constant)
    register_cost("constant-for-test", constant)
    assert make_cost("constant-for-test", value=2.0)(batch()).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="is there already"):
        register_cost("constant-for-test", TokenCost)
    with pytest.raises(ValueError, match="cost is 'hst'; choose one of"):
        make_cost("hst")
    with pytest.raises(ValueError, match=r"options of the cost 'tokens'.*layers"):
        make_cost("tokens", layers=2)
