import os
import re

import fbgemm_gpu  # noqa: F401  (loads the operator that is the independent reference)
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.references.bucketize import bucketize as reference
from tests.trainer_client.embedding.routing.batches import MODES, Batch, make_batch
from trainer_client.embedding.routing import Bucketized, Routing, block_bucketize, continuous, cpu, cuda, owners


@st.composite
def batches(draw: st.DrawFn, *, modes: tuple[Routing, ...] = MODES, negative: bool | None = None) -> Batch:
    num_features = draw(st.integers(0, 5))
    index_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    world_size = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 63, 64, 255, 256, 1000, 4096]))
    return make_batch(
        draw(st.integers(0, 2**32)),
        num_features=num_features,
        max_rows=draw(st.sampled_from([0, 1, 7, 40] if world_size < 255 else [0, 1, 2])),  # time grows with both
        max_length=draw(st.sampled_from([0, 1, 5, 70])),
        world_size=world_size,
        routings=draw(st.lists(st.sampled_from(modes), min_size=num_features, max_size=num_features)),
        index_dtype=index_dtype,
        length_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        weight_dtype=draw(st.sampled_from([None, torch.float32, torch.float64])),
        variable=draw(st.booleans()),
        negative=draw(st.booleans()) if negative is None else negative and index_dtype == torch.int64,
        giant=draw(st.integers(0, 9)) == 0,
    )


def assert_same(ours: tuple[torch.Tensor | None, ...], theirs: tuple[torch.Tensor | None, ...]) -> None:
    for field, mine, other in zip(Bucketized._fields, ours, theirs, strict=True):
        assert (mine is None) == (other is None), field
        if mine is not None and other is not None:
            assert mine.dtype == other.dtype, field
            assert torch.equal(mine, other), field


@settings(max_examples=40, deadline=None)
@given(batches())
def test_equals_the_definition_in_every_mode(batch: Batch) -> None:
    assert_same(batch.bucketized(), batch.by_definition())


@settings(max_examples=60, deadline=None)
@given(batches(modes=(continuous(),), negative=True), st.booleans(), st.booleans())
def test_equals_fbgemm_in_continuous_mode(batch: Batch, positions: bool, permutation: bool) -> None:
    if not batch.block_sizes or not batch.lengths.numel():
        return  # FBGEMM divides by the number of features
    sizes = torch.tensor(batch.batch_sizes, dtype=batch.lengths.dtype) if batch.batch_sizes else None
    theirs = torch.ops.fbgemm.block_bucketize_sparse_features(
        batch.lengths,
        batch.indices,
        positions,
        permutation,
        torch.tensor(batch.block_sizes).to(batch.indices.dtype),
        batch.world_size,
        batch.weights,
        sizes,
        max(batch.batch_sizes) if batch.batch_sizes else -1,
    )
    assert_same(batch.bucketized(positions=positions, permutation=permutation), theirs)


def test_a_batch_of_several_chunks_equals_the_definition() -> None:
    batch = make_batch(
        7,
        num_features=3,
        max_rows=3000,
        max_length=250,
        world_size=13,
        routings=list(MODES[:3]),
        weight_dtype=torch.float32,
    )
    assert batch.indices.numel() > 300_000
    expected = batch.by_definition()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same(batch.bucketized(), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 4096])
def test_blocks_near_the_largest_keys(world_size: int) -> None:
    keys = torch.tensor([0, 1, 2**62, 2**62 + 1, 2**63 - 1, -1, -(2**63), -(2**62), 2**52 - 1, 2**52])
    for block in (0, 1, 2, 2**32 // world_size, 2**52, 2**62 - 1, 2**62, 2**63 - 1):
        ours = block_bucketize(torch.tensor([keys.numel()]), keys, [block], world_size, "continuous")
        expected = reference(torch.tensor([keys.numel()]), keys, [block], world_size, [continuous()])
        assert_same(ours, (*expected[:3], None, expected[4]))
        expected_owners = [continuous().owner(key, world_size=world_size, block_size=block) for key in keys.tolist()]
        assert torch.equal(ours.lengths, torch.bincount(torch.tensor(expected_owners), minlength=world_size))
        found = owners(keys, continuous(), world_size=world_size, block_size=block)
        assert found.tolist() == expected_owners


def test_works_under_torch_compile_and_passes_the_operator_checks() -> None:
    batch = make_batch(3, num_features=2, max_rows=9, max_length=9, world_size=5, routings=list(MODES[1:3]))
    arguments = (batch.lengths, batch.indices, torch.tensor([10, 20]), 5, [0, 2], [0, 99])
    for options in ({"weights": torch.rand(batch.indices.numel()), "positions": True}, {"permutation": False}):
        torch.library.opcheck(torch.ops.evenkeel.block_bucketize.default, arguments, options)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("evenkeel::block_bucketize", "CUDA")

    def step(lengths: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = block_bucketize(lengths, indices + 1, [10, 20], 5, batch.routings)
        return result.lengths * 2, result.indices - 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for mine, other in zip(compiled(batch.lengths, batch.indices), step(batch.lengths, batch.indices), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 4097}, "world_size is 4097"),
        ({"routing": b"random"}, "routing is b'random'; choose one of"),
        ({"routing": ["continuous"] * 3}, "3 routings for 2 features"),
        ({"routing": ["roundrobin", "continuous"], "block_sizes": None}, "block_sizes is None"),
        ({"routing": "continuous", "block_sizes": [4, -1]}, "block_sizes has -1"),
        ({"lengths": torch.tensor([1, 2, 3])}, "3 lengths do not divide by 2"),
        ({"lengths": torch.tensor([])}, "lengths have dtype torch.float32"),
        ({"lengths": torch.tensor([[1], [2]])}, r"lengths have shape \(2, 1\)"),
        ({"indices": torch.ones(3, dtype=torch.int16)}, "indices have dtype torch.int16"),
        ({"lengths": torch.tensor([1, 1])}, "lengths sum to 2, but there are 3"),
        ({"lengths": torch.tensor([-1, 4])}, r"lengths\[0\] is -1; there are 3 indices"),
        ({"lengths": torch.tensor([2**62] * 4 + [3, 0])}, r"lengths\[0\] is 4611686018427387904"),
        ({"lengths": torch.tensor([], dtype=torch.int64)}, "lengths sum to 0, but there are 3"),
        ({"batch_sizes": [1, 2]}, r"batch_sizes \[1, 2\] add up to 3, but there are 2 lengths"),
        ({"batch_sizes": [-1, 3]}, r"batch_sizes \[-1, 3\]"),
        ({"weights": torch.ones(2)}, "weights have shape"),
        ({"weights": torch.ones(3, 1)}, "weights have shape"),
        ({"indices": torch.ones(3, dtype=torch.int64, device="meta")}, "lengths are on cpu and indices on meta"),
        ({"batch_sizes": [2]}, "batch_sizes has 1 entries for 2 features"),
    ],
)
def test_refusals_name_field_and_value(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "lengths": torch.tensor([1, 2]),
        "indices": torch.tensor([4, 5, 6]),
        "block_sizes": [4, 4],
        "world_size": 2,
        "routing": "roundrobin",
    }
    with pytest.raises(ValueError, match=message):
        block_bucketize(**(arguments | change))  # type: ignore[arg-type]


def test_a_forked_child_has_threads_of_its_own() -> None:
    parents = cpu._pool(1)
    assert parents.submit(int, 7).result(timeout=60) == 7
    child = os.fork()
    if child == 0:
        good = cpu._pool(1) is not parents and cpu._pool(1).submit(int, 8).result(timeout=60) == 8
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_parameters_of_cuda_kernels_are_those_of_the_structure_in_order() -> None:
    text = cuda.source()
    body = re.sub(r"//.*", "", text[text.index("struct Params {") : text.index("};", text.index("struct Params {"))])
    names = [
        name.strip(" *\n")
        for line in body.split("{")[1].split(";")
        for name in re.sub(r"^\s*(const )?\w+\b\*?", "", line).split(",")
        if name.strip()
    ]
    assert names == [name for name, _ in cuda._Params._fields_]
