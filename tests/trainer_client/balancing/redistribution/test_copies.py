"""What is copied where: picked samples against batches made of them, parts of samples, and slices that cannot be."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from evenkeel.partitioning.slices import Slice
from evenkeel.partitioning.splits import ALL, FIRST, LAST, part_ranges, samples_of_parts
from tests.trainer_client.nests import Shape, as_bytes, make, nests, parts, spec_of
from trainer_client.balancing.batches import BatchError, BatchSpec, FlatBatch, MaxLength, Padded, flatten
from trainer_client.balancing.redistribution import cut, gathering, pick
from trainer_client.balancing.redistribution.copies import WHOLE, FieldTable
from trainer_client.balancing.redistribution.gathering import Samples, describe_samples
from trainer_client.balancing.redistribution.layout import measure

ONE_FIELD = np.array([0])
FOUR_BYTES = FieldTable(column=ONE_FIELD, unit_bytes=np.array([4]), leaf=ONE_FIELD, in_memory=ONE_FIELD)
NOWHERE = np.zeros((1, 1), np.int64)


@settings(max_examples=60, deadline=None)
@given(
    shape=nests, counts=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 2**32),
    most=st.one_of(st.integers(1, 40), st.just(WHOLE)),
)  # fmt: skip
def test_picked_samples_make_the_batch_that_they_would_have_made(
    shape: Shape, counts: list[int], seed: int, most: int
) -> None:
    """Whole and in small pieces; a batch that is wanted whole and alone is not copied."""
    rng, spec = np.random.default_rng(seed), spec_of(shape)
    samples = [[10 * at + number for number in range(count)] for at, count in enumerate(counts)]
    batches = [flatten(make(shape, own), spec) for own in samples]
    assume(len({batch.schema.hash for batch in batches}) == 1)
    chosen = [np.flatnonzero(rng.random(count) < 0.5) for count in counts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "piece_bytes", lambda _: most)
        found = pick(batches, chosen)
    wanted = [own[at] for own, some in zip(samples, chosen, strict=True) for at in some.tolist()]
    assert parts(found.unflatten(spec)) == parts(make(shape, wanted))
    whole = batches[seed % len(batches)]
    every = [np.arange(batch.num_samples if batch is whole else 0) for batch in batches]
    assert pick(batches, every) is whole


def test_a_batch_on_several_devices_is_refused() -> None:
    flat = flatten({"a": torch.zeros(4), "b": torch.zeros(4)})
    spread = flat.rebuild([flat.tensors[0], flat.tensors[1].to("meta")], flat.lengths)
    with pytest.raises(BatchError, match=r"on several devices: 'a' on cpu, 'b' on meta; move it to one"):
        pick([spread, spread], [np.array([0]), np.array([1])])


@pytest.mark.parametrize(
    ("rank", "counts", "totals", "destinations", "words"),
    [
        (0, [1, 1], [2**62, 2**62], [], f"has {2**62} values"),  # whose sum times four bytes wraps around to nothing
        (0, [1, 1], [2**31, 0], [], "has 2147483648 values on one rank; a batch may have 2147483647 at most"),
        (0, [1, -1], [3, 3], [], "negative number"),
        (0, [1, 1], [3, 3], [0, 1], "keeps 1 samples on rank 0, but announces 0"),
        (1, [1, 1], [3, 3], [1], "keeps 0 values of jagged field 0 on rank 1, but announces 3 from it; pass the batch"),
    ],
)
def test_a_slice_that_announces_what_cannot_be_is_refused(
    rank: int, counts: list[int], totals: list[int], destinations: list[int], words: str
) -> None:
    piece = Slice(
        rank=rank, destinations=np.array(destinations, np.int32), sources=np.array([1, 2], np.int32),
        source_counts=np.array(counts, np.int32), source_totals=np.array(totals).reshape(2, 1),
    )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        measure(piece, np.zeros((len(destinations), 1), np.int64), FOUR_BYTES, 3, 64)


def test_more_values_than_pieces_can_count_are_refused() -> None:
    table = np.array([[2**31 - 1], [1]])
    with pytest.raises(ValueError, match=f"has {2**31} values"):
        describe_samples([Samples((), table, table.sum(0), NOWHERE[0])], FOUR_BYTES, NOWHERE, NOWHERE[0], WHOLE)


def random_cuts(rng: np.random.Generator, samples: int) -> NDArray[np.int64]:
    """Each sample in 1 to 4 parts, which may be empty where it is short."""
    begins = []
    for _ in range(samples):
        more = int(rng.integers(0, 4)) if rng.random() < 0.5 else 0
        begins += [0, *np.sort(rng.integers(1, 12, more)).tolist()]
    return np.array(begins, np.int64)


def rows_of(flat: FlatBatch, leaf: int) -> list[list[torch.Tensor]]:
    """Of a leaf's columns (one for a dense leaf) the rows of each sample."""
    found, tensor = flat.structure.leaves[leaf], flat.tensors[leaf]
    if found.rows:
        return [list(tensor.split(found.rows)) if flat.num_samples else []]
    result, begin = [], 0
    for column in found.columns:
        lengths = flat.lengths[:, column].tolist()
        result.append(list(tensor[begin : begin + sum(lengths)].split(lengths)) if lengths else [])
        begin += sum(lengths)
    return result


JAGGED: Shape = ("dict", ("tuple", "jagged", "odd rows"), ("dict", "keyed", ("dict", "counted", "offsets")))


@settings(max_examples=80, deadline=None)
@given(samples=st.integers(0, 6), seed=st.integers(0, 2**32 - 1))
def test_each_part_has_its_span_and_what_goes_with_it(samples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, spec = make(JAGGED, rng.permutation(99)[:samples].tolist()), spec_of(JAGGED)
    first, *others = flatten(batch, spec).structure.columns
    sequence = {first, *(column for column in others if rng.random() < 0.6)}
    goes_with: dict[str, Any] = {
        column: ("first", "last", "all")[rng.integers(3)] for column in others if column not in sequence
    }
    spec = replace(spec, sequence=sequence, parts=goes_with)
    flat = flatten(batch, spec)
    assert flat.roles is not None
    cuts = random_cuts(rng, samples)
    found = cut(flat, cuts)
    begins, ends = part_ranges(flat.lengths, cuts, flat.roles)
    assert found.structure is flat.structure
    np.testing.assert_array_equal(found.lengths, ends - begins)
    np.testing.assert_array_equal(found.totals, found.lengths.sum(axis=0))
    counts = dict(flat.structure.counts)
    for index, leaf in enumerate(flat.structure.leaves):
        if index in counts:
            assert found.tensors[index].dtype == leaf.dtype
            assert found.tensors[index].tolist() == found.lengths[:, counts[index]].tolist()
            continue
        for place, (wanted, own) in enumerate(zip(rows_of(flat, index), rows_of(found, index), strict=True)):
            assert len(own) == len(cuts)
            for part, sample in enumerate(samples_of_parts(cuts).tolist()):
                rows = wanted[sample]
                if not leaf.rows:
                    column = leaf.columns[place]
                    rows = rows[begins[part, column] : ends[part, column]]
                assert as_bytes(own[part]) == as_bytes(rows), leaf.path
    assert len(found.unflatten(spec)["id"]) == len(cuts)


@dataclass
class History:
    items: JaggedTensor
    codes: torch.Tensor
    num_codes: torch.Tensor


def a_batch() -> dict[str, Any]:
    """Two samples of 3 and 4 items, two codes each."""
    items = JaggedTensor(torch.arange(7), weights=torch.arange(7) / 10, lengths=torch.tensor([3, 4], dtype=torch.int32))
    return {
        "history": History(items, torch.arange(14), torch.tensor([6, 8])),
        "user": KeyedJaggedTensor(
            ["clicks", "tags"], torch.arange(6), lengths=torch.tensor([1, 1, 3, 1], dtype=torch.int32)
        ),
        "padded": torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]),
        "labels": torch.tensor([1.0, 0.0]),
        "names": ["ada", "grace"],
        "longest": 4,
    }


SPEC = BatchSpec(
    rows_per_sample={"history.codes": "history.num_codes"},
    padded={"padded": "history.items"},
    derived={"longest": MaxLength("history.items")},
    sequence={"history.items": 1, "history.codes": 2},
    parts={"user.clicks": "all", "user.tags": "first"},
)
CUTS = np.array([0, 0, 1, 3])


def test_items_are_cut_without_a_copy_and_other_fields_go_with_the_last_part_unless_declared() -> None:
    flat = flatten(a_batch(), SPEC)
    assert flat.structure.roles == (1, 2, ALL, ALL, FIRST)
    assert flatten(a_batch(), replace(SPEC, parts={})).structure.roles == (1, 2, ALL, LAST, LAST)
    assert cut(flat, CUTS).unflatten(SPEC)["padded"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 0, 0]]
    found = cut(flat, CUTS)
    same = {leaf.path for leaf, own, other in zip(flat.structure.leaves, found.tensors, flat.tensors, strict=True)
            if own is other}  # fmt: skip
    assert same == {"history.items", "history.items.weights", "history.codes", "padded"}


def test_ranks_that_declare_another_sequence_have_another_schema() -> None:
    plain = flatten(a_batch(), replace(SPEC, sequence=(), parts={})).schema
    assert "sequence" not in "".join(plain.lines)
    schemas = [flatten(a_batch(), spec).schema for spec in (SPEC, replace(SPEC, parts={}))]
    assert len({schema.hash for schema in (plain, *schemas)}) == 3
    assert "with all parts" in schemas[0].diff(schemas[1])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"sequence": {"labels"}}, "sequence names 'labels', which has 1 row for each sample: all parts get it"),
        ({"sequence": {"names"}}, "sequence names 'names', whose samples have no positions: it is a list of objects"),
        ({"sequence": {"nothing"}}, "sequence names 'nothing', which the batch does not have"),
        ({"sequence": {"history"}}, "sequence names 'history', which is no jagged field"),
        ({"sequence": {"history.items": 0}}, "sequence['history.items'] is 0; give the values of an item"),
        ({"sequence": "history.items"}, "sequence is 'history.items'; give a collection of paths"),
        ({"sequence": {"history.codes": 3}}, "sample 1 has 8 values in 'history.num_codes', which sequence declares"),
        ({"sequence": {"history.items": 1, "history.items.weights": 2}}, "are declared differently in sequence"),
        (
            {"sequence": {"history.items"}, "parts": {"history.items.weights": "all"}},
            "'history.items' is in sequence and 'history.items.weights', which has the same lengths, in parts",
        ),
        ({"sequence": {"padded"}, "padded": {"padded": Padded()}, "derived": {"longest": len}}, "padded without"),
        ({"parts": {"labels": "all"}}, "which has 1 row for each sample: all parts get it; leave it out"),
        ({"parts": {"names": "first"}}, "parts names 'names', which has one entry for each sample"),
        ({"parts": {"user.tags": "middle"}}, "parts['user.tags'] is 'middle'; give 'last', 'first' or 'all'"),
        ({"parts": {"user.tags"}}, "give a mapping from paths to"),
    ],
)
def test_what_cannot_be_cut_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=re.escape(message)):
        flatten(a_batch(), replace(SPEC, **spec))
