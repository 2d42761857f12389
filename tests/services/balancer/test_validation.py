from typing import Any

import numpy as np
import pytest

from evenkeel.partitioning.delays import Cause
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import Outcome, Reason
from services.balancer.joins import read_join
from services.balancer.limits import Limits
from services.balancer.refusals import Code, Refusal, RefusedError
from services.balancer.submissions import Joining, Submission
from services.balancer.validation import read_node, read_submission
from tests.services.balancer.samples import join_message, options, submit_message, terms
from trainer_client.balancing.service.joining import join_submits

STRATEGIES = ("minimal_move", "karmarkar_karp", "lpt")


def read(message: pb.Join, **limits: int) -> Joining:
    return read_join(message, Limits(**limits), STRATEGIES, "minimal_move")  # type: ignore[arg-type]


def learned(*slow: tuple[int, float], fixed: float = 0.0) -> pb.LearnedSpeeds:
    return pb.LearnedSpeeds(stragglers=[pb.Straggler(rank=rank, speed=speed) for rank, speed in slow], fixed=fixed)


def late(*ranks: tuple[int, int, float]) -> pb.LearnedSpeeds:
    return pb.LearnedSpeeds(
        delays=[pb.Delay(rank=rank, cause=cause, share=share) for rank, cause, share in ranks]  # type: ignore[arg-type]
    )


def read_round(message: pb.Submit, **limits: int) -> Submission:
    return read_submission(message, terms(2), Limits(**limits))  # type: ignore[arg-type]


def refusal_of(error: pytest.ExceptionInfo[RefusedError]) -> Refusal:
    refusal = error.value.refusal
    assert refusal.field in refusal.message
    assert refusal.value in refusal.message
    assert refusal.remedy in refusal.message
    return refusal


def f64(*values: float) -> bytes:
    return np.array(values, "<f8").tobytes()


def i64(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"protocol_versions": [2, 3]}, "protocol_versions", Code.VERSION),
        ({"protocol_versions": []}, "protocol_versions", Code.VERSION),
        ({"job": ""}, "job", Code.INVALID_ARGUMENT),
        ({"job": "x" * 257}, "job", Code.LIMIT_EXCEEDED),
        ({"job": "train\x1b[2J"}, "job", Code.INVALID_ARGUMENT),
        ({"node": "gpu01\nforged"}, "node", Code.INVALID_ARGUMENT),
        ({"node": "x" * 257}, "node", Code.LIMIT_EXCEEDED),
        ({"world_size": 0}, "world_size", Code.INVALID_ARGUMENT),
        ({"world_size": 5000}, "world_size", Code.LIMIT_EXCEEDED),
        ({"rank": 2}, "rank", Code.INVALID_ARGUMENT),
        ({"window": 65}, "window", Code.LIMIT_EXCEEDED),
        ({"options": pb.PartitionOptions(strategy="best")}, "options.strategy", Code.INVALID_ARGUMENT),
        ({"options": pb.PartitionOptions(tolerance=-1)}, "options.tolerance", Code.INVALID_ARGUMENT),
        ({"options": pb.PartitionOptions(tolerance=float("nan"))}, "options.tolerance", Code.INVALID_ARGUMENT),
        ({"options": pb.PartitionOptions(tolerance=1.5)}, "options.tolerance", Code.INVALID_ARGUMENT),
        ({"options": pb.PartitionOptions(speeds=f64(1, 9e6))}, "options.speeds[1]", Code.INVALID_ARGUMENT),
        ({"options": pb.PartitionOptions(speeds=f64(1))}, "options.speeds", Code.INVALID_ARGUMENT),
        ({"options": pb.PartitionOptions(speeds=f64(1, 0))}, "options.speeds[1]", Code.INVALID_ARGUMENT),
        ({"options": pb.PartitionOptions(speeds=f64(float("nan"), 1))}, "options.speeds[0]", Code.INVALID_ARGUMENT),
        ({"options": pb.PartitionOptions(memory_caps=f64(1, -1))}, "options.memory_caps[1]", Code.INVALID_ARGUMENT),
        ({"schema": pb.Schema(hash=b"x" * 65)}, "schema.hash", Code.INVALID_ARGUMENT),
        ({"schema": pb.Schema(fields=[pb.Field()] * 5000)}, "schema.fields", Code.LIMIT_EXCEEDED),
        ({"schema": pb.Schema(fields=[pb.Field(path="x" * 300)])}, "schema.fields[0]", Code.LIMIT_EXCEEDED),
    ],
)
def test_a_wrong_join_is_refused_by_field(changes: dict[str, object], field: str, code: Code) -> None:
    with pytest.raises(RefusedError) as error:
        read(join_message(**changes))
    refusal = refusal_of(error)
    assert (refusal.field, refusal.code) == (field, code)
    assert refusal.fatal


def test_a_join_is_read_with_the_servers_defaults() -> None:
    joining = read(join_message(1, node="host-a", restart_count=3, options=pb.PartitionOptions(counts=pb.COUNTS_FREE)))
    assert (joining.rank, joining.node, joining.restart_count) == (1, "host-a", 3)
    assert joining.terms.options == options(counts="free")
    assert joining.terms.window == 1
    assert joining.terms.num_jagged == 1
    assert joining.terms.schema == ("ids int64 jagged []",)


def test_a_tolerance_of_0_is_0_and_none_is_the_default() -> None:
    for message, expected in ((pb.PartitionOptions(), 1e-3), (pb.PartitionOptions(tolerance=0.0), 0.0)):
        sent = pb.PartitionOptions.FromString(message.SerializeToString())
        assert read(join_message(1, options=sent)).terms.options.tolerance == expected


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"costs_f64": f64(1, float("nan"), 3)}, "costs_f64[1]"),
        ({"costs_f64": f64(1, 2, float("inf"))}, "costs_f64[2]"),
        ({"costs_f64": f64(-1, 2, 3)}, "costs_f64[0]"),
        ({"costs_f64": f64(1, 2)}, "costs_f64"),
        ({"costs_i64": i64(1, -2, 3)}, "costs_i64[1]"),
        ({"costs_i64": i64(2**62, 2**62, 2**62)}, "costs_i64[0]"),
        ({"costs_i64": i64(2**60, 2**60, 2**60)}, "costs_i64"),
        ({"costs_i64": i64(2**60, 2**60, 0)}, "costs_i64"),
        ({"costs_i64": b"123"}, "costs_i64"),
        ({"costs_i64": b""}, "costs_i64"),
        ({"memory": f64(1, 2)}, "memory"),
        ({"memory": f64(1, 2, float("nan"))}, "memory[2]"),
        ({"sizes": i64(1, 2, -3)}, "sizes[2]"),
        ({"lengths": b""}, "lengths"),
        ({"lengths": b"\0" * 16}, "lengths"),
        ({"batch_sizes": [2]}, "batch_sizes"),
        ({"batch_sizes": [1, 2]}, "batch_sizes"),
        ({"learned": learned((1, 0.5), (1, 0.5))}, "learned.stragglers[1].rank"),
        ({"learned": learned((1, 0.5), (2, 0.5))}, "learned.stragglers[1].rank"),
        ({"learned": learned((0, 0.5), (1, 0.5), (2, 0.5))}, "learned.stragglers"),
        ({"learned": learned((1, 0.29))}, "learned.stragglers[0].speed"),
        ({"learned": learned((1, 1.01))}, "learned.stragglers[0].speed"),
        ({"learned": learned((1, float("nan")))}, "learned.stragglers[0].speed"),
        ({"learned": late((1, 1, 0.5), (1, 1, 0.5))}, "learned.delays[1].rank"),
        ({"learned": late((2, 1, 0.5))}, "learned.delays[0].rank"),
        ({"learned": late((1, 1, 16.5))}, "learned.delays[0].share"),
        ({"learned": late((1, 2, float("nan")))}, "learned.delays[0].share"),
        ({"learned": late(*[(0, 77, 0.5)] * 33)}, "learned.delays"),
        ({"learned": learned(fixed=-1.0)}, "learned.fixed"),
        ({"learned": learned(fixed=float("inf"))}, "learned.fixed"),
    ],
)
def test_a_wrong_submission_is_refused_by_field_and_ends_no_stream(changes: dict[str, object], field: str) -> None:
    with pytest.raises(RefusedError) as error:
        read_round(submit_message(0, [1, 2, 3], **changes))
    refusal = refusal_of(error)
    assert refusal.field == field
    assert not refusal.fatal


def test_a_cause_of_delay_that_a_newer_client_knows_is_left_out() -> None:
    read = read_round(submit_message(0, [1, 2, 3], learned=late((0, 1, 0.5), (1, 1, 0.2), (1, 77, 9e9))))
    assert [(one.rank, one.cause, one.share) for one in read.learned.delays] == [
        (0, Cause.LOADING, 0.5), (1, Cause.LOADING, 0.2),
    ]  # fmt: skip


def test_too_many_samples_name_the_limit() -> None:
    with pytest.raises(RefusedError) as error:
        read_round(submit_message(0, [1, 2, 3]), max_samples_per_rank=2)
    refusal = refusal_of(error)
    assert refusal.code is Code.LIMIT_EXCEEDED
    assert "max_samples_per_rank" in refusal.remedy


def test_memory_is_required_when_the_session_has_caps() -> None:
    capped = terms(2, options=options(memory_caps=(1.0, 1.0)))
    with pytest.raises(RefusedError) as error:
        read_submission(submit_message(0, [1]), capped, Limits())
    assert refusal_of(error).field == "memory"
    assert read_submission(submit_message(0, []), capped, Limits()).num_samples == 0


def test_an_empty_submission_is_ordinary() -> None:
    read_back = read_round(pb.Submit(round=0, exhausted=True))
    assert read_back.num_samples == 0
    assert read_back.samples.lengths.shape == (0, 1)


def test_timeouts_have_a_default_and_a_limit() -> None:
    limits = Limits(round_timeout=3.0, max_round_timeout=20.0)
    timeouts = [
        read_submission(submit_message(0, [1], timeout_ms=ms), terms(2), limits).timeout for ms in (0, 1, 10_000, 10**6)
    ]
    assert timeouts == [3.0, 0.001, 10.0, 20.0]


def test_enumerations_are_those_of_the_wire() -> None:
    codes = {name.removeprefix("ERROR_CODE_"): number for name, number in pb.ErrorCode.items() if number}
    assert {code.name: code.value for code in Code} == codes
    reasons = {name.removeprefix("REASON_"): number for name, number in pb.Decision.Reason.items() if number}
    assert {reason.name: reason.value for reason in Reason if reason} == reasons
    outcomes = {name.removeprefix("OUTCOME_"): number for name, number in pb.Decision.Outcome.items() if number}
    assert {outcome.name: outcome.value for outcome in Outcome} == outcomes


def whole(rank: int, costs: list[float], **changes: Any) -> pb.Submit:
    return submit_message(7, costs, rank=rank, sizes=i64(*range(len(costs))), **changes)


def joined(*messages: pb.Submit, ranks: tuple[int, ...]) -> pb.SubmitNode:
    """What a leader sends of them."""
    (node,), odd = join_submits(messages, join_message(ranks[0], world_size=8, ranks=list(ranks)))
    assert not odd
    return pb.SubmitNode.FromString(node.SerializeToString())


def read_of_node(node: pb.SubmitNode, *ranks: int, **limits: int) -> tuple[Submission | None, dict[int, Refusal]]:
    found, refused = read_node(node, ranks, terms(8), Limits(**limits))  # type: ignore[arg-type]
    return found, {rank: refusal for of_ranks, refusal in refused for rank in of_ranks}


@pytest.mark.parametrize("largest", [200, 60_000, 4_000_000_000, 2**40])
def test_a_nodes_ranks_say_together_what_each_says_alone(largest: int) -> None:
    messages = [whole(2, [1, largest]), whole(5, []), whole(3, [7] * 40, traceparent="00-x")]
    node = joined(*(one for one in messages if one.num_samples), ranks=(2, 3))
    found, refused = read_of_node(node, 2, 3)
    assert found is not None
    assert not refused
    alone = [read_submission(one, terms(8), Limits()) for one in messages]
    assert found.fingerprints == {**alone[0].fingerprints, **alone[2].fingerprints}
    assert found.samples.lengths.itemsize == 1, "lengths travel as narrow as they are"
    assert found.traceparents == {3: "00-x"}
    ((first, own),) = found.parts()
    assert (first, own.costs.tolist(), own.counts_at_home.tolist()) == (2, [1, largest, *[7] * 40], [2, 40])
    assert found.of([3]).fingerprints == alone[2].fingerprints
    assert not found.of([2]).traceparents
    assert found.of([3]).parts()[0][1].sizes.tolist() == list(range(40))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"costs": [1, -2, 3]}, "costs_int[1]", "-2 on rank 3"),
        ({"costs": [3 * 2**57, 3 * 2**57]}, "costs_int", "in sum on rank 3"),
        ({"costs": [1] * 20}, "num_samples", "20 on rank 3"),
    ],
)
def test_a_rank_that_lies_is_named_and_the_rest_of_its_node_goes_on(
    changes: dict[str, Any], field: str, said: str
) -> None:
    honest = [whole(rank, [1, 2]) for rank in (2, 4)]
    node = joined(honest[0], whole(3, **changes), honest[1], ranks=(2, 3, 4))
    found, refused = read_of_node(node, 2, 3, 4, max_samples_per_rank=10)
    assert found is not None
    assert found.ranks == (2, 4)
    assert found.fingerprints == {
        rank: number for one in honest for rank, number in read_submission(one, terms(8), Limits()).fingerprints.items()
    }
    assert refused.keys() == {3}
    assert refused[3].field == field
    assert said in refused[3].value
    assert not refused[3].fatal


def test_what_is_refused_takes_no_memory_with_what_is_not() -> None:
    node = joined(whole(2, [-1] * 10_000, memory=f64(*[1] * 10_000)), whole(3, [1, 2], memory=f64(3, 4)), ranks=(2, 3))
    found, refused = read_of_node(node, 2, 3)
    assert refused.keys() == {2}
    assert found is not None
    samples = found.samples
    for array in (samples.costs, samples.lengths, samples.sizes, samples.memory, samples.batch_sizes):
        assert array is not None
        assert array.base is None or memoryview(array.base).nbytes <= 64


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ranks": np.array([2, 9], "<u4").tobytes()}, "ranks"),
        ({"ranks": np.array([2, 2], "<u4").tobytes()}, "ranks"),
        ({"ranks": b"123"}, "ranks"),
        ({"num_samples": b"\0" * 12}, "num_samples"),
        ({"costs_int": b"1"}, "costs_int"),
        ({"costs_f64": b"1"}, "costs_f64"),
        ({"lengths": b"1"}, "lengths"),
        ({"sizes": b"1"}, "sizes"),
        ({"memory": b"1"}, "memory"),
        ({"batch_sizes": b"1"}, "batch_sizes"),
        ({"traceparents": ["a"]}, "traceparents"),
        ({"divisible": b"1"}, "divisible"),
        ({"num_divisible": np.array([0, 1], "<u4").tobytes()}, "divisible"),
    ],
)
def test_arrays_that_cannot_be_told_apart_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    node = joined(whole(2, [1, 2]), whole(3, [3]), ranks=(2, 3))
    for name, value in changes.items():
        if isinstance(value, list):
            node.traceparents.extend(value)
        else:
            setattr(node, name, value)
    with pytest.raises(RefusedError) as error:
        read_of_node(node, 2, 3)
    assert refusal_of(error).field == field
    assert not error.value.refusal.fatal


def test_a_submission_that_contradicts_itself_is_sent_alone() -> None:
    wrong = whole(3, [1, 2])
    wrong.lengths = b"123"
    nodes, odd = join_submits([whole(2, [1]), wrong], join_message(2, world_size=8, ranks=[2, 3]))
    assert [np.frombuffer(node.ranks, "<u4").tolist() for node in nodes] == [[2]]
    assert odd == [wrong]
