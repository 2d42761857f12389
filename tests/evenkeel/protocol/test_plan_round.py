"""The wire: what is written is read again, and bytes that were not written so are refused by name."""

from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.refinements import plan_round, slice_round
from evenkeel.partitioning.rounds import RoundOptions, RoundPlan
from evenkeel.partitioning.splits import SplitOptions
from evenkeel.protocol import balancer_pb2 as pb
from evenkeel.protocol.plan_round import (
    InvalidMessage,
    LimitExceeded,
    RoundLimits,
    RunFacts,
    read_request,
    read_response,
    write_response,
)
from tests.evenkeel.protocol.rounds import Round, make_round, request_of, rounds, split_samples


def assert_same(left: Any, right: Any) -> None:
    for field in fields(left):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if isinstance(ours, np.ndarray) or isinstance(theirs, np.ndarray):
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)
            assert ours.dtype == theirs.dtype, field.name
        elif field.name == "parts" and ours is not None:
            assert_same(ours, theirs)
        else:
            assert ours == theirs, field.name


def planned(one: Round) -> RoundPlan:
    try:
        return plan_round(one.samples, one.options)
    except PartitionError:
        assume(False)
        raise


@given(rounds())
@settings(max_examples=200, deadline=None)
def test_round_trip(one: Round) -> None:
    names, samples, options, facts = read_request(request_of(one))
    assert (names, options, facts) == (one.names, one.options, one.facts)
    unsent = {"lengths": samples.lengths, "roles": None}
    offered = one.samples.divisible if one.options.split is not None else None
    assert_same(samples, replace(one.samples, sizes=one.samples.moving_sizes, divisible=offered, **unsent))
    plan = planned(one)
    again = plan_round(samples, options)
    assert_same(replace(again, seconds=plan.seconds), plan)  # the plan does not depend on who makes it
    read = read_response(write_response(plan), one.samples)
    assert_same(read, plan)
    slice_round(read, one.samples)


@given(rounds(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_corrupted_bytes(one: Round, random: Any) -> None:
    """Whatever the bytes are, they are read or refused by name; a plan that is read can be cut."""
    request, response = request_of(one), write_response(planned(one))
    for data in (corrupted(request, random), corrupted(response, random)):
        for read in (read_request, lambda data: slice_round(read_response(data, one.samples), one.samples)):
            with suppress(InvalidMessage):
                read(data)


def corrupted(data: bytes, random: Any) -> bytes:
    content = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(content) + 1)
        match random.randrange(4):
            case 0:
                del content[at : at + random.randint(1, 9)]
            case 1:
                content[at:at] = random.randbytes(random.randint(1, 9))
            case 2:
                del content[at:]
            case _:
                content[at : at + 1] = random.randbytes(1)
    return bytes(content)


def f8(*values: float) -> bytes:
    return np.array(values, "<f8").tobytes()


def i4(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def i8(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


WRONG_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("job", {"job": ""}),
    ("job", {"job": "a\nb"}),
    ("ranks", {"ranks": 0}),
    ("batches", {"batches": 0}),
    ("batch_sizes", {"batch_sizes": i4(2)}),
    ("costs_int", {"costs_int": i8(1, 2, 3, 4, 5)}),
    ("costs_int[1]", {"costs_int": i8(1, -2, 3, 4)}),
    ("costs_int", {"costs_int": i8(*[2**61] * 4)}),
    ("costs_f64[2]", {"costs_f64": f8(1, 2, float("nan"), 4)}),
    ("costs_f64[3]", {"costs_f64": f8(1, 2, 3, -1e-9)}),
    ("sizes", {"sizes": b"12345"}),
    ("sizes[0]", {"sizes": i8(-1, 2, 3, 4)}),
    ("memory[3]", {"memory": f8(1, 2, 3, float("nan"))}),
    ("nodes", {"nodes": i4(0)}),
    ("nodes[1]", {"nodes": i4(0, -1)}),
    ("divisible", {"divisible": b"1" * 95}),
    ("divisible[0]", {"divisible": f8(*range(12))}),
    ("options.tolerance", {"options": {"tolerance": -0.1}}),
    ("options.move_price", {"options": {"move_price": float("nan")}}),
    ("options.counts", {"options": {"counts": 7}}),
    ("options.strategy", {"options": {"strategy": "x" * 300}}),
    ("options.speeds", {"options": {"speeds": f8(1)}}),
    ("options.speeds[1]", {"options": {"speeds": f8(1, 0)}}),
    ("options.memory_caps[0]", {"memory": f8(1, 2, 3, 4), "options": {"memory_caps": f8(float("nan"), 1)}}),
    ("memory", {"options": {"memory_caps": f8(1, 1)}}),
    ("options.split", {"options": {"split": {"above": -1}}}),
    ("facts.stragglers[0].rank", {"facts": {"stragglers": [{"rank": 2, "speed": 1}]}}),
    ("facts.stragglers[0].speed", {"facts": {"stragglers": [{"rank": 1, "speed": 2}]}}),
    ("facts.stragglers", {"facts": {"stragglers": [{"rank": 1}] * 3}}),
    ("facts.delays[0].share", {"facts": {"delays": [{"rank": 1, "share": float("nan")}]}}),
    ("facts.step_seconds", {"facts": {"step_seconds": -1}}),
    ("facts.last_trouble", {"facts": {"last_trouble": "\x1b[2J"}}),
]


@pytest.mark.parametrize(("field", "changes"), WRONG_REQUESTS)
def test_wrong_requests(field: str, changes: dict[str, Any]) -> None:
    message = pb.PlanRoundRequest.FromString(request_of(make_round(2, 2)))
    for name, value in changes.items():
        if isinstance(value, dict):
            part = getattr(message, name)
            part.MergeFrom(type(part)(**value))
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidMessage) as caught:
        read_request(message.SerializeToString())
    assert caught.value.field == field
    assert caught.value.remedy in str(caught.value)


@pytest.mark.parametrize("limits", [{"max_ranks": 1}, {"max_samples": 7}, {"max_batches": 1}])
def test_limits(limits: dict[str, int]) -> None:
    data = request_of(make_round(2, 2, batches=2))
    read_request(data, RoundLimits(max_ranks=2, max_samples=8, max_batches=2))
    with pytest.raises(LimitExceeded, match=next(iter(limits))):
        read_request(data, RoundLimits(**limits))


WRONG_RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("destinations", {"destinations": i4(0, 1, 1)}),
    ("destinations[2]", {"destinations": i4(0, 1, 2, 1)}),
    ("batches", {"batches": i4(0, 0, 0, 0)}),
    ("loads_after", {"loads_after": f8(1)}),
    ("loads_before[0]", {"loads_before": f8(float("nan"), 1)}),
    ("figures", {"figures": []}),
    ("seconds", {"seconds": -1.0}),
    ("part_begins", {"part_samples": i8(0, 1, 0, 1), "part_begins": i8(0, 0, 0, 5)}),
    ("part_samples", {"part_samples": i8(0, 1, 1, 1), "part_begins": i8(0, 0, 0, 0)}),
    ("pieces", {"part_samples": i8(0, 1, 0, 1), "part_begins": i8(0, 0, 0, 0), "pieces": i8(0, 0, 0, 0, 0, 2, 0, 1)}),
    ("pieces", {"part_samples": i8(0, 1, 0, 1), "part_begins": i8(0, 0, 0, 0), "pieces": i8(0, 0, 0, 0, 9, 0, 0, 1)}),
    ("pieces", {"part_samples": i8(0, 1, 0, 1), "part_begins": i8(0, 0, 0, 0), "pieces": i8(3, 0, 0, 0, 0, 0, 0, 1)}),
]


@pytest.mark.parametrize(("field", "changes"), WRONG_RESPONSES)
def test_wrong_responses(field: str, changes: dict[str, Any]) -> None:
    one = make_round(2, 2)
    message = pb.PlanRoundResponse.FromString(write_response(plan_round(one.samples, one.options)))
    for name, value in changes.items():
        message.ClearField(name)
        if value != []:
            setattr(message, name, value)
    with pytest.raises(InvalidMessage) as caught:
        read_response(message.SerializeToString(), one.samples)
    assert caught.value.field == field


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("name", ["samples", "moved_samples"])
def test_figures_are_those_of_the_plan(batches: int, name: str) -> None:
    one = make_round(2, 2, batches=batches)
    message = pb.PlanRoundResponse.FromString(write_response(plan_round(one.samples, one.options)))
    right = getattr(message.figures[-1], name)
    setattr(message.figures[-1], name, right + 1)
    with pytest.raises(InvalidMessage, match=rf"figures\[{batches - 1}\].{name} is {right + 1}; send {right}, as"):
        read_response(message.SerializeToString(), one.samples)


@pytest.mark.parametrize("more", [1, -1, 100, 2**40, 2**62])
@pytest.mark.parametrize("batches", [1, 2])
def test_parts_that_begin_elsewhere_than_pieces_say_are_refused(batches: int, more: int) -> None:
    items = np.array([700, 5, 3, 650, 4, 9, 8, 7] * batches)
    samples = split_samples(items, np.full((4, batches), 2), np.random.default_rng(0))
    plan = plan_round(samples, RoundOptions(split=SplitOptions()))
    assert_same(read_response(write_response(plan), samples), plan)
    further = np.flatnonzero(plan.parts.begins > 0)
    for at in further:
        begins = plan.parts.begins.copy()
        begins[at] += more
        with pytest.raises(InvalidMessage):
            read_response(write_response(replace(plan, parts=replace(plan.parts, begins=begins))), samples)
        destinations = plan.destinations.copy()
        destinations[at] = (destinations[at] + 1) % 4
        with pytest.raises(InvalidMessage):
            read_response(write_response(replace(plan, destinations=destinations)), samples)
    assert further.size


def test_last_trouble_is_made_printable() -> None:
    one = make_round(facts=RunFacts(last_trouble="failed:\n" + "x" * 1000))
    facts = read_request(request_of(one))[3]
    assert facts.last_trouble.startswith("failed: xxx")
    assert len(facts.last_trouble) <= 256
