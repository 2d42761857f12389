import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from trainer_client.balancing.votes import VOTE_BYTES, Held, Vote, checksums_cancel, transfer_checksum

from evenkeel.partitioning.slices import Slice, slice_plan

U64 = st.integers(0, 2**64 - 1)


@given(
    st.builds(
        Vote,
        round=U64, held=st.sampled_from(Held), instance=U64, digest=U64, moved=U64, checksum=U64, samples=U64,
        exhausted=st.booleans(), asked=st.booleans(), ready=st.booleans(), costs_valid=st.booleans(),
        costs_float=st.booleans(), schema=U64, load=st.floats(allow_nan=False), heaviest=st.floats(allow_nan=False),
    )
)  # fmt: skip
def test_the_struct_survives_the_wire(vote: Vote) -> None:
    data = vote.pack()
    assert len(data) == VOTE_BYTES
    assert Vote.unpack(data) == vote


@st.composite
def plans(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts = np.array(draw(st.lists(st.integers(0, 6), min_size=1, max_size=6)), dtype=np.int64)
    total, fields = int(counts.sum()), draw(st.integers(0, 3))
    destinations = draw(hnp.arrays(np.int32, total, elements=st.integers(0, len(counts) - 1)))
    lengths = draw(hnp.arrays(np.int64, (total, fields), elements=st.integers(0, 1000)))
    return counts, destinations, lengths


def votes_of(slices: list[Slice], counts: np.ndarray, lengths: np.ndarray) -> list[Vote]:
    begins = np.concatenate([[0], np.cumsum(counts)])
    return [
        Vote(round=0, checksum=transfer_checksum(piece, lengths[begins[rank] : begins[rank + 1]]))
        for rank, piece in enumerate(slices)
    ]


@given(plans())
def test_checksums_of_one_plan_cancel(plan: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    counts, destinations, lengths = plan
    assert checksums_cancel(votes_of(list(slice_plan(destinations, counts, lengths)), counts, lengths))


@given(plans(), st.data())
def test_checksums_of_mixed_plans_do_not(plan: tuple[np.ndarray, np.ndarray, np.ndarray], data: st.DataObject) -> None:
    counts, destinations, lengths = plan
    others = data.draw(hnp.arrays(np.int32, len(destinations), elements=st.integers(0, len(counts) - 1)))
    rank = data.draw(st.integers(0, len(counts) - 1))
    slices = list(slice_plan(destinations, counts, lengths))
    foreign = slice_plan(others, counts, lengths)[rank]
    same = all(
        np.array_equal(getattr(slices[rank], field), getattr(foreign, field))
        for field in ("sources", "source_counts", "source_totals")
    ) and (
        # What this rank sends, as totals for each receiver: the checksum does not depend on which samples make them up.
        sent_by(slices[rank], counts, lengths) == sent_by(foreign, counts, lengths)
    )
    slices[rank] = foreign
    assert checksums_cancel(votes_of(slices, counts, lengths)) == same


def sent_by(piece: Slice, counts: np.ndarray, lengths: np.ndarray) -> dict[int, list[int]]:
    begin = int(counts[: piece.rank].sum())
    totals: dict[int, list[int]] = {}
    for offset, target in enumerate(piece.destinations.tolist()):
        entry = totals.setdefault(target, [0] * (1 + lengths.shape[1]))
        for column, amount in enumerate([1, *lengths[begin + offset].tolist()]):
            entry[column] += amount
    return totals
