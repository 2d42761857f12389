"""Rounds with split samples over the wire: what each rank reads is what the round core planned."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.harness.plans import make_plan
from evenkeel.partitioning import PartitionError
from evenkeel.partitioning.divisible import MOST, WIDTH
from evenkeel.partitioning.rounds import RoundPlan
from evenkeel.partitioning.split_options import SplitOptions
from evenkeel.protocol import balancer_pb2 as pb
from services.balancer.decisions import balanced
from services.balancer.effects import PlanInput
from services.balancer.encoding import answer_bytes
from services.balancer.joins import read_join
from services.balancer.limits import Limits
from services.balancer.node_answers import node_bytes
from services.balancer.refusals import RefusedError
from services.balancer.submissions import Terms
from services.balancer.validation import read_node, read_submission
from services.balancer.workers.arena import Arena, MessageError, read_result, read_round, write_result, write_round
from services.balancer.workers.worker import plan_or_failure
from tests.evenkeel.partitioning.test_split_rounds import ROLES, Round, carried_out, giants, rounds
from tests.services.balancer.samples import join_message
from trainer_client.balancing.opening import SessionName
from trainer_client.balancing.service.joining import join_submits, split_answer
from trainer_client.balancing.service.messages import (
    MalformedAnswerError,
    ServiceDecision,
    join_request,
    read_decision,
    submit_request,
)
from trainer_client.balancing.votes import transfer_checksum

SESSION = SessionName(job="job", group="", loader="train", run_id="run", restart_count=0, opening=1)


def _join(done: Round) -> pb.Join:
    fields = [(f"field{number}", "int64", "jagged", ()) for number in range(ROLES.size)]
    return join_request(
        SESSION, world_size=len(done.ranks), rank=0, node="", options=done.options, schema_hash=b"",
        schema_fields=fields, roles=ROLES.tolist(), window=done.samples.num_batches,
    )  # fmt: skip


def joined(done: Round) -> Terms:
    """The session's terms, as the wire tells them."""
    message = _join(done)
    return read_join(pb.Join.FromString(message.SerializeToString()), Limits(), ("minimal_move",), "minimal_move").terms


def served(done: Round) -> list[ServiceDecision] | None:
    """What ranks read of a round that went over the wire, through a worker's memory and back; None without a plan."""
    terms = joined(done)
    assert terms.options == done.options
    submissions, messages = [], []
    for rank, own in enumerate(done.ranks):
        message = submit_request(0, rank, own, exhausted=False, timeout_ms=1000)
        messages.append(message)
        submissions.append(read_submission(pb.Submit.FromString(message.SerializeToString()), terms, Limits()))
    joined_ones, odd = join_submits(messages, _join(done))
    assert not odd
    read = [read_node(one, tuple(range(len(done.ranks))), terms, Limits()) for one in joined_ones]
    said = {rank: number for one, refused in read if one is not None for rank, number in one.fingerprints.items()}
    assert said == {rank: number for one in submissions for rank, number in one.fingerprints.items()}
    nodes = done.samples.nodes
    names = tuple("" if nodes is None else f"node {nodes[rank]}" for rank in range(len(done.ranks)))
    inputs = PlanInput(
        parts=tuple(each.samples for each in submissions),
        options=terms.options,
        nodes=names,
        window=terms.window,
        roles=terms.roles,
    )
    memory = Arena.create("test")
    samples, options, _ = read_round(memory, write_round(memory, inputs))
    result = plan_or_failure(samples, options)
    back = Arena(os.dup(memory.fd))
    result = read_result(back, write_result(memory, result))
    memory.close()
    back.close()
    if not isinstance(result, RoundPlan):
        return None
    ranks = tuple(range(len(done.ranks)))
    answers = [pb.Answer.FromString(answer_bytes(7, 0, rank, balanced(result))) for rank in ranks]
    together = pb.AnswerGroup.FromString(node_bytes(7, 0, ranks, balanced(result))).nodes[0]
    assert split_answer(together) == answers
    return [
        read_decision(
            answer.decision, rank=rank, world_size=len(done.ranks), lengths=done.ranks[rank].lengths,
            window=terms.window,
        )
        for rank, answer in enumerate(answers)
    ]  # fmt: skip


@settings(max_examples=40)
@given(done=rounds())
def test_every_rank_reads_the_plan_that_ranks_without_a_service_make(done: Round) -> None:
    decisions = served(done)
    try:
        plan = done.plan()
    except PartitionError:
        assert decisions is None
        return
    assert decisions is not None
    assert len({decision.digest for decision in decisions}) == 1
    plans = []
    for rank, decision in enumerate(decisions):
        own, told = plan.of(rank), decision.plan
        assert told is not None
        plans.append(told)
        assert told.splits == own.splits
        assert told.figures == own.figures
        assert len(told.cuts) == len(own.cuts)
        for batch in range(done.samples.num_batches):
            mine, theirs = own.cuts_in(batch), told.cuts_in(batch)
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                np.testing.assert_array_equal(mine.samples, theirs.samples)
                np.testing.assert_array_equal(mine.begins, theirs.begins)
            for name in ("destinations", "sources", "source_counts", "source_totals"):
                one, other = getattr(own.slices[batch], name), getattr(told.slices[batch], name)
                np.testing.assert_array_equal(one, other)
        if own.steps is not None:
            np.testing.assert_array_equal(own.steps, told.steps)
    for batch in range(done.samples.num_batches):
        carried_out(done, plans, batch)
        sums = [
            transfer_checksum(told.slices[batch], told.sent_in(own, batch), batch)
            for own, told in zip(done.ranks, plans, strict=True)
        ]
        assert sum(sums) % 2**64 == 0


def test_an_older_service_or_client_has_whole_samples() -> None:
    done = giants()
    join = join_request(
        SESSION, world_size=4, rank=0, node="", options=done.options, schema_hash=b"",
        schema_fields=[(f"field{number}", "int64", "jagged", ()) for number in range(ROLES.size)], roles=ROLES.tolist(),
    )  # fmt: skip
    join.options.ClearField("split")  # as who does not know of a field passes over it
    join.schema.ClearField("roles")
    terms = read_join(join, Limits(), ("minimal_move",), "minimal_move").terms
    assert terms.options == replace(done.options, split=None)
    submissions = []
    for rank, own in enumerate(done.ranks):
        message = submit_request(0, rank, own, exhausted=False, timeout_ms=1000)
        message.ClearField("divisible")
        submissions.append(read_submission(message, terms, Limits()))
    inputs = PlanInput(parts=tuple(each.samples for each in submissions), options=terms.options, nodes=("",) * 4)
    plan = make_plan(inputs)
    assert isinstance(plan, RoundPlan)
    told = pb.Answer.FromString(answer_bytes(7, 0, 0, balanced(plan))).decision
    assert not told.cuts
    assert not told.pieces
    own = read(told, done).plan
    assert own is not None
    assert own.cuts == own.splits == ()


def decision_of(done: Round, rank: int = 0) -> pb.Decision:
    return pb.Answer.FromString(answer_bytes(7, 0, rank, balanced(done.plan()))).decision


def read(message: pb.Decision, done: Round) -> ServiceDecision:
    return read_decision(message, rank=0, world_size=4, lengths=done.ranks[0].lengths)


def test_ranks_that_read_other_pieces_hold_other_decisions() -> None:
    done = giants()
    message = decision_of(done)
    before = read(message, done)
    pieces = np.frombuffer(message.pieces, "<i8").reshape(-1, 8).copy()
    pieces[0, 5] += 1
    message.pieces = pieces.tobytes()
    assert read(message, done).digest != before.digest


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("cuts", np.array([[5, 3]]), "cuts are not of parts"),
        ("cuts", np.array([[0, 3], [0, 3], [0, 9]]), "cuts are not of parts"),
        ("cuts", np.array([[0, 0], [0, 2], [0, 3]]), "cuts are not of parts"),
        ("cuts", np.array([1]), "rows of other lengths"),
        ("cuts", np.array([[0, 3]]), "destinations has"),
        ("pieces", np.array([1, 2, 3]), "rows of other lengths"),
        ("pieces", np.array([[1, 0, 0, 0, 0, 0, 0, 9]]), "a piece is of batch 1"),
        ("pieces", np.array([[0, 0, 0, 0, 9, 0, 0, 9]]), "rank is 9; the group has ranks 0 to 3"),
        ("pieces", np.array([[0, 0, 0, 0, 0, 0, 4, 9]]), "begin is 4; begin at 0"),
    ],
)
def test_answers_that_contradict_themselves_are_refused(field: str, value: Any, complaint: str) -> None:
    done = giants()
    message = decision_of(done)
    setattr(message, field, value.astype("<i8").tobytes())
    with pytest.raises((MalformedAnswerError, ValueError), match=complaint):
        read(message, done)


def changed(table: Any, row: int, column: int, value: float) -> bytes:
    table = table.copy()
    table[row, column] = value
    return bytes(table.astype("<f8").tobytes())


@pytest.mark.parametrize(
    ("divisible", "complaint"),
    [
        (lambda _: b"\0" * 95, "pack 0 little-endian elements|pack"),
        (lambda table: changed(table, 0, 0, 3), r"names samples that are not ascending numbers from 0 to 2"),
        (lambda table: changed(table, 0, 0, 0.5), r"names samples that are not ascending"),
        (lambda table: changed(table, 0, 2, float("nan")), r"\[0\] has numbers that are not finite"),
        (lambda table: changed(table, 0, 2, 7.5), r"\[0\] has positions 7.5, not a whole number"),
        (lambda table: changed(table, 0, 11, 0), r"\[0\] has granule 0, not a whole number"),
        (lambda table: changed(table, 0, 3, 1e6), r"\[0\] has context, candidates, targets or head that do not fit"),
        (lambda table: changed(table, 0, 5, 1.0), r"\[0\] costs .* by its positions, but .* as a sample"),
        (lambda _: b"\0" * (MOST + 1) * WIDTH * 8, f"offer at most {MOST} samples"),
    ],
)
def test_what_ranks_say_of_positions_is_checked(divisible: Any, complaint: str) -> None:
    done = giants()
    terms, table = joined(done), done.ranks[0].divisible
    message = submit_request(0, 0, done.ranks[0], exhausted=False, timeout_ms=1000)
    message.divisible = divisible(table)
    with pytest.raises(RefusedError, match=complaint) as caught:
        read_submission(message, terms, Limits())
    assert caught.value.refusal.field == "divisible"
    assert not caught.value.refusal.fatal


def test_what_a_rank_says_wrongly_of_positions_stays_its_own() -> None:
    """A sample that it does not have would be the next rank's, where ranks of a node come together."""
    done = giants()
    messages = [submit_request(0, rank, own, exhausted=False, timeout_ms=1000) for rank, own in enumerate(done.ranks)]
    messages[0].divisible = changed(done.ranks[0].divisible, -1, 0, len(done.ranks[0]))
    (node,), _ = join_submits(messages[:2], _join(done))
    found, refused = read_node(node, (0, 1), joined(done), Limits())
    assert [ranks for ranks, _ in refused] == [(0,)]
    assert found == read_submission(messages[1], joined(done), Limits())


def test_sessions_whose_ranks_differ_about_splitting_are_told_so() -> None:
    done = giants()
    terms = joined(done)
    other = joined(replace(done, options=replace(done.options, split=SplitOptions(above=0.2))))
    assert terms.difference(other) == (
        "options.split",
        "SplitOptions(above=0.05, within=0.0, between=0.0, fixed=0.0)",
        "SplitOptions(above=0.2, within=0.0, between=0.0, fixed=0.0)",
    )
    assert terms.difference(replace(terms, roles=(1, 2, 0, -1, 0))) == (
        "schema.roles",
        "[1, 2, 0, -1, -2]",
        "[1, 2, 0, -1, 0]",
    )


@pytest.mark.parametrize(
    ("options", "roles", "complaint"),
    [
        (pb.PartitionOptions(split=pb.Split(above=-1)), [], "options.split"),
        (pb.PartitionOptions(split=pb.Split(within=float("inf"))), [], "options.split"),
        (pb.PartitionOptions(split=pb.Split(fixed=-1)), [], "options.split"),
        (pb.PartitionOptions(split=pb.Split()), [1, 2], "schema.roles"),
        (pb.PartitionOptions(split=pb.Split()), [-3], "schema.roles"),
    ],
)
def test_options_and_roles_out_of_range_are_refused(
    options: pb.PartitionOptions, roles: list[int], complaint: str
) -> None:
    message = join_message(options=options)
    message.schema.roles.extend(roles)
    with pytest.raises(RefusedError) as caught:
        read_join(message, Limits(), ("minimal_move",), "minimal_move")
    assert caught.value.refusal.field == complaint


def test_offers_are_refused_where_nothing_is_split() -> None:
    done = giants()
    terms = joined(replace(done, options=replace(done.options, split=None)))
    with pytest.raises(RefusedError, match="leave it empty"):
        read_submission(submit_request(0, 0, done.ranks[0], exhausted=False, timeout_ms=1000), terms, Limits())


def test_parts_that_do_not_fit_the_plan_are_no_message() -> None:
    plan = giants().plan()
    assert plan.parts is not None
    memory = Arena.create("test")
    broken = replace(plan, parts=replace(plan.parts, begins=plan.parts.begins[1:]))
    with pytest.raises(MessageError, match="parts that do not fit"):
        read_result(memory, write_result(memory, broken))
    memory.close()
