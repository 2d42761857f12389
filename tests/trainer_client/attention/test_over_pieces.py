import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.trainer_client.attention.model import CAUSAL, HEAD_DIM, KEY_HEADS, VALUE_DIM, Program, Sample, on_rank, train
from tests.trainer_client.balancing.redistribution.pool import GlooRanks
from trainer_client.attention import (
    DenseSilu,
    DenseSoftmax,
    Piece,
    PieceGroup,
    Pieces,
    SplitSample,
    VarlenSoftmax,
    attend_over_pieces,
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Samples of 0 to 24 positions in 1 to 5 pieces, on any ranks."""
    world_size = draw(st.integers(2, 4))
    samples = []
    kernel = draw(st.sampled_from(["softmax", "silu", CAUSAL]))
    most = (0, 1) if kernel == CAUSAL else (3, 4)
    for _ in range(draw(st.integers(1, 5))):
        counts = st.tuples(st.integers(0, most[0]), st.integers(0, 18), st.integers(0, most[1]))
        context, history, candidates = draw(counts)
        length = context + history + candidates
        cuts = st.integers(max(context, 1), max(length - 1, 1))
        inner = sorted(draw(st.sets(cuts, max_size=4))) if length > max(context, 1) else []
        ranks = draw(st.lists(st.integers(0, world_size - 1), min_size=len(inner) + 1, max_size=len(inner) + 1))
        pieces = tuple(zip(ranks, [*inner, length], strict=True))
        samples.append(Sample(pieces=pieces, num_context=context, num_candidates=candidates))
    return Program(
        samples=tuple(samples),
        world_size=world_size,
        kernel=kernel,
        layers_again=draw(st.integers(0, 2)),
        parallel=draw(st.sampled_from([None, "ddp", "fsdp2"])),
        nodes=draw(st.sampled_from([None, ("one", "two", "two", "two")[:world_size]])),
    )


def run(ranks: GlooRanks, program: Program) -> list[dict[str, Any]]:
    return ranks.call(on_rank, [(program,)] * program.world_size)


def check_equal(program: Program, parts: list[dict[str, Any]]) -> None:
    whole = train(replace(program, parallel=None), None, None)
    assert sum(part["loss"] for part in parts) == pytest.approx(whole["loss"], abs=1e-10, rel=1e-10)
    for number, expected in enumerate(whole["gradients"]):
        found = torch.stack([part["gradients"][number] for part in parts])
        # Under DDP and FSDP2 each rank has the mean of all, else its own part of the sum.
        found = program.world_size * found if program.parallel else found.sum(0, keepdim=True)
        torch.testing.assert_close(found, expected.expand_as(found), atol=1e-10, rtol=1e-10)
    rows = {place: values for part in parts for place, values in part["rows"].items()}
    assert rows.keys() == whole["rows"].keys()
    for place, values in whole["rows"].items():
        torch.testing.assert_close(torch.tensor(rows[place]), torch.tensor(values), atol=1e-9, rtol=1e-9)


@settings(max_examples=24)
@given(program=programs())
def test_ranks_train_what_one_process_trains(ranks: GlooRanks, program: Program) -> None:
    """Ranks that share no sample send nothing."""
    parts = run(ranks, program)
    check_equal(program, parts)
    sharing = {rank for sample in program.samples for rank, _ in sample.pieces if len(sample.pieces) > 1}
    for rank, part in enumerate(parts):
        assert part["has_pieces"] == (rank in sharing)
        assert part["has_pieces"] or not part["sent"]


def test_under_the_compiler(ranks: GlooRanks) -> None:
    giant = Sample(pieces=((1, 9), (0, 14)), num_context=2, num_candidates=3)
    program = Program(samples=(giant, Sample(pieces=((0, 5),))), world_size=2, num_layers=1, compiled=True)
    check_equal(program, run(ranks, program))


def test_to_a_node_everything_goes_once_and_is_passed_on_there(ranks: GlooRanks) -> None:
    giant = Sample(pieces=((0, 9), (1, 13), (2, 14), (3, 15)))
    program = Program(samples=(giant,), world_size=4, num_layers=1, kernel=CAUSAL, nodes=("one", "two", "two", "two"))
    parts = run(ranks, program)
    check_equal(program, parts)
    row = KEY_HEADS * (HEAD_DIM + VALUE_DIM)
    # By rank, its messages' rows: first what leaves its piece, then what it passes on; gradients go the other way.
    assert [[_rows(call, row) for call in part["sent"]] for part in parts] == [
        [{1: 3, 2: 3, 3: 3}, {}],
        [{2: 2, 3: 2}, {2: 3, 3: 3}, {2: 3, 3: 3}, {0: 3}],
        [{3: 1}, {1: 3, 3: 3 + 2}, {1: 3, 3: 3 + 2}, {0: 3, 1: 2}],
        [{}, {1: 3, 2: 3 + 2}, {1: 3, 2: 3 + 2}, {0: 3, 1: 2, 2: 1}],
    ]


def _rows(call: list[tuple[int, int]], row: int) -> dict[int, int]:
    """Rows of keys and values that go to each peer."""
    counts = dict.fromkeys([peer for peer, _ in call], 0)
    for peer, count in call:
        counts[peer] += count
    return {peer: count // row for peer, count in counts.items()}


def split(*ends: int, **counts: int) -> SplitSample:
    """A sample whose pieces are the first sequences of the only rank."""
    begins = (0, *ends)
    pieces = (Piece(rank=0, sequence=n, begin=begins[n], end=end) for n, end in enumerate(ends))
    return SplitSample(pieces=tuple(pieces), **counts)


def pieces_of(*samples: SplitSample) -> Pieces:
    pieces = PieceGroup().pieces(samples)
    assert pieces is not None
    return pieces


def test_whole_steps_compile_in_one_graph() -> None:
    kernel, offsets = DenseSilu(), torch.tensor([0, 3, 7])

    def attend(query: Tensor) -> Tensor:
        return attend_over_pieces(
            query, query, query, offsets, None, own=lambda q, k, v: q * k * v, other=kernel.other
        ).square()

    query = torch.randn(7, 2, 3)
    torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(query), query**6)


TWO = split(4, 6)


def product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query * key * value


@pytest.mark.parametrize(
    ("lengths", "own", "message"),
    [
        ([4, 2], product, "own returns a tensor, other a pair; let both return"),
        (
            [4, 2], lambda q, k, v: (product(q, k, v), q.sum(-1).T),
            r"own returns logarithms of shape \(2, 6\) for \(6, 2, 3\); return .* \(6, 2\)",
        ),
        ([4, 2], lambda q, k, v: (product(q, k, v), q.detach().sum(-1)), "own returns logarithms without a gradient"),
        ([4, 3], None, "sequence 1 has 3 rows, but its piece has positions 4 to 6"),
        ([4], None, "a piece is sequence 1, but offsets are of 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(lengths: list[int], own: Any, message: str) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.randn(int(offsets[-1]), 2, 3, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        attend_over_pieces(rows, rows, rows, offsets, pieces_of(TWO), own=own, other=DenseSoftmax().other)
    with pytest.raises(ValueError, match="a piece is sequence 1 of 1; pass all of the batch"):
        pieces_of(TWO).preceding(1)


def test_nonsense_pieces_are_refused() -> None:
    first, second = TWO.pieces
    with pytest.raises(ValueError, match="end is 4; use a whole number of at least 5"):
        replace(second, end=4)
    samples: list[tuple[dict[str, Any], str]] = [
        ({"pieces": ()}, "pieces is empty"),
        ({"pieces": (replace(first, end=5), second)}, r"pieces\[1\].begin is 4; begin at 5, where the one before ends"),
        ({"num_context": 5}, r"num_context is 5, but pieces\[0\].end is 4"),
        ({"num_context": 3, "num_candidates": 4}, "num_context is 3 and num_candidates 4 of 6 positions"),
    ]
    for change, message in samples:
        with pytest.raises(ValueError, match=message):
            replace(TWO, **change)
    for other, message in (
        (replace(second, rank=1), r"samples\[0\].pieces\[1\].rank is 1; the group has ranks 0 to 0"),
        (replace(second, sequence=0), r"samples\[0\].pieces\[1\] is sequence 0 of rank 0, and so is samples\[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            PieceGroup().pieces([SplitSample(pieces=(first, other))])
    with pytest.raises(ValueError, match="max_ctas is 0; give a whole number >= 1"):
        PieceGroup(max_ctas=0)


def _page_of_pieces() -> dict[str, Any]:
    page = (Path(__file__).parents[3] / "docs/train/giants.md").read_text(encoding="utf-8")
    loop, *others = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {}
    for block in (loop, *others):
        exec(block.replace('Balancer.connect("balancer:50051", job="train-42", ', "Balancer.embedded("), names)
    return names


def test_the_loop_of_the_page_runs_as_written() -> None:
    names = _page_of_pieces()

    def jagged(*lengths: int) -> JaggedTensor:
        return JaggedTensor(torch.arange(sum(lengths)), lengths=torch.tensor(lengths))

    batch = {"items": jagged(3, 1), "actions": jagged(3, 1), "user": jagged(1, 2), "labels": jagged(1, 1)}
    weight = torch.nn.Parameter(torch.ones(()))
    seen = []

    def model(batch: dict[str, JaggedTensor], pieces: Pieces | None) -> Tensor:
        seen.append((batch["items"].values().tolist(), pieces))
        return batch["items"].values().sum() * weight

    names["train"]([batch], model, torch.optim.SGD([weight], lr=0.5), "cpu")
    assert seen == [([0, 1, 2, 3], None)]
    assert weight.item() == 1 - 0.5 * 6 / 2
    names["balancer"].close()


def test_the_page_of_pieces_runs_as_written() -> None:
    names = _page_of_pieces()
    sample = SplitSample(
        pieces=(Piece(rank=0, sequence=1, begin=0, end=70), Piece(rank=0, sequence=0, begin=70, end=100)),
        num_candidates=10,
    )
    pieces = names["group"].pieces([sample])
    offsets = torch.tensor([0, 30, 100, 105], dtype=torch.int32)
    expected = [*range(70, 100), *range(70), *range(5)]
    assert names["positions_of"](105, offsets, pieces).tolist() == expected
    with torch.device("meta"):  # what is made there by default is of no use here
        elsewhere = SimpleNamespace(preceding=lambda _, device: torch.tensor([70, 0, 0], device=device))
        assert names["positions_of"](105, offsets, elsewhere).tolist() == expected
    assert pieces.beginnings(3).tolist() == [1, 2]
    assert pieces.endings(3).tolist() == [0, 2]
    query, key, value = torch.randn(3, 105, 2, 4, dtype=torch.float64).unbind()
    found = names["attend"](query, key, value, offsets, torch.tensor([10, 0, 0]), pieces)
    order = torch.cat([torch.arange(30, 100), torch.arange(30)])
    whole = DenseSoftmax().own(query[order], key[order], value[order], torch.tensor([0, 100]), 0, 10)[0]
    torch.testing.assert_close(found[order], whole, atol=1e-12, rtol=1e-12)
    causal = names["group"].pieces([replace(sample, num_candidates=1)])
    found = names["attend_causally"](query, key, value, offsets, causal)
    whole = DenseSoftmax().own(query[order], key[order], value[order], torch.tensor([0, 100]))[0]
    torch.testing.assert_close(found[order], whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kernel", ["causal", "softmax"])
@pytest.mark.parametrize("cuts", [(300,), (120, 300)])
def test_halves_are_as_exact_as_those_of_torch_also_where_scores_are_large(
    kernel: str, cuts: tuple[int, ...], autocast: bool
) -> None:
    pieces = pieces_of(split(*cuts)) if len(cuts) > 1 else None
    offsets = torch.tensor([0, *cuts], dtype=torch.int32)
    dense, causal = DenseSoftmax(), VarlenSoftmax(max_length=300)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if kernel == "causal":
            return causal(query, key, value, offsets, pieces)
        return attend_over_pieces(
            query, key, value, offsets, pieces, own=lambda *of: dense.own(*of, offsets), other=dense.other
        )

    def of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = (part.transpose(0, 1)[None] for part in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True)[0].transpose(0, 1)

    torch.manual_seed(0)
    given = [torch.randn(300, 1, 16).mul(scale).bfloat16() for scale in (12, 12, 1, 1)]  # scores of 144

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        *own, gradient = (tensor.to(dtype) for tensor in given)
        own = [tensor.requires_grad_() for tensor in own]
        with torch.autocast("cpu", enabled=autocast and dtype is torch.bfloat16):
            found = function(*own)
        found.backward(gradient)
        return [found.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]

    exact, theirs, ours = run(of_torch, torch.float64), run(of_torch, torch.bfloat16), run(attend, torch.bfloat16)
    for expected, peer, found in zip(exact, theirs, ours, strict=True):
        assert found.dtype == torch.bfloat16
        error, of_peer = ((part.double() - expected).norm() / expected.norm() for part in (found, peer))
        assert error < max(2 * of_peer, torch.tensor(4e-3))


def test_a_causal_kernel_refuses_samples_that_are_not_causal() -> None:
    kernel, rows, offsets = VarlenSoftmax(max_length=6), torch.randn(6, 2, 3), torch.tensor([0, 4, 6])
    for counts, message in (({"num_candidates": 2}, "2 candidates"), ({"num_context": 1}, "1 contextual positions")):
        pieces = pieces_of(replace(TWO, **counts))
        with pytest.raises(ValueError, match=message):
            kernel(rows, rows, rows, offsets, pieces)
    causal = PieceGroup().pieces([replace(TWO, num_context=1)], contextual=False)
    assert kernel(rows, rows, rows, offsets, causal).shape == rows.shape
