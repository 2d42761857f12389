"""Messages of arrays in memory that two processes share."""

import json
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.harness.plans import make_plan
from evenkeel.partitioning.rounds import RoundPlan
from services.balancer.decisions import PlanFailure, Reason, balanced
from services.balancer.effects import PlanInput
from services.balancer.node_answers import ToldPlan, node_bytes, tell
from services.balancer.workers.arena import (
    Arena,
    Column,
    MessageError,
    read_result,
    read_round,
    write_result,
    write_round,
)
from services.balancer.workers.worker import plan_or_failure
from tests.services.balancer.samples import options, submission


@pytest.fixture
def arena():  # type: ignore[no-untyped-def]
    made = Arena.create("test")
    yield made
    made.close()


def test_arrays_arrive_as_they_were_and_grow_the_memory(arena: Arena) -> None:
    reader = Arena(os.dup(arena.fd))
    for count in (0, 3, 200_000, 5):
        pieces = [np.arange(count, dtype=np.int64), np.arange(2, dtype=np.int64)]
        floats = np.linspace(0, 1, 2 * count).reshape(count, 2)
        nbytes = arena.write(
            json.dumps({"count": count}), [Column(np.dtype(np.int64), (count + 2,), pieces), Column.of(floats)]
        )
        header, (numbers, pairs) = reader.read(nbytes)
        assert header == {"count": count}
        np.testing.assert_array_equal(numbers, np.concatenate(pieces))
        np.testing.assert_array_equal(pairs, floats)
        assert numbers.flags.carray, "kernels take it as it is"
    reader.close()


def test_memory_cannot_be_pulled_from_under_the_reader(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


def _forged(arena: Arena, head: bytes, length: int | None = None) -> int:
    memory = arena._mapped(4096, grow=True)
    memory[:8] = (len(head) if length is None else length).to_bytes(8, "little")
    memory[8 : 8 + len(head)] = head
    return 4096


@pytest.mark.parametrize(
    "head",
    [
        b"no JSON",
        b"[]",
        b"[1, []]",
        b"[{}, 3]",
        b'[{}, [["<i8", -1]]]',
        b'[{}, [["<i8", 1e9]]]',
        b'[{}, [["<i8", 4611686018427387904, 4]]]',
        b'[{}, [["|O", 1]]]',
        b'[{}, [["<i8", 1000]]]',
        b'[{}, [[["<i8"], 1]]]',
        b"[" * 2000,
    ],
)
def test_what_a_broken_worker_writes_is_refused(arena: Arena, head: bytes) -> None:
    with pytest.raises(MessageError):
        arena.read(_forged(arena, head))


@pytest.mark.parametrize("nbytes", [-1, 0, 7, 1 << 62])
def test_a_wrong_length_is_refused(arena: Arena, nbytes: int) -> None:
    _forged(arena, b"[{}, []]")
    with pytest.raises(MessageError):
        arena.read(nbytes)


@given(data=st.binary(max_size=200), length=st.integers(0, 2**63))
def test_any_bytes_are_refused_or_read(data: bytes, length: int) -> None:
    arena = Arena.create("test")
    try:
        arena.read(_forged(arena, data, length))
    except MessageError:
        pass
    finally:
        arena.close()


def _inputs(window: int = 1, **changes: Any) -> PlanInput:
    rng = np.random.default_rng(7)
    submissions = []
    for rank in range(4):
        n = 3 * window + rank
        more: dict[str, Any] = {"batch_sizes": tuple([3] * (window - 1) + [3 + rank])} if window > 1 else {}
        if changes.get("memory_caps"):
            more["memory"] = np.ones(n)
        if changes.get("mixed") and rank == 1:
            more["sizes"] = np.arange(n, dtype=np.int64)
        costs = rng.integers(1, 1000, n) * (1.5 if changes.get("mixed") and rank == 2 else 1)
        dtype = np.float64 if changes.get("mixed") and rank == 2 else np.int64
        lengths = rng.integers(0, 50, (n, 2)).astype(np.uint32)
        submissions.append(submission(*costs, window=window, dtype=dtype, lengths=lengths, **more))
    caps = {"memory_caps": changes["memory_caps"]} if "memory_caps" in changes else {}
    nodes = changes.get("nodes", ("",) * 4)
    chosen = options(counts="free", speeds=changes.get("speeds", ()), **caps)
    return PlanInput(parts=tuple(each.samples for each in submissions), options=chosen, nodes=nodes, window=window)


def _arrays(value: object) -> list[NDArray[Any]]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple) and not hasattr(value, "destinations"):
        return [array for each in value for array in _arrays(each)]
    names = getattr(value, "__slots__", ())
    return [array for name in sorted(names) if name != "__weakref__" for array in _arrays(getattr(value, name))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 3},
        {"mixed": True},
        {"memory_caps": (9.0, 9.0, 9.0, 9.0)},
        {"speeds": (1.0, 2.0, 1.0, 1.0), "nodes": ("a", "a", "b", "b")},
    ],
)
def test_a_worker_makes_the_plan_that_this_process_makes(arena: Arena, changes: dict[str, Any]) -> None:
    inputs = _inputs(**changes)
    here = make_plan(inputs)
    samples, chosen, together = read_round(arena, write_round(arena, inputs))
    there = plan_or_failure(samples, chosen)
    plans = Arena.create("plans")
    came = read_result(plans, write_result(plans, there))
    plans.close()
    assert isinstance(here, RoundPlan)
    assert isinstance(came, RoundPlan)
    assert together == []
    assert here.digest == came.digest
    assert here.nbytes == came.nbytes
    expected, found = _arrays(here), _arrays(came)
    assert len(expected) == len(found) > 7
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("together", [((0, 1), (2, 3)), ((3, 1),), ((0, 1, 2, 3),)])
def test_what_nodes_are_told_comes_ready_and_is_what_this_process_would_say(
    arena: Arena, together: tuple[tuple[int, ...], ...]
) -> None:
    inputs = replace(_inputs(), together=together)
    here = make_plan(inputs)
    assert isinstance(here, RoundPlan)
    samples, chosen, named = read_round(arena, write_round(arena, inputs))
    assert tuple(named) == together
    there = plan_or_failure(samples, chosen)
    assert isinstance(there, RoundPlan)
    there = replace(there, seconds=here.seconds)
    plans = Arena.create("plans")
    came = read_result(plans, write_result(plans, there, tell(there, named)), together)
    plans.close()
    assert isinstance(came, ToldPlan)
    assert set(came.told) == set(together)
    assert came.nbytes > here.nbytes, "what is told counts"
    for ranks in (*together, (0,), (2, 1)):
        for detail in ("", "planned by another search"):
            ready, plain = (balanced(replace(plan, detail=detail)) for plan in (came, here))
            assert node_bytes(7, 300, ranks, ready) == node_bytes(7, 300, ranks, plain)


def test_what_is_told_must_fit_who_is_told(arena: Arena) -> None:
    plan = make_plan(_inputs())
    assert isinstance(plan, RoundPlan)
    nbytes = write_result(arena, plan, tell(plan, [(0, 1)]))
    with pytest.raises(MessageError, match="told together"):
        read_result(arena, nbytes, ((0, 1), (2, 3)))
    with pytest.raises(MessageError, match="told together"):
        read_result(arena, nbytes)


def test_a_failure_comes_as_it_was(arena: Arena) -> None:
    failure = PlanFailure(reason=Reason.NOT_FOUND, detail="3 short")
    assert read_result(arena, write_result(arena, failure)) == failure


def test_a_plan_with_arrays_missing_is_refused(arena: Arena) -> None:
    header = {"digest": "00" * 16, "seconds": 0.1, "batches": []}
    with pytest.raises(MessageError):
        read_result(arena, arena.write(json.dumps(header), [Column.of(np.zeros(3, np.int32))]))
    with pytest.raises(MessageError):
        read_result(arena, arena.write('{"reason": 77, "detail": ""}', []))
